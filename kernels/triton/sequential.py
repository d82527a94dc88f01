"""Scans token by token, diagonal Longhorn and Mamba: Triton kernels, then their launchers.

What a token does is in ``longhorn_diagonal.py`` and ``mamba.py``, behind ``sequential_tokens.py``; the
states that segments start from are found in ``sequential_segments.py``. This file is everything around
them: both directions, the gate, saved states. A program owns one segment of one batch element
and BLOCK_D channels, one per lane, whose states stay in registers as a tuple over j; keys and
queries are broadcast loads of packed float32 rows. The sums over channels are products with a matrix
of ones, so there are no atomics and gradients are the same bits from run to run.

Everything is in the order of the tokens. A chunk is INTERVAL tokens, a segment some chunks.

Letters: N directions, B batch, L tokens, D channels, M state size (padded to a multiple of 4 in the
kernels), S segments. Of N = 2 directions, index 1 runs from the last token to the first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.triton import tuning
from vil.kernels.triton.launch import launch
from vil.kernels.triton.sequential_segments import Scan
from vil.kernels.triton.sequential_tokens import (
    INTERVAL,
    RUN_TIME,
    advance,
    broadcast_row,
    by_quads,
    first_states,
    from_quads,
    full_states,
    gate_backward,
    load_rates,
    load_states,
    place_of_program,
    retreat,
    step_size,
    step_size_and_slope,
    store_states,
    store_sums,
    sums_over_channels,
)
from vil.kernels.triton.tiles import alive_row, half_silu, load_row

# Registers of the Longhorn backward pass at M <= 16: three warps on every scheduler of an NVIDIA GPU
# rather than two, for 5 % more instructions.
MOST_REGISTERS = 168


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
    rates = load_rates(rates_ptr, direction, d, mask, D, M, MAMBA)
    sequence, start = direction * B + b, segment * segment_tokens
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
    state = first_states(entry_ptr, sequence * segments + segment, d, mask, ENTRY, D, M, BLOCK_D)
    # x and dt are loaded one token ahead: a step is shorter than a round trip to memory.
    next_x, next_dt = load_row(x_row + d, mask), load_row(dt_row + d, mask)
    done = 0
    for c in range(chunks):
        # The short chunk is the last one of the sequence, whichever way it is gone through.
        chunk = chunks - 1 - c if REVERSE else c
        if SAVE:
            saved = sequence * all_chunks + first_chunk + chunk
            store_states(states_ptr + saved * (M * D), state, d, mask, D, M)
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
            step = step_size(v, row + 2 * M, mask, MAMBA, FAST)
            k = broadcast_row(row, M, BLOCK_D)
            state = advance(state, x, step, k, rates, M, MAMBA, FAST)
            q = broadcast_row(row + M, M, BLOCK_D)
            row += sign * (2 * M + 4)
            y = skip * x  # in place: by a function, 16 % more instructions on sm_90 (diagonal)
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
        stored = d < tl.where(segment == (segments - 1) * (1 - REVERSE), D, 0)
        store_states(final_ptr + b * (M * D), state, d, stored, D, M)


@triton.jit(do_not_specialize=RUN_TIME)
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
    block, segment, _, b = place_of_program(segments, B, D, BLOCK_D)
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


@triton.jit
def _scan_again(
    state, scratch, x_row, dt_row, rows, bias, rates, x_stride_l, dt_stride_l,
    back, sign, live, first_group, end_group, d, channel,
    MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr, INTERVAL: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Leave the states before each group of a chunk's tokens in the scratch."""
    lane = tl.arange(0, BLOCK_D)
    store_states(scratch + first_group * (M * BLOCK_D), state, lane, channel, BLOCK_D, M)
    for group in range(first_group + 1, end_group):
        for t in tl.static_range(GROUP):
            r = (INTERVAL - 1) * back + sign * ((group - 1) * GROUP + t)
            mask = alive_row(r, live, d, D, BLOCK_D)
            x = load_row(x_row + r * x_stride_l, mask)
            v = load_row(dt_row + r * dt_stride_l, mask) + bias
            row = rows + r * (2 * M + 4)
            step = step_size(v, row + 2 * M, mask, MAMBA, FAST)
            k = broadcast_row(row, M, BLOCK_D)
            state = advance(state, x, step, k, rates, M, MAMBA, FAST)
        store_states(scratch + group * (M * BLOCK_D), state, lane, channel, BLOCK_D, M)
    tl.debug_barrier()  # a lane reads what it wrote itself; this makes it so for any layout


