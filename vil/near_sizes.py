"""Resize images that are near the trained size, or below it, to the trained size inside the model.

A class token reads six patches near the middle of the image through its convolution. Where patches of
another grid lie between those six, no interpolation of tokens recovers them well: at 5/4 of the trained
side a tenth to a quarter of the accuracy is lost, and below the trained side most of it. Resizing the
image costs next to nothing and keeps the accuracy (``experiments/sizes.py`` measures it).
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import is_exporting, register_notrace_function
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def trained_pixels(size: int, trained: int, patch: int, stride: int, below: float) -> int:
    """Return the pixels that a side of an image has inside the model.

    Args:
        size: Pixels of the side, covered by whole patches.
        trained: Patches of the trained grid along the side.
        patch: Pixels of a patch.
        stride: Pixels between neighbouring patches.
        below: Sides of fewer than ``below`` times the trained patches are resized; 0 resizes none.
    """
    patches, limit = (size - patch) // stride + 1, math.ceil(below * trained)
    usual = (trained - 1) * stride + patch
    if not torch.jit.is_scripting() and is_exporting():
        # A branch would bind the program to the sizes on one side.
        larger = torch.sym_min(torch.sym_max(patches - limit + 1, 0), 1)
        return usual + larger * (size - usual)
    return usual if patches < limit else size


def _equal(size: list[int], other: list[int]) -> bool:
    """Tell whether sizes (height, width) are equal, in a program of any size: always."""
    if not torch.jit.is_scripting() and is_exporting():
        return all(statically_known_true(size[i] == other[i]) for i in (0, 1))
    return size[0] == other[0] and size[1] == other[1]


@register_notrace_function
def to_trained_size(
    images: Tensor,
    trained_grid: tuple[int, int],
    patch_size: tuple[int, int],
    stride: tuple[int, int],
    below: float,
) -> Tensor:
    """Resize images (B, C, height, width) along the sides that are near the trained one.

    Each side by itself, since the tokens, too, are measured by row and by column. Same arguments as
    ``trained_pixels``, for (height, width). Other images are handed out as they are.
    """
    own = [images.shape[-2], images.shape[-1]]
    size = [
        trained_pixels(own[0], trained_grid[0], patch_size[0], stride[0], below),
        trained_pixels(own[1], trained_grid[1], patch_size[1], stride[1], below),
    ]
    if _equal(size, own):
        return images
    return F.interpolate(images, size, mode="bicubic", antialias=True)


@register_notrace_function
def to_own_grid(tokens: Tensor, grid: list[int], own_grid: list[int], num_prefix: int) -> Tensor:
    """Resize the patches among tokens to the grid of the image as it was given.

    The mean over the patches stays the same, so that averaged tokens classify as those of the resized
    image do.

    Args:
        tokens: (B, num_prefix + H W, C), prefix first.
        grid: Rows and columns (H, W) inside the model.
        own_grid: Rows and columns (h, w) of the image.
        num_prefix: Tokens that are no patches.

    Returns:
        (B, num_prefix + h w, C), the very same tokens if the grids are equal.
    """
    if _equal(grid, own_grid):
        return tokens
    patches = tokens[:, num_prefix:].mT.unflatten(2, [grid[0], grid[1]])
    own = F.interpolate(patches, [own_grid[0], own_grid[1]], mode="bilinear", antialias=True)
    own = own + (patches.mean((2, 3), keepdim=True) - own.mean((2, 3), keepdim=True))
    return torch.cat([tokens[:, :num_prefix], own.flatten(2).mT], 1)
