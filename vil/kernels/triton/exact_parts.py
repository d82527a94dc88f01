"""Building blocks of the exact Longhorn scan: places, substitutions, packed keys.

The kernels at the end process data without channels: keys, queries and their Gram matrices, before
the scans and after the backward scan. Equations and letters are in ``exact.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.tiles import (
    asm_identity,
    columns,
    from_columns,
    load_states,
    one_row,
    round_tf32,
)

# Finding the states that splits start from takes a fifth of the scan's time if the device is not
# full. On an H200, the scans took 0.73 of the time with 4 splits (512 px, batch 32, forward), and
# 1.15 with 2 (224 px, batch 64).
MIN_FIT_FOR_SPLITS = 2.5

# Arguments that vary between calls but need no separate compilation: sizes, strides, and the
# alignment of the caller's tensors, which loads of one channel per lane do not use.
RUN_TIME = (
    *("B", "L", "num_splits", "split_chunks", "zero", "blocks", "kappa_scale"),
    *(f"{name}_stride_{axis}" for name in ("x", "dt", "z", "q", "k") for axis in ("dir", "b")),
    *("q_stride_l", "k_stride_l"),
    *(f"{name}_ptr" for name in ("x", "dt", "z", "q", "k", "y", "out", "dout", "dx", "ddt", "dz", "dq", "dk")),
    *("skip_ptr", "bias_ptr", "dt_weight_ptr"),
)


@triton.jit
def place_of_program(num_splits, DIRECTIONS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return batch element, split, direction and block of this program; blocks vary fastest."""
    rest = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) - rest * BLOCKS
    direction, rest = rest % DIRECTIONS, rest // DIRECTIONS
    return (rest // num_splits).to(tl.int64), rest % num_splits, direction, block


@triton.jit
def split_state(split_states_ptr, lane, d, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load the state [BLOCK_D, BLOCK_M] that a split starts from, zeros if none is given."""
    if split_states_ptr is None:
        return tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    else:
        row = split_states_ptr + lane[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        return load_states(row, d, D, BLOCK_D)


@triton.jit
def store_states(pointer, lane, state, d, limit, BLOCK_M: tl.constexpr):
    """Store the states [BLOCK_D, BLOCK_M] of the channels below a limit."""
    row = pointer + lane[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(row, state.to(pointer.dtype.element_ty), mask=(d < limit)[:, None])


@triton.jit
def load_keys(keys_ptr, chunk, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load the keys of a chunk, or its queries, [16, BLOCK_M]."""
    t, m = tl.arange(0, 16), tl.arange(0, BLOCK_M)
    row = keys_ptr + (chunk * 16 + t[:, None]) * (2 * BLOCK_M)
    return tl.load(row + (QUERIES * BLOCK_M + m[None, :]))


@triton.jit
def load_read(gram_ptr, chunk):
    """Load the Gram matrix of keys and queries, [16, 16]."""
    t = tl.arange(0, 16)
    return tl.load(gram_ptr + chunk * 512 + (256 + t[:, None] * 16 + t[None, :]))


@triton.jit
def load_gram(gram_ptr, chunk):
    """Load the Gram matrix of keys as four tiles of four rows, [4, 16]."""
    row = gram_ptr + chunk * 512 + (tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :])
    return tl.load(row), tl.load(row + 64), tl.load(row + 128), tl.load(row + 192)


@triton.jit
def _broadcast(rows):
    """Return four rows of a Gram matrix as broadcast chunks, passed through shared memory."""
    row = columns(tl.trans(rows), 4)
    return (row[0][:, None], row[1][:, None], row[2][:, None], row[3][:, None])


@triton.jit
def forward_substitution(rest, eps, gram, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr):
    """Return C: C_t = eps_t rest_t, subtracted from every later rest_s with weight k_s.k_t.

    rest and eps are chunks, gram is from ``load_gram``. C is [BLOCK_D, 16], rounded for products.
    """
    c = ()
    for i in tl.static_range(4):
        g = _broadcast(gram[i])
        for j in tl.static_range(4):
            c_t = round_tf32(one_row(eps * rest, 4 * i + j), PRECISION, FAST)
            c += (c_t,)
            rest -= g[j] * c_t[None, :]
    return from_columns(c, BLOCK_D)


@triton.jit
def backward_substitution(dc, eps, gram, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr):
    """Return eps W, with W_t = dC_t minus eps_s W_s k_s.k_t for every later s.

    W is the gradient of rest. dc and eps are chunks. eps W is [BLOCK_D, 16], rounded for products.
    """
    w = ()
    for i in tl.static_range(4):
        # As if they were others: rows of the forward substitution must not stay in registers until
        # here.
        g = _broadcast(asm_identity(gram[3 - i], FAST))
        for j in tl.static_range(4):
            w_t = round_tf32(one_row(eps * dc, 15 - 4 * i - j), PRECISION, FAST)
            w = (w_t,) + w
            dc -= g[3 - j] * w_t[None, :]
    return from_columns(w, BLOCK_D)


@triton.jit(do_not_specialize=RUN_TIME)
def gram_kernel(
    q_ptr, k_ptr, keys_ptr, gram_ptr, kappa_ptr, B, L, kappa_scale,
    q_stride_dir, q_stride_b, q_stride_l, k_stride_dir, k_stride_b, k_stride_l,
    REVERSE: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Pack one chunk of keys and queries in scan order, with their Gram matrices.

    A short last chunk is filled with dead rows, the last rows of the chunk before it, so that all
    of its rows can be read. Dead rows have no effect. L must be 16 or more.

    keys (N, B, chunks, 16, 2 BLOCK_M): k then q, float32, zero if dead and beyond M.
    gram (N, B, chunks, 2, 16, 16): K K', then k_tau.q_t for tau <= t and else 0, for products.
    kappa (N, B, chunks, 2, 16): 1 + kappa_scale |k|^2, infinite if dead. Then the divisor of the
    gate: 2 or, if dead, so large that the quotient vanishes.
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
    tl.store(kappa, tl.where(alive, 1.0 + kappa_scale * tl.sum(k * k, 1), float("inf")))
    tl.store(kappa + T, tl.where(alive, 2.0, 1e30))
    gram = gram_ptr + chunk * (2 * T * T) + t[:, None] * T + t[None, :]
    tl.store(gram, tl.dot(k, tl.trans(k), input_precision=PRECISION))
    read = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    read = tl.where(t[:, None] <= t[None, :], read, 0.0)
    tl.store(gram + T * T, round_tf32(read, PRECISION, FAST))


@triton.jit(do_not_specialize=RUN_TIME)
def keys_kernel(
    keys_ptr, sums_ptr, dq_ptr, dk_ptr, B, L, blocks, kappa_scale,
    REVERSE: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Add up one chunk's sums over channels and backpropagate them to its queries and keys.

    Blocks are added in order, so results are bit-identical. dq, dk (N, B, L, M). The diagonal of
    dgram is the gradient of |k|^2 in the step sizes: no token meets its own key in the
    substitution.
    """
    T: tl.constexpr = 16
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.cdiv(L, T)
    n, sequence = chunk % chunks, chunk // chunks
    t, m = tl.arange(0, T), tl.arange(0, BLOCK_M)
    wide = t[:, None] * (BLOCK_M + T) + m[None, :]
    square = t[:, None] * (BLOCK_M + T) + BLOCK_M + t[None, :]
    dq, dk = tl.zeros((T, BLOCK_M), tl.float32), tl.zeros((T, BLOCK_M), tl.float32)
    dread, dgram = tl.zeros((T, T), tl.float32), tl.zeros((T, T), tl.float32)
    by_dstate = tl.zeros((T, BLOCK_M), tl.float32)
    for block in range(blocks):
        part = sums_ptr + (block * tl.num_programs(0) + chunk) * (T * (3 * BLOCK_M + 2 * T))
        dq += tl.load(part + wide)
        dread += tl.load(part + square)
        part += T * (BLOCK_M + T)
        dk -= tl.load(part + wide)
        dgram -= tl.load(part + square)
        part += T * (BLOCK_M + T)
        by_dstate += tl.load(part + t[:, None] * BLOCK_M + m[None, :])
    dk += tl.trans(by_dstate) if BLOCK_M == T else by_dstate  # see _store_sums
    causal = t[:, None] >= t[None, :]  # rows are queries, columns keys
    dread = round_tf32(tl.where(causal, dread, 0.0), PRECISION, FAST)
    dgram = tl.where(causal, dgram, 0.0)
    dgram = tl.where(t[:, None] == t[None, :], kappa_scale * dgram, dgram)
    dgram = round_tf32(dgram + tl.trans(dgram), PRECISION, FAST)
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
