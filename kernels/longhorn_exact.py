"""The exact Longhorn scan in chunks of 16 tokens: Triton kernels, then their launchers.

Within a chunk, E = eps, S0 the state at its start, tokens in the order of the scan:

    C_t = E_t o (X_t - k_t.S0 - sum_{tau<t} (k_t.k_tau) C_tau)     forward substitution per channel
    Y   = Q S0 + tril(Q K') C + D o X,    S_T = S0 + K' C          matrix products

The Gram matrices K K' and tril(Q K') are shared by all channels. The backward pass is the same
with the substitution transposed; every sum over channels is a matrix product, so there are no
atomics and gradients are the same bits from run to run. Derivation: kernels/README.md.
Letters: B batch, L tokens, D channels, M state size, N chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels import tuning
from vil.kernels.tiles import (
    alive_row,
    columns,
    four_scalars,
    from_columns,
    half_sigmoid,
    half_silu,
    load_row,
    load_states,
    log_eps_slope,
    longhorn_eps,
)


@triton.jit
def _gram_kernel(
    q_ptr, k_ptr, keys_ptr, gram_ptr, kappa_ptr, B, L,
    q_stride_dir, q_stride_b, q_stride_l, k_stride_dir, k_stride_b, k_stride_l,
    M: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pack one chunk of keys and queries in the order of the scan, with their Gram matrices.

    keys (directions, B, N, 16, 2 BLOCK_M): k then q, float32, zero beyond L and M.
    gram (directions, B, N, 2, 16, 16): K K', then k_tau.q_t for tau <= t and else 0.
    kappa (directions, B, N, 16): 1 + |k|^2.
    """
    T: tl.constexpr = 16
    n, b, direction = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    chunks = tl.num_programs(0)
    t, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    position = n * T + t
    token = tl.where(direction == 1, L - 1 - position, position)
    mask = (position < L)[:, None] & (m < M)[None, :]
    k_row = k_ptr + direction * k_stride_dir + b * k_stride_b + token[:, None] * k_stride_l
    q_row = q_ptr + direction * q_stride_dir + b * q_stride_b + token[:, None] * q_stride_l
    k = tl.load(k_row + m[None, :], mask=mask, other=0.0).to(tl.float32)
    q = tl.load(q_row + m[None, :], mask=mask, other=0.0).to(tl.float32)
    chunk = (direction * B + b) * chunks + n
    keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t[:, None] * (2 * BLOCK_M) + m[None, :]
    tl.store(keys, k)
    tl.store(keys + BLOCK_M, q)
    tl.store(kappa_ptr + chunk * T + t, 1.0 + tl.sum(k * k, 1))
    gram = gram_ptr + chunk * (2 * T * T) + t[:, None] * T + t[None, :]
    tl.store(gram, tl.dot(k, tl.trans(k), input_precision=PRECISION))
    read = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    tl.store(gram + T * T, tl.where(t[:, None] <= t[None, :], read, 0.0))


@triton.jit
def _forward_substitution(rest, eps, gram_ptr, BLOCK_D: tl.constexpr):
    """Return C: C_t = eps_t rest_t, taken from every later rest_s with weight k_s.k_t."""
    c = ()
    for t in tl.static_range(16):
        c_t = eps[t] * rest[t]
        c = c + (c_t,)
        updated = ()
        for s in tl.static_range(0, 16, 4):
            if s + 3 > t:
                g = four_scalars(gram_ptr + t * 16 + s, BLOCK_D)
                for j in tl.static_range(4):
                    updated = updated + ((rest[s + j] - g[j] * c_t) if s + j > t else rest[s + j],)
            else:
                updated = updated + (rest[s], rest[s + 1], rest[s + 2], rest[s + 3])
        rest = updated
    return c


