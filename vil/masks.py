"""Images of several sizes in one batch, padded: which patches are theirs.

Empty patches around an image would be read, written and met by the taps. Here each image is a box of its own
patches, and images with boxes of one size go through the model together, without the rest: the result of an
image does not depend on what it was padded to. Images enter with zeros where they are masked: a patch may have
pixels that are not its image's, and zero times NaN is NaN.

Letters: B images, H W grid of patches as padded, b images with boxes of h w patches, n = h w.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def valid_patches(
    mask: Tensor,
    images: Tensor,
    grid: tuple[int, int],
    patch: tuple[int, int],
    stride: tuple[int, int],
) -> Tensor:
    """Return which patches belong to their images, bool (B, H, W).

    Args:
        mask: True, or not 0, where a pixel belongs to its image, (B, height, width) as transformers'
            pixel_mask; or the same of patches, (B, H, W).
        images: As given to the model, (B, in_chans, height, width).
        grid: Rows and columns (H, W) of their patches.
        patch: Height and width of a patch.
        stride: Distance of neighbouring patches. Of those that do not overlap one belongs to an image
            if any of its pixels does, as where an image is padded to whole patches; of those that
            overlap, if all do.

    Raises:
        ValueError: The mask has another shape, or leaves an image without a patch.
    """
    B, _, height, width = images.shape
    pixels, patches = (B, height, width), (B, *grid)
    if tuple(mask.shape) not in (pixels, patches):
        raise ValueError(
            f"mask must have the shape of the images, {pixels}, or of their patches, {patches}, got "
            f"{tuple(mask.shape)}"
        )
    valid = mask != 0
    if tuple(mask.shape) != patches:
        apart = tuple(patch) == tuple(stride)
        # Padding to whole patches belongs to no image, and spoils no patch that is to belong to one whole.
        below, beside = ((n - 1) * s + p for n, s, p in zip(grid, stride, patch, strict=True))
        padding = [0, beside - width, 0, below - height]
        whole = F.pad(valid.float(), padding, value=0.0 if apart else 1.0)[:, None]
        if apart:
            valid = F.max_pool2d(whole, patch, stride)[:, 0] > 0
        else:
            valid = F.avg_pool2d(whole, patch, stride)[:, 0] == 1
        valid = valid[:, : grid[0], : grid[1]]
    empty = (~valid.flatten(1).any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"mask must leave each image a patch, images {empty} have none")
    return valid


def zeros_where_masked(
    images: Tensor,
    mask: Tensor,
    valid: Tensor,
    patch: tuple[int, int],
    stride: tuple[int, int],
) -> Tensor:
    """Return images with zeros in pixels that are masked, or that no patch of their image meets.

    Args:
        images: As whole patches cover them, (B, in_chans, height, width).
        mask: As of ``valid_patches``, at most as large as the images.
        valid: What that returned, bool (B, H, W).
        patch: As of ``valid_patches``.
        stride: As of ``valid_patches``.
    """
    height, width = images.shape[-2:]

    def as_large(pixels: Tensor) -> Tensor:
        return F.pad(pixels, [0, width - pixels.shape[-1], 0, height - pixels.shape[-2]])

    ones = torch.ones(1, 1, *patch, device=valid.device)
    own = as_large(F.conv_transpose2d(valid[:, None].float(), ones, stride=stride)) > 0
    if mask.shape != valid.shape:
        own &= as_large(mask != 0)[:, None]
    return images.masked_fill(~own, 0)


class Box(NamedTuple):
    """Images with boxes of one size."""

    images: Tensor
    """Their numbers in the batch, int64 (b,)."""
    patches: Tensor
    """Numbers of the patches in the box, by rows, among H W, int64 (b, n)."""
    size: tuple[int, int]
    """Rows and columns (h, w)."""


def boxes(valid: Tensor) -> Iterator[Box]:
    """Group images by the size of the boxes of their patches.

    Args:
        valid: Which patches belong to their images, bool (B, H, W).

    Yields:
        A box for each group.

    Raises:
        ValueError: The patches of an image are no box.
    """
    W = valid.shape[2]
    rows, columns = valid.any(2), valid.any(1)
    corners = [_first_and_last(side) for side in (rows, columns)]
    sizes = torch.stack([last - first + 1 for first, last in corners], 1)
    holes = sizes.prod(1) > valid.flatten(1).sum(1)
    if holes.any():
        raise ValueError(
            "mask must leave each image a box of patches, images "
            f"{holes.nonzero().flatten().tolist()} lack patches inside theirs"
        )
    for size in sizes.unique(dim=0):
        (h, w), images = size.tolist(), (sizes == size).all(1).nonzero().flatten()
        top, left = (first[images] for first, _ in corners)
        row = top[:, None] + torch.arange(h, device=valid.device)
        column = left[:, None] + torch.arange(w, device=valid.device)
        patches = (row[:, :, None] * W + column[:, None, :]).flatten(1)
        yield Box(images, patches, (h, w))


def pixels(
    box: Box, images: Tensor, columns: int, patch: tuple[int, int], stride: tuple[int, int]
) -> Tensor:
    """Return what lies in the boxes, (b, in_chans, height, width).

    Args:
        box: Of some of the images.
        images: As padded, (B, in_chans, height, width).
        columns: W of their grid.
        patch: As of ``valid_patches``.
        stride: As of ``valid_patches``.
    """
    height, width = ((n - 1) * s + p for n, s, p in zip(box.size, stride, patch, strict=True))
    corners = [divmod(first, columns) for first in box.patches[:, 0].tolist()]
    cut = [
        images[i, :, row * stride[0] :, column * stride[1] :][:, :height, :width]
        for i, (row, column) in zip(box.images.tolist(), corners, strict=True)
    ]
    return torch.stack(cut)


def _first_and_last(side: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last True of each row of a bool (B, S)."""
    number = torch.arange(side.shape[1], device=side.device)
    first = torch.where(side, number, side.shape[1]).amin(1)
    return first, torch.where(side, number, -1).amax(1)
