"""Scans token by token, cut in splits: the states that splits start from.

A split is several chunks of INTERVAL tokens: all of them, unless there are too few channels to fill the
GPU. Then splits run in parallel, from start states that the kernels here find first. A scan is linear in
its state, so the effect of a split is one product and one sum per channel and state. Letters as in
``recurrent.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.recurrent_parts import (
    RUN_TIME,
    advance,
    broadcast_row,
    fade,
    full_states,
    load_rates,
    place_of_program,
    step_size,
    store_states,
)
from vil.kernels.triton.tiles import half_silu, load_row, token_mask


@triton.jit(do_not_specialize=RUN_TIME)
def recurrent_summary_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, kq_ptr, rates_ptr, bias_ptr, split_end_ptr, split_decay_ptr,
    B, L, num_splits, split_tokens,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, MAMBA: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Find the effect of a split on a state s, decay s + end, both (N, B, S, M / 4, D, 4).

    With ADJOINT, find the effect on the gradient of the state after the split, in the backward pass.
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
    sign = 1 - 2 * back
    first = (start + back * (count - 1)).to(tl.int64)
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l
    if ADJOINT:
        dout_row = dout_ptr + (b * L + first) * D
        if N == 2:
            z_row = z_ptr + b * z_stride_b + first * z_stride_l
    else:
        x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l
    row = kq_ptr + (sequence * tl.cdiv(L, INTERVAL) * INTERVAL + first) * (2 * M + 4)
    end = full_states(0.0, M, BLOCK_D)
    product = full_states(1.0, M, BLOCK_D)
    for _ in range(count):
        k = broadcast_row(row, M, BLOCK_D)
        v = load_row(dt_row + d, mask) + bias
        step = step_size(v, row + 2 * M, mask, MAMBA, FAST)
        if ADJOINT:
            dy = load_row(dout_row + d, mask)
            dout_row += sign * D
            if N == 2:
                dy *= half_silu(load_row(z_row + d, mask), FAST)
                z_row += sign * z_stride_l
            q = broadcast_row(row + M, M, BLOCK_D)
            read = ()
            for j in tl.static_range(M):
                read += (end[j] + dy * q[j],)
            end = fade(read, step, k, rates, M, MAMBA, FAST)
        else:
            x = load_row(x_row + d, mask)
            x_row += sign * x_stride_l
            end = advance(end, x, step, k, rates, M, MAMBA, FAST)
        product = fade(product, step, k, rates, M, MAMBA, FAST)
        dt_row += sign * dt_stride_l
        row += sign * (2 * M + 4)
    offset = (sequence * num_splits + split) * (M * D)
    store_states(split_end_ptr + offset, end, d, mask, D, M)
    store_states(split_decay_ptr + offset, product, d, mask, D, M)


@triton.jit(do_not_specialize=RUN_TIME)
def recurrent_carry_kernel(
    split_end_ptr, split_decay_ptr, initial_ptr, B, num_splits,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the ends of splits by their start states, in place.

    split_end, split_decay (N, B, S, SIZE). initial (N, B, SIZE): state of the first split, zero if not given.
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
