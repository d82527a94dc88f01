"""The exact Longhorn scan in chunks of 16 tokens: Triton kernels, then their plan.

Within a chunk, E = eps, S0 is the state at its start, and tokens are in scan order:

    C_t = E_t o (X_t - k_t.S0 - sum_{tau<t} (k_t.k_tau) C_tau)     forward substitution per channel
    Y   = Q S0 + tril(Q K') C + D o X,    S_T = S0 + K' C          matrix products

The Gram matrices K K' and tril(Q K') are shared by all channels. The backward pass is the same
with the substitution transposed. Every sum over channels is a matrix product, so there are no
atomics and gradients are bit-identical from run to run. Derivation: kernels/README.md.

Chunk n holds tokens 16 n to 16 n + 15 in either direction, with rows in scan order. In reverse, a
ragged chunk comes first and begins with its dead rows, whose keys are zero and leave the state
unchanged. This file has the scan and its backward pass. ``exact_parts.py`` makes the matrices that
all channels share, and ``exact_splits.py`` the states that splits start from.
Letters: N directions, B batch, L tokens, S splits, D channels, M state size.
"""

from collections.abc import Callable

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.interface import ScanArgs, ScanKey, ScanResult
from vil.kernels.reference import dt_proj
from vil.kernels.triton import tuning
from vil.kernels.triton.exact_parts import (
    MIN_FIT_FOR_SPLITS,
    RUN_TIME,
    backward_substitution,
    forward_substitution,
    gram_kernel,
    keys_kernel,
    load_gram,
    load_keys,
    load_read,
    place_of_program,
    split_state,
    store_states,
)
from vil.kernels.triton.exact_splits import exact_states_kernel
from vil.kernels.triton.exact_splits_backward import MAX_REGISTERS, STATES_OF_LANE, exact_gradients_kernel
from vil.kernels.triton.launch import Kernel
from vil.kernels.triton.scan_plan import LaunchConfig, ScanPlan
from vil.kernels.triton.tiles import (
    asm_identity,
    columns,
    exp_and_eps,
    from_columns,
    half_silu,
    load_broadcast_rows,
    load_ranks,
    load_row,
    load_rows,
    load_states,
    longhorn_eps,
    prefetch_rows,
    round_tf32,
    row_mask,
    sigmoid,
    store_rows,
    to_rows,
    token_mask,
)


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, dt_weight_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
    y_ptr, out_ptr, states_ptr, split_states_ptr, final_ptr, B, L, b, split, num_splits,
    split_chunks, d, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one direction of one split of one batch element and block of channels.

    A single direction (no z) stores y. Of two directions, direction 0 leaves y as a partial sum.
    Direction 1 adds its own, gates and stores the result, and also stores the sum if states are
    saved.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    t16, chunks, begin = tl.arange(0, T), tl.cdiv(L, T), split * split_chunks
    end = tl.minimum(begin + split_chunks, chunks)
    first_chunk = (direction * B + b) * chunks
    lane = ((direction * B + b) * num_splits + split) * D + d
    state = split_state(split_states_ptr, lane, d, D, BLOCK_D, BLOCK_M)
    mask = token_mask(0, 1, d, D, BLOCK_D)
    channel = mask[None, :]
    bias = load_row(bias_ptr + direction * D + d, mask)
    skip = load_row(skip_ptr + direction * D + d, mask)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b
    if dt_weight_ptr is not None:
        weight = load_ranks(dt_weight_ptr + (direction * D + d) * RANK, mask, RANK, FAST)
    rounded = round_tf32(state, PRECISION, FAST)
    n = (end - 1) if REVERSE else begin
    first = tl.cast(tl.minimum(n * T, L - T) + ((T - 1) if REVERSE else 0), tl.int64)
    gram, low = load_gram(gram_ptr, first_chunk + n), None
    k = load_keys(keys_ptr, first_chunk + n, 0, BLOCK_M)
    if dt_weight_ptr is not None:
        low = load_ranks(dt_row + (first + sign * t16) * dt_stride_l, t16 < T, RANK, FAST)
    for i in range(begin, end):
        n = (begin + end - 1 - i) if REVERSE else i
        # Load ahead what the next chunk needs first; bring the rest of it to the L2 cache.
        after = n + tl.where(i + 1 < end, sign, 0)
        ahead = tl.cast(tl.minimum(after * T, L - T), tl.int64)
        next_k = load_keys(keys_ptr, first_chunk + after, 0, BLOCK_M)
        next_gram, next_low = load_gram(gram_ptr, first_chunk + after), None
        if dt_weight_ptr is not None:
            tokens = ahead + ((T - 1 - t16) if REVERSE else t16)
            next_low = load_ranks(dt_row + tokens * dt_stride_l, t16 < T, RANK, FAST)
        rows, steps = (x_row + ahead * x_stride_l,), (x_stride_l,)
        if direction == 1:
            rows += (z_ptr + b * z_stride_b + ahead * z_stride_l, y_ptr + (b * L + ahead) * D)
            steps += (z_stride_l, D)
        prefetch_rows(rows, steps, d, D, BLOCK_D, FAST)
        chunk = first_chunk + n
        if states_ptr is not None:
            store_states(states_ptr, chunk * D + d, rounded, d, D, BLOCK_M)
        start, num_valid = tl.minimum(n * T, L - T), L - n * T
        first = tl.cast(start + ((T - 1) if REVERSE else 0), tl.int64)
        if dt_weight_ptr is None:
            dt = load_rows(dt_row + first * dt_stride_l + d, sign * dt_stride_l, channel)
        else:
            dt = tl.dot(weight, tl.trans(low), input_precision=PRECISION)
            dt = to_rows(dt.to(dt_ptr.dtype.element_ty), BLOCK_D).to(tl.float32)
        recalled = to_rows(tl.dot(rounded, tl.trans(k), input_precision=PRECISION), BLOCK_D)
        kappa = load_broadcast_rows(kappa_ptr + chunk * (2 * T), BLOCK_D)
        x = load_rows(x_row + first * x_stride_l + d, sign * x_stride_l, channel)
        eps = longhorn_eps(dt + bias[None, :], kappa, FAST)
        # All loads that do not hold up the products before here go out together.
        q, read = load_keys(keys_ptr, chunk, 1, BLOCK_M), load_read(gram_ptr, chunk)
        c = forward_substitution(x - recalled, eps, gram, BLOCK_D, PRECISION, FAST)
        y = tl.dot(rounded, tl.trans(q), input_precision=PRECISION)
        y = to_rows(tl.dot(c, read, y, input_precision=PRECISION), BLOCK_D) + skip[None, :] * x
        state = tl.dot(c, k, state, input_precision=PRECISION)
        rounded = round_tf32(state, PRECISION, FAST)
        token = (b * L + first) * D
        alive = row_mask(num_valid, d, not REVERSE, D, BLOCK_D)  # dead rows come before live rows
        if z_ptr is None:
            store_rows(out_ptr + token + d, sign * D, y, alive)
        elif direction == 0:
            store_rows(y_ptr + token + d, sign * D, y, alive)
        else:
            y += load_rows(y_ptr + token + d, sign * D, alive)
            z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
            z = load_rows(z_row, sign * z_stride_l, channel)
            if states_ptr is not None:
                store_rows(y_ptr + token + d, sign * D, y, alive)
            store_rows(out_ptr + token + d, sign * D, y * half_silu(z, FAST), alive)
        k, gram, low = next_k, next_gram, next_low
    if final_ptr is not None:
        left = begin if REVERSE else chunks - end
        store_states(final_ptr, b * D + d, state, d, tl.where(left == 0, D, 0), BLOCK_M)