@triton.jit
def _backward_substitution(dc, eps, gram_ptr, BLOCK_D: tl.constexpr):
    """Return W, the gradient of rest: W_t = dC_t less eps_s W_s k_s.k_t of every later s."""
    w = ()
    for i in tl.static_range(16):
        w_t = dc[15 - i]
        w = (w_t,) + w
        scaled = eps[15 - i] * w_t
        updated = ()
        for s in tl.static_range(0, 16, 4):
            if s < 15 - i:
                g = four_scalars(gram_ptr + (15 - i) * 16 + s, BLOCK_D)
                for j in tl.static_range(4):
                    updated = updated + (
                        (dc[s + j] - g[j] * scaled) if s + j < 15 - i else dc[s + j],
                    )
            else:
                updated = updated + (dc[s], dc[s + 1], dc[s + 2], dc[s + 3])
        dc = updated
    return w


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
    y_ptr, out_ptr, states_ptr, B, L, b, d,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SAVE: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one direction of one batch element and block of channels.

    Direction 0 leaves y as a partial sum; direction 1, in reverse, adds its own to that, gates and
    stores the result, and the sum too if SAVE.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if direction == 1 else 1
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    chunks = tl.cdiv(L, T)
    state = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    bias = load_row(bias_ptr + direction * D + d, d < D)
    skip = load_row(skip_ptr + direction * D + d, d < D)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    for n in range(chunks):
        chunk = (direction * B + b) * chunks + n
        keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t16[:, None] * (2 * BLOCK_M) + m[None, :]
        k, q = tl.load(keys), tl.load(keys + BLOCK_M)
        gram = gram_ptr + chunk * (2 * T * T)
        if SAVE:
            saved = ((direction * B + b) * chunks + n) * D + d
            tl.store(
                states_ptr + saved[:, None] * BLOCK_M + m[None, :], state, mask=(d < D)[:, None]
            )
        recalled = columns(tl.dot(state, tl.trans(k), input_precision=PRECISION), BLOCK_D)
        first = tl.cast((L - 1 - n * T) if direction == 1 else n * T, tl.int64)
        live = L - n * T
        eps, x, rest = (), (), ()
        kappa = ()
        for t in tl.static_range(T):
            mask = alive_row(t, live, d, D, BLOCK_D)
            if t % 4 == 0:
                kappa = kappa + four_scalars(kappa_ptr + chunk * T + t, BLOCK_D)
            x_t = load_row(x_row + first * x_stride_l + sign * t * x_stride_l, mask)
            v = load_row(dt_row + first * dt_stride_l + sign * t * dt_stride_l, mask) + bias
            eps = eps + (longhorn_eps(v, kappa[t], FAST),)
            x = x + (x_t,)
            rest = rest + (x_t - recalled[t],)
        c = from_columns(_forward_substitution(rest, eps, gram, BLOCK_D), BLOCK_D)
        read = tl.load(gram + T * T + t16[:, None] * T + t16[None, :])
        y = tl.dot(state, tl.trans(q), input_precision=PRECISION)
        y = columns(tl.dot(c, read, y, input_precision=PRECISION), BLOCK_D)
        state = tl.dot(c, k, state, input_precision=PRECISION)
        for t in tl.static_range(T):
            mask = alive_row(t, live, d, D, BLOCK_D)
            y_t = y[t] + skip * x[t]
            row = (b * L + first) * D + sign * t * D + d
            if direction == 0:
                tl.store(y_ptr + row, y_t, mask=mask)
            else:
                y_t += tl.load(y_ptr + row, mask=mask, other=0.0)
                z_t = load_row(
                    z_ptr + b * z_stride_b + first * z_stride_l + sign * t * z_stride_l + d, mask
                )
                if SAVE:
                    tl.store(y_ptr + row, y_t, mask=mask)
                gated = y_t * half_silu(z_t, FAST)
                tl.store(out_ptr + row, gated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_direction(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
    states_ptr, dx_ptr, ddt_ptr, dz_ptr, dkeys_ptr, dskip_ptr, dbias_ptr,
    B, L, b, d, block, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one direction of one batch element and block of channels back.

    Gradients of keys and queries are partial sums over the block's channels, (blocks, 2, B, L,
    2 BLOCK_M). Direction 0 also writes the gradient of the gate.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if direction == 1 else 1
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    chunks = tl.cdiv(L, T)
    lane = (direction * B + b) * D + d
    dstate = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    bias = load_row(bias_ptr + direction * D + d, d < D)
    skip = load_row(skip_ptr + direction * D + d, d < D)
    dbias, dskip = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    for i in range(chunks):
        n = chunks - 1 - i
        chunk = (direction * B + b) * chunks + n
        keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t16[:, None] * (2 * BLOCK_M) + m[None, :]
        k, q = tl.load(keys), tl.load(keys + BLOCK_M)
        gram = gram_ptr + chunk * (2 * T * T)
        read = tl.load(gram + T * T + t16[:, None] * T + t16[None, :])
        saved = chunk * D + d
        state_row = states_ptr + saved[:, None] * BLOCK_M + m[None, :]
        state = load_states(state_row, d, D, BLOCK_D)
        recalled = columns(tl.dot(state, tl.trans(k), input_precision=PRECISION), BLOCK_D)
        first = tl.cast((L - 1 - n * T) if direction == 1 else n * T, tl.int64)
        live = L - n * T
        eps, dy, rest, kappa = (), (), (), ()
        for t in tl.static_range(T):
            mask = alive_row(t, live, d, D, BLOCK_D)
            if t % 4 == 0:
                kappa = kappa + four_scalars(kappa_ptr + chunk * T + t, BLOCK_D)
            x_t = load_row(x_row + first * x_stride_l + sign * t * x_stride_l, mask)
            v = load_row(dt_row + first * dt_stride_l + sign * t * dt_stride_l, mask) + bias
            row = (b * L + first) * D + sign * t * D + d
            dy_t = load_row(dout_ptr + row, mask)
            z_row = b * z_stride_b + first * z_stride_l + sign * t * z_stride_l + d
            z_t = load_row(z_ptr + z_row, mask)
            if direction == 0:  # silu'(z) = s + silu(z) (1 - s)
                s = half_sigmoid(z_t, FAST)
                slope = s * (1.0 + z_t * (1.0 - 2.0 * s))
                dz_t = dy_t * load_row(y_ptr + row, mask) * slope
                tl.store(dz_ptr + row, dz_t.to(dz_ptr.dtype.element_ty), mask=mask)
                dy_t = dy_t * z_t * s
            else:
                dy_t = dy_t * half_silu(z_t, FAST)
            eps = eps + (longhorn_eps(v, kappa[t], FAST),)
            dskip += dy_t * x_t
            dy = dy + (dy_t,)
            rest = rest + (x_t - recalled[t],)
        c = _forward_substitution(rest, eps, gram, BLOCK_D)
        c_tile, dy_tile = from_columns(c, BLOCK_D), from_columns(dy, BLOCK_D)
        dc = tl.dot(dstate, tl.trans(k), input_precision=PRECISION)
        dc = tl.dot(dy_tile, tl.trans(read), dc, input_precision=PRECISION)
        w = _backward_substitution(columns(dc, BLOCK_D), eps, gram, BLOCK_D)
        scaled = ()
        for t in tl.static_range(T):
            mask = alive_row(t, live, d, D, BLOCK_D)
            scaled = scaled + (eps[t] * w[t],)
            row = ((direction * B + b) * L + first) * D + sign * t * D + d
            dx_t = scaled[t] + skip * dy[t]
            tl.store(dx_ptr + row, dx_t.to(dx_ptr.dtype.element_ty), mask=mask)
            # Loaded again rather than kept in 16 registers.
            v = load_row(dt_row + first * dt_stride_l + sign * t * dt_stride_l, mask) + bias
            dv = w[t] * c[t] * log_eps_slope(v, eps[t], FAST)
            tl.store(ddt_ptr + row, dv.to(ddt_ptr.dtype.element_ty), mask=mask)
            dbias += dv
        w_tile = from_columns(scaled, BLOCK_D)

        # Sums over channels, then what follows for keys and queries through the Gram matrices.
        dq = tl.dot(tl.trans(dy_tile), state, input_precision=PRECISION)
        dk = tl.dot(tl.trans(c_tile), dstate, input_precision=PRECISION)
        dk -= tl.dot(tl.trans(w_tile), state, input_precision=PRECISION)
        dread = tl.dot(tl.trans(c_tile), dy_tile, input_precision=PRECISION)
        dread = tl.where(t16[:, None] <= t16[None, :], dread, 0.0)
        dgram = tl.dot(tl.trans(w_tile), c_tile, input_precision=PRECISION)
        dgram = tl.where(t16[:, None] >= t16[None, :], dgram, 0.0)
        dq = tl.dot(tl.trans(dread), k, dq, input_precision=PRECISION)
        dk = tl.dot(dread, q, dk, input_precision=PRECISION)
        dk -= tl.dot(dgram + tl.trans(dgram), k, input_precision=PRECISION)
        token = first + sign * t16
        partial = ((block * 2 + direction) * B + b) * L + token
        partial = dkeys_ptr + partial[:, None] * (2 * BLOCK_M) + m[None, :]
        alive = (t16 < live)[:, None]
        tl.store(partial, dk, mask=alive)
        tl.store(partial + BLOCK_M, dq, mask=alive)
        dstate = tl.dot(dy_tile, q, dstate, input_precision=PRECISION)
        dstate -= tl.dot(w_tile, k, input_precision=PRECISION)
    tl.store(dskip_ptr + lane, dskip, mask=d < D)
    tl.store(dbias_ptr + lane, dbias, mask=d < D)


@triton.jit
def _bidirectional_forward_kernel(
    x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr,
    states_ptr, B, L, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SAVE: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan both directions, the second one adding to, gating and storing what the first left."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.program_id(1).to(tl.int64)
    _forward_direction(
        x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
        y_ptr, out_ptr, states_ptr, B, L, b, d,
        x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
        0, x_stride_l, dt_stride_l, z_stride_l, D, BLOCK_D, BLOCK_M,
        SAVE, FAST, PRECISION,
    )  # fmt: skip
    tl.debug_barrier()  # a lane reads the sum that it wrote itself; this makes it so for any layout
    _forward_direction(
        x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
        y_ptr, out_ptr, states_ptr, B, L, b, d,
        x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
        1, x_stride_l, dt_stride_l, z_stride_l, D, BLOCK_D, BLOCK_M,
        SAVE, FAST, PRECISION,
    )  # fmt: skip


@triton.jit
def _bidirectional_backward_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
    states_ptr, dx_ptr, ddt_ptr, dz_ptr, dkeys_ptr, dskip_ptr, dbias_ptr, B, L,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take both directions back; the first one also writes the gradient of the gate."""
    block = tl.program_id(0)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.program_id(1).to(tl.int64)
    _backward_direction(
        x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
        states_ptr, dx_ptr, ddt_ptr, dz_ptr, dkeys_ptr, dskip_ptr, dbias_ptr,
        B, L, b, d, block.to(tl.int64), x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
        z_stride_b, 0, x_stride_l, dt_stride_l, z_stride_l, D, BLOCK_D, BLOCK_M,
        FAST, PRECISION,
    )  # fmt: skip
    _backward_direction(
        x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
        states_ptr, dx_ptr, ddt_ptr, dz_ptr, dkeys_ptr, dskip_ptr, dbias_ptr,
        B, L, b, d, block.to(tl.int64), x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
        z_stride_b, 1, x_stride_l, dt_stride_l, z_stride_l, D, BLOCK_D, BLOCK_M,
        FAST, PRECISION,
    )  # fmt: skip


# -------------------------------------------------------------------------------------- launchers


def _row_major(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Chunks:
    """Keys, queries and Gram matrices of q, k (2, B, L, M), packed by chunk in scan order."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        directions, B, L, self.M = k.shape
        self.block_m = max(16, triton.next_power_of_2(self.M))
        count = triton.cdiv(L, tuning.CHUNK)
        lead, T = (directions, B, count), tuning.CHUNK
        self.keys = torch.empty(*lead, T, 2 * self.block_m, device=k.device)
        self.gram = torch.empty(*lead, 2, T, T, device=k.device)
        self.kappa = torch.empty(*lead, T, device=k.device)
        q, k = _row_major(q), _row_major(k)
        _gram_kernel[(count, B, directions)](
            q, k, self.keys, self.gram, self.kappa, B, L, *q.stride()[:3], *k.stride()[:3],
            M=self.M, BLOCK_M=self.block_m,
            PRECISION=tuning.dot_precision(k.dtype),
            num_warps=1, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip


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
        (B, L, D) float32, and the state before every chunk, (2, B, N, D, M) float32.
    """
    _, B, L, channels = x.shape
    chunks = _Chunks(q, k)
    x, dt, z = _row_major(x), _row_major(dt), _row_major(z)
    block_d, warps = tuning.blocks("exact_forward", channels)
    out = x.new_empty(B, L, channels)
    y_sum = torch.empty(B, L, channels, device=x.device)
    count = chunks.kappa.shape[2]
    shape = (2, B, count, channels, chunks.block_m) if save else (1,)
    states = torch.empty(shape, device=x.device)
    _bidirectional_forward_kernel[(triton.cdiv(channels, block_d), B)](
        x, dt, z, chunks.keys, chunks.gram, chunks.kappa, D, bias, y_sum, out, states, B, L,
        *x.stride()[:2], *dt.stride()[:2], z.stride(0),
        x_stride_l=x.stride(2), dt_stride_l=dt.stride(2), z_stride_l=z.stride(1),
        D=channels, BLOCK_D=block_d, BLOCK_M=chunks.block_m, SAVE=save,
        FAST=tuning.compiles_for_nvidia(), PRECISION=tuning.dot_precision(x.dtype),
        num_warps=warps, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return (out, y_sum, states) if save else (out, None, None)


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
) -> tuple[Tensor, ...]:
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
    chunks = _Chunks(q, k)
    x, dt, z, dout = _row_major(x), _row_major(dt), _row_major(z), dout.contiguous()
    block_d, warps = tuning.blocks("exact_backward", channels)
    num_blocks = triton.cdiv(channels, block_d)
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dz = z.new_empty(z.shape)
    dkeys = torch.empty(num_blocks, 2, B, L, 2 * chunks.block_m, device=x.device)
    dskip, dbias = torch.empty(2, 2, B, channels, device=x.device)
    _bidirectional_backward_kernel[(num_blocks, B)](
        x, dt, z, dout, y_sum, chunks.keys, chunks.gram, chunks.kappa, D, bias, states,
        dx, ddt, dz, dkeys, dskip, dbias, B, L,
        *x.stride()[:2], *dt.stride()[:2], z.stride(0),
        x_stride_l=x.stride(2), dt_stride_l=dt.stride(2), z_stride_l=z.stride(1),
        D=channels, BLOCK_D=block_d, BLOCK_M=chunks.block_m,
        FAST=tuning.compiles_for_nvidia(), PRECISION=tuning.dot_precision(x.dtype),
        num_warps=warps, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    dkeys = dkeys.sum(0)  # in a fixed order: the same bits from run to run
    dk, dq = dkeys[..., : chunks.M], dkeys[..., chunks.block_m : chunks.block_m + chunks.M]
    return (
        dx,
        ddt,
        dq.to(q.dtype),
        dk.to(k.dtype),
        dskip.sum(1).to(D.dtype),
        dbias.sum(1).to(bias.dtype),
        dz,
    )
