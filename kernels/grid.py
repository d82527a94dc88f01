"""Tokens on another grid than the trained one: how they are convolved and how far they step.

The taps of the convolution have learnt what lies one, two and three patches before a token, and the step
size how much a patch writes. On a finer grid, of larger images or a smaller stride, both must be measured
in patches of the trained grid. With r the tokens of the grid for each of the trained one, along a side:

    distance    Tap j of a token in column c meets column c - j r of its row; beyond the row's end, that
                of the row r away. Every n-th column of every n-th row is a sequence of its own, n =
                floor(r), in which the distance is j r / n. Where that is no integer the value between
                tokens is interpolated by Keys' cubic, since linear interpolation blurs: the taps of
                two layers add up to a row, and the blur of all layers adds up, too.
    class token Patches pass over it, and its own taps meet the centres of those patches of the trained
                grid that stand before and after it there, interpolated alike by row and by column.
    step        Divided by the number of tokens for each of the trained grid (``step_area.py``).

At the trained grid there is nothing to do.

Letters: B batch, H W the grid, n = H W patches, K taps, T taps once resampled, P positions in the order,
U tokens that the class token reads.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """A grid of patches and the trained one; an operator takes its numbers as a list."""

    H: int
    W: int
    trained_H: int
    trained_W: int
    patch_height: int
    patch_width: int
    stride_height: int
    stride_width: int
    class_token: int
    """1 if one stands in the middle of the sequence, else 0."""
    measured_taps: int = 1
    """1 if the distance of the taps is in patches of the trained grid, 0 if only the step sizes are."""

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.H * self.W + self.class_token

    def quotients(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return how many tokens there are for each of the trained grid, by rows and by columns.

        As numerator and denominator. Patches that overlap end before the last stride does, so their
        number alone would be too small.
        """
        rows = self.H * self.stride_height + self.patch_height - self.stride_height
        columns = self.W * self.stride_width + self.patch_width - self.stride_width
        return (
            (rows, self.trained_H * self.stride_height),
            (columns, self.trained_W * self.stride_width),
        )

    @property
    def area(self) -> float:
        """Tokens for each of the trained grid."""
        if self[:2] == self[2:4]:
            return 1.0
        rows, columns = self.quotients()
        return rows[0] / rows[1] * (columns[0] / columns[1])

    @property
    def is_plain(self) -> bool:
        """Whether tokens are convolved as they stand, behind one another."""
        return self[:2] == self[2:4] or not self.measured_taps


class Layout(NamedTuple):
    """Where tokens stand: made once for all blocks, outside of the operators. What is not needed is empty."""

    grid: list[int]
    """The numbers of a ``Grid``."""
    order: Tensor
    """Of the patches, int32 (P,), as of ``reference.causal_conv1d_bidirectional``."""
    taps: Tensor
    """Shares of the K taps in the T that the convolution has, float32 (K, T)."""
    class_reads: Tensor
    """Tokens that the class token reads, first itself, int64 (U,)."""
    class_shares: Tensor
    """Their shares in its taps, float32 (1, 2, K, U)."""


def layout_of(grid: Sequence[int], taps: int, device: torch.device) -> Layout:
    """Return how the tokens of a whole grid are convolved.

    Args:
        grid: The numbers of a ``Grid``.
        taps: Taps K of the convolution.
        device: Of the tokens.
    """
    grid = Grid(*map(operator.index, grid))
    order, resampling, reads, shares = _tables(grid, taps)
    return Layout(
        list(grid),
        torch.tensor(order, dtype=torch.int32, device=device),
        torch.tensor(resampling, device=device),
        torch.tensor(reads, dtype=torch.int64, device=device),
        torch.tensor([shares], device=device),
    )


def layout_sizes(grid: Sequence[int], taps: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors of ``layout_of``."""
    order, resampling, reads, _ = _tables(Grid(*grid), taps)
    return (len(order),), (taps, len(resampling[0])), (len(reads),), (1, 2, taps, len(reads))


def _tables(grid: Grid, taps: int) -> tuple[list, list, list, list]:
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
    """Return the (K, T) shares by which K taps at multiples of a quotient are T neighbouring ones."""
    reads = []
    for distance in range(taps):
        nearer, rest = divmod(distance * numerator, denominator)
        # Nobody is nearer than the token itself, which stands in for what would be.
        reads.append(_merged((max(n, 0), s) for n, s in _between(nearer, rest / denominator)))
    width = max(max(read) for read in reads) + 1
    shares = [[0.0] * width for _ in range(taps)]
    for distance, read in enumerate(reads):
        for place, share in read.items():
            shares[taps - 1 - distance][width - 1 - place] = share
    return shares


def _between(first: int, rest: float) -> list[tuple[int, float]]:
    """Return the places around ``first + rest``, 0 <= rest < 1, and their shares in the value there.

    Keys' cubic convolution with a = -1/2, which has straight lines and parabolas as they are.
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
    """Return the sum of the shares of every place."""
    merged: dict[int, float] = {}
    for place, share in shares:
        merged[place] = merged.get(place, 0.0) + share
    return merged


def _by_phases(grid: Grid, phases: tuple[int, int], gap: int) -> list[int]:
    """Return the order of patches, those of a phase behind one another, ``gap`` apart from others."""
    H, W, order = grid.H, grid.W, []
    for row, column in itertools.product(range(phases[0]), range(phases[1])):
        order += [-1] * gap if order else []
        for patch in (
            i * W + j for i in range(row, H, phases[0]) for j in range(column, W, phases[1])
        ):
            order.append(patch + (patch >= H * W // 2) * grid.class_token)
    return order


def _around(center: float, size: int) -> list[tuple[int, float]]:
    """Return the places of a side that a point is at or between, and their shares."""
    center = min(max(center, 0.0), size - 1.0)
    first = math.floor(center)
    inside = ((min(max(n, 0), size - 1), share) for n, share in _between(first, center - first))
    return list(_merged(inside).items())


def _class_token_reads(grid: Grid, taps: int) -> tuple[list[int], list[list[list[float]]]]:
    """Return which U tokens the class token's taps read, and their shares (2, K, U)."""
    (rows, per_row), (columns, per_column) = grid.quotients()
    middle, trained_middle = grid.H * grid.W // 2, grid.trained_H * grid.trained_W // 2
    tokens, reads = [middle], [(0, taps - 1, 0, 1.0), (1, taps - 1, 0, 1.0)]
    for direction in range(2):
        for distance in range(1, taps):
            old = trained_middle + (distance - 1 if direction == 1 else -distance)
            if not 0 <= old < grid.trained_H * grid.trained_W:
                continue
            row, column = old // grid.trained_W + 0.5, old % grid.trained_W + 0.5
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
