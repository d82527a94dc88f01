"""The exact Longhorn scan in registers: the backward pass, for what ``exact_fragments.py`` scanned.

A warp has the gradients of its 32 channels to itself, too. The gradients of keys, queries and low-rank
step sizes are sums over channels. So each warp computes its own channels' part of dk, dq and d_low in
its registers. ``small_gradients_kernel`` adds the warps in a fixed order. There are no atomics:
gradients are bit-identical from run to run.
"""

import triton
import triton.language as tl

from vil.kernels.triton.exact_fragments import (
    ACROSS,
    KEYS,
    OPERANDS,
    QUERIES,
    READ_BACK,
    RECALL,
    RUN_TIME_FRAGMENTS,
    eps_of_chunk,
    load_channels,
    load_kappa,
    load_ranks,
    load_solver,
    load_weight,
    place_of_lane,
    start,
    store_before_split,
    substitution,
    tokens_of_lane,
)
from vil.kernels.triton.exact_parts import place_of_program
from vil.kernels.triton.fragments import (
    add_channel_product,
    add_product,
    from_tokens,
    high_half,
    load_operand,
    load_state,
    load_tokens,
    load_words,
    low_half,
    negative,
    operand_of_tokens,
    prefetch_tokens,
    rounded,
    square_transposed,
    store_float,
    store_state,
    store_tokens,
    store_words,
    sum_of_quad,
    to_tokens,
    transposed,
    two_parts,
    zeros,
)
from vil.kernels.triton.tiles import exp_and_eps, sigmoid


@triton.jit
def _through_gate(dout, y, z, FAST: tl.constexpr):
    """Return the gradients of y and, if y is given, of z, for tiles."""
    dy, dz = (), ()
    for e in tl.static_range(16):
        s = sigmoid(z[e], 2.0, FAST)
        by_s = dout[e] * s
        dy += (by_s * z[e],)
        if y is not None:  # silu'(z) = s + silu(z) (1 - s)
            dz += (by_s * y[e] * (1.0 + z[e] * (1.0 - 2.0 * s)),)
    return dy, dz


@triton.jit
def _numbers(operand):
    """Return the tile of pairs of columns, in float32."""
    tile = ()
    for i in tl.static_range(len(operand)):
        tile += (low_half(operand[i]), high_half(operand[i]))
    return tile