@triton.jit
def _load_group(
    x_row, dt_row, z_row, dout_ptr, y_ptr, rows, bias, x_stride_l, dt_stride_l, z_stride_l,
    back, sign, live, group, row, d, gate_channels,
    N: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    INTERVAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return tuples over a group's tokens: x, step sizes and slopes, gradients of y and of z.

    ``row`` is an offset: with pointers to the row, 7 % more instructions on sm_90 (Mamba).
    """
    xs, steps, slopes, dys, dzs = (), (), (), (), ()
    for t in tl.static_range(GROUP):
        r = (INTERVAL - 1) * back + sign * (group * GROUP + t)
        mask = alive_row(r, live, d, D, BLOCK_D)
        offset = row + r * D
        dy = load_row(dout_ptr + offset, mask)
        if N == 2:
            z = load_row(z_row + r * z_stride_l, mask)
            y = load_row(y_ptr + offset, mask & (d < gate_channels))
            dy, dz = gate_backward(dy, z, y, FAST)
            dzs += (dz,)
        x = load_row(x_row + r * x_stride_l, mask)
        v = load_row(dt_row + r * dt_stride_l, mask) + bias
        step, slope = step_size_and_slope(v, rows + r * (2 * M + 4) + 2 * M, mask, MAMBA, FAST)
        xs += (x,)
        steps += (step,)
        slopes += (slope,)
        dys += (dy,)
    return xs, steps, slopes, dys, dzs


@triton.jit
def _group_backward(
    grad, drates, dskip, dbias, state, xs, steps, slopes, dys, dzs, skip, rates, rows, partial,
    dx_ptr, ddt_ptr, dz_ptr, back, sign, live, group, own_row, shared_row, d, gate_channels, key_norm,
    N: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    INTERVAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a group of tokens back, given the state before it; return the gradients so far."""
    history = state
    for t in tl.static_range(GROUP - 1):
        r = (INTERVAL - 1) * back + sign * (group * GROUP + t)
        k = broadcast_row(rows + r * (2 * M + 4), M, BLOCK_D)
        state = advance(state, xs[t], steps[t], k, rates, M, MAMBA, FAST)
        history += state
    for t in tl.static_range(GROUP - 1, -1, -1):
        r = (INTERVAL - 1) * back + sign * (group * GROUP + t)
        x, step, dy = xs[t], steps[t], dys[t]
        row = rows + r * (2 * M + 4)
        k, q = broadcast_row(row, M, BLOCK_D), broadcast_row(row + M, M, BLOCK_D)
        grad, drates, recalled, dstep, dk, dq = retreat(
            grad, drates, history[t * M : t * M + M], x, step, k, q, dy, rates, key_norm, M,
            MAMBA, FAST,
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
        summed = sums_over_channels(dk + dq, 2 * M, BITS, BLOCK_D, PRECISION, FAST)
        store_sums(partial + r * (2 * M), summed, tl.where(r < live, 2 * M, 0), BITS)
    return grad, drates, dskip, dbias


@triton.jit
def _chunk_backward(
    grad, drates, dskip, dbias, bias, skip, rates, scratch,
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, rows_ptr, states_ptr, dx_ptr, ddt_ptr, dz_ptr,
    drows_ptr, B, L, key_norm, block, direction, b, back, chunk, d,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    N: tl.constexpr, MAMBA: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    INTERVAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a chunk back by groups, the last first; return the gradients so far.

    Token r of the chunk is the i-th of the scan, which has the dead ones of a short chunk last or,
    in reverse, first. Their keys are zero.
    """
    lane, channel = tl.arange(0, BLOCK_D), alive_row(0, 1, d, D, BLOCK_D)
    sign = 1 - 2 * back
    gate_channels = tl.where(direction == 0, D, 0)  # of which this program writes dz
    live = tl.minimum(L - chunk * INTERVAL, INTERVAL)
    first_group = back * ((INTERVAL - live) // GROUP)
    end_group = tl.where(back == 1, INTERVAL // GROUP, tl.cdiv(live, GROUP))
    first = (chunk * INTERVAL).to(tl.int64)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l + d
    z_row = z_ptr
    if N == 2:
        z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
    sequence = direction * B + b
    shared_row = (b * L + first) * D + d  # of what both directions have in common
    own_row = (sequence * L + first) * D + d
    saved = sequence * tl.cdiv(L, INTERVAL) + chunk
    rows = rows_ptr + saved * (INTERVAL * (2 * M + 4))
    partial = drows_ptr + (((block * N + direction) * B + b) * L + first) * (2 * M)
    state = load_states(states_ptr + saved * (M * D), d, channel, D, M)
    _scan_again(
        state, scratch, x_row, dt_row, rows, bias, rates, x_stride_l, dt_stride_l,
        back, sign, live, first_group, end_group, d, channel,
        MAMBA, D, M, INTERVAL, GROUP, BLOCK_D, FAST,
    )  # fmt: skip
    for group_back in range(end_group - first_group):
        group = end_group - 1 - group_back
        # Nothing is stored before everything from far memory is asked for: a load cannot pass a
        # store that might be to the same address.
        xs, steps, slopes, dys, dzs = _load_group(
            x_row, dt_row, z_row, dout_ptr, y_ptr, rows, bias, x_stride_l, dt_stride_l, z_stride_l,
            back, sign, live, group, shared_row, d, gate_channels,
            N, MAMBA, D, M, INTERVAL, GROUP, BLOCK_D, FAST,
        )  # fmt: skip
        state = load_states(scratch + group * (M * BLOCK_D), lane, channel, BLOCK_D, M)
        grad, drates, dskip, dbias = _group_backward(
            grad, drates, dskip, dbias, state, xs, steps, slopes, dys, dzs, skip, rates, rows, partial,
            dx_ptr, ddt_ptr, dz_ptr, back, sign, live, group, own_row, shared_row, d, gate_channels,
            key_norm,
            N, MAMBA, D, M, BITS, INTERVAL, GROUP, BLOCK_D, FAST, PRECISION,
        )  # fmt: skip
    return grad, drates, dskip, dbias


@triton.jit(do_not_specialize=RUN_TIME)
def _backward_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, states_ptr,
    dentry_ptr, scratch_ptr, dx_ptr, ddt_ptr, dz_ptr, drows_ptr, drates_ptr, dskip_ptr, dbias_ptr,
    dinitial_ptr, B, L, segments, segment_tokens, key_norm,
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
    Mamba has no use for key_norm.
    """
    block, segment, direction, b = place_of_program(segments, B, D, BLOCK_D)
    lane = tl.arange(0, BLOCK_D)
    d = block * BLOCK_D + lane
    channel = alive_row(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, channel)
    skip = load_row(skip_ptr + direction * D + d, channel)
    sequence = direction * B + b
    scratch = scratch_ptr + tl.program_id(0).to(tl.int64) * (INTERVAL // GROUP * M * BLOCK_D)
    back = direction if N == 2 else REVERSE
    start = segment * segment_tokens
    chunks = tl.cdiv(tl.minimum(L - start, segment_tokens), INTERVAL)
    place = sequence * segments + segment
    sums = place * D + d
    rates, drates = load_rates(rates_ptr, direction, d, channel, D, M, MAMBA), ()
    if MAMBA:
        drates = full_states(0.0, M, BLOCK_D)
    grad = first_states(dentry_ptr, place, d, channel, ENTRY, D, M, BLOCK_D)
    dskip, dbias = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for c in range(chunks):
        chunk = start // INTERVAL + tl.where(back == 1, c, chunks - 1 - c)
        grad, drates, dskip, dbias = _chunk_backward(
            grad, drates, dskip, dbias, bias, skip, rates, scratch,
            x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, rows_ptr, states_ptr, dx_ptr, ddt_ptr, dz_ptr,
            drows_ptr, B, L, key_norm, block, direction, b, back, chunk, d,
            x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
            z_stride_b, z_stride_l,
            N, MAMBA, D, M, BITS, INTERVAL, GROUP, BLOCK_D, FAST, PRECISION,
        )  # fmt: skip
    if MAMBA:
        store_states(drates_ptr + place * (M * D), drates, d, channel, D, M)
    tl.store(dskip_ptr + sums, dskip, mask=channel)
    tl.store(dbias_ptr + sums, dbias, mask=channel)
    if N == 1:
        stored = d < tl.where(segment == (segments - 1) * REVERSE, D, 0)
        store_states(dinitial_ptr + b * (M * D), grad, d, stored, D, M)


# -------------------------------------------------------------------------------------- launchers


def _group_size(padded: int) -> int:
    """Return how many tokens the backward pass takes back between accesses to its scratch.

    The states of a group stay in registers. Groups of 4 would halve the traffic, not the number of
    instructions, and need 232 registers instead of 165 (sm_90, M = 16): two warps instead of three
    on every scheduler.
    """
    return 2 if padded <= 16 else 1


def _register_limit(run: Scan) -> dict[str, int]:
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
    key_norm: float = 1.0,
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
        key_norm: What |k|^2 is multiplied by in Longhorn's step size; nothing to Mamba.

    Returns:
        out (B, L, D) in the dtype of x. Of two directions, with ``save``, their sum before the gate,
        (B, L, D) float32, else None. With ``save`` the states before every chunk in the order of the
        scan, (N, B, chunks, M' / 4, D, 4) float32, else None. Of one direction its last state, (B, D, M)
        float32, else None.
    """
    run = Scan(x, dt, A, q, k, bias, z, reverse, key_norm)
    entry = run.entry(by_quads(initial_state, run.M), None)
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
    final = None if both else from_quads(final, k.shape[-1])
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
    key_norm: float = 1.0,
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
        key_norm: As in ``forward``.
    """
    if states is None:
        _, y_sum, states, _ = forward(
            x, dt, A, q, k, D, bias, z, initial_state, reverse, True, key_norm
        )
    run = Scan(x, dt, A, q, k, bias, z, reverse, key_norm)
    dout = dout.contiguous()
    dentry = run.entry(by_quads(dfinal, run.M), dout)
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
        key_norm=float(key_norm), ENTRY=dentry is not None,
        BITS=max(4, (2 * run.M - 1).bit_length()), GROUP=group, BLOCK_D=block_d, PRECISION=tuning.dot_precision(x.dtype),
        **_register_limit(run),
    )  # fmt: skip
    M = k.shape[-1]
    drows = drows.sum(0)  # in a fixed order: the same bits from run to run
    return (
        dx,
        ddt,
        None if A is None else from_quads(drates.sum((1, 2)), M).to(A.dtype),
        drows[..., run.M : run.M + M].to(q.dtype),
        drows[..., :M].to(k.dtype),
        dskip.sum((1, 2)).to(D.dtype),
        dbias.sum((1, 2)).to(bias.dtype),
        dz,
        None if initial_state is None else from_quads(dinitial, M),
    )
