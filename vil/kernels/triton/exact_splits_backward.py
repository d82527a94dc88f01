"""The exact Longhorn scan in chunks, cut in splits: the gradients of the states after splits.

The kernel here goes through all chunks against the scan. With G the gradient of the state, a token
does:

    G <- G + dy_t q_t,   w_t = eps_t k_t.G,   G <- G - w_t k_t

It has few programs, so its time is that of its longest chain of instructions. Matrix products would
lengthen it: their results take long to come back. So the states of a channel are divided among
lanes, four each, in float32. It takes a group of eight tokens at a time: all k_t.G first, with one
exchange between the lanes of a channel, then the substitution, in every lane. Equations and letters
are in ``exact.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.exact_parts import RUN_TIME, place_of_program
from vil.kernels.triton.tiles import half_silu, load_quads, longhorn_eps, no_lane

STATES_OF_LANE = 4  # P below: one vector load
# As an aim, too (see ``tuning.THREE_WARPS``): left alone, ptxas moves the loads of the next tokens
# to their use.
MAX_REGISTERS = 240


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
def _load_keys(keys_row, gram_row, half: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return keys, Gram rows and queries of a group, the last token first.

    A load fetches four numbers for each of four tokens: compile time grows with the number of
    loads.
    """
    t: tl.constexpr = 15 - 8 * half
    step: tl.constexpr = -2 * BLOCK_M
    row = keys_row + t * (2 * BLOCK_M)
    keys = load_quads(row, step, 16) + load_quads(row + 4 * step, step, 16)
    row += BLOCK_M
    queries = load_quads(row, step, 16) + load_quads(row + 4 * step, step, 16)
    # The columns of the group's last four tokens in the rows of all, then those of its first four
    # in their own rows.
    row = gram_row + (t * 17 - 3)
    gram = load_quads(row, -16, 16) + load_quads(row - 64, -16, 16)
    return keys, gram + load_quads(row - 68, -16, 16), queries


@triton.jit
def _load_group(
    after, n, half: tl.constexpr, sequence, dout_row, dt_row, z_row, keys_row, gram_row, kappa_row,
    own, L, reverse, mask, OWNERS: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    dt_step: tl.constexpr, z_step: tl.constexpr,
):  # fmt: skip
    """Return ``_load_keys``, and rows of dout, step sizes, kappa and, if there is a gate, z.

    A lane has every OWNERS-th token of a group. Nothing is loaded before ``after``, zeros from
    ``_arrived``.
    """
    rows, sign, chunk = (), 1 - 2 * reverse, sequence * tl.cdiv(L, 16) + n
    keys_row += chunk * (32 * BLOCK_M) + after * 4
    keys = _load_keys(keys_row, gram_row + chunk * 512 + after * 4, half, BLOCK_M)
    first = tl.minimum(n * 16, L - 16).to(tl.int64) + 15 * reverse
    kappa_row += chunk * 32 - own + after
    place = (first - own * sign + after).to(tl.int64)
    for i in tl.static_range(0, 8, OWNERS):
        token = place + sign * (15 - half * 8 - i)
        row = (_load(dout_row + token * D, mask), _load(dt_row + token * dt_step, mask))
        row += (tl.load(kappa_row + (15 - half * 8 - i)),)
        if z_row is not None:
            row += (_load(z_row + token * z_step, mask),)
        rows += (row,)
    return keys, rows


@triton.jit
def _bits(number):
    """Return an int32 that depends on a number of 32 or 16 bits."""
    if number.dtype == tl.float32:
        return number.to(tl.int32, bitcast=True)
    else:
        return number.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _arrived(group, state, zero):
    """Return zeros that are known once a group and the state are known.

    The compiler must not know that ``zero`` is 0.

    Loads share six counters on NVIDIA GPUs, and a counter only tells when all of its loads have
    arrived. If the next group's loads went out before this group is waited for, they would be
    waited for as well. The state keeps the compiler from waiting before the last group is computed.
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
def _prefetch(address, LEVEL: tl.constexpr):
    """Bring the cache lines of addresses, int64, to the cache L1 or L2."""
    asm: tl.constexpr = "prefetch.global." + LEVEL + " [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def _prefetch_keys(keys_ptr, gram_ptr, chunk, place, BLOCK_M: tl.constexpr):
    """Bring a chunk's keys and Gram matrix to the L1 cache, a line by each lane."""
    keys = tl.cast(keys_ptr + chunk * (32 * BLOCK_M), tl.int64)
    gram = tl.cast(gram_ptr + chunk * 512, tl.int64) - BLOCK_M * 128
    for first in tl.static_range(0, BLOCK_M + 8, place.shape[0]):
        line = tl.minimum(first + place, BLOCK_M + 7)
        _prefetch(tl.where(line < BLOCK_M, keys, gram) + line * 128, "L1")