@triton.jit
def _add_columns(total, a, b):
    """Add to four channels the sums over this lane's columns of a product of tiles, or of one."""
    result = ()
    for j in tl.static_range(4):
        value = total[j]
        for i in tl.static_range(4):
            if b is None:
                value += a[j // 2 * 8 + j % 2 * 2 + i // 2 * 4 + i % 2]
            else:
                value += a[j // 2 * 8 + j % 2 * 2 + i // 2 * 4 + i % 2] * b[j // 2 * 8 + j % 2 * 2 + i // 2 * 4 + i % 2]
        result += (value,)
    return result


@triton.jit
def _lower(square, g, q, diagonal):
    """Return a square, 8 numbers, with zeros above its diagonal and a factor on it; rows g and g + 8."""
    result = ()
    for i in tl.static_range(8):
        ahead = (g + 8 * (i // 2 % 2)) - (2 * q + (8 * (i // 4) + i % 2))
        value = square[i] if diagonal is None else tl.where(ahead == 0, diagonal, 1.0) * square[i]
        result += (tl.where(ahead >= 0, value, 0.0),)
    return result


@triton.jit
def _small_gradients(dy, dy_rest, w, c, state, state_rest, later, operands, g, q, kappa_scale, LANES: tl.constexpr):
    """Return what dk and dq of a chunk get from a warp's channels, two squares: token by state.

    dy, w, c, state and later are operands: of dY, eps W, C, the state before the chunk, and the
    gradient of the state after it.
    """
    keys, queries = load_operand(operands + KEYS * 256), load_operand(operands + QUERIES * 256)
    dy, w, c, state = transposed(dy), negative(transposed(w)), transposed(c), transposed(state)
    dy_rest = transposed(dy_rest)
    dq = add_channel_product(add_channel_product(zeros(LANES, 8), dy, state), dy_rest, state)
    dk = add_channel_product(add_channel_product(zeros(LANES, 8), w, state), c, transposed(later))
    state_rest = transposed(state_rest)
    dq, dk = add_channel_product(dq, dy, state_rest), add_channel_product(dk, w, state_rest)
    read = add_channel_product(add_channel_product(zeros(LANES, 8), dy, c), dy_rest, c)
    read, read_rest = two_parts(_lower(read, g, q, None))
    # The diagonal is the gradient of |k|^2: no token meets its own key in the substitution.
    gram, gram_rest = two_parts(_lower(add_channel_product(zeros(LANES, 8), w, c), g, q, kappa_scale))
    dq = add_product(add_product(dq, read, keys), read_rest, keys)
    dk = add_product(add_product(dk, square_transposed(read), queries), square_transposed(read_rest), queries)
    dk = add_product(add_product(dk, gram, keys), square_transposed(gram), keys)
    return add_product(add_product(dk, gram_rest, keys), square_transposed(gram_rest), keys), dq


@triton.jit
def _store_square(pointer, square, mask):
    """Store a square, 8 numbers, in bfloat16, as a ``second_operand`` of its column and row."""
    pairs = rounded(square)
    store_words(pointer, pairs[0], pairs[2], mask)
    store_words(pointer + 4, pairs[1], pairs[3], mask)


@triton.jit
def _ranks_by_token(low):
    """Return second operands, token by rank, given those of rank by token."""
    result = ()
    for s in tl.static_range(len(low)):
        t = transposed(low[s])
        result += ((t[0], t[2], t[1], t[3]),)
    return result


@triton.jit
def _load_operands(of_chunk, gram, of_tokens, lane, q):
    """Load what brings the gradient of the state through a chunk."""
    operands = of_chunk + lane * 8
    recall, keys = load_operand(operands + RECALL * 256), load_operand(operands + KEYS * 256)
    read, rest = load_operand(operands + READ_BACK * 256), load_operand(operands + (READ_BACK + 1) * 256)
    across = load_words(of_chunk + (ACROSS * 256 + 128) + lane * 4)
    solvers = load_solver(gram, of_tokens, q, 1, True), load_solver(gram, of_tokens, q, 0, True)
    queries = load_operand(operands + QUERIES * 256)
    return recall, keys, read, rest, queries, solvers, across


@triton.jit
def _before_chunk(dstate, dy, eps, operands):
    """Return the gradient of the state before a chunk, eps W as a tile and as operand, and other operands.

    These are the gradient of the state after the chunk, rounded, and dY in two parts.
    """
    recall, keys, read, read_rest, queries, solvers, across = operands
    recall, keys = negative(recall), negative(keys)
    later, later_rest = two_parts(dstate)
    dy_operand, dy_rest = two_parts(dy)
    # First what does not wait for the chunk after this one.
    dc = add_product(add_product(zeros(dy[0].shape[0], 16), dy_operand, read), dy_rest, read)
    dc = add_product(dc, dy_operand, read_rest)
    dc = add_product(add_product(dc, later, recall), later_rest, recall)
    dstate = add_product(add_product(dstate, dy_operand, queries), dy_rest, queries)
    w_operand, w = substitution(dc, eps, solvers, across, True)
    return add_product(dstate, w_operand, keys), w, w_operand, later, dy_operand, dy_rest


@triton.jit
def _chunk_backward(
    state, dstate, dskip, dbias, dweight, bias, skip, weight, x_row, dt_row, z_row, dout_ptr, y_ptr,
    c_ptr, operands_ptr, gram_ptr, kappa_ptr, dx_ptr, ddt_ptr, dz_row, sums_ptr, B, L, b, n, chunks,
    total, kappa_scale, g, q, d, exists, direction: tl.constexpr, REVERSE: tl.constexpr,
    x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Backpropagate through a chunk; return the state before it, and all gradients so far."""
    step: tl.constexpr = -1 if REVERSE else 1
    lane, chunk = tl.arange(0, LANES) % 32, (direction * B + b) * chunks + n
    of_chunk = operands_ptr + chunk * (OPERANDS * 256)
    operands = of_chunk + lane * 8
    first, alive = tokens_of_lane(n, q, L, exists, REVERSE)
    row = (b * L + first) * D + d
    own_row = ((direction * B + b) * L + first) * D + d
    ahead, channel = (n - step) * 16, tl.minimum(d // 32 * 32, D - 1)
    c_row, dout_row = c_ptr + (direction * B + b) * L * D + channel, dout_ptr + b * L * D + channel
    prefetch_tokens(c_row, D, x_row - d + channel, x_stride_l, ahead, L)
    if z_row is None:
        prefetch_tokens(dout_row, D, dout_row, D, ahead, L)
    else:
        prefetch_tokens(dout_row, D, z_row - d + channel, z_stride_l, ahead, L)
        if direction == 0:
            y_row = y_ptr + b * L * D + channel
            prefetch_tokens(y_row, D, y_row, D, ahead, L)
    c = operand_of_tokens(load_tokens(c_ptr + own_row, step * D, alive))
    dy = from_tokens(load_tokens(dout_ptr + row, step * D, alive))
    x = from_tokens(load_tokens(x_row + first * x_stride_l, step * x_stride_l, alive))
    of_tokens = kappa_ptr + chunk * 24
    kappa = load_kappa(of_tokens, q)
    if z_row is not None:
        z, y = from_tokens(load_tokens(z_row + first * z_stride_l, step * z_stride_l, alive)), None
        if direction == 0:
            y = from_tokens(load_tokens(y_ptr + row, step * D, alive))
        dy, dz = _through_gate(dy, y, z, FAST)
        if direction == 0:
            store_tokens(dz_row + first * z_stride_l, step * z_stride_l, to_tokens(dz), alive)
    dskip = _add_columns(dskip, dy, x)
    if RANK > 0:
        low, v = load_ranks(dt_row, dt_stride_l, n, g, q, L, REVERSE, RANK), zeros(LANES, 16)
        for s in tl.static_range(len(low)):
            v = add_product(v, weight[s], low[s])
    else:
        v = from_tokens(load_tokens(dt_row + d + first * dt_stride_l, step * dt_stride_l, alive))
    eps, exp_minus_v = (), ()
    for e in tl.static_range(16):
        both = exp_and_eps(v[e], bias[e // 8 * 2 + e // 2 % 2], kappa[e // 4 % 2 * 2 + e % 2], FAST)
        exp_minus_v += (both[0],)
        eps += (both[1],)
    own = _load_operands(of_chunk, gram_ptr + chunk * 256, of_tokens, lane, q)
    state = add_product(state, c, negative(own[1]))
    dstate, w, w_operand, later, dy_operand, dy_rest = _before_chunk(dstate, dy, eps, own)
    c_numbers, dx, dv = _numbers(c), (), ()
    for e in tl.static_range(16):
        dx += (w[e] + skip[e // 8 * 2 + e // 2 % 2] * dy[e],)
        dv += (w[e] * (c_numbers[e] * exp_minus_v[e]),)
    store_tokens(dx_ptr + own_row, step * D, to_tokens(dx), alive)
    dbias = _add_columns(dbias, dv, None)
    warp, count = d // 32, 2 + len(dweight)
    sums, whole = sums_ptr + ((warp * total + chunk) * count) * 256 + lane * 8, warp < (D + 31) // 32
    of_state, state_rest = two_parts(state)
    dk, dq = _small_gradients(
        dy_operand, dy_rest, w_operand, c, of_state, state_rest, later, operands, g, q, kappa_scale, LANES
    )
    _store_square(sums, dk, whole)
    _store_square(sums + 256, dq, whole)
    if RANK > 0:
        dv_operand = rounded(dv)
        dv_transposed, by_token, result = transposed(dv_operand), _ranks_by_token(low), ()
        for s in tl.static_range(len(low)):
            d_low = add_channel_product(zeros(LANES, 8), dv_transposed, transposed(weight[s]))
            _store_square(sums + (2 + s) * 256, d_low, whole)
            result += (add_product(dweight[s], dv_operand, by_token[s]),)
        dweight = result
    else:
        store_tokens(ddt_ptr + own_row, step * D, to_tokens(dv), alive)
    return state, dstate, dskip, dbias, dweight


@triton.jit
def _store_weight(pointer, tiles, q, exists, RANK: tl.constexpr):
    """Store sums for the weight of the step sizes, (channels, RANK); see ``load_weight``."""
    for s in tl.static_range(len(tiles)):
        for i in tl.static_range(8):  # j // 2, n, j % 2
            r = 2 * q + (16 * s + 8 * (i // 2 % 2))
            place = pointer + (i // 4 * 2 + i % 2) * RANK + r
            store_words(place, tiles[s][2 * i], tiles[s][2 * i + 1], exists & (r < RANK))


@triton.jit
def _backward_direction(
    x_ptr, dt_ptr, dt_weight_ptr, z_ptr, dout_ptr, y_ptr, c_ptr, last_ptr, operands_ptr, gram_ptr,
    kappa_ptr, skip_ptr, bias_ptr, split_states_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, dskip_ptr,
    dbias_ptr, dweight_ptr, dinitial_ptr, B, L, b, split, num_splits, split_chunks, block, total,
    kappa_scale, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Backpropagate through one direction of one split of one batch element and block of channels."""
    g, q, d, exists = place_of_lane(block, D, LANES)
    chunks, begin = tl.cdiv(L, 16), split * split_chunks
    end, sequence = tl.minimum(begin + split_chunks, chunks), (direction * B + b) * num_splits + split
    place = sequence * (D * 16) + d * 16 + 2 * q
    state, dstate, dweight, weight = load_state(last_ptr + place, exists), zeros(LANES, 16), (), ()
    if split_states_ptr is not None:
        dstate = load_state(split_states_ptr + place, exists)
    bias, skip = (
        load_channels(bias_ptr + direction * D + d, exists),
        load_channels(skip_ptr + direction * D + d, exists),
    )
    if FAST:
        scaled = ()
        for j in tl.static_range(4):
            scaled += (bias[j] * -1.4426950408889634,)
        bias = scaled
    if RANK > 0:
        weight = load_weight(dt_weight_ptr + (direction * D + d) * RANK, q, exists, RANK)
        for _ in tl.static_range(len(weight)):
            dweight += (zeros(LANES, 16),)
    z_row, dz_row = None, None
    if z_ptr is not None:
        z_row = z_ptr + b * z_stride_b + d
        if direction == 0:
            dz_row = dz_ptr + b * z_stride_b + d
    dskip, dbias = zeros(LANES, 4), zeros(LANES, 4)
    for i in range(begin, end):
        n = i if REVERSE else begin + end - 1 - i
        state, dstate, dskip, dbias, dweight = _chunk_backward(
            state, dstate, dskip, dbias, dweight, bias, skip, weight,
            x_ptr + direction * x_stride_dir + b * x_stride_b + d,
            dt_ptr + direction * dt_stride_dir + b * dt_stride_b, z_row, dout_ptr, y_ptr, c_ptr,
            operands_ptr, gram_ptr, kappa_ptr, dx_ptr, ddt_ptr, dz_row, sums_ptr, B, L, b, n, chunks,
            total, kappa_scale, g, q, d, exists, direction, REVERSE, x_stride_l, dt_stride_l, z_stride_l,
            RANK, D, LANES, FAST,
        )  # fmt: skip
    mine = exists & (q == 0)
    for j in tl.static_range(4):
        store_float(dskip_ptr + sequence * D + d + j, sum_of_quad(dskip[j]), mine)
        store_float(dbias_ptr + sequence * D + d + j, sum_of_quad(dbias[j]), mine)
    if RANK > 0:
        _store_weight(dweight_ptr + (sequence * D + d) * RANK, dweight, q, exists, RANK)
    if dinitial_ptr is not None:
        left = (chunks - end) if REVERSE else begin
        store_state(dinitial_ptr + b * (D * 16) + d * 16 + 2 * q, dstate, exists & (left == 0))


@triton.jit(do_not_specialize=RUN_TIME_FRAGMENTS)
def fragments_backward_kernel(
    x_ptr, dt_ptr, dt_weight_ptr, z_ptr, dout_ptr, y_ptr, c_ptr, last_ptr, operands_ptr, gram_ptr,
    kappa_ptr, skip_ptr, bias_ptr, split_states_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, dskip_ptr,
    dbias_ptr, dweight_ptr, dinitial_ptr, B, L, num_splits, split_chunks, kappa_scale, x_stride_dir,
    x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Backpropagate through one direction; of two, direction 0 also writes the gradient of the gate."""
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    b, split, way, block = place_of_program(num_splits, DIRECTIONS, (D + LANES - 1) // LANES)
    total = DIRECTIONS * B * tl.cdiv(L, 16)
    for direction in tl.static_range(DIRECTIONS):
        if way == direction:
            _backward_direction(
                x_ptr, dt_ptr, dt_weight_ptr, z_ptr, dout_ptr, y_ptr, c_ptr, last_ptr, operands_ptr,
                gram_ptr, kappa_ptr, skip_ptr, bias_ptr, split_states_ptr, dx_ptr, ddt_ptr, dz_ptr,
                sums_ptr, dskip_ptr, dbias_ptr, dweight_ptr, dinitial_ptr, B, L, b, split, num_splits,
                split_chunks, block, total, kappa_scale, x_stride_dir, x_stride_b, dt_stride_dir,
                dt_stride_b, z_stride_b, direction, REVERSE or direction == 1, x_stride_l, dt_stride_l,
                z_stride_l, RANK, D, LANES, FAST,
            )  # fmt: skip


@triton.jit(do_not_specialize=RUN_TIME_FRAGMENTS)
def small_gradients_kernel(
    sums_ptr, dk_ptr, dq_ptr, dlow_ptr, B, L, warps, row_step, low_columns,
    REVERSE: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Add up what one chunk's keys, queries and low-rank step sizes get from each warp's channels.

    dk, dq (N, B, L, M) and dlow (N, B, L, low_columns), whose tokens lie ``row_step`` elements apart.
    """
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(L, 16)
    n, sequence = chunk % chunks, chunk // chunks
    e = tl.arange(0, 256)
    lane, place = e // 8, e % 8
    row, column = place // 4 * 8 + lane // 4, place // 2 % 2 * 8 + lane % 4 * 2 + place % 2
    reverse = sequence // B == 1 or REVERSE
    token = n * 16 + tl.where(reverse, 15 - row, row)
    for i in tl.static_range(2 + RANKS):
        total = tl.zeros((256,), tl.float32)
        for warp in range(warps):
            part = (warp * tl.num_programs(0) + chunk) * (2 + RANKS) + i
            total += tl.load(sums_ptr + part * 256 + e).to(tl.float32)
        at, mask = sequence * L + token, token < L
        if i == 0:
            tl.store(dk_ptr + at * row_step + column, total.to(tl.bfloat16), mask=mask & (column < M))
        elif i == 1:
            tl.store(dq_ptr + at * row_step + column, total.to(tl.bfloat16), mask=mask & (column < M))
        else:
            of_rank = column + 16 * (i - 2)
            tl.store(dlow_ptr + at * row_step + of_rank, total.to(tl.bfloat16), mask=mask & (of_rank < low_columns))


@triton.jit
def _load_chunk(
    n, sequence, dt_row, z_row, dout_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d, exists,
    REVERSE: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Load all of a chunk that changes the gradient of the state."""
    step: tl.constexpr = -1 if REVERSE else 1
    chunk, lane = sequence * tl.cdiv(L, 16) + n, tl.arange(0, LANES) % 32
    first, alive = tokens_of_lane(n, q, L, exists, REVERSE)
    dout, z = load_tokens(dout_row + first * D, step * D, alive), ()
    if z_row is not None:
        z = load_tokens(z_row + first * z_stride_l, step * z_stride_l, alive)
    if RANK > 0:
        dt = load_ranks(dt_row, dt_stride_l, n, g, q, L, REVERSE, RANK)
    else:
        dt = load_tokens(dt_row + d + first * dt_stride_l, step * dt_stride_l, alive)
    of_tokens, of_chunk = kappa_ptr + chunk * 24, operands_ptr + chunk * (OPERANDS * 256)
    own = _load_operands(of_chunk, gram_ptr + chunk * 256, of_tokens, lane, q)
    return dout, z, dt, load_kappa(of_tokens, q), own


@triton.jit
def _go_back(dstate, loaded, bias, weight, FAST: tl.constexpr):
    """Return the gradient of the state before a chunk."""
    dout, z, dt, kappa, operands = loaded
    dy, eps = from_tokens(dout), eps_of_chunk(dt, bias, weight, kappa, FAST)
    if len(z) > 0:
        dy, _ = _through_gate(dy, None, from_tokens(z), FAST)
    return _before_chunk(dstate, dy, eps, operands)[0]


@triton.jit
def _gradients_direction(
    dt_ptr, dt_weight_ptr, z_ptr, dout_ptr, operands_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
    split_states_ptr, B, L, b, num_splits, split_chunks, block, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Carry the gradient of the state against one direction, and store it after every split."""
    g, q, d, exists = place_of_lane(block, D, LANES)
    sequence, chunks, of_lane = direction * B + b, tl.cdiv(L, 16), d * 16 + 2 * q
    dstate, bias, weight = start(
        start_ptr, b * (D * 16) + of_lane, bias_ptr, dt_weight_ptr, direction, q, d, exists, RANK, D, LANES
    )  # fmt: skip
    dt_row, z_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b, None
    if z_ptr is not None:
        z_row = z_ptr + b * z_stride_b + d
    dout_row, states_row = dout_ptr + b * L * D + d, split_states_ptr + sequence * num_splits * (D * 16) + of_lane
    # The last split on the way is not gone through, so another chunk always follows.
    count = (num_splits - 1) * split_chunks if REVERSE else chunks - split_chunks
    n, way = 0 if REVERSE else (chunks - 1), 1 if REVERSE else -1
    even = _load_chunk(
        n, sequence, dt_row, z_row, dout_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d, exists,
        REVERSE, dt_stride_l, z_stride_l, RANK, D, LANES,
    )  # fmt: skip
    # As in ``exact_fragments._states_direction``.
    for _ in range(count // 2):
        odd = _load_chunk(
            n + way, sequence, dt_row, z_row, dout_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d,
            exists, REVERSE, dt_stride_l, z_stride_l, RANK, D, LANES,
        )  # fmt: skip
        tl.debug_barrier()
        store_before_split(states_row, dstate, n, split_chunks, chunks, exists, not REVERSE, D)
        dstate = _go_back(dstate, even, bias, weight, FAST)
        even = _load_chunk(
            n + 2 * way, sequence, dt_row, z_row, dout_row, operands_ptr, gram_ptr, kappa_ptr, L, g, q, d,
            exists, REVERSE, dt_stride_l, z_stride_l, RANK, D, LANES,
        )  # fmt: skip
        tl.debug_barrier()
        store_before_split(states_row, dstate, n + way, split_chunks, chunks, exists, not REVERSE, D)
        dstate = _go_back(dstate, odd, bias, weight, FAST)
        n += 2 * way
    if count % 2 == 1:
        store_before_split(states_row, dstate, n, split_chunks, chunks, exists, not REVERSE, D)
        dstate = _go_back(dstate, even, bias, weight, FAST)
    store_state(states_row + (num_splits - 1 if REVERSE else 0) * (D * 16), dstate, exists)


@triton.jit(do_not_specialize=RUN_TIME_FRAGMENTS)
def fragments_gradients_kernel(
    dt_ptr, dt_weight_ptr, z_ptr, dout_ptr, operands_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
    split_states_ptr, B, L, num_splits, split_chunks, dt_stride_dir, dt_stride_b, z_stride_b,
    REVERSE: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the states after splits, (N, B, S, D, 16), given that of one direction's last."""
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    b, _, way, block = place_of_program(1, DIRECTIONS, (D + LANES - 1) // LANES)
    for direction in tl.static_range(DIRECTIONS):
        if way == direction:
            _gradients_direction(
                dt_ptr, dt_weight_ptr, z_ptr, dout_ptr, operands_ptr, gram_ptr, kappa_ptr, bias_ptr,
                start_ptr, split_states_ptr, B, L, b, num_splits, split_chunks, block, dt_stride_dir,
                dt_stride_b, z_stride_b, direction, REVERSE or direction == 1, dt_stride_l, z_stride_l,
                RANK, D, LANES, FAST,
            )  # fmt: skip
