"""The exact Longhorn scan in chunks, cut in splits: the states that splits start from.

Sequences too few to fill the device are cut in splits of whole chunks, which run in parallel.
Before that, the kernel here goes through all chunks in order. It only updates the state, and stores
it before every split. The backward pass has a kernel of its own, ``exact_splits_backward.py``.
Equations and letters are in ``exact.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.exact_parts import (
    RUN_TIME,
    forward_substitution,
    load_gram,
    load_keys,
    place_of_program,
    split_state,
    store_states,
)
from vil.kernels.triton.tiles import (
    load_ranks,
    load_row,
    load_rows,
    longhorn_eps,
    round_tf32,
    to_rows,
    token_mask,
)


@triton.jit
def _load_chunk(
    n, sequence, x_row, dt_row, keys_ptr, gram_ptr, kappa_ptr, L, d, channel, REVERSE: tl.constexpr,
    x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return a chunk's step sizes or their RANK numbers, keys, Gram matrix, kappa, and x."""
    T: tl.constexpr = 16
    sign: tl.constexpr = -1 if REVERSE else 1
    t16, chunk = tl.arange(0, T), sequence * tl.cdiv(L, T) + n
    first = tl.cast(tl.minimum(n * T, L - T) + ((T - 1) if REVERSE else 0), tl.int64)
    if RANK == 0:
        dt = load_rows(dt_row + first * dt_stride_l + d, sign * dt_stride_l, channel)
    else:
        dt = load_ranks(dt_row + (first + sign * t16) * dt_stride_l, t16 < T, RANK, FAST)
    k, gram = load_keys(keys_ptr, chunk, 0, BLOCK_M), load_gram(gram_ptr, chunk)
    x = load_rows(x_row + first * x_stride_l, sign * x_stride_l, channel, False)
    return dt, k, gram, tl.load(kappa_ptr + chunk * (2 * T) + t16), x


@triton.jit
def _states_direction(
    x_ptr, dt_ptr, dt_weight_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
    split_states_ptr, B, L, b, num_splits, split_chunks, d,
    x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b, direction: tl.constexpr,
    REVERSE: tl.constexpr, x_stride_l: tl.constexpr, dt_stride_l: tl.constexpr, RANK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry the state through one direction."""
    T: tl.constexpr = 16
    step: tl.constexpr = -1 if REVERSE else 1
    mask = token_mask(0, 1, d, D, BLOCK_D)
    bias = load_row(bias_ptr + direction * D + d, mask)[None, :]
    sequence, chunks = direction * B + b, tl.cdiv(L, T)
    x_row = x_ptr + direction * x_stride_dir + b * x_stride_b + d
    dt_row = dt_ptr + direction * dt_stride_dir + b * dt_stride_b
    if RANK > 0:
        weight = load_ranks(dt_weight_ptr + (direction * D + d) * RANK, mask, RANK, FAST)
    state = split_state(start_ptr, b * D + d, d, D, BLOCK_D, BLOCK_M)
    rounded = round_tf32(state, PRECISION, FAST)
    lane = sequence * num_splits * D + d
    # The last split on the way is not gone through.
    count = (chunks - split_chunks) if REVERSE else (num_splits - 1) * split_chunks
    chunk = _load_chunk(
        (chunks - 1) if REVERSE else 0, sequence, x_row, dt_row, keys_ptr, gram_ptr, kappa_ptr, L,
        d, mask[None, :], REVERSE, x_stride_l, dt_stride_l, RANK, BLOCK_M, FAST,
    )  # fmt: skip
    for i in range(count):
        n = (chunks - 1 - i) if REVERSE else i
        # Nothing waits for memory: everything is loaded one chunk ahead.
        ahead = _load_chunk(
            n + step, sequence, x_row, dt_row, keys_ptr, gram_ptr, kappa_ptr, L, d, mask[None, :],
            REVERSE, x_stride_l, dt_stride_l, RANK, BLOCK_M, FAST,
        )  # fmt: skip
        if (i == 0) | (((n + 1) if REVERSE else n) % split_chunks == 0):
            store_states(split_states_ptr, lane + n // split_chunks * D, state, d, D, BLOCK_M)
        dt, k, gram, kappa, x = chunk
        if RANK > 0:
            dt = tl.dot(weight, tl.trans(dt), input_precision=PRECISION)
            dt = to_rows(dt.to(dt_ptr.dtype.element_ty), BLOCK_D).to(tl.float32)
        eps = longhorn_eps(dt + bias, kappa[:, None], FAST)
        recalled = to_rows(tl.dot(rounded, tl.trans(k), input_precision=PRECISION), BLOCK_D)
        c = forward_substitution(x.to(tl.float32) - recalled, eps, gram, BLOCK_D, PRECISION, FAST)
        state = tl.dot(c, k, state, input_precision=PRECISION)
        rounded = round_tf32(state, PRECISION, FAST)
        chunk = ahead
    lane += 0 if REVERSE else (num_splits - 1) * D
    store_states(split_states_ptr, lane, state, d, D, BLOCK_M)


@triton.jit(do_not_specialize=RUN_TIME)
def exact_states_kernel(
    x_ptr, dt_ptr, dt_weight_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
    split_states_ptr, B, L, num_splits, split_chunks, x_stride_dir, x_stride_b, dt_stride_dir,
    dt_stride_b, DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, x_stride_l: tl.constexpr,
    dt_stride_l: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the states that splits start from.

    One direction of one batch element and block of channels. split_states (N, B, S, D, BLOCK_M).
    start (B, D, BLOCK_M), for a single direction: the state before the first split on the way,
    zeros if not given.
    """
    b, _, place, block = place_of_program(1, DIRECTIONS, (D + BLOCK_D - 1) // BLOCK_D)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    for direction in tl.static_range(DIRECTIONS):
        if place == direction:
            _states_direction(
                x_ptr, dt_ptr, dt_weight_ptr, keys_ptr, gram_ptr, kappa_ptr, bias_ptr, start_ptr,
                split_states_ptr, B, L, b, num_splits, split_chunks, d,
                x_stride_dir, x_stride_b, dt_stride_dir, dt_stride_b,
                direction, REVERSE or direction == 1, x_stride_l, dt_stride_l, RANK, D,
                BLOCK_D, BLOCK_M, FAST, PRECISION,
            )  # fmt: skip
