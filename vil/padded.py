"""Padded images of several sizes in one batch, with a mask that says which pixels belong to an image.

Each image is cut to its box, the rectangle of its own patches, because the convolution would read the empty patches
around it. The result of an image therefore does not depend on its padding. Images with boxes of one size run together.
A patch at the edge may contain masked pixels. They are replaced by zeros, so they may be NaN.

Letters: B images, H W grid of patches as padded, b images with boxes of h w patches, n = h w.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.patch_embed import OverlapPatchEmbed


def run_padded(
    run: Callable[[Tensor], list[Tensor]],
    x: Tensor,
    mask: Tensor,
    patch_embed: OverlapPatchEmbed,
    num_prefix: int,
) -> tuple[list[Tensor], Tensor]:
    """Run a model on each image of a padded batch alone.

    Args:
        run: Function that returns one or more sequences of tokens (b, num_prefix + n, C) for images of one size.
        x: Padded images, (B, in_chans, height, width).
        mask: Same as in ``valid_patches``.
        patch_embed: Patch embedding of the model.
        num_prefix: Number of prefix tokens.

    Returns:
        One sequence for the padded grid, (B, num_prefix + H W, C), for each of ``run``, with zeros for masked patches.
        Then which tokens are valid, bool (B, num_prefix + H W).

    Raises:
        AssertionError: The model does not support the size of the padded images.
        ValueError: Same as in ``valid_patches``. Also if an image has no patch, its patches do not fill a box, or the
            model has ``dynamic_img_size=False`` and the box another size.
    """
    covered = patch_embed.covered(x)
    H, W = patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
    valid = valid_patches(mask, x, patch_embed)
    boxes = _boxes(valid)
    ahead = mask.device.type == "cpu"  # copies to the CPU must be complete before they are read
    mask, valid = (t.to(x.device, non_blocking=ahead) for t in (mask, valid))
    tokens_valid = torch.cat([valid.new_ones(len(x), num_prefix), valid.flatten(1)], 1)
    if not len(x):
        return run(covered), tokens_valid
    x = _zeros_where_masked(covered, mask, valid, patch_embed)
    results: list[Tensor] = []
    for box in boxes:
        if patch_embed.strict_img_size and box.size != patch_embed.grid_size:
            raise ValueError(
                f"with dynamic_img_size=False, mask must keep {patch_embed.grid_size} patches of "
                f"each image, got {box.size}"
            )
        places = _places(box, W, num_prefix, x.device)
        for i, out in enumerate(run(_pixels(box, x, patch_embed))):
            if i == len(results):
                results.append(out.new_zeros(len(x), num_prefix + H * W, out.shape[2]))
            results[i] = results[i].index_put(places, out)
    return results, tokens_valid


def valid_patches(mask: Tensor, images: Tensor, patch_embed: OverlapPatchEmbed) -> Tensor:
    """Return which patches belong to their images, bool (B, H, W).

    A patch that does not overlap others belongs to an image if any of its pixels does, as in padding to whole patches.
    With overlap, all of its pixels must belong to the image.

    Args:
        mask: Nonzero where a pixel belongs to its image, (B, height, width) like transformers' pixel_mask; or
            where a patch does, (B, H, W).
        images: As given to the model, (B, in_chans, height, width).
        patch_embed: Patch embedding of the model.

    Raises:
        ValueError: The mask has another shape.
    """
    B, _, height, width = images.shape
    patch, stride = patch_embed.patch_size, patch_embed.stride
    grid = patch_embed.dynamic_feat_size((height, width))
    pixels, patches = (B, height, width), (B, *grid)
    if tuple(mask.shape) not in (pixels, patches):
        raise ValueError(
            f"mask must have the shape of the images, {pixels}, or of their patches, {patches}, got "
            f"{tuple(mask.shape)}"
        )
    valid = mask != 0
    if tuple(mask.shape) != patches:
        apart = tuple(patch) == tuple(stride)
        # Pad the mask with 0 if one pixel makes a patch valid, and with 1 if all of its pixels must be valid.
        below, beside = ((n - 1) * s + p for n, s, p in zip(grid, stride, patch, strict=True))
        padding = [0, beside - width, 0, below - height]
        whole = F.pad(valid.float(), padding, value=0.0 if apart else 1.0)[:, None]
        if apart:
            valid = F.max_pool2d(whole, patch, stride)[:, 0] > 0
        else:
            valid = F.avg_pool2d(whole, patch, stride)[:, 0] == 1
    return valid


def _zeros_where_masked(
    images: Tensor, mask: Tensor, valid: Tensor, patch_embed: OverlapPatchEmbed
) -> Tensor:
    """Return images with zeros in pixels that are masked or in no valid patch."""
    height, width = images.shape[-2:]

    def as_large(pixels: Tensor) -> Tensor:
        return F.pad(pixels, [0, width - pixels.shape[-1], 0, height - pixels.shape[-2]])

    ones = torch.ones(1, 1, *patch_embed.patch_size, device=valid.device)
    patches = F.conv_transpose2d(valid[:, None].float(), ones, stride=patch_embed.stride)
    own = as_large(patches) > 0
    if mask.shape != valid.shape:
        own &= as_large(mask != 0)[:, None]
    return images.masked_fill(~own, 0)


class _Box(NamedTuple):
    """Images with boxes of one size."""

    size: tuple[int, int]
    """Rows and columns (h, w)."""
    images: list[tuple[int, int, int]]
    """Index of each image in the batch, and the first row and column of its box."""


def _boxes(valid: Tensor) -> list[_Box]:
    """Group images by the size of their boxes, given valid patches, bool (B, H, W).

    Only this reads values of the mask, and all at once: a read waits for the GPU.
    """
    corners = [*_first_and_last(valid.any(2)), *_first_and_last(valid.any(1))]
    numbers = torch.stack([*corners, valid.flatten(1).sum(1)], 1).tolist()
    sizes: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    empty, holes = [], []
    for i, (top, bottom, left, right, patches) in enumerate(numbers):
        h, w = bottom - top + 1, right - left + 1
        sizes.setdefault((h, w), []).append((i, top, left))
        if patches < h * w:
            (holes if patches else empty).append(i)
    if empty:
        raise ValueError(f"mask must keep at least one patch per image, images {empty} have none")
    if holes:
        raise ValueError(
            "mask must keep a rectangle of patches in each image, but masks patches inside the "
            f"rectangles of images {holes}"
        )
    return [_Box(size, images) for size, images in sorted(sizes.items())]


def _places(box: _Box, W: int, num_prefix: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index of each image, int64 (b, 1), and of its tokens in the padded sequence, (b, num_prefix + n)."""
    image, top, left = torch.tensor(box.images).mT[:, :, None]
    row, column = top + torch.arange(box.size[0]), left + torch.arange(box.size[1])
    patches = (row[:, :, None] * W + column[:, None, :]).flatten(1)
    tokens = torch.cat([patches.new_zeros(len(image), num_prefix), patches + num_prefix], 1)
    return image.to(device, non_blocking=True), tokens.to(device, non_blocking=True)


def _pixels(box: _Box, images: Tensor, patch_embed: OverlapPatchEmbed) -> Tensor:
    """Cut the boxes out of images; return (b, in_chans, height, width)."""
    stride, patch = patch_embed.stride, patch_embed.patch_size
    height, width = ((n - 1) * s + p for n, s, p in zip(box.size, stride, patch, strict=True))
    cut = [
        images[i, :, top * stride[0] :, left * stride[1] :][:, :height, :width]
        for i, top, left in box.images
    ]
    return torch.stack(cut)


def _first_and_last(side: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the first and the last True in each row of a bool (B, S)."""
    number = torch.arange(side.shape[1], device=side.device)
    first = torch.where(side, number, side.shape[1]).amin(1)
    return first, torch.where(side, number, -1).amax(1)
