"""Scans token by token, diagonal Longhorn and Mamba: Triton kernels, then their launchers.

What a token does is in ``longhorn_diagonal.py`` and ``mamba.py``; this file is everything around it:
both directions, the gate, saved states, segments. A program owns one segment of one batch element
and BLOCK_D channels, one per lane, whose states stay in registers as a tuple over j; keys and
queries are broadcast loads of packed float32 rows. The sums over channels are products with a matrix
of ones, so there are no atomics and gradients are the same bits from run to run.

Everything is in the order of the tokens. A chunk is INTERVAL tokens, a segment some chunks: all of
them, unless there are too few channels to fill the GPU. Then the segments run side by side, from
states that ``_summary_kernel`` and ``_carry_kernel`` have found before: a scan is linear in its
state, and what a segment makes of one is a product and a sum per channel and state.

Letters: N directions, B batch, L tokens, D channels, M state size (padded to a multiple of 4 in the
kernels), S segments. Of N = 2 directions, index 1 runs from the last token to the first.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.triton import longhorn_diagonal, mamba, tuning
from vil.kernels.triton.launch import launch
from vil.kernels.triton.layout import adjacent_channels
from vil.kernels.triton.tiles import (
    LANES_NEXT,
    alive_row,
    columns,
    decay_and_eps,
    for_product,
    half_sigmoid,
    half_silu,
    join_columns,
    load_quads,
    load_row,
    longhorn_eps,
    no_lane,
)

# Tokens from one saved state to the next. The backward pass keeps a scratch of 2 KB per token of it
# and program: with 16, that of all programs that an H200 runs at a time, 26 MB, stays in its L2.
INTERVAL = tuning.CHUNK
_ROW_TAIL = 4  # floats of a packed row after k and q: 1 + |k|^2, and padding to 128 bits
# Registers of the Longhorn backward pass at M <= 16: three warps on every scheduler of an NVIDIA GPU
# rather than two, for 5 % more instructions.
MOST_REGISTERS = 168
# How many times the work a scan in segments takes: the summary costs about as much as the scan.
_SEGMENTS_OVERHEAD = 2.0


# What differs from call to call and is not worth a compilation of its own.
_RUN_TIME = (
    *("B", "L", "segments", "segment_tokens"),
    *(f"{name}_stride_{axis}" for name in ("x", "dt", "z", "q", "k") for axis in ("dir", "b", "l")),
    *(
        f"{name}_ptr"
        for name in (
            "x",
            "dt",
            "z",
            "q",
            "k",
            "y",
            "out",
            "dout",
            "dx",
            "ddt",
            "dz",
            "skip",
            "bias",
        )
    ),
)


# -------------------------------------------------------------------------------- building blocks


@triton.jit
def _broadcast_row(pointer, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load M consecutive float32, a multiple of 4, into a tuple of M columns [BLOCK_D]."""
    row, lanes = (), no_lane(BLOCK_D)
    SIZE: tl.constexpr = min(M & -M, 16)
    for first in tl.static_range(0, M, SIZE):
        row += load_quads(pointer + first + lanes, 4, SIZE)
    return row


