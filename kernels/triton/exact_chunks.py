"""The exact Longhorn scan in chunks, its building blocks: a program's place, a chunk's substitutions.

What is computed, and the letters, are in ``longhorn_exact.py``.
"""

import triton
import triton.language as tl

from vil.kernels.triton.tiles import (
    for_product,
    four_broadcast_rows,
    from_columns,
    load_states,
    one_row,
)

# What differs from call to call and is not worth a compilation of its own: sizes, strides, and whether
# tensors of the caller are aligned, which their loads of one channel per lane do not make use of.
RUN_TIME = (
    *("B", "L", "segments", "segment_chunks", "blocks", "kappa_scale"),
    *(f"{name}_stride_{axis}" for name in ("x", "dt", "z", "q", "k") for axis in ("dir", "b")),
    *("q_stride_l", "k_stride_l"),
    *(
        f"{name}_ptr"
        for name in ("x", "dt", "z", "q", "k", "y", "out", "dout", "dx", "ddt", "dz", "dq", "dk")
    ),
    *("skip_ptr", "bias_ptr", "dt_weight_ptr"),
)


def padded_states(states: int) -> int:
    """Return M as the kernels see it: what a matrix product takes."""
    return max(16, triton.next_power_of_2(states))


@triton.jit
def place_of_program(segments, DIRECTIONS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return batch element, segment, direction and block of this program, blocks fastest."""
    rest = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) - rest * BLOCKS
    direction, rest = rest % DIRECTIONS, rest // DIRECTIONS
    return (rest // segments).to(tl.int64), rest % segments, direction, block


@triton.jit
def entry_state(entry_ptr, lane, d, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load the state [BLOCK_D, BLOCK_M] that a segment starts from, zeros if none is given."""
    if entry_ptr is None:
        return tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    else:
        row = entry_ptr + lane[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        return load_states(row, d, D, BLOCK_D)


@triton.jit
def store_states(pointer, lane, state, d, limit, BLOCK_M: tl.constexpr):
    """Store the states [BLOCK_D, BLOCK_M] of the channels below a limit."""
    row = pointer + lane[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(row, state, mask=(d < limit)[:, None])


@triton.jit
def forward_substitution(
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
def backward_substitution(
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
