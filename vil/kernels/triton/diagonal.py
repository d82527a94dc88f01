"""Scans token by token, diagonal Longhorn and Mamba: Triton kernels, then their plan.

``longhorn.py`` and ``mamba.py`` define the update for one token, called through
``diagonal_parts.py``. ``diagonal_splits.py`` finds the states that splits start from. This file has
the rest: both directions, the gate, saved states. A program owns one split of one batch element and
BLOCK_D channels, one per lane. The states stay in registers as a tuple over j; keys and queries are
broadcast loads of packed float32 rows. Sums over channels are products with ones, so there are no
atomics and gradients are bit-identical from run to run.

Everything is in token order. A chunk is 16 tokens, and a split is several chunks.

Letters: N directions, B batch, L tokens, D channels, M state size (padded to a multiple of 4 in the
kernels), S splits. With N = 2 directions, index 1 runs from the last token to the first.
"""

import math

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.interface import ScanArgs, ScanKey, ScanResult
from vil.kernels.triton import tuning
from vil.kernels.triton.diagonal_parts import (
    ROW_TAIL,
    RUN_TIME,
    advance,
    advance_backward,
    first_states,
    full_states,
    gate_backward,
    load_broadcast_row,
    load_group,
    load_rates,
    load_states,
    pack_kernel,
    place_of_program,
    step_size,
    step_size_and_slope,
    store_states,
    store_sums_over_channels,
)
from vil.kernels.triton.diagonal_splits import diagonal_carry_kernel, diagonal_summary_kernel
from vil.kernels.triton.launch import Kernel
from vil.kernels.triton.scan_plan import ScanPlan
from vil.kernels.triton.states import padded_states
from vil.kernels.triton.tiles import TF32_SCALE, half_silu, load_row, one_row, token_mask


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, z_ptr, kq_ptr, rates_ptr, skip_ptr, bias_ptr, split_states_ptr,
    y_ptr, out_ptr, states_ptr, final_ptr, B, L, num_splits, split_tokens, split, b, d,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    direction: tl.constexpr, N: tl.constexpr, REVERSE: tl.constexpr, MAMBA: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scan a split in one direction, by groups of tokens.

    With two directions, index 0 leaves its y. Index 1 adds its own, gates and stores the result.
    Missing tokens of a group have keys (Mamba: a step) of zero, which leave the state unchanged.
    """
    sign: tl.constexpr = 1 - 2 * REVERSE
    last: tl.constexpr = REVERSE * (GROUP - 1)
    mask = token_mask(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, mask)
    skip = load_row(skip_ptr + direction * D + d, mask)
    rates = load_rates(rates_ptr, direction, d, mask, D, M, MAMBA)
    sequence, start = direction * B + b, (split * split_tokens).to(tl.int64)
    count = tl.minimum(L - split * split_tokens, split_tokens)
    groups, all_chunks = tl.cdiv(count, GROUP), tl.cdiv(L, CHUNK)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + start * x_stride_l
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + start * dt_stride_l
    place = (b * L + start) * D
    kq = kq_ptr + (sequence * all_chunks * CHUNK + start) * (2 * M + 4)
    saved = sequence * all_chunks + start // CHUNK
    state = first_states(split_states_ptr, sequence * num_splits + split, d, mask, D, M, BLOCK_D)
    group, order = (groups - 1) * REVERSE, tl.arange(0, GROUP)
    order = (GROUP - 1 - order) if REVERSE else order
    x = load_group(x_row, x_stride_l, group * GROUP + order, count, d, D)
    dt = load_group(dt_row, dt_stride_l, group * GROUP + order, count, d, D)
    if direction == 1:
        z_row = z_ptr + b * z_stride_b + start * z_stride_l
        z = load_group(z_row, z_stride_l, group * GROUP + order, count, d, D)
        y_other = load_group(y_ptr + place, D, group * GROUP + order, count, d, D)
    for i in range(groups):
        group = groups - 1 - i if REVERSE else i
        # A group takes about as long as a load from memory, so the next group's rows are loaded
        # first.
        ahead = (group + sign) * GROUP + order
        next_x = load_group(x_row, x_stride_l, ahead, count, d, D)
        next_dt = load_group(dt_row, dt_stride_l, ahead, count, d, D)
        if direction == 1:
            next_z = load_group(z_row, z_stride_l, ahead, count, d, D)
            next_y = load_group(y_ptr + place, D, ahead, count, d, D)
        if states_ptr is not None:
            # The short chunk is the last chunk of the sequence in either direction.
            in_chunk = group % (CHUNK // GROUP)
            if (i == 0) | (in_chunk == REVERSE * (CHUNK // GROUP - 1)):
                row = saved + group // (CHUNK // GROUP)
                store_states(states_ptr + row * (M * D), state, d, mask, D, M)
        first = group * GROUP + last
        token = kq + first * (2 * M + 4)
        ys = ()
        for t in tl.static_range(GROUP):
            live = token_mask(first + sign * t, count, d, D, BLOCK_D)
            row = token + sign * t * (2 * M + 4)
            step = step_size(one_row(dt, t) + bias, row + 2 * M, live, MAMBA, FAST)
            k = load_broadcast_row(row, M, BLOCK_D)
            state = advance(state, one_row(x, t), step, k, rates, M, MAMBA, FAST)
            q = load_broadcast_row(row + M, M, BLOCK_D)
            y = skip * one_row(x, t)
            for j in tl.static_range(M):
                y = tl.fma(q[j], state[j], y)
            if direction == 1:
                y += one_row(y_other, t)
            ys += (y,)
        offset = place + first.to(tl.int64) * D + d
        for t in tl.static_range(GROUP):
            live = token_mask(first + sign * t, count, d, D, BLOCK_D)
            y = ys[t]
            if N == 2 and (direction == 0 or states_ptr is not None):
                tl.store(y_ptr + offset + sign * t * D, y, mask=live)
            if direction == 1:
                y *= half_silu(one_row(z, t), FAST)
            if direction == N - 1:
                out = y.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + offset + sign * t * D, out, mask=live)
        x, dt = next_x, next_dt
        if direction == 1:
            z, y_other = next_z, next_y
    if N == 1:
        stored = d < tl.where(split == (num_splits - 1) * (1 - REVERSE), D, 0)
        store_states(final_ptr + b * (M * D), state, d, stored, D, M)


@triton.jit(do_not_specialize=RUN_TIME)
def diagonal_forward_kernel(
    x_ptr, dt_ptr, z_ptr, kq_ptr, rates_ptr, skip_ptr, bias_ptr, split_states_ptr,
    y_ptr, out_ptr, states_ptr, final_ptr, B, L, num_splits, split_tokens,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, REVERSE: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scan a split of one batch element and BLOCK_D channels.

    N = 2: both directions, averaged and gated; y (B, L, D) receives their sum. N = 1: one
    direction, set by REVERSE; final (B, M / 4, D, 4) receives its last state. If given, states (N,
    B, chunks, M / 4, D, 4) receive the state before every chunk. split_states (N, B, S, M / 4, D,
    4): states that splits start from, zeros if not given.
    """
    block, split, _, b = place_of_program(num_splits, B, D, BLOCK_D)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    for direction in tl.static_range(N):
        if direction == 1:
            tl.debug_barrier()  # lets a lane read the y that it wrote, for any layout
        _forward_direction(
            x_ptr, dt_ptr, z_ptr, kq_ptr, rates_ptr, skip_ptr, bias_ptr, split_states_ptr,
            y_ptr, out_ptr, states_ptr, final_ptr, B, L, num_splits, split_tokens, split, b, d,
            x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
            z_stride_b, z_stride_l,
            direction, N, 1 if direction == 1 else REVERSE, MAMBA, D, M, CHUNK, GROUP, BLOCK_D,
            FAST,
        )  # fmt: skip


