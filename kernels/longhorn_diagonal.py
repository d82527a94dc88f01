"""The diagonal Longhorn scan, token by token: Triton kernels, then their launchers.

Per channel and state j, with eps = 1 / (1 + |k|^2 + exp(-(dt + bias))):

    forward    s_j <- s_j + eps k_j (x - k_j s_j),   y = sum_j q_j s_j + D x
    backward   G_j <- G_j + dy q_j, then with s_j the state before the token and h_j = x - k_j s_j
               dx = eps sum_j k_j G_j + D dy,   deps = sum_j k_j G_j h_j
               dk_j = sum over channels of 2 eps G_j h_j - eps x G_j - 2 k_j eps^2 deps
               dq_j = sum over channels of dy s_j, s_j after the token
               ddt = deps eps^2 exp(-(dt + bias)),   G_j <- G_j - eps k_j (k_j G_j)

A program owns one batch element and BLOCK_D channels, one per lane, whose states stay in registers
as a tuple over j; keys and queries are broadcast loads of packed float32 rows. The sums over
channels are products with a matrix of ones, so there are no atomics and gradients are the same bits
from run to run.
Letters: B batch, L tokens, D channels, M state size (padded to a multiple of 4 in the kernels).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels import tuning
from vil.kernels.tiles import (
    alive_row,
    four_scalars,
    half_sigmoid,
    half_silu,
    load_row,
    log_eps_slope,
    longhorn_eps,
)

FORWARD_WARPS = 4
BACKWARD_WARPS = 2
# Tokens from one saved state to the next. The backward pass keeps a scratch of 2 KB per token of it
# and program: with 16, that of all programs that an H200 runs at a time, 26 MB, stays in its L2.
INTERVAL = 16
ROW_TAIL = 4  # floats of a packed row after k and q: 1 + |k|^2, and padding to 128 bits


# ----------------------------------------------------- building blocks, shared with the Mamba scan


@triton.jit
def _pack_kernel(
    q_ptr, k_ptr, rows_ptr, L,
    q_stride_dir, q_stride_b, q_stride_l, q_stride_m,
    k_stride_dir, k_stride_b, k_stride_l, k_stride_m,
    STATES: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Pack keys and queries of TOKENS tokens in the order of the scan.

    rows (2, B, L rounded up, 2 M + 4): k, q, 1 + |k|^2, float32, zero beyond L and STATES.
    """
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    b, direction = tl.program_id(1).to(tl.int64), tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    token = tl.where(direction == 1, L - 1 - i, i)
    mask = (i < L)[:, None] & (m < STATES)[None, :]
    q_base = q_ptr + direction * q_stride_dir + b * q_stride_b
    k_base = k_ptr + direction * k_stride_dir + b * k_stride_b
    q_tile = q_base + token[:, None] * q_stride_l + m[None, :] * q_stride_m
    k_tile = k_base + token[:, None] * k_stride_l + m[None, :] * k_stride_m
    q = tl.load(q_tile, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_tile, mask=mask, other=0.0).to(tl.float32)
    tokens = tl.num_programs(0) * TOKENS
    row = rows_ptr + ((direction * tl.num_programs(1) + b) * tokens + i) * (2 * M + 4)
    inside = (i < tokens)[:, None] & (m < M)[None, :]
    tl.store(row[:, None] + m[None, :], k, mask=inside)
    tl.store(row[:, None] + M + m[None, :], q, mask=inside)
    tl.store(row + 2 * M, 1.0 + tl.sum(k * k, 1))


