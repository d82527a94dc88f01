"""The exact Longhorn scan in chunks of 16 tokens: Triton kernels, then their launchers.

Within a chunk, E = eps, S0 the state at its start, tokens in the order of the scan:

    C_t = E_t o (X_t - k_t.S0 - sum_{tau<t} (k_t.k_tau) C_tau)     forward substitution per channel
    Y   = Q S0 + tril(Q K') C + D o X,    S_T = S0 + K' C          matrix products

The Gram matrices K K' and tril(Q K') are shared by all channels. The backward pass is the same
with the substitution transposed; every sum over channels is a matrix product, so there are no
atomics and gradients are the same bits from run to run. Derivation: kernels/README.md.

Chunk n holds tokens 16 n to 16 n + 15 in either direction; within it rows are in the order of the
scan, so that in reverse a ragged chunk comes first and begins with its dead rows, whose keys are
zero and leave the state alone. Sequences too few to fill the device are cut in segments of whole
chunks that run side by side: the scan is linear in its state, so a summary of every segment gives
the states that the segments start from.
Letters: N directions, B batch, L tokens, S segments, D channels, M state size.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.triton import tuning
from vil.kernels.triton.launch import launch
from vil.kernels.triton.layout import adjacent_channels, padded_tokens
from vil.kernels.triton.tiles import (
    alive_row,
    alive_rows,
    broadcast_rows,
    columns,
    decay_and_eps,
    for_product,
    four_broadcast_rows,
    from_columns,
    gate_sigmoid,
    half_silu,
    load_row,
    load_rows,
    load_states,
    longhorn_eps,
    one_row,
    opaque,
    store_rows,
    to_rows,
)

# What differs from call to call and is not worth a compilation of its own: sizes, strides, and whether
# tensors of the caller are aligned, which their loads of one channel per lane do not make use of.
_RUN_TIME = (
    *("B", "L", "segments", "segment_chunks", "blocks"),
    *(f"{name}_stride_{axis}" for name in ("x", "dt", "z", "q", "k") for axis in ("dir", "b")),
    *("q_stride_l", "k_stride_l"),
    *(
        f"{name}_ptr"
        for name in ("x", "dt", "z", "q", "k", "y", "out", "dout", "dx", "ddt", "dz", "dq", "dk")
    ),
    *("skip_ptr", "bias_ptr"),
)


@triton.jit(do_not_specialize=_RUN_TIME)
def _gram_kernel(
    q_ptr, k_ptr, keys_ptr, gram_ptr, kappa_ptr, B, L,
    q_stride_dir, q_stride_b, q_stride_l, k_stride_dir, k_stride_b, k_stride_l,
    REVERSE: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Pack one chunk of keys and queries in the order of the scan, with their Gram matrices.

    A short last chunk has dead rows, the last ones of the chunk before it, so that all of its rows
    can be read; they add nothing and take nothing. L must be 16 or more.

    keys (N, B, chunks, 16, 2 BLOCK_M): k then q, float32, zero if dead and beyond M.
    gram (N, B, chunks, 2, 16, 16): K K', then k_tau.q_t for tau <= t and else 0, for products.
    kappa (N, B, chunks, 2, 16): 1 + |k|^2, infinite if dead; then the divisor of the gate, 2 or, if
    dead, so large that the quotient is nothing.
    """
    T: tl.constexpr = 16
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(L, T)
    n, b, direction = chunk % chunks, chunk // chunks % B, chunk // chunks // B
    t, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    reverse = direction == 1 or REVERSE
    token = tl.minimum(n * T, L - T) + tl.where(reverse, T - 1 - t, t)
    alive = token >= n * T
    mask = alive[:, None] & (m < M)[None, :]
    k_row = k_ptr + direction * k_stride_dir + b * k_stride_b + token[:, None] * k_stride_l
    q_row = q_ptr + direction * q_stride_dir + b * q_stride_b + token[:, None] * q_stride_l
    k = tl.load(k_row + m[None, :], mask=mask, other=0.0).to(tl.float32)
    q = tl.load(q_row + m[None, :], mask=mask, other=0.0).to(tl.float32)
    keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t[:, None] * (2 * BLOCK_M) + m[None, :]
    tl.store(keys, k)
    tl.store(keys + BLOCK_M, q)
    kappa = kappa_ptr + chunk * (2 * T) + t
    tl.store(kappa, tl.where(alive, 1.0 + tl.sum(k * k, 1), float("inf")))
    tl.store(kappa + T, tl.where(alive, 2.0, 1e30))
    gram = gram_ptr + chunk * (2 * T * T) + t[:, None] * T + t[None, :]
    tl.store(gram, tl.dot(k, tl.trans(k), input_precision=PRECISION))
    read = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    read = tl.where(t[:, None] <= t[None, :], read, 0.0)
    tl.store(gram + T * T, for_product(read, PRECISION, FAST))


