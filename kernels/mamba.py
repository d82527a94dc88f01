"""The Mamba scan, token by token: Triton kernels, then their launchers.

Per channel and state j, with delta = softplus(dt + bias) and a_j = exp(delta A_j):

    forward    s_j <- a_j s_j + delta x k_j,   y = sum_j q_j s_j + D x
    backward   G_j <- G_j + dy q_j, then with s_j the state before the token and r = sum_j k_j G_j
               f_j = a_j G_j s_j,   dA_j += delta f_j,   ddelta = sum_j A_j f_j + x r
               dx = delta r + D dy,   ddt = ddelta sigmoid(dt + bias)
               dk_j = sum over channels of delta x G_j
               dq_j = sum over channels of dy s_j, s_j after the token
               G_j <- a_j G_j

Laid out as the diagonal Longhorn scan, whose building blocks it shares. Rates are A / ln 2, so that
an exponential is one instruction; there is one per token, channel and state, which is what bounds
the speed.
Letters: B batch, L tokens, D channels, M state size (padded to a multiple of 4 in the kernels).
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels import tuning
from vil.kernels.longhorn_diagonal import (
    BACKWARD_WARPS,
    FORWARD_WARPS,
    INTERVAL,
    ROW_TAIL,
    broadcast_row,
    empty_states,
    gate_backward,
    group_size,
    lane_major,
    load_states,
    pack_rows,
    store_states,
    store_sums,
    sums_over_channels,
    zero_states,
)
from vil.kernels.tiles import alive_row, half_silu, load_row


@triton.jit
def _softplus(v):
    """Return log(1 + exp(v)), to a relative error of 1e-7 however small it is.

    log(1 + u) = 2 artanh(u / (2 + u)) by its series: the logarithm instruction of a GPU has an
    absolute error, which would show in small steps.
    """
    u = tl.exp(-tl.abs(v))
    t = u / (2.0 + u)
    s = t * t
    series = 1.0 / 13.0
    series = series * s + 1.0 / 11.0
    series = series * s + 1.0 / 9.0
    series = series * s + 1.0 / 7.0
    series = series * s + 1.0 / 5.0
    series = series * s + 1.0 / 3.0
    return tl.maximum(v, 0.0) + 2.0 * t * (series * s + 1.0)


@triton.jit
def _sigmoid(v):
    u = tl.exp(-tl.abs(v))
    return tl.where(v < 0.0, u, 1.0) / (1.0 + u)


@triton.jit
def _decay(exponent, FAST: tl.constexpr):
    """Return 2^exponent, zero where that is subnormal if FAST."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [exponent],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.exp2(exponent)


# ---------------------------------------------------------------------------------------- forward


