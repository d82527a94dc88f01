"""Triton building blocks for matrix products whose operands and results stay in registers.

A tensor here has one number for every lane, [LANES], and a tile is a tuple of such tensors. So the code
says which lane holds what. Only the functions at the end move numbers between lanes. A warp has a tile
of 32 channels by 16 columns, which are tokens, states or ranks. It is the result of ``mma.sync``:

    lane 4 g + q has channels 4 g + j and columns 8 n + 2 q + p, at place 8 (j // 2) + 4 n + 2 (j % 2) + p

for j < 4 and n, p < 2. Rounded to bfloat16 and packed in pairs of columns, the tile is the first
operand of the next product as it is. The four channels lie side by side in memory.
Second operands, 16 by 16, come from memory as ``second_operand`` orders them. Numbers are for NVIDIA
GPUs from sm_80 on, and in bfloat16.
"""

import triton
import triton.language as tl

_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    "{$10, $11, $12, $13};"
)
_MMA_8 = tl.constexpr(
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
)
_LOAD_WORDS = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }"
)
_LOAD_WORD = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }")
_STORE_WORDS = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; @p st.global.v2.b32 [$1], {$2, $3}; }"
)
_STORE_FLOAT = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; @p st.global.b32 [$1], $2; }")
_TRANSPOSE = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
_FROM_LANE = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, -1;")


@triton.jit
def zeros(LANES: tl.constexpr, N: tl.constexpr):
    """Return N zeros of every lane."""
    tile = ()
    for _ in tl.static_range(N):
        tile += (tl.zeros((LANES,), tl.float32),)
    return tile


# ---------------------------------------------------------------------------------- pairs of numbers