@triton.jit
def _forward_substitution(
    rest, eps, gram_ptr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr
):
    """Return C: C_t = eps_t rest_t, taken from every later rest_s with weight k_s.k_t.

    rest and eps are chunks, C comes as [BLOCK_D, 16], rounded for products.
    """
    c = ()
    for i in tl.static_range(4):
        g = four_broadcast_rows(gram_ptr + i * 64, i, 4, BLOCK_D)
        for j in tl.static_range(4):
            c_t = for_product(one_row(eps * rest, 4 * i + j), PRECISION, FAST)
            c += (c_t,)
            rest -= g[j] * c_t[None, :]
    return from_columns(c, BLOCK_D)


@triton.jit
def _backward_substitution(
    dc, eps, gram_ptr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr
):
    """Return eps W, W the gradient of rest: W_t = dC_t less eps_s W_s k_s.k_t of every later s.

    dc and eps are chunks, eps W comes as [BLOCK_D, 16], rounded for products.
    """
    w = ()
    for i in tl.static_range(4):
        if i == 2:
            tl.debug_barrier()  # keeps the later Gram rows from being loaded early: fewer spills
        g = four_broadcast_rows(gram_ptr + (3 - i) * 64, 0, 4 - i, BLOCK_D)
        for j in tl.static_range(4):
            w_t = for_product(one_row(eps * dc, 15 - 4 * i - j), PRECISION, FAST)
            w = (w_t,) + w
            dc -= g[3 - j] * w_t[None, :]
    return from_columns(w, BLOCK_D)


