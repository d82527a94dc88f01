"""Images and grids of another size than the trained one: all that a model does for them, and the trained grid itself.

Two grids have names. ``grid`` is that of the patches inside the model, and ``ref_feat_shape`` the one that the weights
were trained at. Only a resized image has a third, its own (``feat_shape``).

What changes on another grid, in the order of a forward pass:

    image       A side near the trained length, or below it, is resized to it. The reason is the class token, which
                reads six patches near the middle of the image through its convolution. On another grid it would read
                values that are interpolated between patches. At 5/4 of the trained side this costs a tenth to a
                quarter of the accuracy, and below the trained side most of it. Resizing costs next to nothing and
                keeps the accuracy (``lab/experiments/sizes.py`` measures it).
    position    The position embedding is resampled.
    distance    The taps of the convolution have learnt the patches one, two and three before a token. Let r be the
                number of tokens per trained token along a side. Tap j of a token in column c meets column c - j r of
                its row. Beyond the row's end, it meets that column of the row r away. Every n-th column of every n-th
                row forms a separate sequence, n = floor(r), with distance j r / n. If this is no integer, Keys' cubic
                interpolates between tokens. Linear interpolation blurs: the taps of two layers add up to a row, and
                the blur accumulates over all layers.
    class token Patches skip the class token. Its own taps meet the centres of the patches before and after it on the
                trained grid, with the same interpolation by row and by column.
    step        Divided by the area, the number of tokens per trained token. Together these tokens should write and
                forget as much as the trained one did (``fit``).
    tokens      Those of a resized image are resized to its own grid.

Distances, class token and steps change the parameters of a block outside its operator, so autograd needs no help. The
operator gets an order of the tokens, what the class token reads, and the area (``kernels/order.py``).

Letters: B batch, H W grid of patches, N = H W patches, L = N + 1 tokens, C channels, E channels of the scan, K taps, T
resampled taps, P positions in the order, U distinct tokens that the class token reads, itself first.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import is_exportable, register_notrace_function, resample_abs_pos_embed
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from vil.kernels import mixer
from vil.kernels.checks import in_transform, is_eager, is_exporting
from vil.kernels.plan import MAX_KEPT
from vil.tokens import class_token_first

# ------------------------------------------------------------------------------ images and tokens


def are_equal(size: list[int], other: list[int]) -> bool:
    """Return whether sizes (height, width) are equal; for dynamic sizes of an export, whether they always are."""
    if not torch.jit.is_scripting() and is_exporting():
        return all(statically_known_true(size[i] == other[i]) for i in (0, 1))
    return size[0] == other[0] and size[1] == other[1]


@torch.jit.unused
def is_undecided(size: int, limit: int) -> bool:
    """Return whether a program of torch.export is for sizes below the limit and for others."""
    return not (statically_known_true(size < limit) or statically_known_true(size >= limit))


@torch.jit.unused
def _check_decided(size: int, limit: int) -> None:
    """Raise ValueError if a program is for sizes below the limit and for others."""
    if is_undecided(size, limit):
        raise ValueError(_NOT_ANY)


_NOT_ANY = (
    "img_size must be static, got a dynamic one: the model resizes images or measures distances of tokens in patches "
    "of ref_feat_shape. Export for images of one size, or create the model with grid_aware=False"
)


@register_notrace_function
def resize_images(
    images: Tensor,
    ref_feat_shape: tuple[int, int],
    patch_size: tuple[int, int],
    stride: tuple[int, int],
    below: float,
) -> Tensor:
    """Resize images (B, C, height, width) along the sides that are near the trained length or below it.

    Each side is treated separately, because distances of tokens are also measured by row and by
    column. Images that need no resizing are returned as the same tensor.

    Args:
        images: Images whose sides are covered by whole patches.
        ref_feat_shape: Rows and columns of the trained grid.
        patch_size: Height and width of a patch in pixels.
        stride: Distance of neighbouring patches in pixels.
        below: Sides of fewer than ``below`` times the trained patches are resized; 0 resizes none.
    """
    exporting = not torch.jit.is_scripting() and is_exporting()
    size, resized = [images.shape[-2], images.shape[-1]], False
    for i in (0, 1):
        patches = (size[i] - patch_size[i]) // stride[i] + 1
        limit = math.ceil(below * ref_feat_shape[i])
        if exporting:
            _check_decided(patches, limit)
        if patches < limit:
            size[i] = (ref_feat_shape[i] - 1) * stride[i] + patch_size[i]
            resized = resized or size[i] != images.shape[i - 2]
    return F.interpolate(images, size, mode="bicubic", antialias=True) if resized else images


@register_notrace_function
def resample_pos_embed(pos_embed: Tensor, grid: list[int], own_grid: list[int], num_prefix: int) -> Tensor:
    """Resample a position embedding (1, L, C) to another grid.

    While exporting, timm's function resamples even to the same grid, so that the program does not depend on the size of
    the example. If the sizes are constants of the program and equal, the same tensor is returned instead.
    """
    if not torch.jit.is_scripting():
        if are_equal(grid, own_grid):  # timm asks a flag that other threads set when they export
            return pos_embed
        if not is_exporting() and torch.compiler.is_compiling() and torch.is_grad_enabled():
            # PyTorch (2.15) cannot compile the gradient of this resampling to a symbolic size;
            # index() makes it a constant of the program.
            grid = [operator.index(size) for size in grid]
    return resample_abs_pos_embed(pos_embed, grid, own_grid, num_prefix)


@register_notrace_function
def resize_tokens(x: Tensor, grid: list[int], feat_shape: list[int], num_prefix: int) -> Tensor:
    """Resize patch tokens from the grid inside the model to the image's own grid.

    The mean over the patches stays the same, so that averaged tokens give the logits of the resized image.

    Args:
        x: (B, num_prefix + H W, C), prefix first.
        grid: Rows and columns (H, W) inside the model.
        feat_shape: Rows and columns (h, w) of the image.
        num_prefix: Number of prefix tokens, which are not resized.

    Returns:
        (B, num_prefix + h w, C), the same tensor if the grids are equal.
    """
    if are_equal(grid, feat_shape):
        return x
    patches = x[:, num_prefix:].mT.unflatten(2, [grid[0], grid[1]])
    own = F.interpolate(patches, [feat_shape[0], feat_shape[1]], mode="bilinear", antialias=True)
    own = own + (patches.mean((2, 3), keepdim=True) - own.mean((2, 3), keepdim=True))
    return torch.cat([x[:, :num_prefix], own.flatten(2).mT], 1)


# ------------------------------------------------------------------------------ parameters of a block


class TokenLayout(NamedTuple):
    """Where the tokens of a grid other than the trained one lie; made once for all blocks.

    Weights are integers, in units of 2^-30: FSDP2 casts all floating-point inputs of a module.
    """

    tokens_per_ref: list[int]
    """Area: numerator and denominator of the number of tokens per trained token."""
    order: Tensor | None
    """Token at each position, int32 (P,); None if only steps are scaled (``grid_aware="dt"``)."""
    cls_index: Tensor | None
    """Tokens that the class token reads, itself first, int64 (U,); None without a class token."""
    taps: Tensor | None
    """Weights of the K learnt taps in the T resampled taps, int32 (T, K)."""
    cls_taps: Tensor | None
    """Weights of the tokens read in the taps of the class token, int32 (2, U, K)."""


class Fitted(NamedTuple):
    """Parameters of a mixer for a grid, and the arguments of ``kernels.order.Order``."""

    conv_weight: Tensor
    """(2, E, T)."""
    x_proj_weight: Tensor
    A: Tensor | None
    cls_weight: Tensor | None
    """(2, U, E)."""
    order: Tensor | None
    cls_index: Tensor | None
    tokens_per_ref: list[int]


def fit(
    conv_weight: Tensor,
    x_proj_weight: Tensor,
    A: Tensor | None,
    layout: TokenLayout | None,
    recurrence: str,
    dt_rank: int,
) -> Fitted:
    """Return the parameters that depend on the grid, as the grid needs them; unchanged on the trained grid.

    Every step size is divided by the area m, ``tokens_per_ref``:

        Longhorn  eps / m = 1 / (m (1 + |k|^2 + exp(-v))), with v = dt + bias, multiplies products of two keys or of a
                  key and a query. Scaling keys and queries by m^(-1/2) does the same if eps keeps the original
                  |k|^2, which is m times the |k|^2 that the scan sees (``order.kappa_scale``). With fewer tokens
                  than were trained, eps / m could exceed 1 / |k|^2, beyond which the recurrence grows. There beta is
                  divided instead of eps, by leaving out ``kappa_scale``.
        exact     One token retains 1 - eps |k|^2 = 1 / (1 + u) along a key, u = beta |k|^2, so each of m tokens
                  should retain (1 + u)^(-1/m). With ``kappa_scale`` sqrt(m) instead of m, each retains
                  1 - (u / m) / (1 + u / sqrt(m)), whose m-th power is within 0.09 of 1 / (1 + u) for any u up to 100
                  and m up to 9. Division by m itself would retain a third where nine tenths should be forgotten.
        Mamba     dt / m multiplies A and k, so the scan gets A / m and k / m.

    m equal tokens in a row then act as one did: exactly in what Mamba forgets, and otherwise to first order in the
    step. In a diagonal state each k_j^2 is small, and no step meets the exact relation for all j.

    Args:
        conv_weight: Taps, (2, E, K).
        x_proj_weight: (2, R + 2 M, E): step sizes of rank R, keys and queries of M states.
        A: Rates, (2, E, M), for Mamba.
        layout: Layout of the tokens; None on the trained grid.
        recurrence: One of ``kernels.reference.RECURRENCES``.
        dt_rank: Rank R.
    """
    if layout is None:
        return Fitted(conv_weight, x_proj_weight, A, None, None, None, [1, 1])
    if torch.jit.is_scripting():
        return _fitted(conv_weight, x_proj_weight, A, layout, recurrence, dt_rank)
    else:
        with mixer.without_autocast(conv_weight):
            return _fitted(conv_weight, x_proj_weight, A, layout, recurrence, dt_rank)


def _fitted(
    conv_weight: Tensor,
    x_proj_weight: Tensor,
    A: Tensor | None,
    layout: TokenLayout,
    recurrence: str,
    dt_rank: int,
) -> Fitted:
    m = layout.tokens_per_ref[0] / layout.tokens_per_ref[1]
    steps, others = x_proj_weight[:, :dt_rank], x_proj_weight[:, dt_rank:]
    if A is not None:
        keys, queries = others.chunk(2, 1)
        x_proj_weight, A = torch.cat([steps, keys / m, queries], 1), A / m
    else:
        x_proj_weight = torch.cat([steps, others * m**-0.5], 1)
    taps, cls_taps = layout.taps, layout.cls_taps
    if taps is None:
        return Fitted(conv_weight, x_proj_weight, A, None, None, None, layout.tokens_per_ref)
    wide = conv_weight if conv_weight.dtype == torch.float64 else conv_weight.float()
    wide = wide.mT  # (2, K, E): results are contiguous along the channels, as backends read them
    cls_weight: Tensor | None = None
    if cls_taps is not None:
        cls_weight = (cls_taps.to(wide.dtype) * 2.0**-30) @ wide
    conv_weight = ((taps.to(wide.dtype) * 2.0**-30) @ wide).mT
    return Fitted(
        conv_weight,
        x_proj_weight,
        A,
        cls_weight,
        layout.order,
        layout.cls_index,
        layout.tokens_per_ref,
    )


# ------------------------------------------------------------------------------ tables of a grid


class _Grids(NamedTuple):
    """The two grids in patches, and how patches lie in an image in pixels."""

    H: int
    W: int
    ref_H: int
    ref_W: int
    patch_height: int
    patch_width: int
    stride_height: int
    stride_width: int
    class_token: int

    def quotients(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return tokens per trained token, for rows and for columns, as (numerator, denominator).

        Sides are measured in pixels: overlapping patches extend beyond the last stride, so their count is too small.
        """
        rows = self.H * self.stride_height + self.patch_height - self.stride_height
        columns = self.W * self.stride_width + self.patch_width - self.stride_width
        return ((rows, self.ref_H * self.stride_height), (columns, self.ref_W * self.stride_width))


