"""The exact Longhorn scan in registers, for bfloat16 and up to 16 states on NVIDIA GPUs: Triton kernels.

Same equations, chunks and letters as in ``exact.py``, but a warp keeps its 32 channels to itself, and
every product stays in its registers (``fragments.py``): no shared memory and no barriers. Numbers
that are multiplied again and again, the state and its gradient, are split in two parts of bfloat16.

C is rounded to bfloat16 *before* it updates the state, and it is kept for the backward pass. There, it
leads back from the last state to the first, S0 = S_T - K' C, the same sum in the opposite order. So no
states are kept but the last one of each split, and nothing is solved twice.

Dead rows, which a ragged chunk has, are rows of zeros whose eps is zero.
"""

import triton
import triton.language as tl

from vil.kernels.triton.exact_parts import RUN_TIME, place_of_program
from vil.kernels.triton.fragments import (
    add_half_product,
    add_product,
    from_lane,
    from_tokens,
    high_half,
    load_float,
    load_floats,
    load_operand,
    load_state,
    load_tokens,
    load_word,
    load_words,
    low_half,
    pair,
    prefetch_tokens,
    rounded_number,
    second_operand,
    store_state,
    store_tokens,
    to_tokens,
    tokens_of_operand,
    two_parts,
    zeros,
)
from vil.kernels.triton.tiles import half_silu, longhorn_eps

# What varies between calls, as in ``exact_parts``.
RUN_TIME_FRAGMENTS = (*RUN_TIME, "c_ptr", "last_ptr", "back_chunks", "dlow_ptr", "warps", "row_step", "low_columns")

# Operands of a chunk in ``operands``, each 16 by 16: by row and column
RECALL = tl.constexpr(0)  # state, token: -K'
ANSWER = tl.constexpr(1)  # state, token: Q'
KEYS = tl.constexpr(2)  # token, state: K
QUERIES = tl.constexpr(3)  # token, state: Q
READ = tl.constexpr(4)  # earlier token, token: tril(Q K')'
READ_BACK = tl.constexpr(5)  # token, earlier token: tril(Q K'), then what its rounding lost
ACROSS = tl.constexpr(7)  # first and second half, 8 by 8: -K K' in two parts, then transposed
OPERANDS = tl.constexpr(8)