@triton.jit
def _place(segments, DIRECTIONS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return batch element, segment, direction and block of this program, blocks fastest."""
    rest = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) - rest * BLOCKS
    direction, rest = rest % DIRECTIONS, rest // DIRECTIONS
    return (rest // segments).to(tl.int64), rest % segments, direction, block


@triton.jit
def _entry_state(entry_ptr, lane, d, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load the state [BLOCK_D, BLOCK_M] that a segment starts from, zeros if none is given."""
    if entry_ptr is None:
        return tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    else:
        row = entry_ptr + lane[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        return load_states(row, d, D, BLOCK_D)


@triton.jit
def _store_states(pointer, lane, state, d, limit, BLOCK_M: tl.constexpr):
    """Store the states [BLOCK_D, BLOCK_M] of the channels below a limit."""
    row = pointer + lane[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(row, state, mask=(d < limit)[:, None])


@triton.jit
def _forward_direction(
    x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
    y_ptr, out_ptr, states_ptr, entry_ptr, final_ptr, B, L, b, segment, segments, segment_chunks, d,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one direction of one segment of one batch element and block of channels.

    A single direction (no z) stores y. Of two, direction 0 leaves y as a partial sum; direction 1
    adds its own to that, gates and stores the result, and the sum too if states are saved.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    chunks, begin = tl.cdiv(L, T), segment * segment_chunks
    end = tl.minimum(begin + segment_chunks, chunks)
    lane = ((direction * B + b) * segments + segment) * D + d
    state = _entry_state(entry_ptr, lane, d, D, BLOCK_D, BLOCK_M)
    mask = alive_row(0, 1, d, D, BLOCK_D)
    channel = mask[None, :]
    bias = load_row(bias_ptr + direction * D + d, mask)
    skip = load_row(skip_ptr + direction * D + d, mask)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    rounded = for_product(state, PRECISION, FAST)
    for i in range(begin, end):
        n = (begin + end - 1 - i) if REVERSE else i
        chunk = (direction * B + b) * chunks + n
        keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t16[:, None] * (2 * BLOCK_M) + m[None, :]
        k, q = tl.load(keys), tl.load(keys + BLOCK_M)
        gram = gram_ptr + chunk * (2 * T * T)
        if states_ptr is not None:
            _store_states(states_ptr, chunk * D + d, rounded, d, D, BLOCK_M)
        recalled = to_rows(tl.dot(rounded, tl.trans(k), input_precision=PRECISION), BLOCK_D)
        kappa = broadcast_rows(kappa_ptr + chunk * (2 * T), BLOCK_D)
        start, live = tl.minimum(n * T, L - T), L - n * T
        first = tl.cast(start + ((T - 1) if REVERSE else 0), tl.int64)
        x = load_rows(x_row + first * x_stride_l, sign * x_stride_l, channel)
        dt = load_rows(dt_row + first * dt_stride_l, sign * dt_stride_l, channel)
        eps = longhorn_eps(dt + bias[None, :], kappa, FAST)
        c = _forward_substitution(x - recalled, eps, gram, BLOCK_D, PRECISION, FAST)
        read = tl.load(gram + T * T + t16[:, None] * T + t16[None, :])
        y = tl.dot(rounded, tl.trans(q), input_precision=PRECISION)
        y = to_rows(tl.dot(c, read, y, input_precision=PRECISION), BLOCK_D) + skip[None, :] * x
        state = tl.dot(c, k, state, input_precision=PRECISION)
        rounded = for_product(state, PRECISION, FAST)
        token = (b * L + first) * D
        alive = alive_rows(live, d, not REVERSE, D, BLOCK_D)  # dead rows come before the chunk's
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
    if final_ptr is not None:
        left = begin if REVERSE else chunks - end
        _store_states(final_ptr, b * D + d, state, d, tl.where(left == 0, D, 0), BLOCK_M)


@triton.jit
def _backward_direction(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
    states_ptr, entry_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, dskip_ptr, dbias_ptr, dinitial_ptr,
    B, L, b, segment, segments, segment_chunks, d, block,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr,
    x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one direction of one segment of one batch element and block of channels back.

    Of two directions, direction 0 also writes the gradient of the gate. For ``_keys_kernel`` it
    leaves the sums over the block's channels of

        [dY | eps W] by [S0 | C] and of C by dS,    (blocks, N, B, chunks, 16 (3 BLOCK_M + 32)).
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    chunks, begin = tl.cdiv(L, T), segment * segment_chunks
    end = tl.minimum(begin + segment_chunks, chunks)
    lane = ((direction * B + b) * segments + segment) * D + d
    mask = alive_row(0, 1, d, D, BLOCK_D)
    channel = mask[None, :]
    dstate = _entry_state(entry_ptr, lane, d, D, BLOCK_D, BLOCK_M)
    bias = load_row(bias_ptr + direction * D + d, mask)
    if FAST:
        bias *= -1.4426950408889634
    skip = load_row(skip_ptr + direction * D + d, mask)
    dbias, dskip = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    x_ptr += direction * x_stride_dir + b * x_stride_b
    dt_ptr += direction * dt_stride_dir + b * dt_stride_b
    later = for_product(dstate, PRECISION, FAST)
    for i in range(begin, end):
        n = i if REVERSE else (begin + end - 1 - i)
        chunk = (direction * B + b) * chunks + n
        keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t16[:, None] * (2 * BLOCK_M) + m[None, :]
        k, q = tl.load(keys), tl.load(keys + BLOCK_M)
        gram = gram_ptr + chunk * (2 * T * T)
        read = tl.load(gram + T * T + t16[:, None] * T + t16[None, :])
        state_row = states_ptr + chunk * (D * BLOCK_M) + (d[:, None] * BLOCK_M + m[None, :])
        state = load_states(state_row, d, D, BLOCK_D)
        start, live = tl.minimum(n * T, L - T), L - n * T
        first = tl.cast(start + ((T - 1) if REVERSE else 0), tl.int64)
        token = (b * L + first) * D
        x_row, dt_row = x_ptr + first * x_stride_l + d, dt_ptr + first * dt_stride_l + d
        dout_row = dout_ptr + token + d
        if z_ptr is not None:
            z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
            y_row, dz_row = y_ptr + token + d, dz_ptr + token + d
        alive = alive_rows(live, d, not REVERSE, D, BLOCK_D)  # dead rows come before the chunk's
        if z_ptr is None:
            dy = load_rows(dout_row, sign * D, alive)
        else:
            divisor = broadcast_rows(kappa_ptr + chunk * (2 * T) + T, BLOCK_D)
            z = load_rows(z_row, sign * z_stride_l, channel)
            s = gate_sigmoid(z, divisor, FAST)
            dy = load_rows(dout_row, sign * D, channel) * s
            if direction == 0:  # silu'(z) = s + silu(z) (1 - s)
                dz = dy * load_rows(y_row, sign * D, channel) * (1.0 + z * (1.0 - 2.0 * s))
                store_rows(dz_row, sign * D, dz, alive)
            dy *= z
        recalled = to_rows(tl.dot(state, tl.trans(k), input_precision=PRECISION), BLOCK_D)
        kappa = broadcast_rows(kappa_ptr + chunk * (2 * T), BLOCK_D)
        x = load_rows(x_row, sign * x_stride_l, channel)
        dt = load_rows(dt_row, sign * dt_stride_l, channel)
        decay, eps = decay_and_eps(dt, bias[None, :], kappa, FAST)
        dy = for_product(dy, PRECISION, FAST)
        dys, xs = columns(tl.trans(dy), 16), columns(tl.trans(x), 16)
        for t in tl.static_range(T):
            dskip += dys[t] * xs[t]
        c_tile = _forward_substitution(x - recalled, eps, gram, BLOCK_D, PRECISION, FAST)
        dy_tile = from_columns(dys, BLOCK_D)
        dc = tl.dot(later, tl.trans(k), input_precision=PRECISION)
        dc = tl.dot(dy_tile, tl.trans(read), dc, input_precision=PRECISION)
        dstate = tl.dot(dy_tile, q, dstate, input_precision=PRECISION)
        token = ((direction * B + b) * L + first) * D + d
        w_tile = _backward_substitution(to_rows(dc, BLOCK_D), eps, gram, BLOCK_D, PRECISION, FAST)
        c, w = tl.trans(c_tile), tl.trans(w_tile)
        store_rows(dx_ptr + token, sign * D, w + skip[None, :] * dy, alive)
        dv = w * (c * decay)
        store_rows(ddt_ptr + token, sign * D, dv, alive)
        dbias += tl.sum(dv, 0)
        dstate = tl.dot(w_tile, -k, dstate, input_precision=PRECISION)
        # Tensor cores take 64 rows at least: the last 16 are nothing.
        zero = tl.zeros((BLOCK_D, T), tl.float32)
        rows = tl.join(tl.join(dy_tile, w_tile), tl.join(c_tile, zero))
        rows = tl.reshape(tl.permute(rows, (3, 2, 1, 0)), (4 * T, BLOCK_D))
        tl.debug_barrier()  # keeps the state from being loaded early: fewer spills
        state = load_states(state_row, d, D, BLOCK_D)  # again, rather than kept in registers
        row = tl.arange(0, 4 * T)[:, None]
        part = ((block.to(tl.int64) * DIRECTIONS + direction) * B + b) * chunks + n
        part = sums_ptr + part * (T * (3 * BLOCK_M + 2 * T))
        both = part + row * (BLOCK_M + T)
        if BLOCK_M == T:  # side by side in one product
            by = tl.reshape(tl.permute(tl.join(state, c_tile), (0, 2, 1)), (BLOCK_D, 2 * T))
            by = tl.dot(rows, opaque(by, FAST), input_precision=PRECISION)
            tl.store(both + tl.arange(0, 2 * T)[None, :], by, mask=row < 2 * T)
        else:
            by_state = tl.dot(rows, state, input_precision=PRECISION)
            by_c = tl.dot(rows, opaque(c_tile, FAST), input_precision=PRECISION)
            tl.store(both + m[None, :], by_state, mask=row < 2 * T)
            tl.store(both + BLOCK_M + t16[None, :], by_c, mask=row < 2 * T)
        by_dstate = tl.dot(rows, later, input_precision=PRECISION)
        tl.store(part + T * (2 * T) + row * BLOCK_M + m[None, :], by_dstate, mask=row // T == 2)
        later = for_product(dstate, PRECISION, FAST)
    tl.store(dskip_ptr + lane, dskip, mask=d < D)
    tl.store(dbias_ptr + lane, dbias, mask=d < D)
    if dinitial_ptr is not None:
        left = chunks - end if REVERSE else begin
        _store_states(dinitial_ptr, b * D + d, dstate, d, tl.where(left == 0, D, 0), BLOCK_M)


@triton.jit(do_not_specialize=_RUN_TIME)
def _keys_kernel(
    keys_ptr, sums_ptr, dq_ptr, dk_ptr, B, L, blocks,
    REVERSE: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Add up one chunk's sums over channels and take them back to its queries and keys.

    The blocks are added in order: the same bits from run to run. dq, dk (N, B, L, M).
    """
    T: tl.constexpr = 16
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(L, T)
    n, sequence = chunk % chunks, chunk // chunks
    t, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    wide = t[:, None] * (BLOCK_M + T) + m[None, :]
    square = t[:, None] * (BLOCK_M + T) + BLOCK_M + t[None, :]
    dq, dk = tl.zeros((T, BLOCK_M), tl.float32), tl.zeros((T, BLOCK_M), tl.float32)
    dread, dgram = tl.zeros((T, T), tl.float32), tl.zeros((T, T), tl.float32)
    for block in range(blocks):
        part = sums_ptr + (block * tl.num_programs(0) + chunk) * (T * (3 * BLOCK_M + 2 * T))
        dq += tl.load(part + wide)
        dread += tl.load(part + square)
        part += T * (BLOCK_M + T)
        dk -= tl.load(part + wide)
        dgram -= tl.load(part + square)
        part += T * (BLOCK_M + T)
        dk += tl.load(part + t[:, None] * BLOCK_M + m[None, :])
    causal = t[:, None] >= t[None, :]  # rows are queries, columns keys
    dread = for_product(tl.where(causal, dread, 0.0), PRECISION, FAST)
    dgram = tl.where(causal, dgram, 0.0)
    dgram = for_product(dgram + tl.trans(dgram), PRECISION, FAST)
    keys = keys_ptr + chunk * (T * 2 * BLOCK_M) + t[:, None] * (2 * BLOCK_M) + m[None, :]
    k, q = tl.load(keys), tl.load(keys + BLOCK_M)
    dq = tl.dot(dread, k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dread), q, dk, input_precision=PRECISION)
    dk = tl.dot(dgram, k, dk, input_precision=PRECISION)
    reverse = sequence // B == 1 or REVERSE
    token = tl.minimum(n * T, L - T) + tl.where(reverse, T - 1 - t, t)
    mask = (token >= n * T)[:, None] & (m < M)[None, :]
    row = (sequence * L + token)[:, None] * M + m[None, :]
    tl.store(dq_ptr + row, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    tl.store(dk_ptr + row, dk.to(dk_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _summary_direction(
    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, summary_ptr,
    B, L, b, segment, segments, segment_chunks, d, j,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    direction: tl.constexpr, REVERSE: tl.constexpr, OWN: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take unit state j, or if OWN zeros under the inputs given, through one segment.

    With dout given, what is taken through is the gradient of the state, against the scan.
    """
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    DESCENDING: tl.constexpr = (dout_ptr is not None) != REVERSE
    t16, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    state = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    if not OWN:
        state += tl.where(m == j, 1.0, 0.0)[None, :]
    segment += 1 if DESCENDING else 0  # the last one on the way needs no summary
    chunks, begin = tl.cdiv(L, T), segment * segment_chunks
    end = tl.minimum(begin + segment_chunks, chunks)
    mask = alive_row(0, 1, d, D, BLOCK_D)
    channel = mask[None, :]
    bias = load_row(bias_ptr + direction * D + d, mask)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b + d
    rounded = for_product(state, PRECISION, FAST)
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
            taken = _forward_substitution(rest, eps, gram, BLOCK_D, PRECISION, FAST)
        else:
            if OWN:
                alive = alive_rows(L - n * T, d, not REVERSE, D, BLOCK_D)
                dy = load_rows(dout_ptr + (b * L + first) * D + d, sign * D, alive)
                if z_ptr is not None:
                    z_row = z_ptr + b * z_stride_b + first * z_stride_l + d
                    dy *= half_silu(load_rows(z_row, sign * z_stride_l, channel), FAST)
                read = tl.load(gram + T * T + t16[:, None] * T + t16[None, :])
                dy = for_product(dy, PRECISION, FAST)
                dy = from_columns(columns(tl.trans(dy), 16), BLOCK_D)
                recalled = tl.dot(dy, tl.trans(read), recalled, input_precision=PRECISION)
                state = tl.dot(dy, tl.load(keys + BLOCK_M), state, input_precision=PRECISION)
            taken = _backward_substitution(
                to_rows(recalled, BLOCK_D), eps, gram, BLOCK_D, PRECISION, FAST
            )
            k = -k
        state = tl.dot(taken, k, state, input_precision=PRECISION)
        rounded = for_product(state, PRECISION, FAST)
    lane = (((direction * B + b) * segments + segment) * (M + 1) + j) * D + d
    _store_states(summary_ptr, lane, state, d, D, BLOCK_M)


@triton.jit(do_not_specialize=_RUN_TIME)
def _forward_kernel(
    x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr,
    states_ptr, entry_ptr, final_ptr, B, L, segments, segment_chunks,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
    REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one direction, or both: the second adds to, gates and stores what the first left."""
    b, segment, _, block = _place(segments, 1, (D + BLOCK_D - 1) // BLOCK_D)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    _forward_direction(
        x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr,
        states_ptr, entry_ptr, final_ptr, B, L, b, segment, segments, segment_chunks, d,
        x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
        0, REVERSE, x_stride_l, dt_stride_l, z_stride_l, D, BLOCK_D, BLOCK_M, FAST, PRECISION,
    )  # fmt: skip
    if z_ptr is not None:
        # A lane reads the sum that it wrote itself; this makes it so for any layout.
        tl.debug_barrier()
        _forward_direction(
            x_ptr, dt_ptr, z_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr, y_ptr, out_ptr,
            states_ptr, entry_ptr, final_ptr, B, L, b, segment, segments, segment_chunks, d,
            x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
            1, True, x_stride_l, dt_stride_l, z_stride_l, D, BLOCK_D, BLOCK_M, FAST, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=_RUN_TIME)
def _backward_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr, bias_ptr,
    states_ptr, entry_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, dskip_ptr, dbias_ptr, dinitial_ptr,
    B, L, segments, segment_chunks, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
    z_stride_b, REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one of the directions back."""
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    b, segment, own, block = _place(segments, DIRECTIONS, (D + BLOCK_D - 1) // BLOCK_D)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    for direction in tl.static_range(DIRECTIONS):
        if direction == own:
            _backward_direction(
                x_ptr, dt_ptr, z_ptr, dout_ptr, y_ptr, keys_ptr, gram_ptr, kappa_ptr, skip_ptr,
                bias_ptr, states_ptr, entry_ptr, dx_ptr, ddt_ptr, dz_ptr, sums_ptr, dskip_ptr,
                dbias_ptr, dinitial_ptr, B, L, b, segment, segments, segment_chunks, d, block,
                x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b, direction,
                DIRECTIONS, REVERSE or direction == 1, x_stride_l, dt_stride_l, z_stride_l,
                D, BLOCK_D, BLOCK_M, FAST, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=_RUN_TIME)
def _summary_kernel(
    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, summary_ptr,
    B, L, segments, segment_chunks, x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
    z_stride_b, REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr,
    z_stride_l: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Summarise what a segment does to a state, or against the scan to a gradient of one.

    summary (N, B, S, M + 1, D, BLOCK_M): j < M is where unit state j ends if nothing is given, M
    where zeros end under what is given: x, or the gradient of y.
    """
    DIRECTIONS: tl.constexpr = 1 if z_ptr is None else 2
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    b, segment, place, block = _place(segments - 1, DIRECTIONS, (M + 1) * BLOCKS)
    j = block // BLOCKS
    d = (block - j * BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    for direction in tl.static_range(DIRECTIONS):
        for own in tl.static_range(2):
            if place == direction and (j == M) == (own == 1):
                _summary_direction(
                    x_ptr, dt_ptr, z_ptr, dout_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr,
                    summary_ptr, B, L, b, segment, segments, segment_chunks, d, j,
                    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, z_stride_b,
                    direction, REVERSE or direction == 1, own == 1, x_stride_l, dt_stride_l,
                    z_stride_l, D, BLOCK_D, M, BLOCK_M, FAST, PRECISION,
                )  # fmt: skip


@triton.jit(do_not_specialize=_RUN_TIME)
def _carry_kernel(
    summary_ptr, start_ptr, entry_ptr, B, segments,
    DESCENDING: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Carry the state of one channel over the segments: entry (N, B, S, D, BLOCK_M).

    DESCENDING is the way of direction 0; direction 1 goes the other way.
    """
    j = tl.arange(0, BLOCK_M)
    d, rest = tl.program_id(0) % D, (tl.program_id(0) // D).to(tl.int64)
    b, direction = rest % B, rest // B
    if start_ptr is None:
        state = tl.zeros((BLOCK_M,), tl.float32)
    else:
        state = tl.load(start_ptr + (b * D + d) * BLOCK_M + j)
    descending = direction == (0 if DESCENDING else 1)
    # A step is short: load three segments ahead, as far as shared memory holds them.
    for i in tl.range(segments - 1, num_stages=4 if BLOCK_M <= 32 else 1):
        place = rest * segments + tl.where(descending, segments - 1 - i, i)
        summary = summary_ptr + (place * ((M + 1) * D) + d) * BLOCK_M + j
        unit = summary[None, :] + j[:, None] * (D * BLOCK_M)
        transition = tl.load(unit, mask=(j < M)[:, None], other=0.0)
        own = tl.load(summary + M * D * BLOCK_M)
        tl.store(entry_ptr + (place * D + d) * BLOCK_M + j, state)
        state = own + tl.sum(transition * state[:, None], 0)
    place = rest * segments + tl.where(descending, 0, segments - 1)
    tl.store(entry_ptr + (place * D + d) * BLOCK_M + j, state)


# -------------------------------------------------------------------------------------- launchers

# What the summary takes for each state started from, as a share of what the kernel takes.
_SUMMARY_SHARE = {"exact_forward": 0.6, "exact_backward": 0.3, "exact_backward_float32": 0.3}


def padded_states(states: int) -> int:
    """Return M as the kernels see it: what a matrix product takes."""
    return max(16, triton.next_power_of_2(states))


def _pack(q: Tensor, k: Tensor, block_m: int, reverse: bool) -> dict[str, Tensor]:
    """Return keys, queries and Gram matrices by chunk: what the Gram kernel writes."""
    (directions, B, L, M), T = k.shape, tuning.CHUNK
    q, k = adjacent_channels(q), adjacent_channels(k)
    lead = (directions, B, triton.cdiv(L, T))
    packed = {
        "keys_ptr": torch.empty(*lead, T, 2 * block_m, device=k.device),
        "gram_ptr": torch.empty(*lead, 2, T, T, device=k.device),
        "kappa_ptr": torch.empty(*lead, 2, T, device=k.device),
    }
    strides = {
        f"{name}_stride_{axis}": stride
        for name, tensor in (("q", q), ("k", k))
        for axis, stride in zip(("dir", "b", "l"), tensor.stride(), strict=False)
    }
    launch(
        _gram_kernel, math.prod(lead), k, num_warps=1, q_ptr=q, k_ptr=k, **packed, B=B, L=L, **strides,
        REVERSE=reverse, M=M, BLOCK_M=block_m, PRECISION=tuning.dot_precision(k.dtype),
        FAST=tuning.fast(k.device),
    )  # fmt: skip
    return packed


class _Scan:
    """One call: how it is spread over the device, and what all its kernels over segments take.

    Args:
        kernel: Name of the main kernel in ``tuning``.
        rows: Programs that it has for a block of channels, if sequences are not cut.
        x: Values, (N, B, L, D).
        dt: Raw step sizes, (N, B, L, D).
        q: Queries, (N, B, L, M).
        k: Keys, (N, B, L, M).
        bias: Added to dt, (N, D).
        z: Gate before its SiLU, (B, L, D), of two directions.
        reverse: Which way a single direction goes.

    Attributes:
        block_m: States of a channel as the kernels see them, a power of two.
        blocks: Blocks of channels.
        segments: S.
    """

    def __init__(
        self,
        kernel: str,
        rows: int,
        x: Tensor,
        dt: Tensor,
        q: Tensor,
        k: Tensor,
        bias: Tensor,
        z: Tensor | None,
        reverse: bool,
    ) -> None:
        _, B, L, channels = x.shape
        self.x, dt = adjacent_channels(x), adjacent_channels(dt)
        z = None if z is None else adjacent_channels(z)
        self.M, self.block_m = k.shape[3], padded_states(k.shape[3])
        self.reverse = reverse and z is None

        self.block_d, self.num_warps = tuning.blocks(kernel, channels, x.device)
        self.blocks = triton.cdiv(channels, self.block_d)
        programs = rows * self.blocks
        self.segments, segment_chunks = tuning.segments(
            programs * self.num_warps,
            triton.cdiv(L, tuning.CHUNK),
            x.device,
            overhead=1 + _SUMMARY_SHARE[kernel] * (self.M + 1),
        )
        self.programs = programs * self.segments
        self.arguments = {
            "x_ptr": self.x, "dt_ptr": dt, "z_ptr": z, "bias_ptr": bias.contiguous(),
            **_pack(q, k, self.block_m, self.reverse),
            "B": B, "L": L, "segments": self.segments, "segment_chunks": segment_chunks,
            "x_stride_dir": self.x.stride(0), "x_stride_b": self.x.stride(1),
            "x_stride_l": self.x.stride(2),
            "dt_stride_dir": dt.stride(0), "dt_stride_b": dt.stride(1), "dt_stride_l": dt.stride(2),
            "z_stride_b": 0 if z is None else z.stride(0),
            "z_stride_l": 0 if z is None else z.stride(1),
            "REVERSE": self.reverse, "D": channels, "BLOCK_M": self.block_m,
            "FAST": tuning.fast(x.device), "PRECISION": tuning.dot_precision(x.dtype),
        }  # fmt: skip

    def run(self, kernel: triton.JITFunction, **arguments: Tensor | None) -> None:
        """Run the main kernel."""
        arguments |= self.arguments | {"BLOCK_D": self.block_d, "num_warps": self.num_warps}
        launch(kernel, self.programs, self.x, **arguments)

    def entries(self, start: Tensor | None, dout: Tensor | None) -> Tensor | None:
        """Return the state before every segment, (N, B, S, D, BLOCK_M), None for a zero state.

        With dout (B, L, D), that is the gradient of the state after every segment.

        Args:
            start: State (or its gradient) before the first segment on the way, (B, D, M).
            dout: Gradient of the output.
        """
        if start is not None:
            start = F.pad(start, (0, self.block_m - self.M)).contiguous()
        if self.segments == 1:
            return start
        directions, B, _, channels = self.x.shape
        lead, starts = (directions, B, self.segments), self.M + 1
        summary = torch.empty(*lead, starts, channels, self.block_m, device=self.x.device)
        block, num_warps = tuning.blocks("exact_summary", channels, self.x.device)
        programs = directions * B * (self.segments - 1) * starts * triton.cdiv(channels, block)
        launch(
            _summary_kernel, programs, self.x, num_warps=num_warps, **self.arguments, dout_ptr=dout,
            summary_ptr=summary, M=self.M, BLOCK_D=block,
        )  # fmt: skip
        entry = torch.empty(*lead, channels, self.block_m, device=self.x.device)
        launch(
            _carry_kernel, directions * B * channels, self.x, num_warps=self.block_m // 16,
            summary_ptr=summary, start_ptr=start, entry_ptr=entry, B=B, segments=self.segments,
            DESCENDING=self.reverse != (dout is not None), D=channels, M=self.M,
            BLOCK_M=self.block_m,
        )  # fmt: skip
        return entry

    def unpad(self, state: Tensor | None) -> Tensor | None:
        """Return (B, D, M) of (B, D, BLOCK_M)."""
        return None if state is None else state[..., : self.M].contiguous()


def forward(
    x: Tensor,
    dt: Tensor,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor | None,
    initial_state: Tensor | None,
    reverse: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Scan both directions, average and gate; or scan a single direction.

    Args:
        x: Values, (N, B, L, D), N = 2 for both directions and 1 for one.
        dt: Raw step sizes, (N, B, L, D).
        q: Queries, (N, B, L, M).
        k: Keys, (N, B, L, M).
        D: Skip weights, (N, D).
        bias: Added to dt, (N, D).
        z: Gate before its SiLU, (B, L, D), if N = 2, else None.
        initial_state: (B, D, M) float32 or None for zeros, if N = 1, else None.
        reverse: Scan from the last token to the first, if N = 1.
        save: Also return what the backward pass needs.

    Returns:
        out (B, L, D) in the dtype of x; the sum of both directions before the gate, (B, L, D)
        float32, with ``save`` if N = 2; the state before every chunk, (N, B, chunks, D, BLOCK_M)
        float32, rounded as products take it, with ``save``; the final state, (B, D, M) float32, if
        N = 1. None for the others.
    """
    length = x.shape[2]
    x, dt, q, k, z = padded_tokens(tuning.CHUNK, x, dt, q, k, z)
    _, B, L, channels = x.shape
    both = z is not None
    scan = _Scan("exact_forward", B, x, dt, q, k, bias, z, reverse)
    out, y_sum, states, final_state = x.new_empty(B, L, channels), None, None, None
    if both:
        y_sum = torch.empty(B, L, channels, device=x.device)
    else:
        final_state = torch.empty(B, channels, scan.block_m, device=x.device)
    if save:
        chunks = triton.cdiv(L, tuning.CHUNK)
        states = torch.empty(*x.shape[:2], chunks, channels, scan.block_m, device=x.device)
    scan.run(
        _forward_kernel, skip_ptr=D.contiguous(), y_ptr=y_sum, out_ptr=out, states_ptr=states,
        entry_ptr=scan.entries(initial_state, None), final_ptr=final_state,
    )  # fmt: skip
    if length < L:
        out, y_sum = (None if t is None else t[:, :length].contiguous() for t in (out, y_sum))
    return out, y_sum if save else None, states, scan.unpad(final_state)


def backward(
    dout: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
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
    """Return the gradients for x, dt, q, k, D, bias, z and the initial state, in their dtypes.

    Args:
        dout: Gradient of the output, (B, L, D).
        dfinal: Gradient of the final state, (B, D, M) float32 or None for zeros, if N = 1.
        x: Values, (N, B, L, D).
        dt: Raw step sizes, (N, B, L, D).
        q: Queries, (N, B, L, M).
        k: Keys, (N, B, L, M).
        D: Skip weights, (N, D).
        bias: Added to dt, (N, D).
        z: Gate before its SiLU, (B, L, D), if N = 2, else None.
        initial_state: As given to the forward pass.
        y_sum: As saved by the forward pass.
        states: As saved by the forward pass, or None to scan again.
        reverse: As given to the forward pass.
    """
    if states is None:
        _, y_sum, states, _ = forward(x, dt, q, k, D, bias, z, initial_state, reverse, save=True)
    length, T = x.shape[2], tuning.CHUNK
    x, dt, q, k, z, dout, y_sum = padded_tokens(T, x, dt, q, k, z, dout, y_sum)
    directions, B, L, channels = x.shape
    precise = tuning.dot_precision(x.dtype) == "tf32x3"
    kernel = "exact_backward_float32" if precise else "exact_backward"
    scan = _Scan(kernel, directions * B, x, dt, q, k, bias, z, reverse)
    dout = dout.contiguous()
    dx, ddt = x.new_empty(x.shape), dt.new_empty(dt.shape)
    dz = None if z is None else z.new_empty(z.shape)
    dinitial = None
    if initial_state is not None:
        dinitial = torch.empty(B, channels, scan.block_m, device=x.device)
    sums = torch.empty(
        scan.blocks, directions, B, triton.cdiv(L, T), T * (3 * scan.block_m + 2 * T),
        device=x.device,
    )  # fmt: skip
    dskip, dbias = torch.empty(2, directions, B, scan.segments, channels, device=x.device)
    entries = scan.entries(dfinal, dout)
    scan.run(
        _backward_kernel, dout_ptr=dout, y_ptr=y_sum, skip_ptr=D.contiguous(), states_ptr=states,
        entry_ptr=entries, dx_ptr=dx, ddt_ptr=ddt, dz_ptr=dz,
        sums_ptr=sums, dskip_ptr=dskip, dbias_ptr=dbias, dinitial_ptr=dinitial,
    )  # fmt: skip
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    launch(
        _keys_kernel, directions * B * triton.cdiv(L, T), x, num_warps=1,
        keys_ptr=scan.arguments["keys_ptr"], sums_ptr=sums, dq_ptr=dq, dk_ptr=dk, B=B, L=L,
        blocks=scan.blocks, REVERSE=scan.reverse, M=scan.M, BLOCK_M=scan.block_m,
        PRECISION=tuning.dot_precision(x.dtype), FAST=tuning.fast(x.device),
    )  # fmt: skip
    dx, ddt, dq, dk, dz = (
        t if t is None or length == L else t[..., :length, :] for t in (dx, ddt, dq, dk, dz)
    )
    return (
        dx,
        ddt,
        dq,
        dk,
        dskip.sum((1, 2)).to(D.dtype),
        dbias.sum((1, 2)).to(bias.dtype),
        dz,
        scan.unpad(dinitial),
    )