@torch.fx.wrap  # FX cannot follow its branches
@register_notrace_function
def token_layout(
    grid: list[int],
    ref_feat_shape: list[int],
    patch_size: list[int],
    stride: list[int],
    class_token: int,
    taps: int,
    like: Tensor,
) -> TokenLayout | None:
    """Return the layout of the tokens, for all blocks of a model; None on the trained grid.

    Args:
        grid: Rows and columns (H, W) inside the model.
        ref_feat_shape: Rows and columns of the trained grid.
        patch_size: Height and width of a patch in pixels.
        stride: Distance of neighbouring patches in pixels.
        class_token: 1 if a class token stands in the middle of the sequence, else 0.
        taps: Number of taps of the convolution; 0 to scale only step sizes.
        like: Any tensor on the device of the tokens.
    """
    if are_equal(grid, ref_feat_shape):
        return None
    if not torch.jit.is_scripting() and is_exporting():
        _check_exports(grid, taps, patch_size != stride)
    area = [1, 1]
    for i in (0, 1):
        area[0] *= grid[i] * stride[i] + patch_size[i] - stride[i]
        area[1] *= ref_feat_shape[i] * stride[i]
    if taps == 0:
        return TokenLayout(area, None, None, None, None)
    grids = grid + ref_feat_shape + patch_size + stride + [class_token]
    if torch.jit.is_scripting():
        tables = torch.ops.vil.token_tables(grids, taps, like.detach())
    else:
        tables = _tables_for(grids, taps, like)
    if class_token == 0:
        return TokenLayout(area, tables[0], None, tables[1], None)
    return TokenLayout(area, tables[0], tables[2], tables[1], tables[3])


