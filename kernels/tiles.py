"""Triton building blocks of the scan kernels: columns of a tile, broadcast rows, gates.

A chunk of T = 16 tokens and BLOCK_D channels lives in two shapes: as a tile [BLOCK_D, T] for matrix
products, and as a tuple of its T columns [BLOCK_D], one channel per lane, for what runs token by
token. FAST writes the exponentials in PTX without the range guards of tl.exp, for NVIDIA GPUs.
"""

import triton
import triton.language as tl


@triton.jit
def columns(tile, BLOCK_D: tl.constexpr):
    """Split a tile [BLOCK_D, 16] into the tuple of its 16 columns."""
    x0, x1 = tl.split(tl.reshape(tile, (BLOCK_D, 2, 2, 2, 2)))  # by the lowest bit of the index
    x00, x01 = tl.split(x0)
    x10, x11 = tl.split(x1)
    x000, x001 = tl.split(x00)
    x010, x011 = tl.split(x01)
    x100, x101 = tl.split(x10)
    x110, x111 = tl.split(x11)
    c0, c8 = tl.split(x000)
    c4, c12 = tl.split(x001)
    c2, c10 = tl.split(x010)
    c6, c14 = tl.split(x011)
    c1, c9 = tl.split(x100)
    c5, c13 = tl.split(x101)
    c3, c11 = tl.split(x110)
    c7, c15 = tl.split(x111)
    return (c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15)


@triton.jit
def from_columns(c, BLOCK_D: tl.constexpr):
    """Join a tuple of 16 columns into a tile [BLOCK_D, 16], the inverse of ``columns``."""
    x00 = tl.join(tl.join(c[0], c[8]), tl.join(c[4], c[12]))
    x01 = tl.join(tl.join(c[2], c[10]), tl.join(c[6], c[14]))
    x10 = tl.join(tl.join(c[1], c[9]), tl.join(c[5], c[13]))
    x11 = tl.join(tl.join(c[3], c[11]), tl.join(c[7], c[15]))
    return tl.reshape(tl.join(tl.join(x00, x01), tl.join(x10, x11)), (BLOCK_D, 16))


@triton.jit
def four_scalars(pointer, BLOCK_D: tl.constexpr):
    """Load 4 consecutive float32 into 4 columns [BLOCK_D], one 128-bit load per lane."""
    offsets = tl.zeros((BLOCK_D, 1), tl.int32) + tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.reshape(tl.load(pointer + offsets), (BLOCK_D, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return (c0, c1, c2, c3)


@triton.jit
def alive_row(t, live, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask [BLOCK_D] of the t-th token of a chunk of which ``live`` tokens exist."""
    if D % BLOCK_D == 0:
        return tl.zeros((BLOCK_D,), tl.int32) + t < live
    return d < tl.where(t < live, D, 0)


@triton.jit
def load_row(pointer, mask):
    """Load a row [BLOCK_D] as float32, zero where masked."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_states(pointer, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load a tile [BLOCK_D, ...] of states, zero for channels beyond D."""
    if D % BLOCK_D == 0:
        return tl.load(pointer)
    return tl.load(pointer, mask=(d < D)[:, None], other=0.0)


@triton.jit
def longhorn_eps(v, kappa_1, FAST: tl.constexpr):
    """Return 1 / (kappa_1 + exp(-v)), with kappa_1 = 1 + |k|^2."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, $2;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f,f",
            [v, kappa_1],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return 1.0 / (kappa_1 + tl.exp(-v))


@triton.jit
def decay_and_eps(dt, bias, kappa_1, FAST: tl.constexpr):
    """Return exp(-v) and eps = 1 / (kappa_1 + exp(-v)), v = dt + bias; FAST takes -bias log2(e).

    Their product is the derivative of log(eps) by v. The equal 1 - eps kappa_1 cancels where keys
    are long: in float32 its error is 1 % at |k| 400 and 30 % at 4,000. The exponential is bounded so
    that the product is finite; where that acts eps is below 1e-34.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            fma.rn.f32 t, $2, 0fBFB8AA3B, $3;
            min.f32 t, t, 0f42E60000;
            ex2.approx.ftz.f32 $0, t;
            add.f32 t, $0, $4;
            rcp.approx.ftz.f32 $1, t;
            }""",
            "=&f,=&f,f,f,f",
            [dt, bias, kappa_1],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    decay = tl.exp(tl.minimum(-(dt + bias), 80.0))
    return decay, 1.0 / (kappa_1 + decay)


@triton.jit
def half_silu(z, FAST: tl.constexpr):
    """Return silu(z) / 2 = z / (2 + 2 exp(-z))."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            fma.rn.f32 t, t, 0f40000000, 0f40000000;
            rcp.approx.ftz.f32 t, t;
            mul.f32 $0, t, $1;
            }""",
            "=f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return z / (2.0 + 2.0 * tl.exp(-z))


@triton.jit
def half_sigmoid(z, FAST: tl.constexpr):
    """Return sigmoid(z) / 2 = 1 / (2 + 2 exp(-z))."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            fma.rn.f32 t, t, 0f40000000, 0f40000000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return 1.0 / (2.0 + 2.0 * tl.exp(-z))


@triton.jit
def gate_sigmoid(z, divisor, FAST: tl.constexpr):
    """Return sigmoid(z) / divisor."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            fma.rn.f32 t, t, $2, $2;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f,f",
            [z, divisor],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return 1.0 / (divisor + divisor * tl.exp(-z))


@triton.jit
def opaque(tile, FAST: tl.constexpr):
    """Return the tile through a move, which hides from the compiler how it was put together.

    Triton 3.9 aborts on a joined and reshaped tile as second operand of a product ("Illegal shared
    layout", in TritonGPUOptimizeDotOperands). The move is no instruction in the end.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [tile], dtype=tl.float32, is_pure=True, pack=1
        )
    return tile