@triton.jit
def _state_rows(pointer, channel, SIZE: tl.constexpr, D: tl.constexpr):
    """Return pointers [SIZE / 4, BLOCK_D, 4] to SIZE states of channels in (M / 4, D, 4)."""
    quad, j = tl.arange(0, SIZE // 4)[:, None, None], tl.arange(0, 4)[None, None, :]
    pointers = pointer + (channel * 4)[None, :, None] + (quad * (4 * D) + j)
    return tl.max_contiguous(pointers, [1, LANES_NEXT, 4])


@triton.jit
def _load_states(pointer, channel, mask, D: tl.constexpr, M: tl.constexpr):
    """Load a tuple of M states of channels from (M / 4, D, 4), by 16, 8 or 4 at once."""
    SIZE: tl.constexpr = min(M & -M, 16)
    states = ()
    for first in tl.static_range(0, M, SIZE):
        rows = _state_rows(pointer + first * D, channel, SIZE, D)
        tile = tl.permute(tl.load(rows, mask=mask[None, :, None], other=0.0), (1, 0, 2))
        states += columns(tl.reshape(tile, (channel.shape[0], SIZE)), SIZE)
    return states


@triton.jit
def _store_states(pointer, states, channel, mask, D: tl.constexpr, M: tl.constexpr):
    """Store a tuple of M states of channels to (M / 4, D, 4), by 16, 8 or 4 at once."""
    SIZE: tl.constexpr = min(M & -M, 16)
    for first in tl.static_range(0, M, SIZE):
        tile = join_columns(states[first : first + SIZE], SIZE)
        tile = tl.permute(tl.reshape(tile, (channel.shape[0], SIZE // 4, 4)), (1, 0, 2))
        rows = _state_rows(pointer + first * D, channel, SIZE, D)
        tl.store(rows, tile, mask=mask[None, :, None])


@triton.jit
def _full_states(value, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a tuple of M columns [BLOCK_D] of one value."""
    states = ()
    for _ in tl.static_range(M):
        states += (tl.full((BLOCK_D,), value, tl.float32),)
    return states


@triton.jit
def _sums_over_channels(
    values, N: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return [16, 2^BITS] whose every row holds the sums of N columns [BLOCK_D], then zeros.

    One matrix product: a butterfly of shuffles per column would cost more than the scan itself.
    """
    for _ in tl.static_range(N, 2**BITS):
        values += (tl.zeros((BLOCK_D,), tl.float32),)
    tile = for_product(join_columns(values, 2**BITS), PRECISION, FAST)
    ones = tl.full((16, BLOCK_D), 1.0, tl.float32)
    return tl.dot(ones, tile, input_precision=PRECISION)


@triton.jit
def _store_sums(pointer, sums, count, BITS: tl.constexpr):
    """Store the first ``count`` results of ``_sums_over_channels``, next to each other."""
    copy, n = tl.arange(0, 16), tl.arange(0, 2**BITS)
    once = (copy == 0)[:, None] & (n < count)[None, :]
    tl.store(pointer + 0 * copy[:, None] + n[None, :], sums, mask=once)


@triton.jit
def _step_size(v, kappa_1_ptr, mask, MAMBA: tl.constexpr, FAST: tl.constexpr):
    if MAMBA:  # a token that does not exist must not fade the state: its step is zero
        return tl.where(mask, mamba.softplus(v), 0.0)
    return longhorn_eps(v, tl.load(kappa_1_ptr), FAST)


@triton.jit
def _step_size_and_slope(v, kappa_1_ptr, mask, MAMBA: tl.constexpr, FAST: tl.constexpr):
    """Return the step size, and ddt over what ``retreat`` returns for it."""
    if MAMBA:
        return tl.where(mask, mamba.softplus(v), 0.0), tl.where(mask, mamba.sigmoid(v), 0.0)
    decay, eps = decay_and_eps(v, tl.zeros_like(v), tl.load(kappa_1_ptr), FAST)
    return eps, eps * (eps * decay)


@triton.jit
def _advance(state, x, step, k, rates, M: tl.constexpr, MAMBA: tl.constexpr, FAST: tl.constexpr):
    if MAMBA:
        return mamba.advance(state, x, step, k, rates, M, FAST)
    return longhorn_diagonal.advance(state, x, step, k, M)


@triton.jit
def _fade(weights, step, k, rates, M: tl.constexpr, MAMBA: tl.constexpr, FAST: tl.constexpr):
    if MAMBA:
        return mamba.fade(weights, step, rates, M, FAST)
    return longhorn_diagonal.fade(weights, step, k, M)


@triton.jit
def _retreat(
    grad, drates, state, x, step, k, q, dy, rates,
    M: tl.constexpr, MAMBA: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    if MAMBA:
        return mamba.retreat(grad, drates, state, x, step, k, q, dy, rates, M, FAST)
    before, recalled, dstep, dk, dq = longhorn_diagonal.retreat(grad, state, x, step, k, q, dy, M)
    return before, drates, recalled, dstep, dk, dq


@triton.jit
def _gate_backward(dout, z, y, FAST: tl.constexpr):
    """Return the gradients of silu(z) y / 2 for y and z, given that of the result."""
    s = half_sigmoid(z, FAST)
    return dout * z * s, dout * y * s * (1.0 + z * (1.0 - 2.0 * s))


@triton.jit(do_not_specialize=_RUN_TIME)
def _pack_kernel(
    q_ptr, k_ptr, rows_ptr, B, L,
    q_stride_dir, q_stride_b, q_stride_l, q_stride_m,
    k_stride_dir, k_stride_b, k_stride_l, k_stride_m,
    STATES: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Pack keys and queries of TOKENS tokens into rows, float32: k, q, 1 + |k|^2.

    rows (N, B, L rounded up, 2 M + 4), zero beyond L and STATES.
    """
    blocks = tl.cdiv(L, TOKENS)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    direction, b = sequence // B, sequence % B
    token, m = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_M)
    mask = (token < L)[:, None] & (m < STATES)[None, :]
    q_base = q_ptr + direction * q_stride_dir + b * q_stride_b
    k_base = k_ptr + direction * k_stride_dir + b * k_stride_b
    q_tile = q_base + token[:, None] * q_stride_l + m[None, :] * q_stride_m
    k_tile = k_base + token[:, None] * k_stride_l + m[None, :] * k_stride_m
    q = tl.load(q_tile, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_tile, mask=mask, other=0.0).to(tl.float32)
    row = rows_ptr + (sequence * (blocks * TOKENS) + token) * (2 * M + 4)
    inside = (m < M)[None, :]
    tl.store(row[:, None] + m[None, :], k, mask=inside)
    tl.store(row[:, None] + M + m[None, :], q, mask=inside)
    tl.store(row + 2 * M, 1.0 + tl.sum(k * k, 1))


@triton.jit
def _place(segments, B, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return which block, segment, direction and batch element a program has.

    All in one dimension of the grid: the others end at 65,535.
    """
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    rest = tl.program_id(0) // blocks
    sequence = rest // segments
    direction = sequence // B
    block, segment = tl.program_id(0) - rest * blocks, rest - sequence * segments
    return block, segment, direction, (sequence - direction * B).to(tl.int64)


# ------------------------------------------------------------------------------- between segments


@triton.jit(do_not_specialize=_RUN_TIME)
def _summary_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, rows_ptr, rates_ptr, bias_ptr, ends_ptr, products_ptr,
    B, L, segments, segment_tokens,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, MAMBA: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Find what a segment makes of a state: products s + ends, both (N, B, S, M / 4, D, 4).

    With ADJOINT, of the gradient of the state after the segment, on the way back.
    """
    block, segment, direction, b = _place(segments, B, D, BLOCK_D)
    sequence = direction * B + b
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = alive_row(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, mask)
    rates = ()
    if MAMBA:
        rates = _load_states(rates_ptr + direction * M * D, d, mask, D, M)
    start = segment * segment_tokens
    count = tl.minimum(L - start, segment_tokens)
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
    row = rows_ptr + (sequence * tl.cdiv(L, INTERVAL) * INTERVAL + first) * (2 * M + 4)
    end = _full_states(0.0, M, BLOCK_D)
    product = _full_states(1.0, M, BLOCK_D)
    for _ in range(count):
        k = _broadcast_row(row, M, BLOCK_D)
        v = load_row(dt_row + d, mask) + bias
        step = _step_size(v, row + 2 * M, mask, MAMBA, FAST)
        if ADJOINT:
            dy = load_row(dout_row + d, mask)
            dout_row += sign * D
            if N == 2:
                dy *= half_silu(load_row(z_row + d, mask), FAST)
                z_row += sign * z_stride_l
            q = _broadcast_row(row + M, M, BLOCK_D)
            read = ()
            for j in tl.static_range(M):
                read += (end[j] + dy * q[j],)
            end = _fade(read, step, k, rates, M, MAMBA, FAST)
        else:
            x = load_row(x_row + d, mask)
            x_row += sign * x_stride_l
            end = _advance(end, x, step, k, rates, M, MAMBA, FAST)
        product = _fade(product, step, k, rates, M, MAMBA, FAST)
        dt_row += sign * dt_stride_l
        row += sign * (2 * M + 4)
    offset = (sequence * segments + segment) * (M * D)
    _store_states(ends_ptr + offset, end, d, mask, D, M)
    _store_states(products_ptr + offset, product, d, mask, D, M)


@triton.jit(do_not_specialize=_RUN_TIME)
def _carry_kernel(
    ends_ptr, products_ptr, initial_ptr, B, segments,
    N: tl.constexpr, REVERSE: tl.constexpr, ADJOINT: tl.constexpr, INITIAL: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the ends of segments by the states that they start from, in place.

    ends, products (N, B, S, SIZE), initial (N, B, SIZE): of the first segment, zero unless INITIAL.
    """
    blocks = tl.cdiv(SIZE, BLOCK)
    sequence = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    back = (sequence // B if N == 2 else REVERSE) ^ ADJOINT
    sequence = sequence.to(tl.int64)
    state = tl.zeros((BLOCK,), tl.float32)
    if INITIAL:
        state = tl.load(initial_ptr + sequence * SIZE + i, mask=i < SIZE, other=0.0)
    for s in range(segments):
        segment = tl.where(back == 1, segments - 1 - s, s)
        offset = (sequence * segments + segment) * SIZE + i
        end = tl.load(ends_ptr + offset, mask=i < SIZE, other=0.0)
        product = tl.load(products_ptr + offset, mask=i < SIZE, other=0.0)
        tl.store(ends_ptr + offset, state, mask=i < SIZE)
        state = product * state + end


# ---------------------------------------------------------------------------------------- forward


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, entry_ptr,
    y_ptr, out_ptr, states_ptr, final_ptr, B, L, segments, segment_tokens, segment, b, d,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    direction: tl.constexpr, N: tl.constexpr, REVERSE: tl.constexpr, MAMBA: tl.constexpr,
    ENTRY: tl.constexpr, SAVE: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scan a segment in one direction.

    Of two, index 0 leaves its y and index 1 adds its own, gates and stores the result.
    """
    sign: tl.constexpr = 1 - 2 * REVERSE
    mask = alive_row(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, mask)
    skip = load_row(skip_ptr + direction * D + d, mask)
    rates = ()
    if MAMBA:
        rates = _load_states(rates_ptr + direction * M * D, d, mask, D, M)
    sequence = direction * B + b
    start = segment * segment_tokens
    count = tl.minimum(L - start, segment_tokens)
    chunks, first_chunk = tl.cdiv(count, INTERVAL), start // INTERVAL
    first = (start + REVERSE * (count - 1)).to(tl.int64)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l
    out_row = out_ptr + (b * L + first) * D
    if N == 2:
        y_row = y_ptr + (b * L + first) * D
        z_row = z_ptr + b * z_stride_b + first * z_stride_l
    all_chunks = tl.cdiv(L, INTERVAL)
    row = rows_ptr + (sequence * all_chunks * INTERVAL + first) * (2 * M + 4)
    if ENTRY:
        entry = entry_ptr + (sequence * segments + segment) * (M * D)
        state = _load_states(entry, d, mask, D, M)
    else:
        state = _full_states(0.0, M, BLOCK_D)
    # x and dt are loaded one token ahead: a step is shorter than a round trip to memory.
    next_x, next_dt = load_row(x_row + d, mask), load_row(dt_row + d, mask)
    done = 0
    for c in range(chunks):
        # The short chunk is the last one of the sequence, whichever way it is gone through.
        chunk = chunks - 1 - c if REVERSE else c
        if SAVE:
            saved = sequence * all_chunks + first_chunk + chunk
            _store_states(states_ptr + saved * (M * D), state, d, mask, D, M)
        end = done + tl.minimum(count - chunk * INTERVAL, INTERVAL)
        for i in range(done, end):
            x, v = next_x, next_dt + bias
            ahead = tl.where(i + 1 < count, sign, 0)
            x_row += ahead * x_stride_l
            dt_row += ahead * dt_stride_l
            next_x, next_dt = load_row(x_row + d, mask), load_row(dt_row + d, mask)
            if direction == 1:
                z = load_row(z_row + d, mask)
                y_other = load_row(y_row + d, mask)
                z_row += sign * z_stride_l
            step = _step_size(v, row + 2 * M, mask, MAMBA, FAST)
            k = _broadcast_row(row, M, BLOCK_D)
            state = _advance(state, x, step, k, rates, M, MAMBA, FAST)
            q = _broadcast_row(row + M, M, BLOCK_D)
            row += sign * (2 * M + 4)
            y = skip * x
            for j in tl.static_range(M):
                y += q[j] * state[j]
            if direction == 1:
                y += y_other
            if N == 2 and (direction == 0 or SAVE):
                tl.store(y_row + d, y, mask=mask)
            if direction == 1:
                y *= half_silu(z, FAST)
            if direction == N - 1:
                tl.store(out_row + d, y.to(out_ptr.dtype.element_ty), mask=mask)
            out_row += sign * D
            if N == 2:
                y_row += sign * D
        done = end
    if N == 1:
        last = (segments - 1) * (1 - REVERSE)
        stored = d < tl.where(segment == last, D, 0)
        _store_states(final_ptr + b * (M * D), state, d, stored, D, M)


@triton.jit(do_not_specialize=_RUN_TIME)
def _forward_kernel(
    x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, entry_ptr,
    y_ptr, out_ptr, states_ptr, final_ptr, B, L, segments, segment_tokens,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, REVERSE: tl.constexpr, MAMBA: tl.constexpr, ENTRY: tl.constexpr,
    SAVE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, INTERVAL: tl.constexpr,
    BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scan a segment of one batch element and BLOCK_D channels.

    N = 2: both directions, averaged and gated; y (B, L, D) takes their sum. N = 1: one, as REVERSE
    says; final (B, M / 4, D, 4) takes its last state. states (N, B, chunks, M / 4, D, 4) take the state before
    every chunk, if SAVE. entry (N, B, S, M / 4, D, 4), if ENTRY: the states that segments start from.
    """
    block, segment, _, b = _place(segments, B, D, BLOCK_D)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    _forward_direction(
        x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, entry_ptr,
        y_ptr, out_ptr, states_ptr, final_ptr, B, L, segments, segment_tokens, segment, b, d,
        x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
        z_stride_b, z_stride_l,
        0, N, REVERSE, MAMBA, ENTRY, SAVE, D, M, INTERVAL, BLOCK_D, FAST,
    )  # fmt: skip
    if N == 2:
        # A lane reads the y that it wrote itself; this makes it so for any layout.
        tl.debug_barrier()
        _forward_direction(
            x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, entry_ptr,
            y_ptr, out_ptr, states_ptr, final_ptr, B, L, segments, segment_tokens, segment, b, d,
            x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
            z_stride_b, z_stride_l,
            1, N, 1, MAMBA, ENTRY, SAVE, D, M, INTERVAL, BLOCK_D, FAST,
        )  # fmt: skip


# --------------------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=_RUN_TIME)
def _backward_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, states_ptr,
    dentry_ptr, scratch_ptr, dx_ptr, ddt_ptr, dz_ptr, drows_ptr, drates_ptr, dskip_ptr, dbias_ptr,
    dinitial_ptr, B, L, segments, segment_tokens,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, REVERSE: tl.constexpr, MAMBA: tl.constexpr, ENTRY: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, INTERVAL: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a segment of one direction, batch element and BLOCK_D channels back.

    From every saved state the scan is repeated, leaving the states before each GROUP of tokens in
    ``scratch``, (programs, INTERVAL / GROUP, M, BLOCK_D); then the groups are taken back from the
    last to the first, with the states inside a group in registers. drows (blocks, N, B, L, 2 M):
    dk and dq summed over the channels of a block. drates (N, B, S, M / 4, D, 4); dskip, dbias (N, B, S, D).
    dentry (N, B, S, M / 4, D, 4), if ENTRY: gradients of the states after segments. Of two directions the
    first one writes dz; with one, dinitial (B, M / 4, D, 4) takes the gradient of its first state.
    """
    groups_per_interval: tl.constexpr = INTERVAL // GROUP
    last: tl.constexpr = INTERVAL - 1
    row_size: tl.constexpr = 2 * M + 4
    block, segment, direction, b = _place(segments, B, D, BLOCK_D)
    lane = tl.arange(0, BLOCK_D)
    d = block * BLOCK_D + lane
    channel = alive_row(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, channel)
    skip = load_row(skip_ptr + direction * D + d, channel)
    sequence = direction * B + b
    scratch = scratch_ptr + tl.program_id(0).to(tl.int64) * (groups_per_interval * M * BLOCK_D)
    back = direction if N == 2 else REVERSE
    sign = 1 - 2 * back
    gate_channels = tl.where(direction == 0, D, 0)  # of which this program writes dz
    start = segment * segment_tokens
    chunks = tl.cdiv(tl.minimum(L - start, segment_tokens), INTERVAL)
    sums = (sequence * segments + segment) * D + d
    rates, drates = (), ()
    if MAMBA:
        rates = _load_states(rates_ptr + direction * M * D, d, channel, D, M)
        drates = _full_states(0.0, M, BLOCK_D)
    if ENTRY:
        dentry = dentry_ptr + (sequence * segments + segment) * (M * D)
        grad = _load_states(dentry, d, channel, D, M)
    else:
        grad = _full_states(0.0, M, BLOCK_D)
    dskip, dbias = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for c in range(chunks):
        chunk = start // INTERVAL + tl.where(back == 1, c, chunks - 1 - c)
        # Token r of the chunk is the i-th of the scan, which has the dead ones of a short chunk last
        # or, in reverse, first. Their keys are zero.
        live = tl.minimum(L - chunk * INTERVAL, INTERVAL)
        first_group = back * ((INTERVAL - live) // GROUP)
        end_group = tl.where(back == 1, groups_per_interval, tl.cdiv(live, GROUP))
        first = (chunk * INTERVAL).to(tl.int64)
        x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l + d
        dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l + d
        if N == 2:
            z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
        shared_row = (b * L + first) * D + d  # of what both directions have in common
        own_row = (sequence * L + first) * D + d
        saved = sequence * tl.cdiv(L, INTERVAL) + chunk
        rows = rows_ptr + saved * (INTERVAL * row_size)
        partial = drows_ptr + (((block * N + direction) * B + b) * L + first) * (2 * M)

        state = _load_states(states_ptr + saved * (M * D), d, channel, D, M)
        _store_states(scratch + first_group * (M * BLOCK_D), state, lane, channel, BLOCK_D, M)
        for group in range(first_group + 1, end_group):
            for t in tl.static_range(GROUP):
                r = last * back + sign * ((group - 1) * GROUP + t)
                mask = alive_row(r, live, d, D, BLOCK_D)
                x = load_row(x_row + r * x_stride_l, mask)
                v = load_row(dt_row + r * dt_stride_l, mask) + bias
                row = rows + r * row_size
                step = _step_size(v, row + 2 * M, mask, MAMBA, FAST)
                k = _broadcast_row(row, M, BLOCK_D)
                state = _advance(state, x, step, k, rates, M, MAMBA, FAST)
            _store_states(scratch + group * (M * BLOCK_D), state, lane, channel, BLOCK_D, M)
        tl.debug_barrier()  # a lane reads what it wrote itself; this makes it so for any layout

        for group_back in range(end_group - first_group):
            group = end_group - 1 - group_back
            # Nothing is stored before everything from far memory is asked for: a load cannot pass
            # a store that might be to the same address.
            xs, steps, slopes, dys, dzs = (), (), (), (), ()
            for t in tl.static_range(GROUP):
                r = last * back + sign * (group * GROUP + t)
                mask = alive_row(r, live, d, D, BLOCK_D)
                offset = shared_row + r * D
                dy = load_row(dout_ptr + offset, mask)
                if N == 2:
                    z = load_row(z_row + r * z_stride_l, mask)
                    y = load_row(y_ptr + offset, mask & (d < gate_channels))
                    dy, dz = _gate_backward(dy, z, y, FAST)
                    dzs += (dz,)
                x = load_row(x_row + r * x_stride_l, mask)
                v = load_row(dt_row + r * dt_stride_l, mask) + bias
                step, slope = _step_size_and_slope(
                    v, rows + r * row_size + 2 * M, mask, MAMBA, FAST
                )
                xs += (x,)
                steps += (step,)
                slopes += (slope,)
                dys += (dy,)
            state = _load_states(scratch + group * (M * BLOCK_D), lane, channel, BLOCK_D, M)
            history = state
            for t in tl.static_range(GROUP - 1):
                r = last * back + sign * (group * GROUP + t)
                k = _broadcast_row(rows + r * row_size, M, BLOCK_D)
                state = _advance(state, xs[t], steps[t], k, rates, M, MAMBA, FAST)
                history += state
            for t in tl.static_range(GROUP - 1, -1, -1):
                r = last * back + sign * (group * GROUP + t)
                x, step, dy = xs[t], steps[t], dys[t]
                row = rows + r * row_size
                k, q = _broadcast_row(row, M, BLOCK_D), _broadcast_row(row + M, M, BLOCK_D)
                grad, drates, recalled, dstep, dk, dq = _retreat(
                    grad, drates, history[t * M : t * M + M], x, step, k, q, dy, rates,
                    M, MAMBA, FAST,
                )  # fmt: skip
                ddt = dstep * slopes[t]
                dx = step * recalled + skip * dy
                dskip += dy * x
                dbias += ddt
                mask = alive_row(r, live, d, D, BLOCK_D)
                offset = r * D
                tl.store(dx_ptr + own_row + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                tl.store(ddt_ptr + own_row + offset, ddt.to(ddt_ptr.dtype.element_ty), mask=mask)
                if N == 2:
                    tl.store(
                        dz_ptr + shared_row + offset,
                        dzs[t].to(dz_ptr.dtype.element_ty),
                        mask=mask & (d < gate_channels),
                    )
                summed = _sums_over_channels(dk + dq, 2 * M, BITS, BLOCK_D, PRECISION, FAST)
                stored = tl.where(r < live, 2 * M, 0)
                _store_sums(partial + r * (2 * M), summed, stored, BITS)
    if MAMBA:
        drates_row = drates_ptr + (sequence * segments + segment) * (M * D)
        _store_states(drates_row, drates, d, channel, D, M)
    tl.store(dskip_ptr + sums, dskip, mask=channel)
    tl.store(dbias_ptr + sums, dbias, mask=channel)
    if N == 1:
        stored = d < tl.where(segment == (segments - 1) * REVERSE, D, 0)
        _store_states(dinitial_ptr + b * (M * D), grad, d, stored, D, M)


# -------------------------------------------------------------------------------------- launchers


def padded_states(states: int) -> int:
    """Return M as the kernels see it: a multiple of 4, for 128-bit loads."""
    return 4 * triton.cdiv(states, 4)


def _pack_rows(q: Tensor, k: Tensor) -> Tensor:
    """Return keys and queries (N, B, L, M) as ``_pack_kernel`` packs them."""
    N, B, L, states = k.shape
    chunks, padded = triton.cdiv(L, INTERVAL), padded_states(states)
    rows = torch.empty(N, B, chunks * INTERVAL, 2 * padded + _ROW_TAIL, device=k.device)
    axes = ("dir", "b", "l", "m")
    strides = {
        f"{name}_stride_{axis}": stride
        for name, tensor in (("q", q), ("k", k))
        for axis, stride in zip(axes, tensor.stride(), strict=True)
    }
    # No fusion: of 1 + |k|^2, which is summed across lanes, they would differ in the last place.
    launch(
        _pack_kernel, chunks * N * B, k, num_warps=4, enable_fp_fusion=False, q_ptr=q, k_ptr=k,
        rows_ptr=rows, B=B, L=L, **strides, STATES=states, M=padded,
        BLOCK_M=triton.next_power_of_2(padded), TOKENS=INTERVAL,
    )  # fmt: skip
    return rows


def _rates(A: Tensor | None, padded: int) -> Tensor | None:
    """Return A / ln 2 as (N, M' / 4, D, 4) float32, zero beyond M."""
    return None if A is None else _by_quads(A.float() / math.log(2.0), padded)


def _by_quads(state: Tensor | None, padded: int) -> Tensor | None:
    """Return states (B, D, M) as (B, M' / 4, D, 4), zero beyond M."""
    if state is None:
        return None
    state = F.pad(state, (0, padded - state.shape[-1]))
    return state.unflatten(-1, (-1, 4)).transpose(1, 2).contiguous()


def _from_quads(state: Tensor, states: int) -> Tensor:
    """Return (B, M' / 4, D, 4) as (B, D, M)."""
    return state.transpose(1, 2).flatten(2)[..., :states]


def _group_size(padded: int) -> int:
    """Return how many tokens the backward pass takes back between accesses to its scratch.

    The states of a group stay in registers. Groups of 4 would halve the traffic, not the number of
    instructions, and need 232 registers instead of 165 (sm_90, M = 16): two warps instead of three
    on every scheduler.
    """
    return 2 if padded <= 16 else 1


class _Launch:
    """What the kernels of one scan have in common: packed inputs, strides, segments, options."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor | None,
        q: Tensor,
        k: Tensor,
        bias: Tensor,
        z: Tensor | None,
        reverse: bool,
    ) -> None:
        self.N, self.B, self.L, self.D = x.shape
        self.rows = _pack_rows(q, k)
        self.M = padded_states(k.shape[-1])
        self.rates = _rates(A, self.M)
        self.x, self.dt = adjacent_channels(x), adjacent_channels(dt)
        self.z = None if z is None else adjacent_channels(z)
        z_strides = (0, 0) if z is None else self.z.stride()[:2]
        self.arguments = {
            f"{name}_stride_{axis}": stride
            for name, axes, strides in (
                ("x", ("dir", "b", "l"), self.x.stride()),
                ("dt", ("dir", "b", "l"), self.dt.stride()),
                ("z", ("b", "l"), z_strides),
            )
            for axis, stride in zip(axes, strides, strict=False)
        }
        block_d, warps = tuning.blocks("sequential_forward", self.D, x.device)
        self.segments, chunks = tuning.segments(
            self.B * triton.cdiv(self.D, block_d) * warps,
            triton.cdiv(self.L, INTERVAL),
            x.device,
            _SEGMENTS_OVERHEAD,
        )
        self.reverse, self.fast = int(reverse), tuning.fast(x.device)
        self.arguments |= {
            "x_ptr": self.x, "dt_ptr": self.dt, "z_ptr": self.z, "rows_ptr": self.rows,
            "rates_ptr": self.rates, "bias_ptr": bias.contiguous(), "B": self.B, "L": self.L,
            "segments": self.segments, "segment_tokens": chunks * INTERVAL, "N": self.N,
            "REVERSE": self.reverse, "MAMBA": A is not None, "D": self.D, "M": self.M,
            "INTERVAL": INTERVAL, "FAST": self.fast,
        }  # fmt: skip

    def programs(self, block_d: int, sequences: int) -> int:
        """Return the number of programs for ``sequences`` scans in blocks of channels."""
        return triton.cdiv(self.D, block_d) * self.segments * sequences

    def empty_states(self, *shape: int) -> Tensor:
        """Return room for float32 states, (*shape, M / 4, D, 4)."""
        return torch.empty(*shape, self.M // 4, self.D, 4, device=self.x.device)

    def entry(self, initial: Tensor | None, dout: Tensor | None) -> Tensor | None:
        """Return the states that segments start from, (N, B, S, M / 4, D, 4), or None if all are zero.

        Given dout, the gradients of the states after them.

        Args:
            initial: State before the first token, or gradient of the one after the last, (B, M / 4, D, 4).
            dout: Gradient of the output, (B, L, D).
        """
        if self.segments == 1:
            return initial
        block_d, warps = tuning.blocks("sequential_forward", self.D, self.x.device)
        ends = self.empty_states(self.N, self.B, self.segments)
        products = torch.empty_like(ends)
        adjoint = int(dout is not None)
        launch(
            _summary_kernel, self.programs(block_d, self.N * self.B), self.x, num_warps=warps,
            **self.arguments, dout_ptr=dout, ends_ptr=ends, products_ptr=products, ADJOINT=adjoint,
            BLOCK_D=block_d,
        )  # fmt: skip
        size, block = self.M * self.D, 256
        launch(
            _carry_kernel, triton.cdiv(size, block) * self.N * self.B, self.x, num_warps=4,
            ends_ptr=ends, products_ptr=products, initial_ptr=initial, B=self.B,
            segments=self.segments, N=self.N, REVERSE=self.reverse, ADJOINT=adjoint,
            INITIAL=initial is not None, SIZE=size, BLOCK=block,
        )  # fmt: skip
        return ends


def _register_limit(run: _Launch) -> dict[str, int]:
    limited = run.fast and run.rates is None and run.M <= 16
    return {"maxnreg": MOST_REGISTERS} if limited else {}


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor | None,
    initial_state: Tensor | None,
    reverse: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Scan two directions, average and gate, or scan one.

    Args:
        x: Values, (N, B, L, D): both directions, or one.
        dt: Raw step sizes, (N, B, L, D).
        A: Decay rates of Mamba, (N, D, M), all negative; None for the diagonal Longhorn scan.
        q: Queries, (N, B, L, M).
        k: Keys, (N, B, L, M).
        D: Skip weights, (N, D).
        bias: Added to dt, (N, D).
        z: Gate before its SiLU, (B, L, D), of two directions; None for one.
        initial_state: Of one direction, (B, D, M) float32, zeros if None.
        reverse: Whether one direction is from the last token to the first; False for two.
        save: Also return what the backward pass needs.

    Returns:
        out (B, L, D) in the dtype of x. Of two directions, with ``save``, their sum before the gate,
        (B, L, D) float32, else None. With ``save`` the states before every chunk in the order of the
        scan, (N, B, chunks, M' / 4, D, 4) float32, else None. Of one direction its last state, (B, D, M)
        float32, else None.
    """
    run = _Launch(x, dt, A, q, k, bias, z, reverse)
    entry = run.entry(_by_quads(initial_state, run.M), None)
    block_d, warps = tuning.blocks("sequential_forward", run.D, x.device)
    out = x.new_empty(run.B, run.L, run.D)
    both = run.N == 2
    y_sum = torch.empty(run.B, run.L, run.D, device=x.device) if both else None
    final = None if both else run.empty_states(run.B)
    states = run.empty_states(run.N, run.B, triton.cdiv(run.L, INTERVAL)) if save else None
    launch(
        _forward_kernel, run.programs(block_d, run.B), x, num_warps=warps, **run.arguments,
        skip_ptr=D.contiguous(), entry_ptr=entry, y_ptr=y_sum, out_ptr=out, states_ptr=states,
        final_ptr=final, ENTRY=entry is not None, SAVE=save, BLOCK_D=block_d,
    )  # fmt: skip
    final = None if both else _from_quads(final, k.shape[-1])
    return out, y_sum if save else None, states, final


def backward(
    dout: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor | None,
    initial_state: Tensor | None,
    y_sum: Tensor | None,
    states: Tensor | None,
    reverse: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, dt, A, q, k, D, bias, z and initial_state, None for None.

    Args:
        dout: Gradient of the output, (B, L, D).
        dfinal: Of one direction, the gradient of its last state, (B, D, M) float32, or None.
        x: This and all up to ``initial_state`` as in ``forward``.
        dt: As in ``forward``.
        A: As in ``forward``.
        q: As in ``forward``.
        k: As in ``forward``.
        D: As in ``forward``.
        bias: As in ``forward``.
        z: As in ``forward``.
        initial_state: As in ``forward``.
        y_sum: As saved by ``forward``.
        states: As saved by ``forward``, or None to scan again.
        reverse: As in ``forward``.
    """
    if states is None:
        _, y_sum, states, _ = forward(x, dt, A, q, k, D, bias, z, initial_state, reverse, True)
    run = _Launch(x, dt, A, q, k, bias, z, reverse)
    dout = dout.contiguous()
    dentry = run.entry(_by_quads(dfinal, run.M), dout)
    N, B, L, S, group = run.N, run.B, run.L, run.segments, _group_size(run.M)
    block_d, warps = tuning.blocks("sequential_backward", run.D, x.device)
    blocks, programs = triton.cdiv(run.D, block_d), run.programs(block_d, N * B)
    scratch = torch.empty(programs * INTERVAL // group * run.M * block_d, device=x.device)
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dz = None if z is None else z.new_empty(z.shape)
    drows = torch.empty(blocks, N, B, L, 2 * run.M, device=x.device)
    drates = None if A is None else run.empty_states(N, B, S)
    dskip, dbias = torch.empty(2, N, B, S, run.D, device=x.device)
    dinitial = run.empty_states(B) if N == 1 else None
    launch(
        _backward_kernel, programs, x, num_warps=warps, **run.arguments, dout_ptr=dout,
        y_ptr=y_sum, skip_ptr=D.contiguous(), states_ptr=states, dentry_ptr=dentry,
        scratch_ptr=scratch, dx_ptr=dx, ddt_ptr=ddt, dz_ptr=dz, drows_ptr=drows,
        drates_ptr=drates, dskip_ptr=dskip, dbias_ptr=dbias, dinitial_ptr=dinitial,
        ENTRY=dentry is not None, BITS=max(4, (2 * run.M - 1).bit_length()), GROUP=group,
        BLOCK_D=block_d, PRECISION=tuning.dot_precision(x.dtype), **_register_limit(run),
    )  # fmt: skip
    M = k.shape[-1]
    drows = drows.sum(0)  # in a fixed order: the same bits from run to run
    return (
        dx,
        ddt,
        None if A is None else _from_quads(drates.sum((1, 2)), M).to(A.dtype),
        drows[..., run.M : run.M + M].to(q.dtype),
        drows[..., :M].to(k.dtype),
        dskip.sum((1, 2)).to(D.dtype),
        dbias.sum((1, 2)).to(bias.dtype),
        dz,
        None if initial_state is None else _from_quads(dinitial, M),
    )
