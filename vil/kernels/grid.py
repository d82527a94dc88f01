"""Tokens on a grid other than the trained one: convolution and step sizes.

The taps of the convolution have learnt the patches one, two and three before a token, and the step size how much a
patch writes. On a finer grid, from larger images or a smaller stride, both must be measured in patches of the trained
grid. Let r be the number of tokens per trained token along a side:

    distance    Tap j of a token in column c meets column c - j r of its row. Beyond the row's end, it meets that column
                of the row r away. Every n-th column of every n-th row forms a separate sequence, n = floor(r), with
                distance j r / n. If this is no integer, Keys' cubic interpolates between tokens. Linear interpolation
                blurs: the taps of two layers add up to a row, and the blur accumulates over all layers.
                The backend gets ``weight @ taps`` and an order (``reference.causal_conv1d_bidirectional``).
    class token Patches skip the class token. Its own taps meet the centres of the patches before and after it on the
                trained grid, with the same interpolation by row and by column. It has no position in the order and
                is convolved here: K U products for B of the B L tokens.
    step        Divided by ``tokens_per_ref``, the number of tokens per trained token. Together these tokens should
                write and forget as much as the trained one did (``DtScale``).

On the trained grid nothing changes.

Letters: B batch, L tokens, D channels, H x W patches of the grid, K taps, T resampled taps, P positions in the order,
U distinct tokens that the class token reads, itself first.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.kernels.args import compute_dtype


class GridSpec(NamedTuple):
    """A patch grid and the trained grid. Operators take the numbers as a list."""

    H: int
    W: int
    ref_H: int
    ref_W: int
    patch_height: int
    patch_width: int
    stride_height: int
    stride_width: int
    class_token: int
    """1 if a class token stands in the middle of the sequence, else 0."""
    scale_conv: int = 1
    """1 to measure tap distances in patches of the trained grid; 0 to rescale only the step sizes."""

    @property
    def length(self) -> int:
        """Number of tokens in the sequence."""
        return self.H * self.W + self.class_token

    def quotients(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return tokens per trained token, for rows and for columns, as (numerator, denominator).

        Sides are measured in pixels: overlapping patches extend beyond the last stride, so their count is too small.
        """
        rows = self.H * self.stride_height + self.patch_height - self.stride_height
        columns = self.W * self.stride_width + self.patch_width - self.stride_width
        return ((rows, self.ref_H * self.stride_height), (columns, self.ref_W * self.stride_width))

    @property
    def tokens_per_ref(self) -> float:
        """Tokens per token of the trained grid."""
        if self[:2] == self[2:4]:
            return 1.0
        rows, columns = self.quotients()
        return rows[0] / rows[1] * (columns[0] / columns[1])

    @property
    def is_plain(self) -> bool:
        """Whether tokens are convolved in sequence order."""
        return self[:2] == self[2:4] or not self.scale_conv


class TokenLayout(NamedTuple):
    """Layout of the tokens, made once for all blocks, outside of the operators. Unused tensors are empty.

    Weights pass from module to module as their bits, int32: FSDP2 casts all floating-point inputs of a module.
    """

    grid: list[int]
    """Numbers of a ``GridSpec``."""
    order: Tensor
    """Token at each position, int32 (P,); see ``reference.causal_conv1d_bidirectional``."""
    kernel_resample: Tensor
    """Weights of the K learnt taps in the T resampled taps, float32 (K, T)."""
    cls_index: Tensor
    """Tokens that the class token reads, itself first, int64 (U,)."""
    cls_weight: Tensor
    """Weights of these tokens in the taps of the class token, float32 (1, 2, K, U)."""


def layout_of(grid: Sequence[int], taps: int, device: torch.device) -> TokenLayout:
    """Return the layout for the tokens of a whole grid.

    Args:
        grid: Numbers of a ``GridSpec``; dynamic sizes become constants of the program.
        taps: Number of taps K of the convolution.
        device: Device of the tokens.
    """
    grid = GridSpec(*map(operator.index, grid))
    order, resampling, reads, shares = _tables(grid, taps)
    return TokenLayout(
        list(grid),
        torch.tensor(order, dtype=torch.int32, device=device),
        torch.tensor(resampling, dtype=torch.float32, device=device),
        torch.tensor(reads, dtype=torch.int64, device=device),
        torch.tensor([shares], dtype=torch.float32, device=device),
    )