@triton.jit(do_not_specialize=RUN_TIME_FRAGMENTS)
def operands_kernel(
    q_ptr, k_ptr, operands_ptr, gram_ptr, kappa_ptr, B, L, kappa_scale,
    q_stride_dir, q_stride_b, q_stride_l, k_stride_dir, k_stride_b, k_stride_l,
    REVERSE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Order one chunk of keys and queries as operands of products, with their Gram matrices.

    operands (N, B, chunks, OPERANDS, 256), bfloat16, as ``second_operand``.
    gram (N, B, chunks, 16, 16): k_tau.k_t for tau < t and else 0, also 0 for tokens 2 i and 2 i + 1.
    kappa (N, B, chunks, 24): 1 + kappa_scale |k|^2, infinite if dead; then k_tau.k_t of these tokens.
    """
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(L, 16)
    n, b, direction = chunk % chunks, chunk // chunks % B, chunk // chunks // B
    t = tl.arange(0, 16)
    reverse = direction == 1 or REVERSE
    token = n * 16 + tl.where(reverse, 15 - t, t)
    mask = (token < L)[:, None] & (t < M)[None, :]
    k_row = k_ptr + direction * k_stride_dir + b * k_stride_b + token[:, None] * k_stride_l
    q_row = q_ptr + direction * q_stride_dir + b * q_stride_b + token[:, None] * q_stride_l
    k = tl.load(k_row + t[None, :], mask=mask, other=0.0)
    q = tl.load(q_row + t[None, :], mask=mask, other=0.0)
    wide, row, column = k.to(tl.float32), t[:, None], t[None, :]
    norm = 1.0 + kappa_scale * tl.sum(wide * wide, 1)
    tl.store(kappa_ptr + chunk * 24 + t, tl.where(token < L, norm, float("inf")))
    gram, read = tl.dot(k, tl.trans(k)), tl.dot(k, tl.trans(q))  # read: earlier token, token
    tl.store(gram_ptr + chunk * 256 + row * 16 + column, tl.where(row // 2 < column // 2, gram, 0.0))
    of_pair = kappa_ptr + chunk * 24 + 16 + row // 2 + column * 0
    tl.store(of_pair, gram, mask=(row % 2 == 0) & (column == row + 1))
    read = tl.where(row <= column, read, 0.0)
    rounded_read = read.to(tl.bfloat16)
    to = operands_ptr + chunk * (OPERANDS * 256)
    here, there = second_operand(row, column), second_operand(column, row)
    # Flips the sign bit: how bfloat16 is negated differs between GPUs.
    minus_k = (k.to(tl.int16, bitcast=True) ^ -32768).to(tl.bfloat16, bitcast=True)
    tl.store(to + RECALL * 256 + there, minus_k)
    tl.store(to + ANSWER * 256 + there, q)
    tl.store(to + KEYS * 256 + here, k)
    tl.store(to + QUERIES * 256 + here, q)
    tl.store(to + READ * 256 + here, rounded_read)
    tl.store(to + READ_BACK * 256 + there, rounded_read)
    tl.store(to + (READ_BACK + 1) * 256 + there, (read - rounded_read.to(tl.float32)).to(tl.bfloat16))
    across, high = (row < 8) & (column >= 8), (-gram).to(tl.bfloat16)
    low = (-gram - high.to(tl.float32)).to(tl.bfloat16)
    # A lane's pair of both parts: (first half, second half), then (second half, first half).
    at = to + ACROSS * 256 + (column - 8) * 16 + row // 2 * 4 + row % 2
    back = to + ACROSS * 256 + 128 + row * 16 + (column - 8) // 2 * 4 + column % 2
    tl.store(at, high, mask=across)
    tl.store(at + 2, low, mask=across)
    tl.store(back, high, mask=across)
    tl.store(back + 2, low, mask=across)


@triton.jit
def place_of_lane(block, D: tl.constexpr, LANES: tl.constexpr):
    """Return g, q, the first channel of a lane and whether it exists; D is a multiple of four."""
    lane = tl.arange(0, LANES)
    d = block * LANES + lane // 32 * 32 + lane % 32 // 4 * 4
    return lane % 32 // 4, lane % 4, d, d < D


@triton.jit
def tokens_of_lane(n, q, L, exists, reverse):
    """Return the token of column 2 q of a chunk, and the masks of the lane's four tokens."""
    first = n * 16 + tl.where(reverse, 15 - 2 * q, 2 * q)
    step, alive = tl.where(reverse, -1, 1), ()
    for i in tl.static_range(4):
        alive += (exists & (first + step * (8 * (i // 2) + i % 2) < L),)
    return first.to(tl.int64), alive


@triton.jit
def load_channels(pointer, exists):
    """Load the float32 numbers of a lane's four channels."""
    values = ()
    for j in tl.static_range(4):
        values += (load_float(pointer + j, exists),)
    return values


@triton.jit
def of_channels(values):
    """Return the tile whose columns are all the same."""
    tile = ()
    for i in tl.static_range(16):
        tile += (values[i // 8 * 2 + i // 2 % 2],)
    return tile


@triton.jit
def load_weight(pointer, q, exists, RANK: tl.constexpr):
    """Return the projection of step sizes as operands of 16 ranks each; pointer is the first channel."""
    operands = ()
    for s in tl.static_range((RANK + 15) // 16):
        operand = ()
        for i in tl.static_range(8):  # j // 2, n, j % 2
            r = 2 * q + (16 * s + 8 * (i // 2 % 2))
            operand += (load_word(pointer + (i // 4 * 2 + i % 2) * RANK + r, exists & (r < RANK)),)
        operands += (operand,)
    return operands


@triton.jit
def load_ranks(row, step: tl.constexpr, n, g, q, L, reverse, RANK: tl.constexpr):
    """Return the low-rank factors of a chunk's step sizes as second operands, rank by token."""
    operands = ()
    for s in tl.static_range((RANK + 15) // 16):
        operand = ()
        for i in tl.static_range(4):  # n, half of the ranks
            t = g + 8 * (i // 2)
            token = n * 16 + tl.where(reverse, 15 - t, t)
            r = 2 * q + (16 * s + 8 * (i % 2))
            operand += (load_word(row + token.to(tl.int64) * step + r, (token < L) & (r < RANK)),)
        operands += (operand,)
    return operands


@triton.jit
def load_kappa(pointer, q):
    """Load the four tokens' numbers of a lane."""
    return load_floats(pointer + 2 * q) + load_floats(pointer + 2 * q + 8)


@triton.jit
def load_solver(gram, kappa, q, HALF: tl.constexpr, BACKWARD: tl.constexpr):
    """Load how eight tokens of the substitution depend on each other: k_tau.k_t of three pairs, and a lane's own.

    Of each pair, the lane's two tokens by the pair's first token, then by its second.
    """
    weights, corner = (), gram + 136 * HALF
    for i in tl.static_range(3):
        if BACKWARD:  # the later pair 3 - i, by the lane's tokens
            a = load_floats(corner + 2 * q * 16 + (6 - 2 * i))
            b = load_floats(corner + 2 * q * 16 + (22 - 2 * i))
            weights += ((a[0], b[0], a[1], b[1]),)
        else:  # the earlier pair i
            weights += (load_floats(corner + 32 * i + 2 * q) + load_floats(corner + 32 * i + 16 + 2 * q),)
    return weights, load_float(kappa + 16 + 4 * HALF + q)


@triton.jit
def _solved(rest, eps, solver, lane, BACKWARD: tl.constexpr):
    """Solve the substitution in eight tokens; return eps times the solution, in pairs and unrounded.

    rest and eps are the eight columns, 8 numbers. In the backward pass, tokens come in reverse.
    """
    weights, own = solver
    first: tl.constexpr = 1 if BACKWARD else 0
    for i in tl.static_range(4):
        solved, exact = (), ()
        for j in tl.static_range(4):
            a = eps[2 * j + first] * rest[2 * j + first]
            b = eps[2 * j + 1 - first] * (rest[2 * j + 1 - first] - own * rounded_number(a))
            solved += (pair(b, a) if BACKWARD else pair(a, b),)
            exact += (b, a) if BACKWARD else (a, b)
        if i < 3:
            owner, left = lane + ((3 - i) if BACKWARD else i), ()
            w = weights[i]
            for j in tl.static_range(4):
                both = from_lane(solved[j], owner)
                a, b = low_half(both), high_half(both)
                left += (rest[2 * j] - w[0] * a - w[2] * b, rest[2 * j + 1] - w[1] * a - w[3] * b)
            rest = left
    return solved, exact


@triton.jit
def _half(tile, n: tl.constexpr):
    """Return eight columns of a tile, 8 numbers."""
    return tile[4 * n : 4 * n + 4] + tile[8 + 4 * n : 12 + 4 * n]


@triton.jit
def _whole(first, second, N: tl.constexpr):
    """Return a tile or its pairs, given N numbers of each 16 channels for both halves of its columns."""
    return first[:N] + second[:N] + first[N:] + second[N:]


@triton.jit
def substitution(rest, eps, solvers, across, BACKWARD: tl.constexpr):
    """Return eps times the solution: rounded, as an operand, and the tile before it was rounded.

    solvers are of the half that is solved first and of the other; across are both parts of what the
    second takes from the first.
    """
    lane = tl.arange(0, rest[0].shape[0]) % 32 // 4 * 4
    begin: tl.constexpr = 1 if BACKWARD else 0
    a, exact_a = _solved(_half(rest, begin), _half(eps, begin), solvers[0], lane, BACKWARD)
    half = add_half_product(add_half_product(_half(rest, 1 - begin), a, across[0]), a, across[1])
    b, exact_b = _solved(half, _half(eps, 1 - begin), solvers[1], lane, BACKWARD)
    if BACKWARD:
        return _whole(b, a, 2), _whole(exact_b, exact_a, 4)
    else:
        return _whole(a, b, 2), _whole(exact_a, exact_b, 4)


@triton.jit
def _load_chunk(
    n, sequence, x_row, dt_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d, exists,
    REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, RANK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Load what updates the state in a chunk: x, step sizes or their low-rank factors, and operands."""
    step: tl.constexpr = -1 if REVERSE else 1
    chunk, lane = sequence * tl.cdiv(L, 16) + n, tl.arange(0, LANES) % 32
    first, alive = tokens_of_lane(n, q, L, exists, REVERSE)
    x = load_tokens(x_row + first * x_stride_l, step * x_stride_l, alive)
    if RANK > 0:
        dt = load_ranks(dt_row, dt_stride_l, n, g, q, L, REVERSE, RANK)
    else:
        dt = load_tokens(dt_row + d + first * dt_stride_l, step * dt_stride_l, alive)
    operands, kappa = operands_ptr + chunk * (OPERANDS * 256), kappa_ptr + chunk * 24
    recall, keys = load_operand(operands + RECALL * 256 + lane * 8), load_operand(operands + KEYS * 256 + lane * 8)
    gram, across = gram_ptr + chunk * 256, load_words(operands + ACROSS * 256 + lane * 4)
    solvers = load_solver(gram, kappa, q, 0, False), load_solver(gram, kappa, q, 1, False)
    return x, dt, load_kappa(kappa, q), recall, solvers, across, keys


@triton.jit
def eps_of_chunk(dt, bias, weight, kappa, FAST: tl.constexpr):
    """Return eps of a chunk, a tile, given its loaded step sizes or their low-rank factors."""
    v, eps = of_channels(bias), ()
    if len(weight) > 0:
        for s in tl.static_range(len(weight)):
            v = add_product(v, weight[s], dt[s])
    else:
        v = sum_of_tiles(v, from_tokens(dt))
    for e in tl.static_range(16):
        eps += (longhorn_eps(v[e], kappa[e // 4 % 2 * 2 + e % 2], FAST),)
    return eps


@triton.jit
def _next_state(state, loaded, bias, weight, FAST: tl.constexpr):
    """Return C as an operand, the state after a chunk, x, and the state before in two parts."""
    pairs, dt, kappa, recall, solvers, across, keys = loaded
    x, eps = from_tokens(pairs), eps_of_chunk(dt, bias, weight, kappa, FAST)
    high, low = two_parts(state)
    rest = add_product(add_product(x, high, recall), low, recall)
    c, _ = substitution(rest, eps, solvers, across, False)
    return c, add_product(state, c, keys), x, high, low


@triton.jit
def sum_of_tiles(a, b):
    """Return the sum of two tiles."""
    result = ()
    for i in tl.static_range(len(a)):
        result += (a[i] + b[i],)
    return result


@triton.jit
def start(
    split_states_ptr, place, bias_ptr, dt_weight_ptr, direction, q, d, exists, RANK: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the first state, bias and weight of the step sizes."""
    state, weight = zeros(LANES, 16), ()
    if split_states_ptr is not None:
        state = load_state(split_states_ptr + place, exists)
    if RANK > 0:
        weight = load_weight(dt_weight_ptr + (direction * D + d) * RANK, q, exists, RANK)
    return state, load_channels(bias_ptr + direction * D + d, exists), weight


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, dt_weight_ptr, z_ptr, operands_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr, y_ptr,
    out_ptr, c_ptr, last_ptr, split_states_ptr, final_ptr, B, L, b, split, num_splits, split_chunks,
    back_chunks, block, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scan one direction of one split of one batch element and block of channels.

    A single direction (no z) stores y. Of two directions, direction 0 leaves y as a partial sum.
    Direction 1 adds its own, gates and stores the result, and also stores the sum if C is saved.
    """
    step: tl.constexpr = -1 if REVERSE else 1
    g, q, d, exists = place_of_lane(block, D, LANES)
    chunks, begin, sequence = tl.cdiv(L, 16), split * split_chunks, direction * B + b
    end, of_lane = tl.minimum(begin + split_chunks, chunks), d * 16 + 2 * q
    place = (sequence * num_splits + split) * (D * 16) + of_lane
    state, bias, weight = start(
        split_states_ptr, place, bias_ptr, dt_weight_ptr, direction, q, d, exists, RANK, D, LANES
    )  # fmt: skip
    skip = load_channels(skip_ptr + direction * D + d, exists)
    for i in range(begin, end):
        n = (begin + end - 1 - i) if REVERSE else i
        loaded = _load_chunk(
            n, sequence, x_ptr + direction * x_stride_dir + b * x_stride_b + d,
            dt_ptr + direction * dt_stride_dir + b * dt_stride_b, operands_ptr, gram_ptr, kappa_ptr, L,
            g, q, d, exists, REVERSE, x_stride_l, dt_stride_l, RANK, LANES,
        )  # fmt: skip
        operands = operands_ptr + (sequence * chunks + n) * (OPERANDS * 256) + tl.arange(0, LANES) % 32 * 8
        answer, read = load_operand(operands + ANSWER * 256), load_operand(operands + READ * 256)
        first, alive = tokens_of_lane(n, q, L, exists, REVERSE)
        row, y = (b * L + first) * D + d, ()
        ahead, channel = (n + step) * 16, tl.minimum(d // 32 * 32, D - 1)
        x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + channel
        if direction == 1:
            y_row = y_ptr + b * L * D + channel
            prefetch_tokens(y_row, D, z_ptr + b * z_stride_b + channel, z_stride_l, ahead, L)
        prefetch_tokens(x_row, x_stride_l, x_row, x_stride_l, ahead, L)
        c, state, x, high, low = _next_state(state, loaded, bias, weight, FAST)
        for e in tl.static_range(16):
            y += (skip[e // 8 * 2 + e // 2 % 2] * x[e],)
        y = add_product(add_product(add_product(y, high, answer), low, answer), c, read)
        if c_ptr is not None:
            own_row = (sequence * L + first) * D + d  # 64 bits: sequence has as many
            store_tokens(c_ptr + own_row, step * D, tokens_of_operand(c), alive)
            if (n % back_chunks == 0) if REVERSE else (((n + 1) % back_chunks == 0) | (n == chunks - 1)):
                last = sequence * tl.cdiv(chunks, back_chunks) + n // back_chunks
                store_state(last_ptr + last * (D * 16) + of_lane, state, exists)
        if z_ptr is None:
            store_tokens(out_ptr + row, step * D, to_tokens(y), alive)
        elif direction == 0:
            store_tokens(y_ptr + row, step * D, to_tokens(y), alive)
        else:
            y = sum_of_tiles(y, from_tokens(load_tokens(y_ptr + row, step * D, alive)))
            z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
            z, gated = from_tokens(load_tokens(z_row, step * z_stride_l, alive)), ()
            for e in tl.static_range(16):
                gated += (y[e] * half_silu(z[e], FAST),)
            if c_ptr is not None:
                store_tokens(y_ptr + row, step * D, to_tokens(y), alive)
            store_tokens(out_ptr + row, step * D, to_tokens(gated), alive)
    if final_ptr is not None:
        left = begin if REVERSE else chunks - end
        store_state(final_ptr + b * (D * 16) + of_lane, state, exists & (left == 0))


@triton.jit(do_not_specialize=RUN_TIME_FRAGMENTS)
def fragments_forward_kernel(
    x_ptr, dt_ptr, dt_weight_ptr, z_ptr, operands_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr, y_ptr,
    out_ptr, c_ptr, last_ptr, split_states_ptr, final_ptr, B, L, num_splits, split_chunks, back_chunks,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Scan one direction, or both: the second adds to the result of the first, gates and stores it.

    c (N, B, L, D), bfloat16, and last (N, B, back splits, D, 16), the states after splits of
    ``back_chunks`` chunks, are for the backward pass.
    """
    b, split, _, block = place_of_program(num_splits, 1, (D + LANES - 1) // LANES)
    for direction in tl.static_range(1 if z_ptr is None else 2):
        if direction == 1:
            tl.debug_barrier()  # lets a lane read the sum that it wrote
        _forward_direction(
            x_ptr, dt_ptr, dt_weight_ptr, z_ptr, operands_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
            y_ptr, out_ptr, c_ptr, last_ptr, split_states_ptr, final_ptr, B, L, b, split, num_splits,
            split_chunks, back_chunks, block, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
            z_stride_b, direction, REVERSE or direction == 1, x_stride_l, dt_stride_l, z_stride_l, RANK,
            D, LANES, FAST,
        )  # fmt: skip


@triton.jit
def store_before_split(
    states_row, state, n, split_chunks, chunks, exists, REVERSE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Store the state before chunk n if a split begins there, on the way through the sequence."""
    begins = ((n + 1) % split_chunks == 0) | (n == chunks - 1) if REVERSE else n % split_chunks == 0
    if begins:
        store_state(states_row + n // split_chunks * (D * 16), state, exists)


@triton.jit
def _states_direction(
    x_ptr, dt_ptr, dt_weight_ptr, operands_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
    split_states_ptr, B, L, b, num_splits, split_chunks, block, x_stride_dir, x_stride_b,
    dt_stride_dir, dt_stride_b, direction: tl.constexpr, REVERSE: tl.constexpr,
    x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Carry the state through one direction, and store it before every split."""
    g, q, d, exists = place_of_lane(block, D, LANES)
    sequence, chunks, of_lane = direction * B + b, tl.cdiv(L, 16), d * 16 + 2 * q
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b
    state, bias, weight = start(
        start_ptr, b * (D * 16) + of_lane, bias_ptr, dt_weight_ptr, direction, q, d, exists, RANK, D, LANES
    )  # fmt: skip
    states_row = split_states_ptr + sequence * num_splits * (D * 16) + of_lane
    # The last split on the way is not gone through, so another chunk always follows.
    count = (chunks - split_chunks) if REVERSE else (num_splits - 1) * split_chunks
    n, way = (chunks - 1) if REVERSE else 0, -1 if REVERSE else 1
    even = _load_chunk(
        n, sequence, x_row, dt_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d, exists, REVERSE,
        x_stride_l, dt_stride_l, RANK, LANES,
    )  # fmt: skip
    # Nothing waits for memory: everything is loaded one chunk ahead. Two chunks by turns, because to
    # copy what has been loaded would wait for it. The barriers keep loads from being moved down.
    for _ in range(count // 2):
        odd = _load_chunk(
            n + way, sequence, x_row, dt_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d, exists,
            REVERSE, x_stride_l, dt_stride_l, RANK, LANES,
        )  # fmt: skip
        tl.debug_barrier()
        store_before_split(states_row, state, n, split_chunks, chunks, exists, REVERSE, D)
        state = _next_state(state, even, bias, weight, FAST)[1]
        even = _load_chunk(
            n + 2 * way, sequence, x_row, dt_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d, exists,
            REVERSE, x_stride_l, dt_stride_l, RANK, LANES,
        )  # fmt: skip
        tl.debug_barrier()
        store_before_split(states_row, state, n + way, split_chunks, chunks, exists, REVERSE, D)
        state = _next_state(state, odd, bias, weight, FAST)[1]
        n += 2 * way
    if count % 2 == 1:
        store_before_split(states_row, state, n, split_chunks, chunks, exists, REVERSE, D)
        state = _next_state(state, even, bias, weight, FAST)[1]
    store_state(states_row + (0 if REVERSE else (num_splits - 1)) * (D * 16), state, exists)


@triton.jit(do_not_specialize=RUN_TIME_FRAGMENTS)
def fragments_states_kernel(
    x_ptr, dt_ptr, dt_weight_ptr, operands_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
    split_states_ptr, B, L, num_splits, split_chunks, x_stride_dir, x_stride_b, dt_stride_dir,
    dt_stride_b, DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Store the states that splits start from, (N, B, S, D, 16), given the first of one direction."""
    b, _, way, block = place_of_program(1, DIRECTIONS, (D + LANES - 1) // LANES)
    for direction in tl.static_range(DIRECTIONS):
        if way == direction:
            _states_direction(
                x_ptr, dt_ptr, dt_weight_ptr, operands_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
                split_states_ptr, B, L, b, num_splits, split_chunks, block, x_stride_dir, x_stride_b,
                dt_stride_dir, dt_stride_b, direction, REVERSE or direction == 1, x_stride_l, dt_stride_l,
                RANK, D, LANES, FAST,
            )  # fmt: skip