@torch.jit.unused
def _check_exports(grid: list[int], taps: int, overlapping: bool) -> None:
    """Raise ValueError for a dynamic grid where tables, or areas of overlapping patches, depend on it."""
    if any(isinstance(size, torch.SymInt) for size in grid) and (taps > 0 or overlapping):
        raise ValueError(_NOT_ANY)


@torch.jit.unused
def _tables_for(grids: list[int], taps: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of ``vil::token_tables``, by the operator only where a program must contain it."""
    if is_exporting():  # constants of the program, because ONNX has no such operator
        return _tensors(tuple(grids), taps, like.device)
    if is_eager(like):
        tables = _gpu_tables if like.device.type == "cuda" else _recent_tables
        return tables(tuple(grids), taps, like.device)
    if not torch.compiler.is_compiling() and in_transform():
        return _tensors(tuple(grids), taps, like.device)
    return torch.ops.vil.token_tables(grids, taps, like.detach())


@torch.library.custom_op(
    "vil::token_tables",
    mutates_args=(),
    schema="(SymInt[] grids, SymInt taps, Tensor like) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _token_tables(grids: Sequence[int], taps: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return new tensors of ``_tensors`` on the device of ``like``.

    Tensors that an operator makes lie in the memory of a CUDA graph and must not outlive the call. A graph can
    record copies from pinned memory.
    """
    on_gpu, cpu = like.device.type == "cuda", torch.device("cpu")
    tables = (_gpu_tables if on_gpu else _recent_tables)(tuple(grids), taps, cpu, on_gpu)
    return tuple(t.to(like.device, non_blocking=True, copy=True) for t in tables)


@_token_tables.register_fake
def _(grids: Sequence[int], taps: int, like: Tensor) -> tuple[Tensor, ...]:
    if all(isinstance(number, int) for number in grids):
        order, resampling, reads, _ = _tables(_Grids(*grids), taps)
        P, T, U = len(order), len(resampling), len(reads)
    else:
        # From two taps on, there are two resampled ones and two reads. Inductor must know that no axis is single.
        size = torch.library.get_ctx().new_dynamic_size
        P, T, U = size(min=1), *((size(min=2), size(min=2)) if taps > 1 else (1, 1))
    shapes = ((P,), (T, taps), (U,), (2, U, taps))
    dtypes = (torch.int32, torch.int32, torch.int64, torch.int32)
    return tuple(like.new_empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))