@triton.jit
def pair(low, high):
    """Return two float32 as a pair of bfloat16, int32."""
    return tl.inline_asm_elementwise(_PAIR, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def rounded_number(value):
    """Return a float32 rounded to bfloat16, as float32."""
    asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;"
    return tl.inline_asm_elementwise(asm, "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def low_half(both):
    """Return the first number of a pair as float32."""
    return (both << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(both):
    """Return the second number of a pair as float32."""
    return (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def negative(pairs):
    """Return pairs with the opposite signs."""
    result = ()
    for i in tl.static_range(len(pairs)):
        result += (pairs[i] ^ -2147450880,)  # 0x80008000
    return result


@triton.jit
def rounded(tile):
    """Return a tile, or its columns in pairs, as pairs of bfloat16: an operand of a product."""
    pairs = ()
    for i in tl.static_range(len(tile) // 2):
        pairs += (pair(tile[2 * i], tile[2 * i + 1]),)
    return pairs


@triton.jit
def two_parts(tile):
    """Return a tile as the sum of two operands: its rounded numbers and what is left, rounded."""
    high, rest = rounded(tile), ()
    for i in tl.static_range(len(high)):
        rest += (tile[2 * i] - low_half(high[i]), tile[2 * i + 1] - high_half(high[i]))
    return high, rounded(rest)


# -------------------------------------------------------------------------------------------- memory


@triton.jit
def _address(pointer):
    return pointer.to(tl.int64, bitcast=True)


@triton.jit
def load_words(pointer, mask=None):
    """Load 8 bytes of every lane as two int32, zeros where masked."""
    if mask is None:
        return tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [_address(pointer)], (tl.int32, tl.int32), False, 1
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _LOAD_WORDS, "=&r,=&r,l,r", [_address(pointer), mask.to(tl.int32)], (tl.int32, tl.int32),
            False, 1,
        )  # fmt: skip


@triton.jit
def load_word(pointer, mask):
    """Load 4 bytes of every lane as int32, zeros where masked."""
    arguments = [_address(pointer), mask.to(tl.int32)]
    return tl.inline_asm_elementwise(_LOAD_WORD, "=&r,l,r", arguments, tl.int32, False, 1)


@triton.jit
def load_float(pointer, mask=None):
    """Load a float32 of every lane, zero where masked."""
    if mask is None:
        return tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=f,l", [_address(pointer)], tl.float32, False, 1)
    else:
        return load_word(pointer, mask).to(tl.float32, bitcast=True)


@triton.jit
def load_floats(pointer, mask=None):
    """Load two float32 of every lane, zeros where masked."""
    low, high = load_words(pointer, mask)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def store_words(pointer, low, high, mask):
    """Store two int32, or float32, of every lane as 8 bytes."""
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    arguments = [_address(pointer), low, high, mask.to(tl.int32)]
    tl.inline_asm_elementwise(_STORE_WORDS, "=r,l,r,r,r", arguments, tl.int32, False, 1)


@triton.jit
def store_float(pointer, value, mask):
    """Store a float32 of every lane."""
    arguments = [_address(pointer), value, mask.to(tl.int32)]
    tl.inline_asm_elementwise(_STORE_FLOAT, "=r,l,f,r", arguments, tl.int32, False, 1)


@triton.jit
def load_operand(pointer):
    """Load a second operand, or half of one's columns; each lane's pairs lie side by side."""
    return load_words(pointer) + load_words(pointer + 4)


@triton.jit
def load_tokens(pointer, step: tl.constexpr, mask):
    """Load four channels of four tokens, 8 pairs of channels, zeros where masked.

    Args:
        pointer: First channel of column 2 q, [LANES]; aligned to 8 bytes.
        step: Elements from one token to the next.
        mask: Mask of each token.
    """
    pairs = ()
    for i in tl.static_range(4):
        pairs += load_words(pointer + (8 * (i // 2) + i % 2) * step, mask[i])
    return pairs


@triton.jit
def store_tokens(pointer, step: tl.constexpr, pairs, mask):
    """Store four channels of four tokens; same arguments as ``load_tokens``."""
    for i in tl.static_range(4):
        row = pointer + (8 * (i // 2) + i % 2) * step
        store_words(row, pairs[2 * i], pairs[2 * i + 1], mask[i])


@triton.jit
def prefetch_tokens(a, a_step: tl.constexpr, b, b_step: tl.constexpr, first, L):
    """Bring a warp's channels of 16 tokens of two tensors to the L2 cache, a row by each lane.

    a and b are the first channel of the warp, [LANES], in tensors whose tokens lie a step apart.
    """
    lane = tl.arange(0, a.shape[0]) % 32
    token = tl.minimum(tl.maximum(first + lane % 16, 0), L - 1).to(tl.int64)
    row = tl.where(lane < 16, _address(a + token * a_step), _address(b + token * b_step))
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [row], tl.int32, False, 1)


@triton.jit
def load_state(pointer, mask):
    """Load a tile of float32 from (channels, 16); pointer is column 2 q of the first channel."""
    tile = ()
    for i in tl.static_range(8):
        tile += load_floats(pointer + (i // 4 * 32 + i % 2 * 16 + i // 2 % 2 * 8), mask)
    return tile


@triton.jit
def store_state(pointer, tile, mask):
    """Store a tile of float32; same arguments as ``load_state``."""
    for i in tl.static_range(8):
        place = pointer + (i // 4 * 32 + i % 2 * 16 + i // 2 % 2 * 8)
        store_words(place, tile[2 * i], tile[2 * i + 1], mask)


# -------------------------------------------------------------------------------- channels and columns


@triton.jit
def from_tokens(pairs):
    """Return the tile of pairs of channels, in float32."""
    tile = ()
    for i in tl.static_range(8):  # j // 2, n, j % 2; p is the token of a pair of columns
        for p in tl.static_range(2):
            both = pairs[4 * (i // 2 % 2) + 2 * p + i // 4]
            tile += (high_half(both) if i % 2 else low_half(both),)
    return tile


@triton.jit
def to_tokens(tile):
    """Return a tile as pairs of channels of each token: the inverse of ``from_tokens``."""
    pairs = ()
    for i in tl.static_range(8):  # n, p, j // 2
        even, odd = tile[8 * (i % 2) + 4 * (i // 4) + i // 2 % 2], tile[8 * (i % 2) + 4 * (i // 4) + i // 2 % 2 + 2]
        pairs += (pair(even, odd),)
    return pairs


@triton.jit
def _interleaved(a, b, ODD: tl.constexpr):
    """Return the pair of the first numbers of two pairs or, with ODD, of the second."""
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, 0x7632;" if ODD else "prmt.b32 $0, $1, $2, 0x5410;"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def operand_of_tokens(pairs):
    """Return pairs of columns, given pairs of channels of each token."""
    operand = ()
    for i in tl.static_range(8):  # j // 2, n, j % 2
        first, second = pairs[4 * (i // 2 % 2) + i // 4], pairs[4 * (i // 2 % 2) + i // 4 + 2]
        operand += (_interleaved(first, second, i % 2),)
    return operand


@triton.jit
def tokens_of_operand(operand):
    """Return pairs of channels of each token, given pairs of columns."""
    pairs = ()
    for i in tl.static_range(8):  # n, p, j // 2
        even, odd = operand[4 * (i % 2) + 2 * (i // 4)], operand[4 * (i % 2) + 2 * (i // 4) + 1]
        pairs += (_interleaved(even, odd, i // 2 % 2),)
    return pairs


# ------------------------------------------------------------------------------------------ products


@triton.jit
def second_operand(k, n):
    """Return where the number of row k and column n of a second operand lies, of 16 by 16."""
    return ((n % 8) * 4 + k % 8 // 2) * 8 + n // 8 * 4 + k // 8 * 2 + k % 2


@triton.jit
def _mma(c, a, b):
    return tl.inline_asm_elementwise(
        _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def add_product(tile, a, b):
    """Add a product to a tile of 16 or 32 rows: a has a tile's pairs, b is 16 by 16."""
    result = ()
    for i in tl.static_range(len(tile) // 4):
        rows, columns = a[4 * (i // 2) : 4 * (i // 2) + 4], b[2 * (i % 2) : 2 * (i % 2) + 2]
        result += _mma(tile[4 * i : 4 * i + 4], rows, columns)
    return result


@triton.jit
def add_half_product(half, a, b):
    """Add to eight columns, 8 numbers, the product of eight columns in pairs, 4 numbers, by b, 8 by 8."""
    result = ()
    for m in tl.static_range(2):
        result += tl.inline_asm_elementwise(
            _MMA_8, "=f,=f,=f,=f,r,r,r,f,f,f,f",
            [a[2 * m], a[2 * m + 1], b, half[4 * m], half[4 * m + 1], half[4 * m + 2], half[4 * m + 3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return result


@triton.jit
def transposed(pairs):
    """Transpose each block of 8 by 8 of an operand: the pairs are then of rows, not of columns."""
    result = ()
    for i in tl.static_range(len(pairs)):
        result += (
            tl.inline_asm_elementwise(_TRANSPOSE, "=r,r", [pairs[i]], dtype=tl.int32, is_pure=True, pack=1),
        )  # fmt: skip
    return result


@triton.jit
def add_channel_product(tile, a, b):
    """Add the sums over a warp's channels of products of columns of a by columns of b, 16 by 16.

    a and b have been ``transposed``. The sum has 8 numbers per lane: rows g and g + 8, as ``add_product``.
    """
    for s in tl.static_range(2):  # 16 channels each
        rows, columns = (a[4 * s], a[4 * s + 2], a[4 * s + 1], a[4 * s + 3]), ()
        for n in tl.static_range(2):
            columns += (b[4 * s + 2 * n], b[4 * s + 2 * n + 1])
        tile = add_product(tile, rows, columns)
    return tile


@triton.jit
def square_transposed(pairs):
    """Return the transposed first operand of 16 by 16, four pairs per lane."""
    t = transposed(pairs)
    return t[0], t[2], t[1], t[3]


@triton.jit
def from_lane(value, lane):
    """Return the value, 32 bits, that another lane of the warp has."""
    return tl.inline_asm_elementwise(_FROM_LANE, "=r,r,r", [value, lane], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def sum_of_quad(value):
    """Return the sum of a float32 over the four lanes of the same channels, in each of them."""
    lane = tl.arange(0, value.shape[0]) % 32
    for i in tl.static_range(2):
        other = from_lane(value.to(tl.int32, bitcast=True), lane ^ (1 << i))
        value += other.to(tl.float32, bitcast=True)
    return value
