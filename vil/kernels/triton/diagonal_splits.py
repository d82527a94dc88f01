"""Scans token by token, cut in splits: the states that splits start from.

A split is several chunks of 16 tokens: all of them, unless there are too few channels to fill the
GPU. Then splits run in parallel, from start states that the kernels here find first. A scan is
linear in its state, so the effect of a split is one product and one sum per channel and state.
Letters as in ``diagonal.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.diagonal_parts import (
    RUN_TIME,
    advance,
    apply_decay,
    full_states,
    load_broadcast_row,
    load_group,
    load_rates,
    place_of_program,
    step_size,
    store_states,
)
from vil.kernels.triton.tiles import half_silu, load_row, one_row, token_mask


@triton.jit
def _gated(row, step, z_row, z_step, tokens, count, d, D: tl.constexpr, FAST: tl.constexpr):
    """Load rows of tokens: x, or the gradient of the output; with z, make that of y."""
    rows = load_group(row, step, tokens, count, d, D)
    if z_row is not None:
        rows *= half_silu(load_group(z_row, z_step, tokens, count, d, D), FAST)
    return rows


@triton.jit(do_not_specialize=RUN_TIME)
def diagonal_summary_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, kq_ptr, rates_ptr, bias_ptr, split_end_ptr, split_decay_ptr,
    B, L, num_splits, split_tokens,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, MAMBA: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Find the effect of a split on a state s, decay s + end, both (N, B, S, M / 4, D, 4).

    With ADJOINT, find the effect on the gradient of the state after the split, in the backward
    pass.
    """
    block, split, direction, b = place_of_program(num_splits, B, D, BLOCK_D)
    sequence = direction * B + b
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = token_mask(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, mask)
    rates = load_rates(rates_ptr, direction, d, mask, D, M, MAMBA)
    start = split * split_tokens
    count = tl.minimum(L - start, split_tokens)
    back = (direction if N == 2 else REVERSE) ^ ADJOINT
    sign, groups, start = 1 - 2 * back, tl.cdiv(count, GROUP), start.to(tl.int64)
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + start * dt_stride_l
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + start * x_stride_l
    x_step, z_row = x_stride_l, None
    if ADJOINT:  # the gradient takes the place of x
        x_row, x_step = dout_ptr + (b * L + start) * D, D
        z_row = None if N == 1 else z_ptr + b * z_stride_b + start * z_stride_l
    kq = kq_ptr + (sequence * tl.cdiv(L, CHUNK) * CHUNK + start) * (2 * M + 4)
    end, product = full_states(0.0, M, BLOCK_D), full_states(1.0, M, BLOCK_D)
    order = tl.arange(0, GROUP)
    order = tl.where(back == 1, GROUP - 1 - order, order)
    tokens = (groups - 1) * back * GROUP + order
    dt = load_group(dt_row, dt_stride_l, tokens, count, d, D)
    x = _gated(x_row, x_step, z_row, z_stride_l, tokens, count, d, D, FAST)
    for i in range(groups):
        group = tl.where(back == 1, groups - 1 - i, i)
        tokens = (group + sign) * GROUP + order
        next_dt = load_group(dt_row, dt_stride_l, tokens, count, d, D)
        next_x = _gated(x_row, x_step, z_row, z_stride_l, tokens, count, d, D, FAST)
        first = group * GROUP + back * (GROUP - 1)
        for t in tl.static_range(GROUP):
            live = token_mask(first + sign * t, count, d, D, BLOCK_D)
            row = kq + (first + sign * t) * (2 * M + 4)
            step = step_size(one_row(dt, t) + bias, row + 2 * M, live, MAMBA, FAST)
            k = load_broadcast_row(row, M, BLOCK_D)
            if ADJOINT:
                q = load_broadcast_row(row + M, M, BLOCK_D)
                read = ()
                for j in tl.static_range(M):
                    read += (end[j] + one_row(x, t) * q[j],)
                end = apply_decay(read, step, k, rates, M, MAMBA, FAST)
            else:
                end = advance(end, one_row(x, t), step, k, rates, M, MAMBA, FAST)
            product = apply_decay(product, step, k, rates, M, MAMBA, FAST)
        x, dt = next_x, next_dt
    offset = (sequence * num_splits + split) * (M * D)
    store_states(split_end_ptr + offset, end, d, mask, D, M)
    store_states(split_decay_ptr + offset, product, d, mask, D, M)


@triton.jit(do_not_specialize=RUN_TIME)
def diagonal_carry_kernel(
    split_end_ptr, split_decay_ptr, initial_ptr, B, num_splits,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the ends of splits by their start states, in place.

    split_end, split_decay (N, B, S, SIZE). initial (N, B, SIZE): state of the first split, zero if
    not given.
    """
    blocks = tl.cdiv(SIZE, BLOCK)
    sequence = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    back = (sequence // B if N == 2 else REVERSE) ^ ADJOINT
    sequence = sequence.to(tl.int64)
    state = tl.zeros((BLOCK,), tl.float32)
    if initial_ptr is not None:
        state = tl.load(initial_ptr + sequence * SIZE + i, mask=i < SIZE, other=0.0)
    for s in range(num_splits):
        split = tl.where(back == 1, num_splits - 1 - s, s)
        offset = (sequence * num_splits + split) * SIZE + i
        end = tl.load(split_end_ptr + offset, mask=i < SIZE, other=0.0)
        product = tl.load(split_decay_ptr + offset, mask=i < SIZE, other=0.0)
        tl.store(split_end_ptr + offset, state, mask=i < SIZE)
        state = product * state + end