def layout_sizes(grid: Sequence[int], taps: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors of ``layout_of``."""
    order, resampling, reads, _ = _tables(GridSpec(*grid), taps)
    return (len(order),), (taps, len(resampling[0])), (len(reads),), (1, 2, taps, len(reads))


def _tables(grid: GridSpec, taps: int) -> tuple[list, list, list, list]:
    """Return the tensors of a layout as lists."""
    reads: list[int] = []
    shares: list[list[list[float]]] = [[[] for _ in range(taps)] for _ in range(2)]
    if grid.is_plain:
        return [], [[] for _ in range(taps)], reads, shares
    rows, columns = grid.quotients()
    phases = (max(rows[0] // rows[1], 1), max(columns[0] // columns[1], 1))
    resampling = _resampling(taps, columns[0], columns[1] * phases[1])
    if grid.class_token:
        reads, shares = _class_token_reads(grid, taps)
    return _by_phases(grid, phases, len(resampling[0]) - 1), resampling, reads, shares


def _resampling(taps: int, numerator: int, denominator: int) -> list[list[float]]:
    """Return the (K, T) weights that turn K taps at multiples of a quotient into T neighbouring taps."""
    reads = []
    for distance in range(taps):
        nearer, rest = divmod(distance * numerator, denominator)
        # No place is nearer than the token itself, so clamp to it.
        reads.append(_merged((max(n, 0), s) for n, s in _between(nearer, rest / denominator)))
    width = max(max(read) for read in reads) + 1
    shares = [[0.0] * width for _ in range(taps)]
    for distance, read in enumerate(reads):
        for place, share in read.items():
            shares[taps - 1 - distance][width - 1 - place] = share
    return shares


def _between(first: int, rest: float) -> list[tuple[int, float]]:
    """Return the places around ``first + rest``, 0 <= rest < 1, and their interpolation weights.

    Keys' cubic convolution with a = -1/2, which reproduces straight lines and parabolas.
    """
    if rest < 1e-6:
        return [(first, 1.0)]
    ahead = 1 - rest
    return [
        (first - 1, -rest * ahead**2 / 2),
        (first, 1 - rest**2 * (2.5 - 1.5 * rest)),
        (first + 1, 1 - ahead**2 * (2.5 - 1.5 * ahead)),
        (first + 2, -ahead * rest**2 / 2),
    ]


def _merged(shares: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the sum of the weights of every place."""
    merged: dict[int, float] = {}
    for place, share in shares:
        merged[place] = merged.get(place, 0.0) + share
    return merged


def _by_phases(grid: GridSpec, phases: tuple[int, int], gap: int) -> list[int]:
    """Return the order of patches, phase by phase, with ``gap`` empty positions between phases."""
    H, W, order = grid.H, grid.W, []
    for row, column in itertools.product(range(phases[0]), range(phases[1])):
        order += [-1] * gap if order else []
        for patch in (
            i * W + j for i in range(row, H, phases[0]) for j in range(column, W, phases[1])
        ):
            order.append(patch + (patch >= H * W // 2) * grid.class_token)
    return order


def _around(center: float, size: int) -> list[tuple[int, float]]:
    """Return the places along a side at or around a point, and their weights."""
    center = min(max(center, 0.0), size - 1.0)
    first = math.floor(center)
    inside = ((min(max(n, 0), size - 1), share) for n, share in _between(first, center - first))
    return list(_merged(inside).items())


def _class_token_reads(grid: GridSpec, taps: int) -> tuple[list[int], list[list[list[float]]]]:
    """Return the U tokens that the class token's taps read, and their weights, (2, K, U)."""
    (rows, per_row), (columns, per_column) = grid.quotients()
    middle, trained_middle = grid.H * grid.W // 2, grid.ref_H * grid.ref_W // 2
    tokens, reads = [middle], [(0, taps - 1, 0, 1.0), (1, taps - 1, 0, 1.0)]
    for direction in range(2):
        for distance in range(1, taps):
            old = trained_middle + (distance - 1 if direction == 1 else -distance)
            if not 0 <= old < grid.ref_H * grid.ref_W:
                continue
            row, column = old // grid.ref_W + 0.5, old % grid.ref_W + 0.5
            y = row * rows / per_row - grid.patch_height / (2 * grid.stride_height)
            x = column * columns / per_column - grid.patch_width / (2 * grid.stride_width)
            for i, row_share in _around(y, grid.H):
                for j, column_share in _around(x, grid.W):
                    token = i * grid.W + j + int(i * grid.W + j >= middle)
                    if token not in tokens:
                        tokens.append(token)
                    share = row_share * column_share
                    reads.append((direction, taps - 1 - distance, tokens.index(token), share))
    shares = [[[0.0] * len(tokens) for _ in range(taps)] for _ in range(2)]
    for direction, tap, place, share in reads:
        shares[direction][tap][place] += share
    return tokens, shares


class _Conv(Protocol):
    """Convolution plan of a backend, such as ``reference.ConvPlan``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None) -> Tensor:
        """Return the result of ``reference.causal_conv1d_bidirectional``."""

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        order: Tensor | None,
        dx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients for x, weight and bias; backends with ``writes_halves`` write the first to ``dx``."""


def conv_forward(
    conv: _Conv, x: Tensor, weight: Tensor, bias: Tensor, layout: TokenLayout | None
) -> Tensor:
    """Convolve in both directions, then apply SiLU.

    Args:
        conv: Convolution of a backend. The result is differentiable if the backend's is.
        x: Input, (B, L, D).
        weight: Learnt taps, (2, D, K).
        bias: Bias, (2, D).
        layout: Layout of the tokens; None for sequence order.

    Returns:
        (2, B, L, D) in the dtype of x.
    """
    if layout is None or not layout.order.numel():
        return conv.forward(x, weight, bias, None)
    out = conv.forward(x, _resampled(weight, layout.kernel_resample), bias, layout.order)
    reads, shares = layout.cls_index, _numbers(layout.cls_weight)
    if not reads.numel():
        return out
    _, v = _class_token(x, weight, bias, reads, shares)
    out[:, :, _middle(layout)] = F.silu(v).to(out.dtype)
    return out


def conv_backward(
    conv: _Conv,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: TokenLayout | None,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``conv_forward`` for x, weight and bias, bit-identical in every run.

    ``grad`` is the gradient of the output, (2, B, L, D). The gradient for x is written to ``dx``, (B, L, D), if given.
    """
    if layout is None or not layout.order.numel():
        return conv.backward(grad, x, weight, bias, None, dx)
    dx, dweight, dbias = conv.backward(
        grad, x, _resampled(weight, layout.kernel_resample), bias, layout.order, dx
    )
    dweight = (dweight @ _numbers(layout.kernel_resample).to(dweight.dtype).mT).to(weight.dtype)
    reads, shares = layout.cls_index, _numbers(layout.cls_weight)
    if not reads.numel():
        return dx, dweight, dbias
    read, v = _class_token(x, weight, bias, reads, shares)
    s = torch.sigmoid(v)
    dv = grad[:, :, _middle(layout)].to(v.dtype) * s * (1 + v * (1 - s))  # (2, B, D)
    dread = dv[:, :, None] * weight.to(v.dtype).mT[:, None]  # (2, B, K, D)
    dtokens = shares.to(v.dtype).flatten(1, 2).mT @ dread.transpose(0, 1).flatten(1, 2)
    dx[:, _middle(layout)] = 0
    dx[:, reads] = (dx[:, reads].to(v.dtype) + dtokens).to(dx.dtype)
    dweight = dweight + (dv[:, :, None] * read).sum(1).mT.to(dweight.dtype)
    return dx, dweight, dbias + dv.sum(1).to(dbias.dtype)


def _middle(layout: TokenLayout) -> int:
    """Return the place of the class token; to read it from ``cls_index`` would wait for the GPU."""
    return layout.grid[0] * layout.grid[1] // 2


def _resampled(weight: Tensor, taps: Tensor) -> Tensor:
    dtype = compute_dtype(weight)
    return weight.to(dtype) @ _numbers(taps).to(dtype)


def _numbers(weights: Tensor) -> Tensor:
    """Return weights of a ``TokenLayout`` in float32."""
    return weights if weights.is_floating_point() else weights.view(torch.float32)


def _class_token(
    x: Tensor, weight: Tensor, bias: Tensor, reads: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the inputs of the class token's taps, (2, B, K, D), and its values before SiLU, (2, B, D)."""
    dtype = compute_dtype(x)
    tokens = x[:, reads].to(dtype)  # (B, U, D)
    read = (shares.to(dtype).flatten(1, 2) @ tokens).unflatten(1, (2, -1)).transpose(0, 1)
    v = (read * weight.to(dtype).mT[:, None]).sum(2) + bias.to(dtype)[:, None]
    return read, v


def kappa_scale(recurrence: str, tokens_per_ref: float) -> float:
    """Return the factor of |k|^2 in a step size; see ``DtScale``."""
    if recurrence == "mamba":
        return 1.0
    return max(tokens_per_ref, 1.0) ** (0.5 if recurrence == "longhorn_exact" else 1.0)


class DtScale:
    """Parameters that divide every step size by ``tokens_per_ref`` (area, m), and the inverse for their gradients.

        Longhorn  eps / area = 1 / (area (1 + |k|^2 + exp(-v))), with v = dt + bias, multiplies products of two keys
                  or of a key and a query. Scaling keys and queries by area^(-1/2) does the same if eps keeps
                  the original |k|^2, which is area times the |k|^2 that the scan sees (``kappa_scale``).
                  With fewer tokens than were trained, eps / area could exceed 1 / |k|^2, beyond which the
                  recurrence grows. There beta is divided instead of eps, by leaving out ``kappa_scale``.
        exact     One token retains 1 - eps |k|^2 = 1 / (1 + u) along a key, u = beta |k|^2, so each of m tokens should
                  retain (1 + u)^(-1/m). With ``kappa_scale`` sqrt(m) instead of m, each retains
                  1 - (u / m) / (1 + u / sqrt(m)), whose m-th power is within 0.09 of 1 / (1 + u) for any u up to 100
                  and m up to 9. Division by m itself would retain a third where nine tenths should be forgotten.
        Mamba     dt / area multiplies A and k, so the scan gets A / area and k / area.

    m equal tokens in a row then act as one did: exactly in what Mamba forgets, and otherwise to first order in
    the step. In a diagonal state each k_j^2 is small, and no step meets the exact relation for all j.

    Shapes: ``x_proj_weight`` (2, R + 2 M, D), ``dt_weight`` (2, D, R), ``A`` (2, D, M) or None; R rank, M states.
    """

    def __init__(
        self,
        x_proj_weight: Tensor,
        dt_weight: Tensor,
        A: Tensor | None,
        recurrence: str,
        tokens_per_ref: float,
    ) -> None:
        self.x_proj_weight, self.A, self.tokens_per_ref = x_proj_weight, A, tokens_per_ref
        if tokens_per_ref == 1.0:
            return
        rank = dt_weight.shape[-1]
        states = (x_proj_weight.shape[1] - rank) // 2
        self.rows = x_proj_weight.new_ones(x_proj_weight.shape[1])  # no blocking copy
        if recurrence == "mamba":
            self.rows[rank : rank + states] = 1 / tokens_per_ref  # keys
            self.A = A / tokens_per_ref
        else:
            self.rows[rank:] = tokens_per_ref**-0.5  # keys and queries
        self.x_proj_weight = x_proj_weight * self.rows[:, None]

    def undo_x_proj(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the given x_proj_weight, from the gradient of the scaled one."""
        return gradient if self.tokens_per_ref == 1.0 else gradient * self.rows[:, None]

    def undo_A(self, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the given A, from the gradient of the scaled one."""
        unchanged = self.tokens_per_ref == 1.0 or gradient is None
        return gradient if unchanged else gradient / self.tokens_per_ref
