"""Triton building blocks of the scan kernels: chunks of rows, broadcast rows, gates.

A chunk is a tile of rows [16, BLOCK_D], with tokens in registers and one channel per lane. This is
Triton's default layout for the shape, so nothing moves between lanes except at matrix products.
Accesses are whole chunks: to choose the layout of one access, Triton's compiler searches the whole
kernel, so compile time grows with their number. FAST writes the exponentials in PTX without the
range guards of tl.exp, for NVIDIA GPUs.
"""

import triton
import triton.language as tl

# A contiguity hint that puts the channels of an access across the lanes, after its four numbers in
# a row. It is not true and only orders the axes: which of two equally contiguous axes comes first
# differs between releases of Triton.
LANES_NEXT = tl.constexpr(2)

# A product of positive float32 numbers by this factor, truncated to TF32, has no bias: over
# log-uniform mantissas, the mean error is zero. Numbers that TF32 holds stay the same.
TF32_SCALE = tl.constexpr(1.0 + 0.7213475 / 2048)  # 1 + c / 2^11, c = 1 / (2 ln 2)


@triton.jit
def no_lane(BLOCK_D: tl.constexpr):
    """Return zeros [BLOCK_D] that Triton's compiler treats as offsets, so that hints are kept."""
    return tl.arange(0, BLOCK_D) // BLOCK_D * 4


@triton.jit
def columns(tile, N: tl.constexpr):
    """Split a tile [BLOCK_D, N], N a power of two from 4 to 16, into the tuple of its columns."""
    if N == 16:
        return _columns(tl.reshape(tile, (tile.shape[0], 2, 2, 2, 2)), 16)
    elif N == 8:
        return _columns(tl.reshape(tile, (tile.shape[0], 2, 2, 2)), 8)
    else:
        tl.static_assert(N == 4)
        return _columns(tl.reshape(tile, (tile.shape[0], 2, 2)), 4)