# --------------------------------------------------------------------------------------- backward


@triton.jit
def _scan_again(
    state, scratch, x_row, dt_row, kq, bias, rates, x_stride_l, dt_stride_l,
    back, sign, num_valid, first_group, end_group, d, channel,
    MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Store the states before each group of a chunk's tokens in the scratch memory."""
    lane = tl.arange(0, BLOCK_D)
    store_states(scratch + first_group * (M * BLOCK_D), state, lane, channel, BLOCK_D, M)
    for group in range(first_group + 1, end_group):
        for t in tl.static_range(GROUP):
            r = (CHUNK - 1) * back + sign * ((group - 1) * GROUP + t)
            mask = token_mask(r, num_valid, d, D, BLOCK_D)
            x = load_row(x_row + r * x_stride_l, mask)
            v = load_row(dt_row + r * dt_stride_l, mask) + bias
            row = kq + r * (2 * M + 4)
            step = step_size(v, row + 2 * M, mask, MAMBA, FAST)
            k = load_broadcast_row(row, M, BLOCK_D)
            state = advance(state, x, step, k, rates, M, MAMBA, FAST)
        store_states(scratch + group * (M * BLOCK_D), state, lane, channel, BLOCK_D, M)
    tl.debug_barrier()  # lets a lane read the states that it wrote, for any layout


@triton.jit
def _load_group(
    x_row, dt_row, z_row, dout_ptr, y_ptr, kq, bias, x_stride_l, dt_stride_l, z_stride_l,
    back, sign, num_valid, group, row, d, gate_channels,
    N: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return tuples over a group's tokens: x, step sizes and slopes, gradients of y and of z.

    ``row`` is an offset: pointers to the row would take 7 % more instructions on sm_90 (Mamba).
    """
    xs, steps, slopes, dys, dzs = (), (), (), (), ()
    for t in tl.static_range(GROUP):
        r = (CHUNK - 1) * back + sign * (group * GROUP + t)
        mask = token_mask(r, num_valid, d, D, BLOCK_D)
        offset = row + r * D
        dy = load_row(dout_ptr + offset, mask)
        if N == 2:
            z = load_row(z_row + r * z_stride_l, mask)
            y = load_row(y_ptr + offset, mask & (d < gate_channels))
            dy, dz = gate_backward(dy, z, y, FAST)
            dzs += (dz,)
        x = load_row(x_row + r * x_stride_l, mask)
        v = load_row(dt_row + r * dt_stride_l, mask) + bias
        step, slope = step_size_and_slope(v, kq + r * (2 * M + 4) + 2 * M, mask, MAMBA, FAST)
        xs += (x,)
        steps += (step,)
        slopes += (slope,)
        dys += (dy,)
    return xs, steps, slopes, dys, dzs


@triton.jit
def _group_backward(
    grad, drates, dskip, dbias, state, xs, steps, slopes, dys, dzs, skip, rates, kq, partial,
    dx_ptr, ddt_ptr, dz_row, back, sign, num_valid, group, own_row, z_stride_l, d, gate_channels,
    kappa_scale, N: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backpropagate through a group of tokens; return the gradients so far.

    ``state`` is the one before the group.
    """
    # Tensor cores truncate the terms of dk and dq, which this factor makes up for.
    SCALE: tl.constexpr = TF32_SCALE if FAST >= 80 and PRECISION == "tf32" else 1.0
    history, keys = state, ()
    for t in tl.static_range(GROUP - 1):
        r = (CHUNK - 1) * back + sign * (group * GROUP + t)
        k = load_broadcast_row(kq + r * (2 * M + 4), M, BLOCK_D)
        state = advance(state, xs[t], steps[t], k, rates, M, MAMBA, FAST)
        history += state
        keys += k
    for t in tl.static_range(GROUP - 1, -1, -1):
        r = (CHUNK - 1) * back + sign * (group * GROUP + t)
        x, step, dy = xs[t], steps[t], dys[t]
        row = kq + r * (2 * M + 4)
        if MAMBA and FAST and t < GROUP - 1:  # registers are short for Longhorn, and on AMD
            k = keys[t * M : t * M + M]
        else:
            k = load_broadcast_row(row, M, BLOCK_D)
        q = load_broadcast_row(row + M, M, BLOCK_D)
        grad, drates, recalled, dstep, dk, dq = advance_backward(
            grad, drates, history[t * M : t * M + M], x, step, k, q, dy, rates, kappa_scale, SCALE,
            M, MAMBA, FAST,
        )  # fmt: skip
        ddt = dstep * slopes[t]
        dx = step * recalled + skip * dy
        dskip += dy * x
        dbias += ddt
        mask = token_mask(r, num_valid, d, D, BLOCK_D)
        offset = r * D
        tl.store(dx_ptr + own_row + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(ddt_ptr + own_row + offset, ddt.to(ddt_ptr.dtype.element_ty), mask=mask)
        if N == 2:
            tl.store(
                dz_row + r * z_stride_l,
                dzs[t].to(dz_row.dtype.element_ty),
                mask=mask & (d < gate_channels),
            )
        count = tl.where(r < num_valid, 2 * M, 0)
        store_sums_over_channels(partial + r * (2 * M), dk + dq, count, 2 * M, BITS, BLOCK_D, PRECISION, FAST)
    return grad, drates, dskip, dbias


@triton.jit
def _chunk_backward(
    grad, drates, dskip, dbias, bias, skip, rates, scratch,
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, kq_ptr, states_ptr, dx_ptr, ddt_ptr, dz_ptr,
    dkq_ptr, B, L, kappa_scale, block, direction, b, back, chunk, d,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Backpropagate through a chunk by groups, the last first; return the gradients so far.

    Token r of the chunk is the i-th in scan order. Dead tokens of a short chunk come last or, in
    reverse, first. Their keys are zero.
    """
    lane, channel = tl.arange(0, BLOCK_D), token_mask(0, 1, d, D, BLOCK_D)
    sign = 1 - 2 * back
    gate_channels = tl.where(direction == 0, D, 0)  # channels whose dz this program writes
    num_valid = tl.minimum(L - chunk * CHUNK, CHUNK)
    first_group = back * ((CHUNK - num_valid) // GROUP)
    end_group = tl.where(back == 1, CHUNK // GROUP, tl.cdiv(num_valid, GROUP))
    first = (chunk * CHUNK).to(tl.int64)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l + d
    z_row, dz_row = z_ptr, dz_ptr
    if N == 2:
        gate = b * z_stride_b + first * z_stride_l + d
        z_row, dz_row = z_ptr + gate, dz_ptr + gate
    sequence = direction * B + b
    shared_row = (b * L + first) * D + d  # of tensors shared by both directions
    own_row = (sequence * L + first) * D + d
    saved = sequence * tl.cdiv(L, CHUNK) + chunk
    kq = kq_ptr + saved * (CHUNK * (2 * M + 4))
    partial = dkq_ptr + (((block * N + direction) * B + b) * L + first) * (2 * M)
    state = load_states(states_ptr + saved * (M * D), d, channel, D, M)
    _scan_again(
        state, scratch, x_row, dt_row, kq, bias, rates, x_stride_l, dt_stride_l,
        back, sign, num_valid, first_group, end_group, d, channel,
        MAMBA, D, M, CHUNK, GROUP, BLOCK_D, FAST,
    )  # fmt: skip
    for group_back in range(end_group - first_group):
        group = end_group - 1 - group_back
        # Issue all loads from far memory before any store: a load cannot pass a store that might be
        # to the same address.
        xs, steps, slopes, dys, dzs = _load_group(
            x_row, dt_row, z_row, dout_ptr, y_ptr, kq, bias, x_stride_l, dt_stride_l, z_stride_l,
            back, sign, num_valid, group, shared_row, d, gate_channels,
            N, MAMBA, D, M, CHUNK, GROUP, BLOCK_D, FAST,
        )  # fmt: skip
        state = load_states(scratch + group * (M * BLOCK_D), lane, channel, BLOCK_D, M)
        grad, drates, dskip, dbias = _group_backward(
            grad, drates, dskip, dbias, state, xs, steps, slopes, dys, dzs, skip, rates, kq,
            partial, dx_ptr, ddt_ptr, dz_row, back, sign, num_valid, group, own_row, z_stride_l, d,
            gate_channels, kappa_scale, N, MAMBA, D, M, BITS, CHUNK, GROUP, BLOCK_D, FAST,
            PRECISION,
        )  # fmt: skip
    return grad, drates, dskip, dbias


@triton.jit(do_not_specialize=RUN_TIME)
def diagonal_backward_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, kq_ptr, rates_ptr, skip_ptr, bias_ptr, states_ptr,
    split_states_ptr, scratch_ptr, dx_ptr, ddt_ptr, dz_ptr, dkq_ptr, drates_ptr, dskip_ptr,
    dbias_ptr, dinitial_ptr, B, L, num_splits, split_tokens, kappa_scale, x_stride_dir, x_stride_b,
    x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l, z_stride_b, z_stride_l, N: tl.constexpr,
    REVERSE: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Backpropagate through a split of one direction, batch element and BLOCK_D channels.

    From every saved state the scan is repeated, which stores the states before each GROUP of tokens
    in ``scratch``, (programs, CHUNK / GROUP, M, BLOCK_D). Then groups are processed from the last
    to the first, with the states inside a group in registers. dkq (blocks, N, B, L, 2 M): dk and dq
    summed over the channels of a block. drates (N, B, S, M / 4, D, 4); dskip, dbias (N, B, S, D).
    split_states (N, B, S, M / 4, D, 4): gradients of the states after splits, zeros if not given.
    With two directions, the first writes dz. With one, dinitial (B, M / 4, D, 4) receives the
    gradient of its first state. Mamba does not use kappa_scale.
    """
    block, split, direction, b = place_of_program(num_splits, B, D, BLOCK_D)
    lane = tl.arange(0, BLOCK_D)
    d = block * BLOCK_D + lane
    channel = token_mask(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, channel)
    skip = load_row(skip_ptr + direction * D + d, channel)
    sequence = direction * B + b
    scratch = scratch_ptr + tl.program_id(0).to(tl.int64) * (CHUNK // GROUP * M * BLOCK_D)
    back = direction if N == 2 else REVERSE
    start = split * split_tokens
    chunks = tl.cdiv(tl.minimum(L - start, split_tokens), CHUNK)
    place = sequence * num_splits + split
    sums = place * D + d
    rates, drates = load_rates(rates_ptr, direction, d, channel, D, M, MAMBA), ()
    if MAMBA:
        drates = full_states(0.0, M, BLOCK_D)
    grad = first_states(split_states_ptr, place, d, channel, D, M, BLOCK_D)
    dskip, dbias = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for c in range(chunks):
        chunk = start // CHUNK + tl.where(back == 1, c, chunks - 1 - c)
        grad, drates, dskip, dbias = _chunk_backward(
            grad, drates, dskip, dbias, bias, skip, rates, scratch,
            x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, kq_ptr, states_ptr, dx_ptr, ddt_ptr, dz_ptr,
            dkq_ptr, B, L, kappa_scale, block, direction, b, back, chunk, d,
            x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
            z_stride_b, z_stride_l,
            N, MAMBA, D, M, BITS, CHUNK, GROUP, BLOCK_D, FAST, PRECISION,
        )  # fmt: skip
    if MAMBA:
        store_states(drates_ptr + place * (M * D), drates, d, channel, D, M)
    tl.store(dskip_ptr + sums, dskip, mask=channel)
    tl.store(dbias_ptr + sums, dbias, mask=channel)
    if dinitial_ptr is not None:
        stored = d < tl.where(split == (num_splits - 1) * REVERSE, D, 0)
        store_states(dinitial_ptr + b * (M * D), grad, d, stored, D, M)


# -------------------------------------------------------------------------------------- plan


# In splits, finding their start states is about as much work as the scan. On an H200, a training
# step of a block took 0.81 of the time with 4 splits (512 px, batch 32), and 1.5 with 3 (224 px,
# batch 64).
_MIN_FIT_FOR_SPLITS = 4.0


class DiagonalPlan(ScanPlan):
    """Scan token by token; states are (*lead, M' / 4, D, 4)."""

    def __init__(self, key: ScanKey) -> None:
        super().__init__(key)
        self.M = M = padded_states(key.states, key.recurrence)
        sequences, strides = self.N * self.B, self.strides
        mamba, fast = key.recurrence == "mamba", tuning.fast(key.device)
        # Tokens that the forward pass loads at a time: registers hold their keys.
        group = 4 if M <= 16 else 2 if M <= 32 else 1
        # Tokens between accesses of the backward pass to its scratch memory: registers hold their
        # states. Groups of 4 would halve the traffic, not the number of instructions. They need 232
        # registers instead of 165 (sm_90, M = 16): two warps fit on every scheduler, not three.
        group_back = 2 if M <= 16 else 1
        ahead = self.launch_config("diagonal_forward", self.B, _MIN_FIT_FOR_SPLITS)
        back = self.launch_config("diagonal_backward", sequences, _MIN_FIT_FOR_SPLITS, ahead[3:])
        if fast >= 80 and back[:2] != (32, 1):  # one warp adds up a program's channels
            raise ValueError(f"tuning.BLOCKS must give diagonal_backward (32, 1), got {back[:2]}")
        self.num_splits, self.blocks = back.num_splits, back.blocks
        programs, wide = self.blocks * self.num_splits, ahead.blocks * self.num_splits
        self.scratch = programs * sequences * tuning.CHUNK // group_back * M * back.block_d
        shared = {
            **strides["x"], **strides["dt"], "B": self.B, "L": self.L,
            "num_splits": self.num_splits, "split_tokens": ahead.split_chunks * tuning.CHUNK,
            "N": self.N, "REVERSE": int(self.reverse), "MAMBA": mamba, "D": self.D, "M": M,
            "CHUNK": tuning.CHUNK, "FAST": fast,
        }  # fmt: skip
        most = tuning.THREE_WARPS if (16 if mamba else 64) >= M else 255
        registers = {"maxnreg": most} if fast else {}
        # No fusion: with it, sums of 1 + |k|^2 across lanes would differ in the last place.
        self._pack = Kernel(
            pack_kernel, self.chunks * sequences, 4, False, B=self.B, L=self.L,
            kappa_scale=key.kappa_scale, **strides["q"], **strides["k"], STATES=key.states, M=M,
            BLOCK_M=triton.next_power_of_2(M), TOKENS=tuning.CHUNK,
        )  # fmt: skip
        size, block = M * self.D, 256
        self._summary, self._summary_back = (
            Kernel(
                diagonal_summary_kernel, wide * sequences, ahead.num_warps, **shared, **strides[z],
                BLOCK_D=ahead.block_d, ADJOINT=adjoint, GROUP=group, **registers,
            )
            for adjoint, z in enumerate(("z", "z_back"))
        )  # fmt: skip
        self._carry, self._carry_back = (
            Kernel(
                diagonal_carry_kernel, triton.cdiv(size, block) * sequences, 4, B=self.B, N=self.N,
                num_splits=self.num_splits, REVERSE=int(self.reverse), ADJOINT=adjoint, SIZE=size,
                BLOCK=block,
            )
            for adjoint in (0, 1)
        )  # fmt: skip
        self._forward = Kernel(
            diagonal_forward_kernel, wide * self.B, ahead.num_warps, **shared, **strides["z"],
            BLOCK_D=ahead.block_d, GROUP=group, **registers,
        )  # fmt: skip
        # With more registers, Longhorn's backward pass would take 5 % fewer instructions, but only
        # two warps would fit.
        limit = {"maxnreg": tuning.THREE_WARPS} if fast and not mamba and M <= 16 else {}
        self._backward = Kernel(
            diagonal_backward_kernel, programs * sequences, back.num_warps, **shared,
            **strides["z_back"], BLOCK_D=back.block_d, GROUP=group_back,
            kappa_scale=key.kappa_scale, BITS=max(4, (2 * M - 1).bit_length()),
            PRECISION=tuning.dot_precision(key.dtype), **limit,
        )  # fmt: skip

    def _packed(self, args: ScanArgs) -> dict[str, Tensor | None]:
        """Launch the kernel that packs keys and queries; return the arguments of all others."""
        kq = self.empty(self.N, self.B, self.chunks * tuning.CHUNK, 2 * self.M + ROW_TAIL)
        self._pack(args.k, q_ptr=args.q, k_ptr=args.k, kq_ptr=kq)
        # The kernels compute powers of 2.
        rates = None if args.A is None else self._to_kernel(args.A.float() / math.log(2.0))
        return {
            "x_ptr": args.x, "dt_ptr": args.dt, "z_ptr": args.z, "bias_ptr": args.bias,
            "kq_ptr": kq, "rates_ptr": rates,
        }  # fmt: skip

    def _to_kernel(self, state: Tensor | None) -> Tensor | None:
        """Return states (1, B, D, M) as (1, B, M' / 4, D, 4), zero beyond M."""
        if state is None:
            return None
        state = F.pad(state, (0, self.M - state.shape[-1]))
        return state.unflatten(-1, (-1, 4)).transpose(-3, -2).contiguous()

    def _from_kernel(self, state: Tensor | None) -> Tensor | None:
        """Return states (..., M' / 4, D, 4) as (..., D, M)."""
        if state is None:
            return None
        return state.transpose(-3, -2).flatten(-2)[..., : self.key.states]

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the output, the last state, the sum of both directions and saved states."""
        args = self.prepared(args)
        inputs = self._packed(args)
        split_states = start = self._to_kernel(args.initial_state)
        if self.num_splits > 1:
            lead = self.N, self.B, self.num_splits
            split_states, decay = (self.empty(*lead, *self.state) for _ in range(2))
            ends = {"split_end_ptr": split_states, "split_decay_ptr": decay}
            self._summary(split_states, **inputs, dout_ptr=None, **ends)
            self._carry(split_states, **ends, initial_ptr=start)
        rows, both = (self.B, self.L, self.D), self.N == 2
        out = self.empty(*rows, dtype=self.key.dtype)
        y_pre_gate = self.empty(*rows, dtype=self.sum_dtype) if both else None
        final = None if both else self.empty(1, self.B, *self.state)
        states = self.empty(*self.saved_states, dtype=self.saved_dtype) if save else None
        self._forward(
            out, **inputs, skip_ptr=args.D, split_states_ptr=split_states, y_ptr=y_pre_gate,
            out_ptr=out, states_ptr=states, final_ptr=final,
        )  # fmt: skip
        return out, self._from_kernel(final), y_pre_gate if save else None, states

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
        if own.z is not None and not self.writes_dz:
            own = own._replace(z=own.z.contiguous())
        inputs, lead = self._packed(own), (self.N, self.B, self.num_splits)
        split_states = start = self._to_kernel(grad_final)
        if self.num_splits > 1:
            split_states, decay = (self.empty(*lead, *self.state) for _ in range(2))
            ends = {"split_end_ptr": split_states, "split_decay_ptr": decay}
            self._summary_back(split_states, **inputs, dout_ptr=grad, **ends)
            self._carry_back(split_states, **ends, initial_ptr=start)
        dx, ddt = (self.empty(*args.x.shape, dtype=self.key.dtype) for _ in range(2))
        own_dz = dz
        if own.z is not None and not self.writes_dz:
            own_dz = self.empty(*own.z.shape, dtype=self.key.dtype)
        dskip, dbias = self.empty(2, *lead, self.D)
        dkq = self.empty(self.blocks, self.N, self.B, self.L, 2 * self.M)
        drates = None if args.A is None else self.empty(*lead, *self.state)
        dinitial = None if args.initial_state is None else self.empty(1, self.B, *self.state)
        self._backward(
            grad, **inputs, skip_ptr=own.D, scratch_ptr=self.empty(self.scratch), dout_ptr=grad,
            y_ptr=y_pre_gate, states_ptr=states, split_states_ptr=split_states, dx_ptr=dx,
            ddt_ptr=ddt, dz_ptr=own_dz, dkq_ptr=dkq, drates_ptr=drates, dskip_ptr=dskip,
            dbias_ptr=dbias, dinitial_ptr=dinitial,
        )  # fmt: skip
        dk, dq = (part[..., : self.key.states] for part in dkq.sum(0).split(self.M, -1))
        dA = None if drates is None else self._from_kernel(drates.sum((1, 2))).to(args.A.dtype)
        return self.gradients(
            args, dz, x=dx, dt=ddt, A=dA, q=dq.to(args.q.dtype), k=dk.to(args.k.dtype), D=dskip,
            bias=dbias, z=own_dz, initial_state=self._from_kernel(dinitial),
        )  # fmt: skip
