"""The bidirectional depthwise convolution with SiLU in Triton: one kernel forward, one backward.

Computes ``reference.causal_conv1d_bidirectional``, in float32 for any input dtype. Both directions
come from one pass over x, and the backward pass recomputes the pre-activations rather than reading
them.

Letters: B batch, L tokens, D channels, K taps. A tile is BLOCK_L tokens of BLOCK_D channels. Its
tokens are unrolled and its channels lie across the lanes, so a row of x, once loaded, feeds all 2K
taps from registers. A tile also reads K - 1 rows on either side, from its neighbours or zeros
beyond the ends of the sequence. Hence ``x[r]`` is token first + r - (K - 1) throughout.

Given an order, all this applies to positions instead of tokens. Rows are read from and written to
the tokens in the table, without a copy. Rows of tokens without a position are not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.interface import ConvKey
from vil.kernels.triton import tuning
from vil.kernels.triton.launch import Kernel
from vil.kernels.triton.tiles import one_row, sigmoid

BLOCK_L = 16
# Programs of the backward pass, for up to four taps and for more. Each has separate sums of the
# parameters' gradients. A large GPU runs twelve, or eight, on each multiprocessor at once. These are
# constants, so that every device adds up in the same order.
BACKWARD_PROGRAMS = (1536, 1024)


@triton.jit
def _in_every_lane(number, FAST: tl.constexpr):
    """Return a number in a form that hides from the compiler that all lanes agree on it.

    The compiler moves such a number to the registers of a warp and back for every use. With all
    loads through a table, this takes 97 more instructions in the forward pass (K = 4, sm_90).
    """
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 lane, t;
            mov.u32 lane, %laneid;
            mov.u32 t, %tid.x;
            and.b32 t, t, 31;
            xor.b32 t, t, lane;
            add.s32 $0, $1, t;
            }""",
            "=r,r",
            [number],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return number


@triton.jit
def _load_order(order_ptr, first, positions, BEFORE: tl.constexpr, ROWS: tl.constexpr):
    """Return the entries of a table at ROWS positions as a tuple of scalars, -1 beyond its ends.

    ``order_ptr`` points at position ``first``, and BEFORE of the rows precede it.
    """
    entries = ()
    for row in tl.static_range(ROWS):
        position = first + (row - BEFORE)
        # As in ``_inside``.
        inside = position >= 0 if row < BEFORE else position < positions
        entries += (tl.load(order_ptr + (row - BEFORE), mask=inside, other=-1),)
    return entries


@triton.jit
def _joined(scalars, START: tl.constexpr, SIZE: tl.constexpr):
    """Return SIZE scalars of a tuple, from index START on, as a tensor."""
    joined = tl.full((SIZE,), 0, tl.int32)
    for i in tl.static_range(SIZE):
        joined = tl.where(tl.arange(0, SIZE) == i, scalars[START + i], joined)
    return joined