@triton.jit
def _columns(tile, N: tl.constexpr):
    """Split by the lowest bit of the column index, then split each half."""
    if N == 2:
        return tl.split(tile)
    else:
        even, odd = tl.split(tile)
        evens, odds = _columns(even, N // 2), _columns(odd, N // 2)
        result = ()
        for i in tl.static_range(N // 2):
            result += (evens[i], odds[i])
        return result


@triton.jit
def join_columns(c, N: tl.constexpr):
    """Join N columns [BLOCK_D], N a power of two, into a tile: the inverse of ``columns``."""
    if N == 2:
        return tl.join(c[0], c[1])
    else:
        evens, odds = (), ()
        for i in tl.static_range(N // 2):
            evens += (c[2 * i],)
            odds += (c[2 * i + 1],)
        tile = tl.join(join_columns(evens, N // 2), join_columns(odds, N // 2))
        return tl.reshape(tile, (c[0].shape[0], N))


@triton.jit
def load_quads(pointer, step: tl.constexpr, N: tl.constexpr):
    """Load N numbers of every lane as a tuple of columns, with one 128-bit load per four numbers.

    Args:
        pointer: First number of each lane, [BLOCK_D]; aligned to 16 bytes.
        step: Elements from four numbers to the next four.
        N: Numbers per lane: 4, 8 or 16.
    """
    quad, j = tl.arange(0, N // 4)[:, None, None], tl.arange(0, 4)[None, None, :]
    pointers = pointer[None, :, None] + (quad * step + j)
    tile = tl.load(tl.max_contiguous(pointers, [1, LANES_NEXT, 4]))
    return columns(tl.reshape(tl.permute(tile, (1, 0, 2)), (pointer.shape[0], N)), N)


@triton.jit
def from_columns(c, BLOCK_D: tl.constexpr):
    """Join a tuple of 16 columns into a tile [BLOCK_D, 16], the inverse of ``columns``.

    ``join_columns`` is not used, because ``columns`` splits first what it joins last. Triton's
    compiler would remove the two, and with them the layout that is their purpose.
    """
    x0 = tl.join(tl.join(c[0], c[1]), tl.join(c[2], c[3]))
    x1 = tl.join(tl.join(c[4], c[5]), tl.join(c[6], c[7]))
    x2 = tl.join(tl.join(c[8], c[9]), tl.join(c[10], c[11]))
    x3 = tl.join(tl.join(c[12], c[13]), tl.join(c[14], c[15]))
    # BLOCK_D, then the bits of the index, the lowest first.
    x = tl.join(tl.join(x0, x1), tl.join(x2, x3))
    return tl.reshape(tl.permute(x, (0, 4, 3, 2, 1)), (BLOCK_D, 16))


@triton.jit
def to_rows(tile, BLOCK_D: tl.constexpr):
    """Return the result [BLOCK_D, 16] of a matrix product as a chunk.

    Goes through columns, which can only lie one channel per lane. Otherwise Triton's compiler moves
    the operands that meet the result to the product's layout, or computes them in both layouts.
    """
    return tl.trans(from_columns(columns(tile, 16), BLOCK_D))


@triton.jit
def one_row(rows, t: tl.constexpr):
    """Return row t of a float32 tile, [BLOCK_D], without instructions: added values are -0.0."""
    # Triton 3.6 and 3.8 make 0.0 of the number -0.0, whose addition takes an instruction.
    nothing = tl.zeros(rows.shape, tl.float32) * -1.0
    return tl.sum(tl.where(tl.arange(0, rows.shape[0])[:, None] == t, rows, nothing), 0)


@triton.jit
def load_broadcast_rows(pointer, BLOCK_D: tl.constexpr):
    """Load 16 float32 into the rows of a chunk, with one 128-bit load per four numbers."""
    quad, j = tl.arange(0, 4)[:, None, None], tl.arange(0, 4)[None, :, None]
    pointers = pointer + (quad * 4 + j + no_lane(BLOCK_D)[None, None, :])
    tile = tl.load(tl.max_contiguous(pointers, [1, 4, LANES_NEXT]))
    return tl.reshape(tile, (16, BLOCK_D))


@triton.jit
def _lines(row, step, first, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the addresses of the cache lines of 16 rows, int64 [BLOCK_D], repeated."""
    BYTES: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
    in_row: tl.constexpr = BLOCK_D * BYTES // 128
    line = tl.arange(0, BLOCK_D) % (16 * in_row)
    channel = tl.minimum(first + line % in_row * (128 // BYTES), D - 1)
    return tl.cast(row, tl.int64) + ((line // in_row).to(tl.int64) * step + channel) * BYTES


@triton.jit
def prefetch_rows(rows, steps, d, D: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr):
    """Bring a chunk of up to four tensors, the first of 16 bits, to the L2 cache."""
    if FAST and BLOCK_D >= 64 and rows[0].dtype.element_ty.primitive_bitwidth == 16:
        which, first = tl.arange(0, BLOCK_D) // (BLOCK_D // 4), tl.min(d, 0)
        lines = _lines(rows[0], steps[0], first, D, BLOCK_D)
        for i in tl.static_range(1, len(rows)):
            lines = tl.where(which == i, _lines(rows[i], steps[i], first, D, BLOCK_D), lines)
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [lines], tl.int32, is_pure=False, pack=1)


@triton.jit
def token_mask(t, num_valid, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask [BLOCK_D] of the t-th token of a chunk with ``num_valid`` existing tokens."""
    if D % BLOCK_D == 0:
        return tl.zeros((BLOCK_D,), tl.int32) + t < num_valid
    return d < tl.where(t < num_valid, D, 0)


@triton.jit
def row_mask(num_valid, d, REVERSE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask [16, BLOCK_D] of a chunk whose first ``num_valid`` tokens exist.

    Rows are tokens or, with REVERSE, tokens from the last to the first.
    """
    t = tl.arange(0, 16)
    token = (15 - t) if REVERSE else t
    alive = tl.zeros((1, BLOCK_D), tl.int32) + token[:, None] < num_valid
    if D % BLOCK_D == 0:
        return alive
    return alive & (d < D)[None, :]


@triton.jit
def load_rows(pointer, step: tl.constexpr, mask, FLOAT: tl.constexpr = True):
    """Load a chunk of 16 rows, zero where masked.

    Args:
        pointer: Channels of the first row, [BLOCK_D]. Triton must not know that the pointer is
            aligned: a lane would get neighbouring channels rather than the tokens of one channel.
        step: Elements from one row to the next.
        mask: Mask, [16 or 1, BLOCK_D].
        FLOAT: Convert to float32.
    """
    rows = pointer[None, :] + (tl.arange(0, 16) * step)[:, None]
    tile = tl.load(rows, mask=mask, other=0.0)
    return tile.to(tl.float32) if FLOAT else tile


@triton.jit
def store_rows(pointer, step: tl.constexpr, tile, mask):
    """Store a chunk; same arguments as ``load_rows``."""
    rows = pointer[None, :] + (tl.arange(0, 16) * step)[:, None]
    tl.store(rows, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_row(pointer, mask):
    """Load a row [BLOCK_D] as float32, zero where masked."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_ranks(pointer, mask, RANK: tl.constexpr, FAST: tl.constexpr):
    """Load RANK numbers from each of the pointers [N], zero where masked, for a product.

    The dtype is kept for NVIDIA GPUs, else float32: Triton's interpreter (3.9) multiplies the bits
    of bfloat16.
    """
    r = tl.arange(0, max(16, triton.next_power_of_2(RANK)))
    mask = mask[:, None] & (r < RANK)[None, :]
    rows = tl.load(pointer[:, None] + r[None, :], mask=mask, other=0.0)
    return rows if FAST else rows.to(tl.float32)


@triton.jit
def load_states(pointer, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load a tile [BLOCK_D, ...] of states in float32, zero for channels beyond D."""
    if D % BLOCK_D == 0:
        return tl.load(pointer).to(tl.float32)
    return tl.load(pointer, mask=(d < D)[:, None], other=0.0).to(tl.float32)


@triton.jit
def longhorn_eps(v, kappa_1, FAST: tl.constexpr):
    """Return 1 / (kappa_1 + exp(-v)), with kappa_1 = 1 + kappa_scale |k|^2."""
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
def exp_and_eps(dt, bias, kappa_1, FAST: tl.constexpr):
    """Return exp(-v) and eps = 1 / (kappa_1 + exp(-v)), v = dt + bias.

    With FAST, bias is -bias log2(e). Their product is the derivative of log(eps) by v. It equals 1
    - eps kappa_1, which cancels for long keys: in float32 its error is 1 % at |k| 400 and 30 % at
    4,000. The exponential is bounded so that the product is finite; the bound acts only where eps
    is below 1e-34.
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
    exp_minus_v = tl.exp(tl.minimum(-(dt + bias), 80.0))
    return exp_minus_v, 1.0 / (kappa_1 + exp_minus_v)


@triton.jit
def sigmoid(z, divisor, FAST: tl.constexpr):
    """Return 1 / (divisor (1 + exp(-z))); denormal numbers count as zeros if FAST."""
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
def half_silu(z, FAST: tl.constexpr):
    """Return silu(z) / 2."""
    return z * sigmoid(z, 2.0, FAST)


@triton.jit
def round_tf32(tile, PRECISION: tl.constexpr, FAST: tl.constexpr):
    """Round a float32 operand to TF32, because tensor cores truncate operands to TF32.

    Truncated operands would make every product too small, by 0.03 % each on average. From sm_90 on,
    one instruction rounds to nearest. Before, that takes three, so two replace it: a multiplication
    by 1 + c / 2^11 and the truncation. It adds between c and 2 c halves of a last place, and c = 1
    / (2 ln 2) makes the mean error over log-uniform mantissas zero. NaN, infinity and numbers that
    TF32 holds are unchanged either way.
    """
    if PRECISION != "tf32":
        return tile
    if FAST >= 90:
        return tl.inline_asm_elementwise(
            "cvt.rn.tf32.f32 $0, $1;", "=r,r", [tile], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0f3F800B8B;
        and.b32 $0, t, 0xFFFFE000;
        }""",
        "=r,r",
        [tile],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def asm_identity(tile, FAST: tl.constexpr):
    """Return the tile through a move, which hides its construction from the compiler.

    Triton 3.8 and 3.9 abort on a joined and reshaped tile as second operand of a product ("Illegal
    shared layout", in TritonGPUOptimizeDotOperands). The move compiles to no instruction.
    """
    if FAST:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [tile], dtype=tl.float32, is_pure=True, pack=1)
    return tile