@triton.jit
def _go_back(state, group, bias, LANES: tl.constexpr, OWNERS: tl.constexpr, FAST: tl.constexpr):
    """Return the gradient of the state before a group of tokens, a tuple of this lane's states."""
    P: tl.constexpr = 4
    keys, rows = group
    k, gram, q = keys
    dy, eps, read, w = (), (), (), ()
    for row in tl.static_range(8 // OWNERS):
        value = rows[row][0].to(tl.float32)
        if len(rows[row]) == 4:
            value *= half_silu(rows[row][3].to(tl.float32), FAST)
        dy += (value,)
        eps += (longhorn_eps(rows[row][1].to(tl.float32) + bias, rows[row][2], FAST),)
    for i in tl.static_range(8):
        value, before, state = _from_lane(dy[i // OWNERS], i % OWNERS, LANES), state, ()
        for j in tl.static_range(P):
            state += (before[j] + value * q[4 * i + j],)
        by_key = k[4 * i] * state[0]
        for j in tl.static_range(1, P):
            by_key += k[4 * i + j] * state[j]
        read += (_total(by_key, LANES),)
    for i in tl.static_range(8):
        rest = read[i]
        for j in tl.static_range(i):
            rest -= gram[16 * (i // 4 + j // 4) + 4 * (i % 4) + 3 - j % 4] * w[j]
        w += (rest * _from_lane(eps[i // OWNERS], i % OWNERS, LANES),)
    result = ()
    for j in tl.static_range(P):
        after = state[j]
        for i in tl.static_range(8):
            after -= k[4 * i + j] * w[i]
        result += (after,)
    return result


@triton.jit
def _store(pointer, state, mask):
    P: tl.constexpr = 4
    for j in tl.static_range(P):
        tl.store(pointer + j, state[j], mask=mask)


@triton.jit(do_not_specialize=RUN_TIME)
def exact_gradients_kernel(
    dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr, split_states_ptr,
    B, L, num_splits, split_chunks, zero, dt_stride_dir, dt_stride_b, z_stride_b,
    REVERSE: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the states after splits.

    One direction of one batch element and block of channels. split_states (N, B, S, D, BLOCK_M).
    start (B, D, BLOCK_M), for a single direction: the gradient of the last state, zeros if not
    given.
    """
    P: tl.constexpr = 4
    LANES: tl.constexpr = BLOCK_M // P
    OWNERS: tl.constexpr = min(LANES, 8)
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    b, _, direction, block = place_of_program(1, DIRECTIONS, (D + BLOCK_D - 1) // BLOCK_D)
    reverse = direction | (1 if REVERSE else 0)
    place = tl.arange(0, BLOCK_D * LANES)
    lane, d = place % LANES, block * BLOCK_D + place // LANES
    mask = None if D % BLOCK_D == 0 else d < D
    m, own = d * BLOCK_M + lane * P, lane % OWNERS
    sequence, chunks = direction * B + b, tl.cdiv(L, 16)
    bias = _load(bias_ptr + direction * D + d, mask).to(tl.float32)
    dout_row, z_row = dout_ptr + b * L * D + d, None
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    if z_ptr is not None:
        z_row = z_ptr + b * z_stride_b + d
    keys_row, gram_row = keys_ptr + lane * P, gram_ptr + no_lane(BLOCK_D * LANES)
    state = ()
    for j in tl.static_range(P):
        if start_ptr is None:
            state += (tl.zeros(place.shape, tl.float32),)
        else:
            start = _load(start_ptr + b * (D * BLOCK_M) + m + j, mask)
            state += (start.to(tl.float32),)
    states_row = split_states_ptr + sequence * num_splits * (D * BLOCK_M) + m
    step, n = 2 * reverse - 1, (1 - reverse) * (chunks - 1)
    group = _load_group(
        place * 0, n, 0, sequence, dout_row, dt_row, z_row, keys_row, gram_row, kappa_ptr, own, L,
        reverse, mask, OWNERS, BLOCK_M, D, dt_stride_l, z_stride_l,
    )  # fmt: skip
    # The last split on the way is not gone through, so another chunk always follows.
    for s in range(num_splits - 1):
        split = tl.where(reverse == 1, s, num_splits - 1 - s)
        _store(states_row + split * (D * BLOCK_M), state, mask)
        for _ in range(tl.minimum(split_chunks, chunks - split * split_chunks)):
            if FAST:
                _prefetch_keys(keys_ptr, gram_ptr, sequence * chunks + n + step, place, BLOCK_M)
                late = tl.minimum(tl.maximum(n + 2 * step, 0), chunks - 1)
                token = tl.minimum(late * 16, L - 16).to(tl.int64) + place % 16
                _prefetch(tl.cast(dout_row + token * D, tl.int64), "L2")
                _prefetch(tl.cast(dt_row + token * dt_stride_l, tl.int64), "L2")
                if z_row is not None:
                    _prefetch(tl.cast(z_row + token * z_stride_l, tl.int64), "L2")
            later = _load_group(
                _arrived(group, state, zero), n, 1, sequence, dout_row, dt_row, z_row, keys_row,
                gram_row, kappa_ptr, own, L, reverse, mask, OWNERS, BLOCK_M, D, dt_stride_l,
                z_stride_l,
            )  # fmt: skip
            tl.debug_barrier()  # keeps the loads from being moved down
            state = _go_back(state, group, bias, LANES, OWNERS, FAST)
            n += step
            group = _load_group(
                _arrived(later, state, zero), n, 0, sequence, dout_row, dt_row, z_row, keys_row,
                gram_row, kappa_ptr, own, L, reverse, mask, OWNERS, BLOCK_M, D, dt_stride_l,
                z_stride_l,
            )  # fmt: skip
            tl.debug_barrier()
            state = _go_back(state, later, bias, LANES, OWNERS, FAST)
    last = tl.where(reverse == 1, num_splits - 1, 0)
    _store(states_row + last * (D * BLOCK_M), state, mask)