@triton.jit
def broadcast_row(pointer, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load M consecutive float32, a multiple of 4, into a tuple of M columns [BLOCK_D]."""
    row = ()
    for j in tl.static_range(0, M, 4):
        row += four_scalars(pointer + j, BLOCK_D)
    return row


@triton.jit
def load_states(pointer, mask, stride, M: tl.constexpr):
    """Load a tuple of M states, ``stride`` apart."""
    states = ()
    for j in tl.static_range(M):
        states += (tl.load(pointer + j * stride, mask=mask, other=0.0),)
    return states


@triton.jit
def store_states(pointer, states, mask, stride, M: tl.constexpr):
    """Store a tuple of M states, ``stride`` apart."""
    for j in tl.static_range(M):
        tl.store(pointer + j * stride, states[j], mask=mask)


@triton.jit
def zero_states(M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a tuple of M columns [BLOCK_D] of zeros."""
    states = ()
    for _ in tl.static_range(M):
        states += (tl.zeros((BLOCK_D,), tl.float32),)
    return states


@triton.jit
def sums_over_channels(
    values, N: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    """Return [16, 2^BITS] whose every row holds the sums of N columns [BLOCK_D], then zeros.

    One matrix product: a butterfly of shuffles per column would cost more than the scan itself.
    """
    for _ in tl.static_range(N, 2**BITS):
        values += (tl.zeros((BLOCK_D,), tl.float32),)
    # Every level joins by one bit of the column's index, the highest first.
    for level in tl.static_range(BITS):
        joined = ()
        for i in tl.static_range(2 ** (BITS - 1 - level)):
            joined += (tl.join(values[i], values[i + 2 ** (BITS - 1 - level)]),)
        values = joined
    tile = tl.reshape(values[0], (BLOCK_D, 2**BITS))
    ones = tl.full((16, BLOCK_D), 1.0, tl.float32)
    return tl.dot(ones, tile, input_precision=PRECISION)


@triton.jit
def store_sums(pointer, sums, count, BITS: tl.constexpr):
    """Store the first ``count`` results of ``sums_over_channels``, next to each other."""
    copy, n = tl.arange(0, 16), tl.arange(0, 2**BITS)
    once = (copy == 0)[:, None] & (n < count)[None, :]
    tl.store(pointer + 0 * copy[:, None] + n[None, :], sums, mask=once)


@triton.jit
def gate_backward(dout, z, y, FAST: tl.constexpr):
    """Return the gradients of silu(z) y / 2 for y and z, given that of the result."""
    s = half_sigmoid(z, FAST)
    return dout * z * s, dout * y * s * (1.0 + z * (1.0 - 2.0 * s))


# ---------------------------------------------------------------------------------------- forward


@triton.jit
def _advance(state, x, eps, k, M: tl.constexpr):
    """Return the states after a token."""
    after = ()
    for j in tl.static_range(M):
        after += (state[j] + eps * k[j] * (x - k[j] * state[j]),)
    return after


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, z_ptr, rows_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr, B, L, b, d,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    direction: tl.constexpr, D: tl.constexpr, M: tl.constexpr, INTERVAL: tl.constexpr,
    BLOCK_D: tl.constexpr, SAVE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scan one direction; index 0 leaves its y, index 1 adds it, gates and stores the result."""
    sign: tl.constexpr = 1 - 2 * direction
    mask = alive_row(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, mask)
    skip = load_row(skip_ptr + direction * D + d, mask)
    sequence = direction * B + b
    row = rows_ptr + sequence * tl.cdiv(L, INTERVAL) * (INTERVAL * (2 * M + 4))
    first = tl.cast((L - 1) * direction, tl.int64)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l
    z_row = z_ptr + b * z_stride_b + first * z_stride_l
    y_row, out_row = y_ptr + (b * L + first) * D, out_ptr + (b * L + first) * D
    saved = states_ptr + sequence * tl.cdiv(L, INTERVAL) * (M * D)
    state = zero_states(M, BLOCK_D)
    # x and dt are loaded one token ahead: a step is shorter than a round trip to memory.
    next_x, next_dt = load_row(x_row + d, mask), load_row(dt_row + d, mask)
    for start in range(0, L, INTERVAL):
        if SAVE:
            store_states(saved + d, state, mask, D, M)
            saved += M * D
        for i in range(start, tl.minimum(start + INTERVAL, L)):
            x, v = next_x, next_dt + bias
            ahead = tl.where(i + 1 < L, sign, 0)
            x_row += ahead * x_stride_l
            dt_row += ahead * dt_stride_l
            next_x, next_dt = load_row(x_row + d, mask), load_row(dt_row + d, mask)
            if direction == 1:
                z = load_row(z_row + d, mask)
                y_other = load_row(y_row + d, mask)
                z_row += sign * z_stride_l
            eps = longhorn_eps(v, tl.load(row + 2 * M), FAST)
            state = _advance(state, x, eps, broadcast_row(row, M, BLOCK_D), M)
            q = broadcast_row(row + M, M, BLOCK_D)
            row += 2 * M + 4
            y = skip * x
            for j in tl.static_range(M):
                y += q[j] * state[j]
            if direction == 1:
                y += y_other
                gated = y * half_silu(z, FAST)
                tl.store(out_row + d, gated.to(out_ptr.dtype.element_ty), mask=mask)
                out_row += sign * D
            if direction == 0 or SAVE:
                tl.store(y_row + d, y, mask=mask)
            y_row += sign * D


@triton.jit
def _forward_kernel(
    x_ptr, dt_ptr, z_ptr, rows_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr, L,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    D: tl.constexpr, M: tl.constexpr, INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr,
    SAVE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scan both directions of one batch element and BLOCK_D channels.

    y (B, L, D): sum of both directions. states (2, B, L / INTERVAL, M, D): states before every
    INTERVAL-th token, if SAVE.
    """
    b, B = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    _forward_direction(
        x_ptr, dt_ptr, z_ptr, rows_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr, B, L, b, d,
        x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
        z_stride_b, z_stride_l, 0, D, M, INTERVAL, BLOCK_D, SAVE, FAST,
    )  # fmt: skip
    tl.debug_barrier()  # a lane reads the y that it wrote itself; this makes it so for any layout
    _forward_direction(
        x_ptr, dt_ptr, z_ptr, rows_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr, B, L, b, d,
        x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
        z_stride_b, z_stride_l, 1, D, M, INTERVAL, BLOCK_D, SAVE, FAST,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- backward


@triton.jit
def _retreat(grad, state, x, eps, k, q, dy, M: tl.constexpr):
    """Take one token back.

    Args:
        grad: Gradient of the state after the token, without what this token's y adds to it.
        state: State before the token.
        x: Value of the token.
        eps: Step size of the token.
        k: Key of the token.
        q: Query of the token.
        dy: Gradient of y.
        M: State size.

    Returns:
        The gradient of the state before the token, sum_j k_j G_j, deps, and per channel what dk and
        dq are sums of.
    """
    before, dk, dq, scaled = (), (), (), ()
    recalled, deps = tl.zeros_like(x), tl.zeros_like(x)
    for j in tl.static_range(M):
        g = grad[j] + dy * q[j]
        error, write, kg = x - k[j] * state[j], eps * k[j], k[j] * g
        dq += (dy * (state[j] + write * error),)
        before += (g - write * kg,)
        recalled += kg
        deps += kg * error
        # dk_j but for its term in deps, which only the last state completes
        scaled += ((eps * g) * (2.0 * error - x),)
    slope = 2.0 * eps * eps * deps
    for j in tl.static_range(M):
        dk += (scaled[j] - slope * k[j],)
    return before, recalled, deps, dk, dq


@triton.jit
def _backward_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, rows_ptr, skip_ptr, bias_ptr, states_ptr, scratch_ptr,
    dx_ptr, ddt_ptr, dz_ptr, drows_ptr, dskip_ptr, dbias_ptr, L,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    D: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, INTERVAL: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one direction of one batch element and BLOCK_D channels back.

    From every saved state the scan is repeated, leaving the states before each GROUP of tokens in
    ``scratch``, (programs, INTERVAL / GROUP, M, BLOCK_D); then the groups are taken back from the
    last to the first, with the states inside a group in registers. drows (blocks, 2, B, L, 2 M):
    dk and dq summed over the channels of a block. The first direction writes dz.
    """
    groups_per_interval: tl.constexpr = INTERVAL // GROUP
    row_size: tl.constexpr = 2 * M + 4
    block, b, direction = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    B = tl.num_programs(1)
    lane = tl.arange(0, BLOCK_D)
    d = block * BLOCK_D + lane
    channel = alive_row(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, channel)
    skip = load_row(skip_ptr + direction * D + d, channel)
    sequence = direction * B + b
    program = sequence * tl.num_programs(0) + block
    scratch = scratch_ptr + program * (groups_per_interval * M * BLOCK_D) + lane
    sign = 1 - 2 * direction
    gate_channels = tl.where(direction == 0, D, 0)  # of which this program writes dz
    chunks = tl.cdiv(L, INTERVAL)
    grad = zero_states(M, BLOCK_D)
    dskip, dbias = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for c in range(chunks):
        chunk = sequence * chunks + (chunks - 1 - c)
        start = (chunks - 1 - c) * INTERVAL
        live = tl.minimum(L - start, INTERVAL)
        groups = tl.cdiv(live, GROUP)
        first = tl.where(direction == 1, L - 1 - start, start).to(tl.int64)
        x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + first * x_stride_l + d
        dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + first * dt_stride_l + d
        z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
        shared_row = (b * L + first) * D + d  # of what both directions have in common
        own_row = (sequence * L + first) * D + d
        rows = rows_ptr + chunk * (INTERVAL * row_size)
        partial = drows_ptr + (((block * 2 + direction) * B + b) * L + first) * (2 * M)

        state = load_states(states_ptr + chunk * (M * D) + d, channel, D, M)
        store_states(scratch, state, channel, BLOCK_D, M)
        for group in range(1, groups):
            for t in tl.static_range(GROUP):
                i = (group - 1) * GROUP + t
                x = load_row(x_row + i * sign * x_stride_l, channel)
                v = load_row(dt_row + i * sign * dt_stride_l, channel) + bias
                row = rows + i * row_size
                eps = longhorn_eps(v, tl.load(row + 2 * M), FAST)
                state = _advance(state, x, eps, broadcast_row(row, M, BLOCK_D), M)
            store_states(scratch + group * (M * BLOCK_D), state, channel, BLOCK_D, M)
        tl.debug_barrier()  # a lane reads what it wrote itself; this makes it so for any layout

        for back in range(groups):
            group = groups - 1 - back
            # Nothing is stored before everything from far memory is asked for: a load cannot pass
            # a store that might be to the same address.
            xs, epses, slopes, dys, dzs = (), (), (), (), ()
            for t in tl.static_range(GROUP):
                i = group * GROUP + t
                mask = alive_row(i, live, d, D, BLOCK_D)
                offset = shared_row + i * sign * D
                z = load_row(z_row + i * sign * z_stride_l, mask)
                dout = load_row(dout_ptr + offset, mask)
                y = load_row(y_ptr + offset, mask & (d < gate_channels))
                dy, dz = gate_backward(dout, z, y, FAST)
                x = load_row(x_row + i * sign * x_stride_l, mask)
                v = load_row(dt_row + i * sign * dt_stride_l, mask) + bias
                eps = longhorn_eps(v, tl.load(rows + i * row_size + 2 * M), FAST)
                xs += (x,)
                epses += (eps,)
                slopes += (eps * log_eps_slope(v, eps, FAST),)
                dys += (dy,)
                dzs += (dz,)
            state = load_states(scratch + group * (M * BLOCK_D), channel, BLOCK_D, M)
            history = state
            for t in tl.static_range(GROUP - 1):
                k = broadcast_row(rows + (group * GROUP + t) * row_size, M, BLOCK_D)
                state = _advance(state, xs[t], epses[t], k, M)
                history += state
            for t in tl.static_range(GROUP - 1, -1, -1):
                i = group * GROUP + t
                x, eps, dy = xs[t], epses[t], dys[t]
                row = rows + i * row_size
                k, q = broadcast_row(row, M, BLOCK_D), broadcast_row(row + M, M, BLOCK_D)
                grad, recalled, deps, dk, dq = _retreat(
                    grad, history[t * M : t * M + M], x, eps, k, q, dy, M
                )
                ddt = deps * slopes[t]
                dx = eps * recalled + skip * dy
                dskip += dy * x
                dbias += ddt
                mask = alive_row(i, live, d, D, BLOCK_D)
                offset = i * sign * D
                tl.store(dx_ptr + own_row + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                tl.store(ddt_ptr + own_row + offset, ddt.to(ddt_ptr.dtype.element_ty), mask=mask)
                tl.store(
                    dz_ptr + shared_row + offset,
                    dzs[t].to(dz_ptr.dtype.element_ty),
                    mask=mask & (d < gate_channels),
                )
                sums = sums_over_channels(dk + dq, 2 * M, BITS, BLOCK_D, PRECISION)
                store_sums(partial + i * sign * (2 * M), sums, tl.where(i < live, 2 * M, 0), BITS)
    tl.store(dskip_ptr + sequence * D + d, dskip, mask=channel)
    tl.store(dbias_ptr + sequence * D + d, dbias, mask=channel)


# -------------------------------------------------------------------------------------- launchers


def pack_rows(q: Tensor, k: Tensor) -> Tensor:
    """Pack keys and queries in the order of the scan, as the kernels load them.

    Args:
        q: Queries of both directions, (2, B, L, M), any strides.
        k: Keys of both directions, (2, B, L, M), any strides.

    Returns:
        (2, B, L', 2 M' + 4) float32: k, q, 1 + |k|^2 of every token, direction 1 from the last
        token to the first, with L' and M' rounded up to INTERVAL and 4 and zeros there.
    """
    _, B, L, states = k.shape
    intervals, padded_states = triton.cdiv(L, INTERVAL), 4 * triton.cdiv(states, 4)
    rows = torch.empty(2, B, intervals * INTERVAL, 2 * padded_states + ROW_TAIL, device=k.device)
    _pack_kernel[(intervals, B, 2)](
        q, k, rows, L, *q.stride(), *k.stride(),
        STATES=states, M=padded_states, BLOCK_M=triton.next_power_of_2(padded_states),
        TOKENS=INTERVAL, num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return rows


def lane_major(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if neighbouring channels are not neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_states(rows: Tensor, L: int, channels: int) -> Tensor:
    """Return room for the states before every INTERVAL-th token, (2, B, intervals, M, D)."""
    padded_states = (rows.shape[-1] - ROW_TAIL) // 2
    shape = (2, rows.shape[1], triton.cdiv(L, INTERVAL), padded_states, channels)
    return torch.empty(shape, device=rows.device)


def group_size(padded_states: int) -> int:
    """Return how many tokens the backward pass takes back between accesses to its scratch.

    The states of a group stay in registers. Groups of 4 would halve the traffic, not the number of
    instructions, and need 232 registers instead of 165 (sm_90, M = 16): two warps instead of three
    on every scheduler.
    """
    return 2 if padded_states <= 16 else 1


def bidirectional_forward(
    x: Tensor,
    dt: Tensor,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scan both directions, average and gate.

    Args:
        x: Values, (2, B, L, D).
        dt: Raw step sizes, (2, B, L, D).
        q: Queries, (2, B, L, M).
        k: Keys, (2, B, L, M).
        D: Skip weights, (2, D).
        bias: Added to dt, (2, D).
        z: Gate before its SiLU, (B, L, D).
        save: Also return what the backward pass needs.

    Returns:
        out (B, L, D) in the dtype of x; with ``save`` the sum of both directions before the gate,
        (B, L, D), and the states before every INTERVAL-th token, (2, B, intervals, M', D), float32.
    """
    _, B, L, channels = x.shape
    rows = pack_rows(q, k)
    x, dt, z = lane_major(x), lane_major(dt), lane_major(z)
    block_d = 32 * FORWARD_WARPS
    out = x.new_empty(B, L, channels)
    y_sum = torch.empty(B, L, channels, device=x.device)
    states = empty_states(rows, L, channels) if save else None
    _forward_kernel[(triton.cdiv(channels, block_d), B)](
        x, dt, z, rows, D.contiguous(), bias.contiguous(), y_sum, out, states if save else y_sum, L,
        *x.stride()[:3], *dt.stride()[:3], *z.stride()[:2],
        D=channels, M=(rows.shape[-1] - ROW_TAIL) // 2, INTERVAL=INTERVAL, BLOCK_D=block_d,
        SAVE=save, FAST=tuning.compiles_for_nvidia(),
        num_warps=FORWARD_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out, y_sum if save else None, states


def bidirectional_backward(
    dout: Tensor,
    x: Tensor,
    dt: Tensor,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor,
    y_sum: Tensor | None,
    states: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for x, dt, q, k, D, bias and z, each in its input's dtype.

    Args:
        dout: Gradient of the output, (B, L, D).
        x: Values, (2, B, L, D).
        dt: Raw step sizes, (2, B, L, D).
        q: Queries, (2, B, L, M).
        k: Keys, (2, B, L, M).
        D: Skip weights, (2, D).
        bias: Added to dt, (2, D).
        z: Gate before its SiLU, (B, L, D).
        y_sum: As saved by the forward pass, or None to scan again.
        states: As saved by the forward pass, or None to scan again.
    """
    if y_sum is None or states is None:
        _, y_sum, states = bidirectional_forward(x, dt, q, k, D, bias, z, save=True)
    _, B, L, channels = x.shape
    rows = pack_rows(q, k)
    x, dt, z = lane_major(x), lane_major(dt), lane_major(z)
    padded_states, block_d = (rows.shape[-1] - ROW_TAIL) // 2, 32 * BACKWARD_WARPS
    blocks = triton.cdiv(channels, block_d)
    group = group_size(padded_states)
    scratch = torch.empty(
        2 * B * blocks * INTERVAL // group * padded_states * block_d, device=x.device
    )
    dx, ddt, dz = x.new_empty(x.shape), dt.new_empty(dt.shape), z.new_empty(z.shape)
    drows = torch.empty(blocks, 2, B, L, 2 * padded_states, device=x.device)
    dskip, dbias = torch.empty(2, 2, B, channels, device=x.device)
    _backward_kernel[(blocks, B, 2)](
        x, dt, z, dout.contiguous(), y_sum, rows, D.contiguous(), bias.contiguous(), states,
        scratch, dx, ddt, dz, drows, dskip, dbias, L,
        *x.stride()[:3], *dt.stride()[:3], *z.stride()[:2],
        D=channels, M=padded_states, BITS=max(4, (2 * padded_states - 1).bit_length()),
        INTERVAL=INTERVAL, GROUP=group, BLOCK_D=block_d, FAST=tuning.compiles_for_nvidia(),
        PRECISION=tuning.dot_precision(x.dtype),
        num_warps=BACKWARD_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    drows = drows.sum(0)  # in a fixed order: the same bits from run to run
    states_of = k.shape[-1]
    dk, dq = drows[..., :states_of], drows[..., padded_states : padded_states + states_of]
    return (
        dx,
        ddt,
        dq.to(q.dtype),
        dk.to(k.dtype),
        dskip.sum(1).to(D.dtype),
        dbias.sum(1).to(bias.dtype),
        dz,
    )