@triton.jit
def _rows(
    row_ptr, stride_l, order, first, L, channel, D: tl.constexpr, BEFORE: tl.constexpr,
    HALO: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return pointers to SIZE rows from row START on, and the mask of those in the sequence.

    The first BEFORE rows precede token ``first``, at whose channels ``row_ptr`` points. Given an
    order, whose first HALO entries precede the tile, ``row_ptr`` points at the channels of token 0.
    """
    if order is None:
        row = START + tl.arange(0, SIZE)
        token = first + (row - BEFORE)
        # ``first`` is in the sequence, so a row can leave it on one side only.
        inside = tl.where(row < BEFORE, token >= 0, token < L)
        offset = (row - BEFORE) * stride_l
    else:
        token = _joined(order, START + HALO - BEFORE, SIZE)
        inside, offset = token >= 0, token.to(tl.int64) * stride_l
    return row_ptr[None, :] + offset[:, None], inside[:, None] & (channel < D)[None, :]


@triton.jit
def _load_rows(
    row_ptr, stride_l, order, first, L, channel, D: tl.constexpr, BEFORE: tl.constexpr,
    HALO: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """Return rows START to END of ``_rows``, each [BLOCK_D] in float32, zeros outside the sequence.

    Rows are loaded in tiles of 16, 8, 4, 2 and 1, so that the compiler has few accesses to analyse.
    """
    rows = ()
    for bit in tl.static_range(5):
        if (END - START) & (16 >> bit):
            pointers, mask = _rows(
                row_ptr, stride_l, order, first, L, channel, D, BEFORE, HALO,
                START + (END - START) // (32 >> bit) * (32 >> bit), 16 >> bit,
            )  # fmt: skip
            tile = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            for i in tl.static_range(16 >> bit):
                rows += (one_row(tile, i),)
    return rows


@triton.jit
def _store_rows(
    row_ptr, stride_l, order, rows, first, L, channel, D: tl.constexpr, HALO: tl.constexpr,
    START: tl.constexpr,
):  # fmt: skip
    """Store four rows from row START on (see ``_rows``); no row precedes token ``first``."""
    row = tl.arange(0, 4)
    tile = tl.zeros((4, channel.shape[0]), tl.float32)
    for i in tl.static_range(4):
        tile = tl.where(row[:, None] == i, rows[i][None, :], tile)
    pointers, mask = _rows(row_ptr, stride_l, order, first, L, channel, D, 0, HALO, START, 4)
    tl.store(pointers, tile.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_taps(weight_ptr, channel, D: tl.constexpr, K: tl.constexpr):
    """Return the K taps of a direction, each [BLOCK_D] in float32, from (D, K).

    Loaded as one tile, so that the taps of a channel come in one access. One access per tap would
    touch the same cache lines K times, which costs more than loading the rows of x.
    """
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    mask = (channel[:, None] < D) & (column < K)
    tile = tl.load(weight_ptr + channel[:, None] * K + column, mask=mask, other=0.0)
    taps = ()
    for tap in tl.static_range(K):
        taps += (tl.sum(tl.where(column == tap, tile, 0.0).to(tl.float32), 1),)
    return taps


@triton.jit
def _load_parameters(weight_ptr, bias_ptr, channel, D: tl.constexpr, K: tl.constexpr):
    """Return taps and bias of the causal direction, then of the anti-causal direction."""
    taps_0 = _load_taps(weight_ptr, channel, D, K)
    taps_1 = _load_taps(weight_ptr + D * K, channel, D, K)
    bias_0 = tl.load(bias_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)
    bias_1 = tl.load(bias_ptr + D + channel, mask=channel < D, other=0.0).to(tl.float32)
    return taps_0, bias_0, taps_1, bias_1


# Arguments that need no separate compilation for every value.
_RUN_TIME = (
    *("order_ptr", "B", "L", "positions"),
    *("x_stride_b", "x_stride_l", "dx_stride_b", "dx_stride_l", "stride_l"),
)


@triton.jit(do_not_specialize=_RUN_TIME)
def conv_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, B, L, positions, x_stride_b, x_stride_l,
    stride_l, D: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Convolve one tile of (B, L, D) into (2, B, L, D).

    With order (positions,), int32, a tile consists of positions.
    Strides are in units of UNIT elements, which is all that the compiler knows about alignment. A
    lane then has UNIT neighbouring channels. ``stride_l`` is the stride of contiguous tokens.
    """
    NUM_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    ROWS: tl.constexpr = BLOCK_L + 2 * (K - 1)
    tile = tl.program_id(0) // NUM_BLOCKS
    tiles_per_sequence = tl.cdiv(L if order_ptr is None else positions, BLOCK_L)
    batch = (tile // tiles_per_sequence).to(tl.int64)
    first = (tile % tiles_per_sequence) * BLOCK_L
    channel = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)

    taps_0, bias_0, taps_1, bias_1 = _load_parameters(weight_ptr, bias_ptr, channel, D, K)
    direction = tl.cast(B, tl.int64) * L * D
    order = None
    x_row = x_ptr + UNIT * (batch * x_stride_b) + channel
    out_row_0 = out_ptr + UNIT * (batch * L * stride_l) + channel
    if order_ptr is None:
        x_row += UNIT * (first.to(tl.int64) * x_stride_l)
        out_row_0 += UNIT * (first.to(tl.int64) * stride_l)
    else:
        order = _load_order(order_ptr + _in_every_lane(first, FAST), first, positions, K - 1, ROWS)
    x = _load_rows(x_row, UNIT * x_stride_l, order, first, L, channel, D, K - 1, K - 1, 0, ROWS)
    out_row_1 = out_row_0 + direction
    out_0, out_1 = (), ()
    for row in tl.static_range(BLOCK_L):
        v_0 = bias_0
        v_1 = bias_1
        for tap in tl.static_range(K):
            v_0 += taps_0[tap] * x[row + tap]
            v_1 += taps_1[tap] * x[row + 2 * (K - 1) - tap]
        out_0 += (v_0 * sigmoid(v_0, 1.0, FAST),)
        out_1 += (v_1 * sigmoid(v_1, 1.0, FAST),)
        if row % 4 == 3:
            _store_rows(out_row_0, D, order, out_0, first, L, channel, D, K - 1, row - 3)
            _store_rows(out_row_1, D, order, out_1, first, L, channel, D, K - 1, row - 3)
            out_0, out_1 = (), ()


@triton.jit
def _through_silu(grad, v, FAST: tl.constexpr):
    """Return the gradient of v, given the gradient of silu(v)."""
    s = sigmoid(v, 1.0, FAST)
    return grad * (s * (1.0 + v * (1.0 - s)))


@triton.jit(do_not_specialize=_RUN_TIME)
def conv_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, dx_ptr, dweight_ptr, dbias_ptr, order_ptr, B, L,
    positions, x_stride_b, x_stride_l, dx_stride_b, dx_stride_l, stride_l, D: tl.constexpr,
    K: tl.constexpr, UNIT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Write dx and each program's sums of the parameters' gradients.

    grad is (2, B, L, D), and dx is (B, L, D) with any strides. dweight is (programs, 2, K, D) and
    dbias (programs, 2, D), both float32. Program p of P takes tiles p, p + P, p + 2P, ... of its
    channels. order is the same as in the forward pass.

    A tile of dx needs the gradients dv of the pre-activations of K - 1 more tokens: after it in the
    causal direction, before it in the other direction. The same K rows of x make one of each: rows
    i to i + K - 1 give dv_0[i] of token first + i and dv_1[i] of token first + i - (K - 1).
    """
    NUM_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    HALO: tl.constexpr = K - 1
    program = tl.program_id(0) // NUM_BLOCKS
    num_programs = tl.num_programs(0) // NUM_BLOCKS
    channel = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    taps_0, bias_0, taps_1, bias_1 = _load_parameters(weight_ptr, bias_ptr, channel, D, K)

    zero = tl.zeros([BLOCK_D], tl.float32)
    dtaps_0 = ()
    dtaps_1 = ()
    for _ in tl.static_range(K):
        dtaps_0 += (zero,)
        dtaps_1 += (zero,)
    dbias_0 = zero
    dbias_1 = zero

    direction = tl.cast(B, tl.int64) * L * D
    tiles_per_sequence = tl.cdiv(L if order_ptr is None else positions, BLOCK_L)
    for tile in range(program, B * tiles_per_sequence, num_programs):
        batch = (tile // tiles_per_sequence).to(tl.int64)
        first = (tile % tiles_per_sequence) * BLOCK_L
        order = None
        x_row = x_ptr + UNIT * (batch * x_stride_b) + channel
        dx_row = dx_ptr + UNIT * (batch * dx_stride_b) + channel
        offset = UNIT * (batch * L * stride_l) + channel
        if order_ptr is None:
            x_row += UNIT * (first.to(tl.int64) * x_stride_l)
            dx_row += UNIT * (first.to(tl.int64) * dx_stride_l)
            offset += UNIT * (first.to(tl.int64) * stride_l)
        else:
            order = _load_order(order_ptr + _in_every_lane(first, FAST), first, positions, HALO, BLOCK_L + 2 * HALO)
        x = _load_rows(x_row, UNIT * x_stride_l, order, first, L, channel, D, HALO, HALO, 0, 2 * HALO)
        grad_row_0, grad_row_1 = grad_ptr + offset, grad_ptr + direction + offset
        grad_0, grad_1 = (), ()
        dv_0 = ()
        dv_1 = ()
        dxs = ()
        for i in tl.static_range(BLOCK_L + HALO):
            if i % 4 == 0:  # four rows ahead: more would cost registers
                x += _load_rows(
                    x_row, UNIT * x_stride_l, order, first, L, channel, D, HALO, HALO,
                    i + 2 * HALO, min(i + 4, BLOCK_L) + 2 * HALO,
                )  # fmt: skip
                grad_0 += _load_rows(
                    grad_row_0, D, order, first, L, channel, D, 0, HALO, i,
                    min(i + 4, BLOCK_L + HALO),
                )  # fmt: skip
                grad_1 += _load_rows(
                    grad_row_1, D, order, first, L, channel, D, HALO, HALO, i,
                    min(i + 4, BLOCK_L + HALO),
                )  # fmt: skip
            v_0 = bias_0
            v_1 = bias_1
            for tap in tl.static_range(K):
                v_0 += taps_0[tap] * x[i + tap]
                v_1 += taps_1[tap] * x[i + HALO - tap]
            dv_0 += (_through_silu(grad_0[i], v_0, FAST),)
            dv_1 += (_through_silu(grad_1[i], v_1, FAST),)
            # Parameter gradients count only the tile's own tokens; its neighbours count theirs.
            sums_0 = ()
            sums_1 = ()
            for tap in tl.static_range(K):
                sum_0 = dtaps_0[tap]
                sum_1 = dtaps_1[tap]
                if i < BLOCK_L:
                    sum_0 += dv_0[i] * x[i + tap]
                if i >= HALO:
                    sum_1 += dv_1[i] * x[i + HALO - tap]
                sums_0 += (sum_0,)
                sums_1 += (sum_1,)
            dtaps_0 = sums_0
            dtaps_1 = sums_1
            if i < BLOCK_L:
                dbias_0 += dv_0[i]
            if i >= HALO:
                dbias_1 += dv_1[i]
                dx = zero
                for tap in tl.static_range(K):
                    dx += taps_0[tap] * dv_0[i - tap]
                    dx += taps_1[tap] * dv_1[i - HALO + tap]
                dxs += (dx,)
                if (i - HALO) % 4 == 3:
                    _store_rows(
                        dx_row, UNIT * dx_stride_l, order, dxs, first, L, channel, D, HALO,
                        i - HALO - 3,
                    )  # fmt: skip
                    dxs = ()

    mask = channel < D
    dweight_row = dweight_ptr + program.to(tl.int64) * 2 * K * D + channel
    dbias_row = dbias_ptr + program.to(tl.int64) * 2 * D + channel
    for tap in tl.static_range(K):
        tl.store(dweight_row + tap * D, dtaps_0[tap], mask=mask)
        tl.store(dweight_row + (K + tap) * D, dtaps_1[tap], mask=mask)
    tl.store(dbias_row, dbias_0, mask=mask)
    tl.store(dbias_row + D, dbias_1, mask=mask)


class ConvPlan:
    """Convolution prepared for given arguments; gradients are bit-identical in every run.

    Args:
        key: Description of the arguments.

    Raises:
        NotImplementedError: If x is float64.
    """

    def __init__(self, key: ConvKey) -> None:
        if key.dtype == torch.float64:
            raise NotImplementedError('the backend "triton" computes in float32, x is torch.float64; use "reference"')
        B, L, D = key.shape
        self._copies = key.strides[-1] != 1
        if self._copies:
            key = key._replace(strides=(L * D, D, 1), aligned=True)
        self.key, self.out_strides = key, (B * L * D, L * D, D, 1)
        block_d, warps = tuning.blocks("conv", D, key.device)
        rows = B * triton.cdiv(L if key.positions is None else key.positions, BLOCK_L)
        blocks = triton.cdiv(D, block_d)
        # One sum per program, added up at the end: atomics would add in another order every time.
        few = key.taps <= 4
        self._sums = min(rows, triton.cdiv(BACKWARD_PROGRAMS[0 if few else 1], max(blocks, 1)))
        # Strides of x and of contiguous tensors are in units of the channels per lane: two if
        # strides and address allow it, as in the backbone, else one.
        strides = (*key.strides[:2], D, *(key.dx or (L * D, D))[:2])
        unit = 2 if key.aligned and not any(s % 2 for s in strides) else 1
        x_b, x_l, token, dx_b, dx_l = (s // unit for s in strides)
        shared = {
            "B": B, "L": L, "positions": key.positions, "D": D, "K": key.taps, "UNIT": unit,
            "BLOCK_L": BLOCK_L, "BLOCK_D": block_d, "FAST": tuning.fast(key.device),
            "x_stride_b": x_b, "x_stride_l": x_l, "stride_l": token,
        }  # fmt: skip
        self._forward = Kernel(conv_forward_kernel, rows * blocks, warps, **shared)
        self._backward = Kernel(
            conv_backward_kernel, self._sums * blocks, warps, **shared, dx_stride_b=dx_b,
            dx_stride_l=dx_l, **({"maxnreg": tuning.THREE_WARPS} if few and shared["FAST"] else {}),
        )  # fmt: skip

    def _inputs(self, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None) -> dict[str, Tensor | None]:
        return {
            "x_ptr": x.contiguous() if self._copies else x, "weight_ptr": weight.contiguous(),
            "bias_ptr": bias.contiguous(),
            "order_ptr": None if order is None else order.contiguous(),
        }  # fmt: skip

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None) -> Tensor:
        """Return the result of ``reference.causal_conv1d_bidirectional``."""
        out = torch.empty((2, *self.key.shape), dtype=x.dtype, device=x.device)
        self._forward(out, **self._inputs(x, weight, bias, order), out_ptr=out)
        return out

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        order: Tensor | None,
        dx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``forward``, as described in ``interface.ConvPlan``."""
        D, K = self.key.shape[2], self.key.taps
        if dx is None:
            dx = torch.empty(self.key.shape, dtype=x.dtype, device=x.device)
        dweight, dbias = (
            torch.empty((self._sums, *shape), dtype=torch.float32, device=x.device) for shape in ((2, K, D), (2, D))
        )
        self._backward(
            dx, grad_ptr=grad.contiguous(), **self._inputs(x, weight, bias, order), dx_ptr=dx,
            dweight_ptr=dweight, dbias_ptr=dbias,
        )  # fmt: skip
        dweight = dweight.sum(0).transpose(1, 2)  # (2, D, K)
        return dx, dweight.to(weight.dtype).contiguous(), dbias.sum(0).to(bias.dtype)