@triton.jit
def _advance(state, x, delta, k, rates, M: tl.constexpr, FAST: tl.constexpr):
    """Return the states after a token."""
    after, write = (), delta * x
    for j in tl.static_range(M):
        after += (_decay(delta * rates[j], FAST) * state[j] + write * k[j],)
    return after


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr,
    B, L, b, d,
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
    rates = load_states(rates_ptr + direction * M * D + d, mask, D, M)
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
            k = broadcast_row(row, M, BLOCK_D)
            state = _advance(state, x, _softplus(v), k, rates, M, FAST)
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
    x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr, L,
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
        x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr,
        B, L, b, d,
        x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
        z_stride_b, z_stride_l, 0, D, M, INTERVAL, BLOCK_D, SAVE, FAST,
    )  # fmt: skip
    tl.debug_barrier()  # a lane reads the y that it wrote itself; this makes it so for any layout
    _forward_direction(
        x_ptr, dt_ptr, z_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr, states_ptr,
        B, L, b, d,
        x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
        z_stride_b, z_stride_l, 1, D, M, INTERVAL, BLOCK_D, SAVE, FAST,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- backward


@triton.jit
def _retreat(grad, drates, state, x, delta, k, q, dy, rates, M: tl.constexpr, FAST: tl.constexpr):
    """Take one token back.

    Args:
        grad: Gradient of the state after the token, without what this token's y adds to it.
        drates: Gradient of A so far.
        state: State before the token.
        x: Value of the token.
        delta: Step size of the token.
        k: Key of the token.
        q: Query of the token.
        dy: Gradient of y.
        rates: A / ln 2.
        M: State size.
        FAST: Whether to use PTX.

    Returns:
        The gradient of the state before the token and of A, sum_j k_j G_j, ddelta, and per channel
        what dk and dq are sums of.
    """
    before, after, dk, dq = (), (), (), ()
    recalled, slope = tl.zeros_like(x), tl.zeros_like(x)
    write = delta * x
    for j in tl.static_range(M):
        g = grad[j] + dy * q[j]
        decay = _decay(delta * rates[j], FAST)
        dq += (dy * (decay * state[j] + write * k[j]),)
        dk += (write * g,)
        recalled += k[j] * g
        decayed = decay * g
        flow = decayed * state[j]
        slope += rates[j] * flow
        before += (decayed,)
        after += (drates[j] + delta * flow,)
    return before, after, recalled, 0.6931471805599453 * slope + x * recalled, dk, dq


@triton.jit
def _backward_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, rows_ptr, rates_ptr, skip_ptr, bias_ptr, states_ptr,
    scratch_ptr, dx_ptr, ddt_ptr, dz_ptr, drows_ptr, drates_ptr, dskip_ptr, dbias_ptr, L,
    x_stride_dir, x_stride_b, x_stride_l, dt_stride_dir, dt_stride_b, dt_stride_l,
    z_stride_b, z_stride_l,
    D: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, INTERVAL: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one direction of one batch element and BLOCK_D channels back.

    From every saved state the scan is repeated, leaving the states before each GROUP of tokens in
    ``scratch``, (programs, INTERVAL / GROUP, M, BLOCK_D); then the groups are taken back from the
    last to the first, with the states inside a group in registers. drows (blocks, 2, B, L, 2 M):
    dk and dq summed over the channels of a block. drates (2, B, M, D). The first direction writes
    dz.
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
    rates = load_states(rates_ptr + direction * M * D + d, channel, D, M)
    grad, drates = zero_states(M, BLOCK_D), zero_states(M, BLOCK_D)
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
                k = broadcast_row(rows + i * row_size, M, BLOCK_D)
                state = _advance(state, x, _softplus(v), k, rates, M, FAST)
            store_states(scratch + group * (M * BLOCK_D), state, channel, BLOCK_D, M)
        tl.debug_barrier()  # a lane reads what it wrote itself; this makes it so for any layout

        for back in range(groups):
            group = groups - 1 - back
            # Nothing is stored before everything from far memory is asked for: a load cannot pass
            # a store that might be to the same address.
            xs, vs, deltas, dys, dzs = (), (), (), (), ()
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
                xs += (x,)
                vs += (v,)
                deltas += (_softplus(v),)
                dys += (dy,)
                dzs += (dz,)
            state = load_states(scratch + group * (M * BLOCK_D), channel, BLOCK_D, M)
            history = state
            for t in tl.static_range(GROUP - 1):
                k = broadcast_row(rows + (group * GROUP + t) * row_size, M, BLOCK_D)
                state = _advance(state, xs[t], deltas[t], k, rates, M, FAST)
                history += state
            for t in tl.static_range(GROUP - 1, -1, -1):
                i = group * GROUP + t
                x, delta, dy = xs[t], deltas[t], dys[t]
                row = rows + i * row_size
                k, q = broadcast_row(row, M, BLOCK_D), broadcast_row(row + M, M, BLOCK_D)
                grad, drates, recalled, ddelta, dk, dq = _retreat(
                    grad, drates, history[t * M : t * M + M], x, delta, k, q, dy, rates, M, FAST
                )
                ddt = ddelta * _sigmoid(vs[t])
                dx = delta * recalled + skip * dy
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
    store_states(drates_ptr + sequence * (M * D) + d, drates, channel, D, M)
    tl.store(dskip_ptr + sequence * D + d, dskip, mask=channel)
    tl.store(dbias_ptr + sequence * D + d, dbias, mask=channel)


# -------------------------------------------------------------------------------------- launchers


def _rates(A: Tensor, padded_states: int) -> Tensor:
    """Return A / ln 2 as (2, M', D) float32, zero beyond M."""
    rates = A.float().mT / math.log(2.0)
    return F.pad(rates, (0, 0, 0, padded_states - A.shape[-1])).contiguous()


def bidirectional_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
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
        A: Decay rates, (2, D, M), all negative.
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
    padded_states = (rows.shape[-1] - ROW_TAIL) // 2
    rates = _rates(A, padded_states)
    x, dt, z = lane_major(x), lane_major(dt), lane_major(z)
    block_d = 32 * FORWARD_WARPS
    out = x.new_empty(B, L, channels)
    y_sum = torch.empty(B, L, channels, device=x.device)
    states = empty_states(rows, L, channels) if save else None
    _forward_kernel[(triton.cdiv(channels, block_d), B)](
        x, dt, z, rows, rates, D.contiguous(), bias.contiguous(), y_sum, out,
        states if save else y_sum, L,
        *x.stride()[:3], *dt.stride()[:3], *z.stride()[:2],
        D=channels, M=padded_states, INTERVAL=INTERVAL, BLOCK_D=block_d,
        SAVE=save, FAST=tuning.compiles_for_nvidia(),
        num_warps=FORWARD_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out, y_sum if save else None, states


def bidirectional_backward(
    dout: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor,
    y_sum: Tensor | None,
    states: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for x, dt, A, q, k, D, bias and z, each in its input's dtype.

    Args:
        dout: Gradient of the output, (B, L, D).
        x: Values, (2, B, L, D).
        dt: Raw step sizes, (2, B, L, D).
        A: Decay rates, (2, D, M), all negative.
        q: Queries, (2, B, L, M).
        k: Keys, (2, B, L, M).
        D: Skip weights, (2, D).
        bias: Added to dt, (2, D).
        z: Gate before its SiLU, (B, L, D).
        y_sum: As saved by the forward pass, or None to scan again.
        states: As saved by the forward pass, or None to scan again.
    """
    if y_sum is None or states is None:
        _, y_sum, states = bidirectional_forward(x, dt, A, q, k, D, bias, z, save=True)
    _, B, L, channels = x.shape
    rows = pack_rows(q, k)
    padded_states = (rows.shape[-1] - ROW_TAIL) // 2
    rates = _rates(A, padded_states)
    x, dt, z = lane_major(x), lane_major(dt), lane_major(z)
    block_d = 32 * BACKWARD_WARPS
    blocks = triton.cdiv(channels, block_d)
    group = group_size(padded_states)
    scratch = torch.empty(
        2 * B * blocks * INTERVAL // group * padded_states * block_d, device=x.device
    )
    dx, ddt, dz = x.new_empty(x.shape), dt.new_empty(dt.shape), z.new_empty(z.shape)
    drows = torch.empty(blocks, 2, B, L, 2 * padded_states, device=x.device)
    drates = torch.empty(2, B, padded_states, channels, device=x.device)
    dskip, dbias = torch.empty(2, 2, B, channels, device=x.device)
    _backward_kernel[(blocks, B, 2)](
        x, dt, z, dout.contiguous(), y_sum, rows, rates, D.contiguous(), bias.contiguous(), states,
        scratch, dx, ddt, dz, drows, drates, dskip, dbias, L,
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
        drates.sum(1)[:, :states_of].mT.to(A.dtype),
        dq.to(q.dtype),
        dk.to(k.dtype),
        dskip.sum(1).to(D.dtype),
        dbias.sum(1).to(bias.dtype),
        dz,
    )