@triton.jit(do_not_specialize=RUN_TIME)
def exact_forward_kernel(
    x_ptr, dt_ptr, dt_weight_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr, y_ptr,
    out_ptr, states_ptr, split_states_ptr, final_ptr, B, L, num_splits, split_chunks,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one direction, or both: the second adds to the result of the first, gates and stores it.

    Given dt_weight (N, D, RANK), dt has RANK numbers per token, and their products with it are the
    step sizes.
    """
    b, split, _, block = place_of_program(num_splits, 1, (D + BLOCK_D - 1) // BLOCK_D)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    for direction in tl.static_range(1 if z_ptr is None else 2):
        if direction == 1:
            tl.debug_barrier()  # lets a lane read the sum that it wrote, for any layout
        _forward_direction(
            x_ptr, dt_ptr, dt_weight_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
            y_ptr, out_ptr, states_ptr, split_states_ptr, final_ptr, B, L, b, split, num_splits,
            split_chunks, d, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
            direction, REVERSE or direction == 1, x_stride_l, dt_stride_l, z_stride_l, RANK, D,
            BLOCK_D, BLOCK_M, FAST, PRECISION,
        )  # fmt: skip


@triton.jit
def _through_gate(
    dout_row, y_row, z_row, dz_row, divisor_ptr, num_valid, d, channel, z_step: tl.constexpr,
    step: tl.constexpr, WRITE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a chunk of y; with WRITE, store the gradient of the gate."""
    divisor = load_broadcast_rows(divisor_ptr, BLOCK_D)
    z = load_rows(z_row, z_step, channel)
    s = sigmoid(z, divisor, FAST)
    dy = load_rows(dout_row, step, channel) * s
    if WRITE:  # silu'(z) = s + silu(z) (1 - s)
        dz = dy * load_rows(y_row, step, channel) * (1.0 + z * (1.0 - 2.0 * s))
        _store_gradient(dz_row, z_step, dz, num_valid, d, channel, D, BLOCK_D)
    return dy * z


@triton.jit
def _store_gradient(row, step: tl.constexpr, tile, num_valid, d, channel, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the rows of a chunk that exist, without a mask if all do."""
    if num_valid >= 16:
        store_rows(row, step, tile, channel)
    else:  # dead rows come before live rows
        store_rows(row, step, tile, row_mask(num_valid, d, step > 0, D, BLOCK_D))


@triton.jit
def _store_sums(
    sums_ptr, dy_tile, w_tile, c_tile, state_row, later, B, b, n, chunks, d, block,
    direction, DIRECTIONS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store a chunk's sums over the block's channels for keys and queries.

        [dY | eps W] by [S0 | C] and C by dS,    (blocks, N, B, chunks, 16 (3 BLOCK_M + 32))

    With BLOCK_M 16 the last is dS by C, so that all come from one product, [dY | eps W | dS] by
    [S0 | C]. Addresses are computed here, not passed: otherwise 44 % more spills on sm_90 (one
    direction).
    """
    T: tl.constexpr = 16
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    # Tensor cores take at least 64 rows: the last 16 are zeros.
    zero = tl.zeros((BLOCK_D, T), tl.float32)
    rows = tl.join(tl.join(dy_tile, w_tile), tl.join(later if BLOCK_M == T else c_tile, zero))
    rows = tl.reshape(tl.permute(rows, (3, 2, 1, 0)), (4 * T, BLOCK_D))
    tl.debug_barrier()  # keeps the state from being loaded early: fewer spills
    state = load_states(state_row, d, D, BLOCK_D)  # reload rather than keep in registers
    row = tl.arange(0, 4 * T)[:, None]
    part = ((block.to(tl.int64) * DIRECTIONS + direction) * B + b) * chunks + n
    part = sums_ptr + part * (T * (3 * BLOCK_M + 2 * T))
    both = part + row * (BLOCK_M + T)
    if BLOCK_M == T:
        column = tl.arange(0, 2 * T)[None, :]
        by = tl.reshape(tl.permute(tl.join(state, c_tile), (0, 2, 1)), (BLOCK_D, 2 * T))
        by = tl.dot(rows, asm_identity(by, FAST), input_precision=PRECISION)
        tl.store(both + column, by, mask=row < 2 * T)
        dstate_by_c = part + T * (2 * T) + row * T + (column - T)
        tl.store(dstate_by_c, by, mask=(row // T == 2) & (column >= T))
    else:
        by_state = tl.dot(rows, state, input_precision=PRECISION)
        by_c = tl.dot(rows, asm_identity(c_tile, FAST), input_precision=PRECISION)
        tl.store(both + m[None, :], by_state, mask=row < 2 * T)
        tl.store(both + BLOCK_M + t16[None, :], by_c, mask=row < 2 * T)
        by_dstate = tl.dot(rows, later, input_precision=PRECISION)
        tl.store(part + T * (2 * T) + row * BLOCK_M + m[None, :], by_dstate, mask=row // T == 2)


@triton.jit
def _load_ahead(
    n, chunk, dt_ptr, keys_ptr, gram_ptr, states_ptr, L, d, reverse, dt_stride_l: tl.constexpr,
    RANK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return keys, Gram matrix, state and low-rank step sizes of chunk n, which come first."""
    states = states_ptr + chunk * (D * BLOCK_M) + d[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    state = tl.load(states, mask=(d < D)[:, None], other=0.0)
    loaded = load_keys(keys_ptr, chunk, 0, BLOCK_M), load_gram(gram_ptr, chunk), state
    if RANK > 0:
        t = tl.arange(0, 16)
        token = tl.cast(tl.minimum(n * 16, L - 16), tl.int64) + tl.where(reverse, 15 - t, t)
        loaded += (load_ranks(dt_ptr + token * dt_stride_l, t < 16, RANK, FAST),)
    return loaded


@triton.jit
def _chunk_backward(
    dstate, later, dskip, dbias, loaded, bias, skip, weight, x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr,
    keys_ptr, gram_ptr, kappa_ptr, states_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, B, L, b,
    n, chunks, d, block, channel, z_stride_b, direction, reverse,
    DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backpropagate through a chunk; return the gradients so far. ``later`` is dstate, rounded.

    x_ptr and dt_ptr point to this direction and batch element. Of two directions, each branches
    only where it loads and stores. If each had a loop of its own, Triton 3.6 and 3.8 would spill
    150 registers on sm_90.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    m = tl.arange(0, BLOCK_M)
    chunk = (direction * B + b) * chunks + n
    k, gram, state = loaded[:3]
    q, read = load_keys(keys_ptr, chunk, 1, BLOCK_M), load_read(gram_ptr, chunk)
    state_row = states_ptr + chunk * (D * BLOCK_M) + (d[:, None] * BLOCK_M + m[None, :])
    state = state.to(tl.float32)
    start, num_valid = tl.minimum(n * T, L - T), L - n * T
    first = tl.cast(start + tl.where(reverse, T - 1, 0), tl.int64)
    token = (b * L + first) * D
    x_row, dt_row = x_ptr + first * x_stride_l + d, dt_ptr + first * dt_stride_l + d
    dout_row = dout_ptr + token + d
    if z_ptr is not None:
        gate = b * z_stride_b + first * z_stride_l + d
        z_row, dz_row, y_row = z_ptr + gate, dz_ptr + gate, y_ptr + token + d
        divisor = kappa_ptr + chunk * (2 * T) + T
    # All loads go out before the gate is computed.
    if DIRECTIONS == 1:
        x = load_rows(x_row, sign * x_stride_l, channel)
        if weight is None:
            dt = load_rows(dt_row, sign * dt_stride_l, channel)
        alive = row_mask(num_valid, d, not REVERSE, D, BLOCK_D)
        dy = load_rows(dout_row, sign * D, alive)
    elif direction == 0:
        x = load_rows(x_row, x_stride_l, channel)
        if weight is None:
            dt = load_rows(dt_row, dt_stride_l, channel)
        dy = _through_gate(
            dout_row, y_row, z_row, dz_row, divisor, num_valid, d, channel, z_stride_l, D, True,
            D, BLOCK_D, FAST,
        )  # fmt: skip
    else:
        x = load_rows(x_row, -x_stride_l, channel)
        if weight is None:
            dt = load_rows(dt_row, -dt_stride_l, channel)
        dy = _through_gate(
            dout_row, y_row, z_row, dz_row, divisor, num_valid, d, channel, -z_stride_l, -D, False,
            D, BLOCK_D, FAST,
        )  # fmt: skip
    if weight is not None:
        dt = tl.dot(weight, tl.trans(loaded[3]), input_precision=PRECISION)
        dt = to_rows(dt.to(dt_ptr.dtype.element_ty), BLOCK_D).to(tl.float32)
    recalled = to_rows(tl.dot(state, tl.trans(k), input_precision=PRECISION), BLOCK_D)
    kappa = load_broadcast_rows(kappa_ptr + chunk * (2 * T), BLOCK_D)
    exp_minus_v, eps = exp_and_eps(dt, bias[None, :], kappa, FAST)
    dy = round_tf32(dy, PRECISION, FAST)
    dys, xs = columns(tl.trans(dy), 16), columns(tl.trans(x), 16)
    for t in tl.static_range(T):
        dskip += dys[t] * xs[t]
    c_tile = forward_substitution(x - recalled, eps, gram, BLOCK_D, PRECISION, FAST)
    dy_tile = from_columns(dys, BLOCK_D)
    dc = tl.dot(later, tl.trans(k), input_precision=PRECISION)
    dc = tl.dot(dy_tile, tl.trans(read), dc, input_precision=PRECISION)
    dstate = tl.dot(dy_tile, q, dstate, input_precision=PRECISION)
    token = ((direction * B + b) * L + first) * D + d
    w_tile = backward_substitution(to_rows(dc, BLOCK_D), eps, gram, BLOCK_D, PRECISION, FAST)
    c, w = tl.trans(c_tile), tl.trans(w_tile)
    dx, dv = w + skip[None, :] * dy, w * (c * exp_minus_v)
    if DIRECTIONS == 1:
        _store_gradient(dx_ptr + token, sign * D, dx, num_valid, d, channel, D, BLOCK_D)
        _store_gradient(ddt_ptr + token, sign * D, dv, num_valid, d, channel, D, BLOCK_D)
    elif direction == 0:
        _store_gradient(dx_ptr + token, D, dx, num_valid, d, channel, D, BLOCK_D)
        _store_gradient(ddt_ptr + token, D, dv, num_valid, d, channel, D, BLOCK_D)
    else:
        _store_gradient(dx_ptr + token, -D, dx, num_valid, d, channel, D, BLOCK_D)
        _store_gradient(ddt_ptr + token, -D, dv, num_valid, d, channel, D, BLOCK_D)
    dbias += tl.sum(dv, 0)
    dstate = tl.dot(w_tile, -k, dstate, input_precision=PRECISION)
    _store_sums(
        sums_ptr, dy_tile, w_tile, c_tile, state_row, later, B, b, n, chunks, d, block,
        direction, DIRECTIONS, D, BLOCK_D, BLOCK_M, FAST, PRECISION,
    )  # fmt: skip
    later = round_tf32(dstate, PRECISION, FAST)
    return dstate, later, dskip, dbias


@triton.jit(do_not_specialize=RUN_TIME)
def exact_backward_kernel(
    x_ptr, dt_ptr, dt_weight_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr,
    bias_ptr, states_ptr, split_states_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, dskip_ptr, dbias_ptr,
    dinitial_ptr, B, L, num_splits, split_chunks, x_stride_dir, x_stride_b, dt_stride_dir,
    dt_stride_b, z_stride_b, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backpropagate through one direction of one split of one batch element and block of channels.

    Of two directions, direction 0 also writes the gradient of the gate.
    """
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    b, split, direction, block = place_of_program(num_splits, DIRECTIONS, BLOCKS)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    direction = direction if DIRECTIONS == 2 else 0
    mask = token_mask(0, 1, d, D, BLOCK_D)
    chunks, begin = tl.cdiv(L, 16), split * split_chunks
    end = tl.minimum(begin + split_chunks, chunks)
    lane = ((direction * B + b) * num_splits + split) * D + d
    channel = mask[None, :]
    dstate = split_state(split_states_ptr, lane, d, D, BLOCK_D, BLOCK_M)
    bias = load_row(bias_ptr + direction * D + d, mask)
    if FAST:
        bias *= -1.4426950408889634
    skip = load_row(skip_ptr + direction * D + d, mask)
    dbias, dskip = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    x_ptr += direction * x_stride_dir + b * x_stride_b
    dt_ptr += direction * dt_stride_dir + b * dt_stride_b
    later = round_tf32(dstate, PRECISION, FAST)
    weight = None
    if dt_weight_ptr is not None:
        weight = load_ranks(dt_weight_ptr + (direction * D + d) * RANK, mask, RANK, FAST)
    reverse = direction == 1 or REVERSE
    first_chunk, n = (direction * B + b) * chunks, tl.where(reverse, begin, end - 1)
    loaded = _load_ahead(
        n, first_chunk + n, dt_ptr, keys_ptr, gram_ptr, states_ptr, L, d, reverse, dt_stride_l,
        RANK, D, BLOCK_D, BLOCK_M, FAST,
    )  # fmt: skip
    for i in range(begin, end):
        n = tl.where(reverse, i, begin + end - 1 - i)
        after = n + tl.where(i + 1 < end, tl.where(reverse, 1, -1), 0)
        ahead = tl.cast(tl.minimum(after * 16, L - 16), tl.int64)
        next_loaded = _load_ahead(
            after, first_chunk + after, dt_ptr, keys_ptr, gram_ptr, states_ptr, L, d, reverse,
            dt_stride_l, RANK, D, BLOCK_D, BLOCK_M, FAST,
        )  # fmt: skip
        token = (b * L + ahead) * D
        rows, steps = (x_ptr + ahead * x_stride_l, dout_ptr + token), (x_stride_l, D)
        if z_ptr is not None:
            rows += (z_ptr + b * z_stride_b + ahead * z_stride_l, y_ptr + token)
            steps += (z_stride_l, D)
        prefetch_rows(rows, steps, d, D, BLOCK_D, FAST)
        dstate, later, dskip, dbias = _chunk_backward(
            dstate, later, dskip, dbias, loaded, bias, skip, weight, x_ptr, dt_ptr, z_ptr, dout_ptr,
            y_ptr, keys_ptr, gram_ptr, kappa_ptr, states_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, B,
            L, b, n, chunks, d, block, channel, z_stride_b, direction, reverse, DIRECTIONS, REVERSE,
            x_stride_l, dt_stride_l, z_stride_l, RANK, D, BLOCK_D, BLOCK_M, FAST, PRECISION,
        )  # fmt: skip
        loaded = next_loaded
    tl.store(dskip_ptr + lane, dskip, mask=d < D)
    tl.store(dbias_ptr + lane, dbias, mask=d < D)
    if dinitial_ptr is not None:
        left = tl.where(reverse, chunks - end, begin)
        store_states(dinitial_ptr, b * D + d, dstate, d, tl.where(left == 0, D, 0), BLOCK_M)


# -------------------------------------------------------------------------------------- plan


# Largest rank of step sizes that the kernels make; twice that would use up their shared memory.
_MAX_RANK = 64


def _splits(config: LaunchConfig, block_d: int) -> dict[str, int]:
    num_splits, length = config.num_splits, config.split_chunks
    return {"num_splits": num_splits, "split_chunks": length, "BLOCK_D": block_d}


class ExactPlan(ScanPlan):
    """Scan of 16 tokens or more; states are (*lead, D, BLOCK_M)."""

    def __init__(self, key: ScanKey) -> None:
        super().__init__(key, _MAX_RANK)
        self.block_m = self.state[1]
        precision, fast = tuning.dot_precision(key.dtype), tuning.fast(key.device)
        backward = "exact_backward_float32" if precision == "tf32x3" else "exact_backward"
        sequences, strides = self.N * self.B, self.strides
        ahead = self.launch_config("exact_forward", self.B, MIN_FIT_FOR_SPLITS)
        back = self.launch_config(backward, sequences, MIN_FIT_FOR_SPLITS)
        self.splits_ahead, self.splits_back = ahead.num_splits, back.num_splits
        self.blocks = back.blocks
        of_keys = {
            "B": self.B, "L": self.L, "REVERSE": self.reverse, "BLOCK_M": self.block_m,
            "PRECISION": precision, "FAST": fast,
        }  # fmt: skip
        norms = {"M": key.states, "kappa_scale": key.kappa_scale}
        of_steps = {"D": self.D, "RANK": key.rank if self.makes_steps else 0}
        shared = of_keys | of_steps | strides["x"] | strides["dt"]
        limit = {"maxnreg": tuning.THREE_WARPS} if 90 <= fast < 100 and self.block_m == 16 else {}
        # Left alone, ptxas takes 40 of 255 registers on sm_89, and spills the others.
        most = {"maxnreg": 255} if 80 <= fast < 90 and self.block_m == 128 else {}
        chunks, of_norms = sequences * self.chunks, norms | strides["q"] | strides["k"]
        self._gram = Kernel(gram_kernel, chunks, 1, **of_keys, **of_norms)
        block, warps = tuning.blocks("exact_states", self.D, key.device)
        self._split_states = Kernel(
            exact_states_kernel, sequences * triton.cdiv(self.D, block), warps,
            DIRECTIONS=self.N, **shared, **_splits(ahead, block),
        )  # fmt: skip
        self._forward = Kernel(
            exact_forward_kernel, self.B * ahead.blocks * ahead.num_splits, ahead.num_warps,
            **shared, **strides["z"], **_splits(ahead, ahead.block_d), **limit, **most,
        )  # fmt: skip
        lanes, warps = tuning.blocks("exact_gradients", self.D, key.device)
        block = lanes * STATES_OF_LANE // self.block_m
        self._split_gradients = Kernel(
            exact_gradients_kernel, sequences * triton.cdiv(self.D, block), warps, B=self.B,
            L=self.L, REVERSE=self.reverse, BLOCK_M=self.block_m, FAST=fast, D=self.D, zero=0,
            **strides["dt_full"], **strides["z_back"], **_splits(back, block),
            **({"maxnreg": MAX_REGISTERS} if fast else {}),
        )  # fmt: skip
        self._backward = Kernel(
            exact_backward_kernel, sequences * back.blocks * back.num_splits, back.num_warps,
            **shared, **strides["z_back"], **_splits(back, back.block_d), **most,
        )  # fmt: skip
        self._keys = Kernel(keys_kernel, chunks, 1, **of_keys, **norms, blocks=back.blocks)

    def _packed(self, args: ScanArgs) -> dict[str, Tensor]:
        """Launch the kernel that packs keys and queries; return its results."""
        T, lead = tuning.CHUNK, (self.N, self.B, self.chunks)
        packed = {
            "keys_ptr": self.empty(*lead, T, 2 * self.block_m),
            "gram_ptr": self.empty(*lead, 2, T, T),
            "kappa_ptr": self.empty(*lead, 2, T),
        }
        self._gram(args.k, q_ptr=args.q, k_ptr=args.k, **packed)
        return packed

    def _padded(self, state: Tensor | None) -> Tensor | None:
        """Return a state (1, B, D, M) with zeros beyond M, (1, B, D, BLOCK_M)."""
        if state is None:
            return None
        return F.pad(state, (0, self.block_m - self.key.states)).contiguous()

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the output, the last state, the sum of both directions and saved states."""
        args = self.prepared(args)
        packed = self._packed(args)
        inputs = {
            "x_ptr": args.x, "dt_ptr": args.dt, "dt_weight_ptr": args.dt_weight,
            "bias_ptr": args.bias, **packed,
        }  # fmt: skip
        split_states = start = self._padded(args.initial_state)
        if self.splits_ahead > 1:
            split_states = self.empty(self.N, self.B, self.splits_ahead, *self.state)
            self._split_states(split_states, **inputs, start_ptr=start, split_states_ptr=split_states)
        rows, both = (self.B, self.L, self.D), self.N == 2
        out = self.empty(*rows, dtype=self.key.dtype)
        y_pre_gate = self.empty(*rows, dtype=self.sum_dtype) if both else None
        final = None if both else self.empty(1, self.B, *self.state)
        states = self.empty(*self.saved_states, dtype=self.saved_dtype) if save else None
        self._forward(
            out, **inputs, z_ptr=args.z, skip_ptr=args.D, split_states_ptr=split_states,
            y_ptr=y_pre_gate, out_ptr=out, states_ptr=states, final_ptr=final,
        )  # fmt: skip
        final = None if final is None else final[..., : self.key.states].contiguous()
        return out, final, y_pre_gate if save else None, states

    def backward(
        self,
        args: ScanArgs,
        grad: Tensor,
        grad_final: Tensor | None,
        saved: tuple[Tensor | None, Tensor] | None = None,
        dz: Tensor | None = None,
        small: None = None,
    ) -> ScanArgs:
        """Return the gradients of ``forward``, as described in ``interface.ScanPlan``."""
        y_pre_gate, states = self.forward(args, True)[2:] if saved is None else saved
        own, grad = self.prepared(args), grad.contiguous()
        z = own.z if own.z is None or self.writes_dz else own.z.contiguous()
        packed = self._packed(own)
        inputs = {"z_ptr": z, "dout_ptr": grad, "bias_ptr": own.bias, **packed}
        split_states = start = self._padded(grad_final)
        if self.splits_back > 1:
            split_states = self.empty(self.N, self.B, self.splits_back, *self.state)
            self._split_gradients(
                split_states, **inputs, dt_ptr=dt_proj(own.dt, own.dt_weight), start_ptr=start,
                split_states_ptr=split_states,
            )  # fmt: skip
        rows, lead = (self.B, self.L, self.D), (self.N, self.B)
        dx, ddt = (self.empty(self.N, *rows, dtype=self.key.dtype) for _ in range(2))
        own_dz = dz
        if z is not None and not self.writes_dz:
            own_dz = self.empty(*rows, dtype=self.key.dtype)
        dskip, dbias = self.empty(2, *lead, self.splits_back, self.D)
        dinitial = None if args.initial_state is None else self.empty(1, self.B, *self.state)
        width = tuning.CHUNK * (3 * self.block_m + 2 * tuning.CHUNK)
        sums = self.empty(self.blocks, *lead, self.chunks, width)
        self._backward(
            grad, **inputs, x_ptr=own.x, dt_ptr=own.dt, dt_weight_ptr=own.dt_weight, sums_ptr=sums,
            skip_ptr=own.D, y_ptr=y_pre_gate, states_ptr=states, split_states_ptr=split_states,
            dx_ptr=dx, ddt_ptr=ddt, dz_ptr=own_dz, dskip_ptr=dskip, dbias_ptr=dbias,
            dinitial_ptr=dinitial,
        )  # fmt: skip
        dq, dk = (self.empty(*args.k.shape, dtype=self.key.dtype) for _ in range(2))
        self._keys(dq, sums_ptr=sums, keys_ptr=packed["keys_ptr"], dq_ptr=dq, dk_ptr=dk)
        dinitial = None if dinitial is None else dinitial[..., : self.key.states].contiguous()
        return self.gradients(
            args, dz, x=dx, dt=ddt, A=None, q=dq, k=dk, D=dskip, bias=dbias, z=own_dz,
            initial_state=dinitial,
        )  # fmt: skip


class ShortPlan:
    """Scan of fewer than 16 tokens: that of 16, of which the last are zeros.

    Zero keys leave the state unchanged in either direction.
    """

    writes_small = False

    def __init__(self, key: ScanKey) -> None:
        N, B, self.L, D = key.shape
        shape = (N, B, tuning.CHUNK, D)
        # No kernel takes such strides, so the plan is for contiguous tensors.
        strides = tuple(None if own is None else (0,) * len(own) for own in key.strides)
        self.plan = ExactPlan(key._replace(shape=shape, strides=strides, dz=None))

    def _padded(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else F.pad(rows, (0, 0, 0, tuning.CHUNK - self.L))

    def _cut(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[..., : self.L, :].contiguous()

    def _of_rows(self, change: Callable, args: ScanArgs) -> ScanArgs:
        names = ("x", "dt", "q", "k", "z")
        return args._replace(**{name: change(getattr(args, name)) for name in names})

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the same results as ``ExactPlan``."""
        args = self._of_rows(self._padded, args)
        out, final, y_pre_gate, states = self.plan.forward(args, save)
        return self._cut(out), final, self._cut(y_pre_gate), states

    def backward(
        self,
        args: ScanArgs,
        grad: Tensor,
        grad_final: Tensor | None,
        saved: tuple[Tensor | None, Tensor] | None = None,
        dz: Tensor | None = None,
        small: None = None,
    ) -> ScanArgs:
        """Return the same gradients as ``ExactPlan``."""
        args, grad = self._of_rows(self._padded, args), self._padded(grad)
        saved = None if saved is None else (self._padded(saved[0]), saved[1])
        grads = self._of_rows(self._cut, self.plan.backward(args, grad, grad_final, saved))
        return grads if dz is None else grads._replace(z=dz.copy_(grads.z))