def _tensors(grids: tuple[int, ...], taps: int, device: torch.device, pinned: bool = False) -> tuple[Tensor, ...]:
    """Return order, taps, cls_index and cls_taps of a ``TokenLayout``; dynamic sizes become constants."""
    order, resampling, reads, shares = _tables(_Grids(*map(operator.index, grids)), taps)
    with torch.inference_mode(False):  # else training could not save tensors made in evaluation
        tables = (
            torch.tensor(order, dtype=torch.int32, device=device),
            _in_units(resampling, device),
            torch.tensor(reads, dtype=torch.int64, device=device),
            _in_units(shares, device),
        )
        return tuple(t.pin_memory() for t in tables) if pinned else tables


def _in_units(weights: list, device: torch.device) -> Tensor:
    exact = torch.tensor(weights, dtype=torch.float64, device="cpu") * 2.0**30
    return exact.round().to(device, torch.int32)


_recent_tables = functools.lru_cache(MAX_KEPT)(_tensors)
# Never evicted: a recorded CUDA graph reads these tensors, or copies from them.
_gpu_tables = functools.cache(_tensors)


def _tables(grids: _Grids, taps: int) -> tuple[list, list, list, list]:
    """Return the tensors of a layout as lists."""
    rows, columns = grids.quotients()
    phases = (max(rows[0] // rows[1], 1), max(columns[0] // columns[1], 1))
    resampling = _resampling(taps, columns[0], columns[1] * phases[1])
    reads, shares = _class_token_reads(grids, taps)
    return _by_phases(grids, phases, len(resampling) - 1), resampling, reads, shares


def _resampling(taps: int, numerator: int, denominator: int) -> list[list[float]]:
    """Return the (T, K) weights that turn K taps at multiples of a quotient into T neighbouring taps."""
    reads = []
    for distance in range(taps):
        nearer, rest = divmod(distance * numerator, denominator)
        # No place is nearer than the token itself, so clamp to it.
        reads.append(_merged((max(n, 0), s) for n, s in _between(nearer, rest / denominator)))
    width = max(max(read) for read in reads) + 1
    shares = [[0.0] * taps for _ in range(width)]
    for distance, read in enumerate(reads):
        for place, share in read.items():
            shares[width - 1 - place][taps - 1 - distance] = share
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


def _by_phases(grids: _Grids, phases: tuple[int, int], gap: int) -> list[int]:
    """Return the order of patches, phase by phase, with ``gap`` empty positions between phases."""
    H, W, order = grids.H, grids.W, []
    for row, column in itertools.product(range(phases[0]), range(phases[1])):
        order += [-1] * gap if order else []
        for patch in (i * W + j for i in range(row, H, phases[0]) for j in range(column, W, phases[1])):
            order.append(patch + (patch >= H * W // 2) * grids.class_token)
    return order


def _around(center: float, size: int) -> list[tuple[int, float]]:
    """Return the places along a side at or around a point, and their weights."""
    center = min(max(center, 0.0), size - 1.0)
    first = math.floor(center)
    inside = ((min(max(n, 0), size - 1), share) for n, share in _between(first, center - first))
    return list(_merged(inside).items())


def _class_token_reads(grids: _Grids, taps: int) -> tuple[list[int], list[list[list[float]]]]:
    """Return the U tokens that the class token's taps read, and their weights, (2, U, K)."""
    (rows, per_row), (columns, per_column) = grids.quotients()
    middle, trained_middle = grids.H * grids.W // 2, grids.ref_H * grids.ref_W // 2
    tokens, reads = [middle], [(0, taps - 1, 0, 1.0), (1, taps - 1, 0, 1.0)]
    for direction in range(2):
        for distance in range(1, taps):
            old = trained_middle + (distance - 1 if direction == 1 else -distance)
            if not 0 <= old < grids.ref_H * grids.ref_W:
                continue
            row, column = old // grids.ref_W + 0.5, old % grids.ref_W + 0.5
            y = row * rows / per_row - grids.patch_height / (2 * grids.stride_height)
            x = column * columns / per_column - grids.patch_width / (2 * grids.stride_width)
            for i, row_share in _around(y, grids.H):
                for j, column_share in _around(x, grids.W):
                    token = i * grids.W + j + int(i * grids.W + j >= middle)
                    if token not in tokens:
                        tokens.append(token)
                    share = row_share * column_share
                    reads.append((direction, taps - 1 - distance, tokens.index(token), share))
    shares = [[[0.0] * taps for _ in tokens] for _ in range(2)]
    for direction, tap, place, share in reads:
        shares[direction][place][tap] += share
    return tokens, shares


# ------------------------------------------------------------------------------ the trained grid

_BITS = 16


def bits_of(grid: tuple[int, int]) -> Tensor:
    """Return the binary digits of a grid, the lowest first, float32 (2, 16).

    Averages and copies in any dtype leave digits near 0 and 1, except averages of different grids.
    """
    return torch.tensor([[(n >> i) % 2 for i in range(_BITS)] for n in grid], dtype=torch.float32)


def grid_of(bits: Tensor) -> tuple[int, int]:
    """Return the grid of a ``ref_feat_bits``; raise ValueError if it is an average of different grids, or none."""
    digits = bits.tolist() if bits.shape == (2, _BITS) and not bits.is_complex() else []
    near = all(min(abs(digit), abs(digit - 1)) < 0.03 for side in digits for digit in side)
    grid = [sum(round(d) << i for i, d in enumerate(side)) for side in digits] if near else []
    if len(grid) != 2 or min(grid) < 1:
        raise ValueError(
            f"ref_feat_bits must be the binary digits of one grid, (2, {_BITS}), got "
            f"{digits or tuple(bits.shape)}; weights of different grids cannot be averaged"
        )
    return grid[0], grid[1]


class GridAware(nn.Module):
    """Part of a backbone that measures distances and step sizes in patches of the grid ``ref_feat_shape``.

    Weights have it as the buffer ``ref_feat_bits``. Reading a tensor waits for the GPU, so its numbers are kept, and
    read again when the buffer is replaced or, on a CPU, written. Once it is on a GPU, what else writes it, such as DDP
    in every step, must write the same grid: the device compares, and nothing waits for it.
    """

    __jit_unused_properties__: ClassVar = ["ref_feat_shape"]

    def _set_grid(
        self,
        ref_feat_shape: tuple[int, int] | None,
        grid_aware: bool | Literal["dt"],
        resize_below_scale: float,
        device: torch.device | str | None,
    ) -> None:
        """Set everything below, once ``patch_embed`` exists; arguments and errors are those of ``VisionLonghorn``."""
        if grid_aware not in (True, False, "dt"):
            raise ValueError(f'grid_aware must be True, False or "dt", got {grid_aware!r}')
        if not 0 <= resize_below_scale < math.inf:
            raise ValueError(f"resize_below_scale must be finite and at least 0, got {resize_below_scale}")
        if ref_feat_shape is None:
            sizes = zip(self.patch_embed.img_size, self.patch_embed.patch_size, strict=True)
            ref_feat_shape = tuple(-(size // -patch) for size, patch in sizes)
        if len(ref_feat_shape) != 2 or not all(1 <= operator.index(size) < 1 << _BITS for size in ref_feat_shape):
            raise ValueError(
                f"ref_feat_shape must be (rows, columns), each from 1 to {(1 << _BITS) - 1}, got {ref_feat_shape}"
            )
        self.exportable = is_exportable()
        self.grid_aware = bool(grid_aware)
        self.scale_conv = self.grid_aware and grid_aware != "dt"
        self.resize_below_scale = float(resize_below_scale) if self.scale_conv else 0.0
        self._ref_grid = (ref_feat_shape[0], ref_feat_shape[1])
        bits = bits_of(self._ref_grid).to(device) if grid_aware else None
        self.register_buffer("ref_feat_bits", bits)
        self._ref_read = (bits, 0)  # the tensor that _ref_grid was read from, and its version then

    @property
    def ref_feat_shape(self) -> tuple[int, int]:
        """The grid (rows, columns) in whose patches tap distances and step sizes are measured."""
        return self._reference()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new ``ref_feat_bits`` is read at once, because exporters only see fake tensors."""
        super().__setattr__(name, value)
        if name == "ref_feat_bits":
            with suppress(ValueError):  # uninitialised memory, which the caller will fill
                self._follow_ref_feat_bits()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._ref_read = (None, 0)
        self._follow_ref_feat_bits()

    def _reference(self) -> tuple[int, int]:
        """Return ``ref_feat_shape``."""
        if not torch.jit.is_scripting():
            self._follow_ref_feat_bits()
        return self._ref_grid

    # Compilers call it while they compile, with the real module; torch.export does so with fake tensors in it.
    @torch.compiler.assume_constant_result
    @torch.jit.unused
    def _follow_ref_feat_bits(self) -> None:
        """Read ``ref_feat_bits`` if it is another tensor than before, or if something wrote into it.

        Of stacked modules (vmap), that of the module that is called counts.
        """
        last, version = self._ref_read
        is_plain = type(self.ref_feat_bits) is Tensor  # no fake tensor of an export
        bits = self.ref_feat_bits if is_plain else last
        if bits is None or bits.is_meta or torch._C._functorch.is_batchedtensor(bits):
            return
        now = -1 if bits.is_inference() else bits._version
        if bits is last and now == version:
            return
        if not is_plain:
            raise RuntimeError(
                "ref_feat_bits was written, but not by load_state_dict; call the model once, and then export it"
            )
        if bits is last and bits.device.type != "cpu":
            own = bits_of(self._ref_grid).to(bits.device, non_blocking=True)
            torch._assert_async(
                (bits.round() == own).all(),
                "ref_feat_bits was written with another grid; load weights by load_state_dict",
            )
        else:
            self._ref_grid = grid_of(bits)
        self._ref_read = (bits, now)

    @torch.jit.ignore
    def grid_inside(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid (H, W) that images of (height, width) pixels have inside the blocks.

        A side that ``resize_below_scale`` resizes has as many patches as in ``ref_feat_shape``.
        """
        H, W = self.patch_embed.dynamic_feat_size(img_size)
        trained_H, trained_W = self._reference()
        return (
            trained_H if self.resize_below_scale * trained_H > H else H,
            trained_W if self.resize_below_scale * trained_W > W else W,
        )

    def _layout(self, grid: list[int], x: Tensor) -> TokenLayout | None:
        """Return the layout of the tokens of a grid (H, W), for patches (B, N, C); None if nothing adapts to it."""
        if not self.grid_aware:
            return None
        reference, embed = self._reference(), self.patch_embed
        return token_layout(
            grid,
            [reference[0], reference[1]],
            [embed.patch_size[0], embed.patch_size[1]],
            [embed.stride[0], embed.stride[1]],
            self.num_prefix_tokens,
            self.d_conv if self.scale_conv else 0,
            x,
        )

    def check_patches_can_drop(self, grid: list[int]) -> None:
        """Raise ValueError if patches of a grid (H, W) cannot be left out.

        On a grid other than the trained one, the kernels find neighbours by rows and columns, which only a
        complete grid has.
        """
        trained = self._reference()
        if self.grid_aware and (grid[0] != trained[0] or grid[1] != trained[1]):
            raise ValueError(
                f"patch_drop_rate and keep need a grid of {trained[0]} x {trained[1]} patches "
                f"(ref_feat_shape), got {grid[0]} x {grid[1]}; grid_aware=False allows any grid"
            )

    @torch.jit.ignore
    def reshape_transform(self, tokens: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
        """Arrange the tokens inside the blocks as a feature map, for hooks and pytorch-grad-cam.

        Args:
            tokens: Output of a block or of its norm, (B, L, C), any dtype, class token in the middle.
            height: Rows H of the grid inside the model (``grid_inside``). Default: for ``img_size`` images.
            width: Columns W of that grid. Default: for ``img_size`` images.

        Returns:
            Map of the patches, (B, C, H, W), in the same dtype.

        Raises:
            ValueError: L is not the number of patches plus that of the class token.
        """
        own_height, own_width = self.grid_inside(self.patch_embed.img_size)
        H = own_height if height is None else height
        W = own_width if width is None else width
        if tokens.ndim != 3 or tokens.shape[1] != H * W + self.num_prefix_tokens:
            raise ValueError(
                f"tokens must be (B, {H * W + self.num_prefix_tokens}, C) for a grid of {(H, W)}, "
                f"got {tuple(tokens.shape)}; give height and width for another grid"
            )
        tokens = class_token_first(tokens, self.num_prefix_tokens)
        patches = tokens[:, self.num_prefix_tokens :]
        return rearrange(patches, "b (h w) c -> b c h w", h=H, w=W)
