"""The exact Longhorn scan in chunks, cut in splits: the states that splits start from.

Sequences too few to fill the device are cut in splits of whole chunks, which run in parallel. Before that, the
kernel here goes through all chunks in order, which only updates the state, and stores it before every split. It has
few programs and its time is that of its longest chain of instructions. So it uses no matrix products, whose results
take long to come back, but divides the states of a channel among lanes. It processes a group of tokens at a time: all
k_t.S first, with one exchange between the lanes of a channel, then the substitution, in every lane. In float32.

Backwards, the state is its gradient G and a token adds dy_t q_t to it first. The rest of the token's update,
G -= eps_t k_t (k_t.G), is the forward one with x_t = 0. Equations and letters are in ``chunk.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.chunk_parts import RUN_TIME, place_of_program
from vil.kernels.triton.tiles import half_silu, load_quads, longhorn_eps, no_lane

STATES_OF_LANE = 4  # P below: one vector load. A group is eight tokens.


@triton.jit
def _load(pointer, mask):
    """Load numbers, zero where masked; mask is None if there is nothing to mask."""
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _total(values, LANES: tl.constexpr):
    """Return the sum of the values of a channel's lanes, in each of them, (BLOCK_D * LANES)."""
    tile = tl.reshape(values, (values.shape[0] // LANES, LANES))
    return tl.reshape(tl.broadcast_to(tl.sum(tile, 1)[:, None], tile.shape), values.shape)


@triton.jit
def _from_lane(values, i: tl.constexpr, LANES: tl.constexpr):
    """Return the value of a channel's i-th lane in each of its lanes."""
    tile = tl.reshape(values, (values.shape[0] // LANES, LANES))
    return tl.reshape(tl.gather(tile, tl.full(tile.shape, i, tl.int32), 1), values.shape)


@triton.jit
def _load_keys(
    keys_row, gram_row, half: tl.constexpr, ADJOINT: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return keys, Gram rows and, with ADJOINT, queries of a group, in the order of processing.

    A load fetches four numbers for each of four tokens: compile time grows with the number of loads.
    """
    sign: tl.constexpr = -1 if ADJOINT else 1
    t: tl.constexpr = (15 - 8 * half) if ADJOINT else 8 * half  # the first token
    step: tl.constexpr = sign * 2 * BLOCK_M
    row, queries = keys_row + t * (2 * BLOCK_M), ()
    keys = load_quads(row, step, 16) + load_quads(row + 4 * step, step, 16)
    if ADJOINT:
        row += BLOCK_M
        queries = load_quads(row, step, 16) + load_quads(row + 4 * step, step, 16)
    # Of a token's row, the columns of the first four and of the last four tokens; a quad has tokens in scan order.
    early = gram_row + (t * 17 - (3 if ADJOINT else 0))
    late = early + 64 * sign
    gram = (
        load_quads(early, sign * 16, 16)
        + load_quads(late, sign * 16, 16)
        + load_quads(late + 4 * sign, sign * 16, 16)
    )
    return keys, gram, queries


@triton.jit
def _load_group(
    after, n, half: tl.constexpr, sequence, x_row, dt_row, z_row, keys_row, gram_row, kappa_row, own, L, reverse, mask,
    OWNERS: tl.constexpr, ADJOINT: tl.constexpr, BLOCK_M: tl.constexpr, x_step: tl.constexpr,
    dt_step: tl.constexpr, z_step: tl.constexpr,
):  # fmt: skip
    """Return what ``_load_keys`` does; x, step sizes, kappa and, if there is a gate, z; a lane has every OWNERS-th token.

    Nothing is loaded before ``after``, zeros from ``_arrived``.
    """
    rows, sign, chunk = (), 1 - 2 * reverse, sequence * tl.cdiv(L, 16) + n
    keys = _load_keys(
        keys_row + chunk * (32 * BLOCK_M) + after * 4,
        gram_row + chunk * 512 + after * 4,
        half,
        ADJOINT,
        BLOCK_M,
    )
    first = tl.minimum(n * 16, L - 16).to(tl.int64) + 15 * reverse
    kappa_row += chunk * 32 + own + after
    place = (first + own * sign + after).to(tl.int64)
    for i in tl.static_range(0, 8, OWNERS):
        t = (15 - half * 8 - i) if ADJOINT else half * 8 + i
        token = place + sign * t
        row = (_load(x_row + token * x_step, mask), _load(dt_row + token * dt_step, mask))
        row += (tl.load(kappa_row + t),)
        if z_row is not None:
            row += (_load(z_row + token * z_step, mask),)
        rows += (row,)
    return keys, rows


@triton.jit
def _bits(number):
    """Return an int32 that depends on a number of any dtype."""
    if number.dtype == tl.float32:
        return number.to(tl.int32, bitcast=True)
    else:
        return number.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _arrived(group, state, zero):
    """Return zeros that are known once a group has arrived and the state is known; ``zero`` is 0, unknown to compilers.

    Loads share six counters on NVIDIA GPUs, and a counter only tells when all of its loads have arrived. If the next
    group's loads were sent before this group is waited for, they would be waited for as well. With the state, the
    compiler cannot wait for a group earlier than that.
    """
    keys, rows = group
    after = _bits(state[0])
    bits = after ^ _bits(rows[0][0])
    for part in tl.static_range(len(keys)):  # one number of each vector load
        for i in tl.static_range(0, len(keys[part]), 8):
            bits |= (after ^ _bits(keys[part][i])) | (after ^ _bits(keys[part][i + 4]))
    for row in tl.static_range(len(rows)):
        for i in tl.static_range(len(rows[row])):
            bits |= after ^ _bits(rows[row][i])
    return bits & zero


@triton.jit
def _prefetch(rows, steps, n, L, place, FAST: tl.constexpr):
    """Bring the rows of a chunk to the L2 cache."""
    if FAST:
        token = tl.minimum(n * 16, L - 16).to(tl.int64) + place % 16
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        for i in tl.static_range(len(rows)):
            address = tl.cast(rows[i] + token * steps[i], tl.int64)
            tl.inline_asm_elementwise(asm, "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def _prefetch_keys(keys_ptr, gram_ptr, chunk, place, BLOCK_M: tl.constexpr, FAST: tl.constexpr):
    """Bring the cache lines of a chunk's keys and of their Gram matrix to the L1 cache, one by each lane."""
    if FAST:
        keys = tl.cast(keys_ptr + chunk * (32 * BLOCK_M), tl.int64)
        gram = tl.cast(gram_ptr + chunk * 512, tl.int64)
        asm: tl.constexpr = "prefetch.global.L1 [$1]; mov.b32 $0, 0;"
        for first in tl.static_range(0, BLOCK_M + 8, place.shape[0]):
            line = first + place
            address = tl.where(
                line < BLOCK_M, keys + line * 128, gram + tl.minimum(line - BLOCK_M, 7) * 128
            )
            tl.inline_asm_elementwise(asm, "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def _advance(
    state, group, bias, lane, LANES: tl.constexpr, OWNERS: tl.constexpr, ADJOINT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return the state after a group of tokens: a tuple of this lane's states."""
    P: tl.constexpr = 4
    keys, rows = group
    k, gram, q = keys
    x, eps, rest, c = (), (), (), ()
    for row in tl.static_range(8 // OWNERS):
        value = rows[row][0].to(tl.float32)
        if len(rows[row]) == 4:
            value *= half_silu(rows[row][3].to(tl.float32), FAST)
        x += (value,)
        eps += (longhorn_eps(rows[row][1].to(tl.float32) + bias, rows[row][2], FAST),)
    for i in tl.static_range(8):
        value, owner = x[i // OWNERS], i % OWNERS
        if ADJOINT:
            value, before, state = _from_lane(value, owner, LANES), state, ()
            for j in tl.static_range(P):
                state += (before[j] + value * q[4 * i + j],)
            recalled = k[4 * i] * state[0]
        else:  # x enters the sum over lanes once
            recalled = k[4 * i] * state[0] - tl.where(lane == owner, value, 0.0)
        for j in tl.static_range(1, P):
            recalled += k[4 * i + j] * state[j]
        rest += (_total(recalled, LANES),)
    for i in tl.static_range(8):
        remaining = rest[i]
        for j in tl.static_range(i):
            remaining += (
                gram[16 * (i // 4 + j // 4) + 4 * (i % 4) + ((3 - j % 4) if ADJOINT else j % 4)]
                * c[j]
            )
        c += (-remaining * _from_lane(eps[i // OWNERS], i % OWNERS, LANES),)
    after = ()
    for j in tl.static_range(P):
        new = state[j]
        for i in tl.static_range(8):
            new += k[4 * i + j] * c[i]
        after += (new,)
    return after


@triton.jit
def _store(pointer, state, mask):
    P: tl.constexpr = 4
    for j in tl.static_range(P):
        tl.store(pointer + j, state[j], mask=mask)


@triton.jit(do_not_specialize=RUN_TIME)
def exact_states_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr, split_states_ptr,
    B, L, num_splits, split_chunks, zero, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Store the states that splits start from or, with dout, the gradients of the states after them.

    One direction of one batch element and block of channels. split_states (N, B, S, D, BLOCK_M). start
    (B, D, BLOCK_M), for a single direction: the state before the first split on the way, zeros if not given.
    """
    P: tl.constexpr = 4
    ADJOINT: tl.constexpr = dout_ptr is not None
    LANES: tl.constexpr = BLOCK_M // P
    OWNERS: tl.constexpr = min(LANES, 8)
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    b, _, direction, block = place_of_program(1, DIRECTIONS, (D + BLOCK_D - 1) // BLOCK_D)
    reverse = direction | (1 if REVERSE else 0)
    back = reverse ^ (
        1 if ADJOINT else 0
    )  # the chunks are gone through from the last one to the first
    place = tl.arange(0, BLOCK_D * LANES)
    lane, d = place % LANES, block * BLOCK_D + place // LANES
    mask = None if D % BLOCK_D == 0 else d < D
    m = d * BLOCK_M + lane * P
    own = lane % OWNERS * (-1 if ADJOINT else 1)  # of this lane's token in its group, in scan order
    sequence, chunks = direction * B + b, tl.cdiv(L, 16)
    bias = _load(bias_ptr + direction * D + d, mask).to(tl.float32)
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    x_step: tl.constexpr = D if ADJOINT else x_stride_l
    z_row = None
    if ADJOINT:
        x_row = dout_ptr + b * L * D + d
    else:
        x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    rows, steps = (x_row, dt_row), (x_step, dt_stride_l)
    if ADJOINT and z_ptr is not None:
        z_row = z_ptr + b * z_stride_b + d
        rows, steps = rows + (z_row,), steps + (z_stride_l,)  # noqa: RUF005  (Triton knows no starred tuples)
    keys_row, gram_row = keys_ptr + lane * P, gram_ptr + no_lane(BLOCK_D * LANES)
    state = ()
    for j in tl.static_range(P):
        if start_ptr is None:
            state += (tl.zeros(place.shape, tl.float32),)
        else:
            start = _load(start_ptr + b * (D * BLOCK_M) + m + j, mask)
            state += (start.to(tl.float32),)
    states_row = split_states_ptr + sequence * num_splits * (D * BLOCK_M) + m
    step, n = 1 - 2 * back, back * (chunks - 1)
    group = _load_group(
        place * 0, n, 0, sequence, x_row, dt_row, z_row, keys_row, gram_row, kappa_ptr, own, L, reverse, mask, OWNERS,
        ADJOINT, BLOCK_M, x_step, dt_stride_l, z_stride_l,
    )  # fmt: skip
    for s in range(
        num_splits - 1
    ):  # The last split on the way is not gone through, so a chunk always follows.
        split = tl.where(back == 1, num_splits - 1 - s, s)
        _store(states_row + split * (D * BLOCK_M), state, mask)
        for _ in range(tl.minimum(split_chunks, chunks - split * split_chunks)):
            _prefetch_keys(keys_ptr, gram_ptr, sequence * chunks + n + step, place, BLOCK_M, FAST)
            _prefetch(
                rows, steps, tl.minimum(tl.maximum(n + 2 * step, 0), chunks - 1), L, place, FAST
            )
            later = _load_group(
                _arrived(group, state, zero), n, 1, sequence, x_row, dt_row, z_row, keys_row, gram_row, kappa_ptr, own, L,
                reverse, mask, OWNERS, ADJOINT, BLOCK_M, x_step, dt_stride_l, z_stride_l,
            )  # fmt: skip
            tl.debug_barrier()  # keeps the loads from being moved down
            state = _advance(state, group, bias, lane, LANES, OWNERS, ADJOINT, FAST)
            n += step
            group = _load_group(
                _arrived(later, state, zero), n, 0, sequence, x_row, dt_row, z_row, keys_row, gram_row, kappa_ptr, own, L,
                reverse, mask, OWNERS, ADJOINT, BLOCK_M, x_step, dt_stride_l, z_stride_l,
            )  # fmt: skip
            tl.debug_barrier()
            state = _advance(state, later, bias, lane, LANES, OWNERS, ADJOINT, FAST)
    last = tl.where(back == 1, 0, num_splits - 1)
    _store(states_row + last * (D * BLOCK_M), state, mask)
