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
    t = (15 - 8 * half) if ADJOINT else 8 * half  # the first token
    step = sign * 2 * BLOCK_M
    row, queries = keys_row + t * (2 * BLOCK_M), ()
    keys = load_quads(row, step, 16) + load_quads(row + 4 * step, step, 16)
    if ADJOINT:
        row += BLOCK_M
        queries = load_quads(row, step, 16) + load_quads(row + 4 * step, step, 16)
    # Of a token's row, the columns of the first four and of the last four tokens; each quad has tokens in scan order.
    early = gram_row + (t * 16 + t - (3 if ADJOINT else 0)) + no_lane(keys_row.shape[0])
    late = early + 4 * sign * 16
    gram = (
        load_quads(early, sign * 16, 16),
        load_quads(late, sign * 16, 16),
        load_quads(late + 4 * sign, sign * 16, 16),
    )
    return keys, gram, queries


@triton.jit
def _load_rows(
    n, chunk, half: tl.constexpr, x_row, dt_row, z_row, kappa_row, L, reverse, mask, OWNERS: tl.constexpr,
    ADJOINT: tl.constexpr, x_step: tl.constexpr, dt_step: tl.constexpr, z_step: tl.constexpr,
):  # fmt: skip
    """Return x, step sizes, kappa and, if there is a gate, z of a group; a lane has every OWNERS-th token."""
    rows, sign = (), 1 - 2 * reverse
    first = tl.cast(tl.minimum(n * 16, L - 16) + 15 * reverse, tl.int64)
    kappa_row += chunk * 32
    for i in tl.static_range(0, 8, OWNERS):
        t = (15 - half * 8 - i) if ADJOINT else half * 8 + i
        token = first + sign * t
        x, dt = _load(x_row + token * x_step, mask), _load(dt_row + token * dt_step, mask)
        row = (x, dt, tl.load(kappa_row + t))
        if z_row is not None:
            row += (_load(z_row + token * z_step, mask),)
        rows += (row,)
    return rows


@triton.jit
def _advance(
    state, keys, rows, bias, lane, LANES: tl.constexpr, OWNERS: tl.constexpr, ADJOINT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return the state after a group of tokens: a tuple of this lane's states."""
    P: tl.constexpr = 4
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
                gram[i // 4 + j // 4][4 * (i % 4) + ((3 - j % 4) if ADJOINT else j % 4)] * c[j]
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
    B, L, num_splits, split_chunks, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
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
    sequence, chunks, ahead = direction * B + b, tl.cdiv(L, 16), own * (1 - 2 * reverse)
    bias = _load(bias_ptr + direction * D + d, mask).to(tl.float32)
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + (d + ahead * dt_stride_l)
    x_step: tl.constexpr = D if ADJOINT else x_stride_l
    if ADJOINT:
        x_row = dout_ptr + b * L * D + (d + ahead * D)
    else:
        x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + (d + ahead * x_stride_l)
    z_row = None
    if ADJOINT and z_ptr is not None:
        z_row = z_ptr + b * z_stride_b + (d + ahead * z_stride_l)
    keys_row, kappa_row = keys_ptr + lane * P, kappa_ptr + own
    state = ()
    for j in tl.static_range(P):
        if start_ptr is None:
            state += (tl.zeros(place.shape, tl.float32),)
        else:
            start = _load(start_ptr + b * (D * BLOCK_M) + m + j, mask)
            state += (start.to(tl.float32),)
    states_row = split_states_ptr + sequence * num_splits * (D * BLOCK_M) + m
    # The last split on the way is not gone through, so another chunk always follows.
    count = tl.where(back == 1, chunks - split_chunks, (num_splits - 1) * split_chunks)
    step, n = 1 - 2 * back, back * (chunks - 1)
    chunk = sequence * chunks + n
    keys = _load_keys(
        keys_row + chunk * (32 * BLOCK_M), gram_ptr + chunk * 512, 0, ADJOINT, BLOCK_M
    )
    rows = _load_rows(
        n, chunk, 0, x_row, dt_row, z_row, kappa_row, L, reverse, mask, OWNERS, ADJOINT, x_step,
        dt_stride_l, z_stride_l,
    )  # fmt: skip
    later_rows = _load_rows(
        n, chunk, 1, x_row, dt_row, z_row, kappa_row, L, reverse, mask, OWNERS, ADJOINT, x_step,
        dt_stride_l, z_stride_l,
    )  # fmt: skip
    for i in range(count):
        if (i == 0) | ((n + back) % split_chunks == 0):
            _store(states_row + n // split_chunks * (D * BLOCK_M), state, mask)
        # Nothing waits for memory: keys are loaded a group ahead, which the L2 cache has, and rows a chunk.
        next_rows = _load_rows(
            n + step, chunk + step, 0, x_row, dt_row, z_row, kappa_row, L, reverse, mask, OWNERS, ADJOINT, x_step,
            dt_stride_l, z_stride_l,
        )  # fmt: skip
        later_keys = _load_keys(
            keys_row + chunk * (32 * BLOCK_M), gram_ptr + chunk * 512, 1, ADJOINT, BLOCK_M
        )
        state = _advance(state, keys, rows, bias, lane, LANES, OWNERS, ADJOINT, FAST)
        rows = next_rows
        next_rows = _load_rows(
            n + step, chunk + step, 1, x_row, dt_row, z_row, kappa_row, L, reverse, mask, OWNERS, ADJOINT, x_step,
            dt_stride_l, z_stride_l,
        )  # fmt: skip
        n, chunk = n + step, chunk + step
        keys = _load_keys(
            keys_row + chunk * (32 * BLOCK_M), gram_ptr + chunk * 512, 0, ADJOINT, BLOCK_M
        )
        state = _advance(state, later_keys, later_rows, bias, lane, LANES, OWNERS, ADJOINT, FAST)
        later_rows = next_rows
    last = tl.where(back == 1, 0, num_splits - 1)
    _store(states_row + last * (D * BLOCK_M), state, mask)
