"""The exact Longhorn scan in chunks, cut in splits: the states that splits start from.

Sequences too few to fill the device are cut in splits of whole chunks that run in parallel. The scan is
linear in its state, so a summary of every split gives the states that the splits start from. Equations
and letters are in ``chunk.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.chunk_parts import (
    RUN_TIME,
    backward_substitution,
    forward_substitution,
    place_of_program,
    store_states,
)
from vil.kernels.triton.tiles import (
    broadcast_rows,
    columns,
    from_columns,
    half_silu,
    load_row,
    load_rows,
    longhorn_eps,
    round_tf32,
    row_mask,
    to_rows,
    token_mask,
)


@triton.jit
def _summary_direction(
    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, summary_ptr,
    B, L, b, split, num_splits, split_chunks, d, j,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, OWN: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Propagate unit state j through one split; with OWN, propagate zeros under the given inputs.

    With dout, propagate the gradient of the state instead, against the scan.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    DESCENDING: tl.constexpr = (dout_ptr is not None) != REVERSE
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    state = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    if not OWN:
        state += tl.where(m == j, 1.0, 0.0)[None, :]
    split += 1 if DESCENDING else 0  # the last split on the way needs no summary
    chunks, begin = tl.cdiv(L, T), split * split_chunks
    end = tl.minimum(begin + split_chunks, chunks)
    mask = token_mask(0, 1, d, D, BLOCK_D)
    channel = mask[None, :]
    bias = load_row(bias_ptr + direction * D + d, mask)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    rounded = round_tf32(state, PRECISION, FAST)
    for i in range(begin, end):
        n = (begin + end - 1 - i) if DESCENDING else i
        chunk = (direction * B + b) * chunks + n
        keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t16[:, None] * (2 * BLOCK_M) + m[None, :]
        k = tl.load(keys)
        gram = gram_ptr + chunk * (2 * T * T)
        first = tl.cast(tl.minimum(n * T, L - T) + ((T - 1) if REVERSE else 0), tl.int64)
        kappa = broadcast_rows(kappa_ptr + chunk * (2 * T), BLOCK_D)
        dt = load_rows(dt_row + first * dt_stride_l, sign * dt_stride_l, channel)
        eps = longhorn_eps(dt + bias[None, :], kappa, FAST)
        recalled = tl.dot(rounded, tl.trans(k), input_precision=PRECISION)
        if dout_ptr is None:
            rest = -to_rows(recalled, BLOCK_D)
            if OWN:
                rest += load_rows(x_row + first * x_stride_l, sign * x_stride_l, channel)
            taken = forward_substitution(rest, eps, gram, BLOCK_D, PRECISION, FAST)
        else:
            if OWN:
                alive = row_mask(L - n * T, d, not REVERSE, D, BLOCK_D)
                dy = load_rows(dout_ptr + (b * L + first) * D + d, sign * D, alive)
                if z_ptr is not None:
                    z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
                    dy *= half_silu(load_rows(z_row, sign * z_stride_l, channel), FAST)
                read = tl.load(gram + T * T + t16[:, None] * T + t16[None, :])
                dy = round_tf32(dy, PRECISION, FAST)
                dy = from_columns(columns(tl.trans(dy), 16), BLOCK_D)
                recalled = tl.dot(dy, tl.trans(read), recalled, input_precision=PRECISION)
                state = tl.dot(dy, tl.load(keys + BLOCK_M), state, input_precision=PRECISION)
            taken = backward_substitution(
                to_rows(recalled, BLOCK_D), eps, gram, BLOCK_D, PRECISION, FAST
            )
            k = -k
        state = tl.dot(taken, k, state, input_precision=PRECISION)
        rounded = round_tf32(state, PRECISION, FAST)
    lane = (((direction * B + b) * num_splits + split) * (M + 1) + j) * D + d
    store_states(summary_ptr, lane, state, d, D, BLOCK_M)


@triton.jit(do_not_specialize=RUN_TIME)
def exact_summary_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, summary_ptr,
    B, L, num_splits, split_chunks, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
    z_stride_b, REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Summarise the effect of a split on a state or, against the scan, on the gradient of a state.

    summary (N, B, S, M + 1, D, BLOCK_M): entry j < M is the end of unit state j without inputs. Entry M is
    the end of zeros under the inputs: x, or the gradient of y.
    """
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    b, split, place, block = place_of_program(num_splits - 1, DIRECTIONS, (M + 1) * BLOCKS)
    j = block // BLOCKS
    d = (block - j * BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    for direction in tl.static_range(DIRECTIONS):
        for own in tl.static_range(2):
            if place == direction and (j == M) == (own == 1):
                _summary_direction(
                    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr,
                    summary_ptr, B, L, b, split, num_splits, split_chunks, d, j,
                    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
                    direction, REVERSE or direction == 1, own == 1, x_stride_l, dt_stride_l,
                    z_stride_l, D, BLOCK_D, M, BLOCK_M, FAST, PRECISION,
                )  # fmt: skip


@triton.jit(do_not_specialize=RUN_TIME)
def exact_carry_kernel(
    summary_ptr, start_ptr, split_states_ptr, B, num_splits,
    DESCENDING: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Carry the state of one channel over the splits: split_states (N, B, S, D, BLOCK_M).

    DESCENDING is the order of direction 0; direction 1 has the opposite order.
    """
    j = tl.arange(0, BLOCK_M)
    d, rest = tl.program_id(0) % D, (tl.program_id(0) // D).to(tl.int64)
    b, direction = rest % B, rest // B
    if start_ptr is None:
        state = tl.zeros((BLOCK_M,), tl.float32)
    else:
        state = tl.load(start_ptr + (b * D + d) * BLOCK_M + j)
    descending = direction == (0 if DESCENDING else 1)
    # No pipeline: mamba's authors found that Triton 3.5 to 3.7 corrupts recurrent kernels with one (sm_100, sm_120).
    for i in tl.range(num_splits - 1, num_stages=1):
        place = rest * num_splits + tl.where(descending, num_splits - 1 - i, i)
        summary = summary_ptr + (place * ((M + 1) * D) + d) * BLOCK_M + j
        unit = summary[None, :] + j[:, None] * (D * BLOCK_M)
        transition = tl.load(unit, mask=(j < M)[:, None], other=0.0)
        own = tl.load(summary + M * D * BLOCK_M)
        tl.store(split_states_ptr + (place * D + d) * BLOCK_M + j, state)
        state = own + tl.sum(transition * state[:, None], 0)
    place = rest * num_splits + tl.where(descending, 0, num_splits - 1)
    tl.store(split_states_ptr + (place * D + d) * BLOCK_M + j, state)
