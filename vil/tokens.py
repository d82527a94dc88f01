"""Tokens of images of any size: position embeddings, the class token, feature maps.

Letters: B batch, H W grid of patches, N = H W patches, L = N + prefix tokens, C channels.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function, resample_abs_pos_embed
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from vil.kernels.checks import is_exporting


def are_equal(size: list[int], other: list[int]) -> bool:
    """Return whether sizes (height, width) are equal; for dynamic sizes of an export, whether they always are."""
    if not torch.jit.is_scripting() and is_exporting():
        return all(statically_known_true(size[i] == other[i]) for i in (0, 1))
    return size[0] == other[0] and size[1] == other[1]


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


@register_notrace_function
def resample_pos_embed(
    pos_embed: Tensor, grid: list[int], own_grid: list[int], num_prefix: int
) -> Tensor:
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


def class_token_to_middle(patches: Tensor, class_token: Tensor) -> Tensor:
    """Insert the class token (1, 1, C) before patch N // 2 of patches (B, N, C)."""
    middle = patches.shape[1] // 2
    token = class_token.expand(patches.shape[0], -1, -1)
    return torch.cat([patches[:, :middle], token, patches[:, middle:]], dim=1)


def class_token_first(x: Tensor, num_prefix: int = 1) -> Tensor:
    """Move the class token of (B, L, C) from the middle to the front, if there is one."""
    if num_prefix == 0:
        return x
    middle = (x.shape[1] - 1) // 2
    return torch.cat([x[:, middle : middle + 1], x[:, :middle], x[:, middle + 1 :]], dim=1)


def check_keep(keep: Tensor, patches: Tensor) -> None:
    """Check the indices of the patches to keep; on a GPU without waiting for their values.

    Args:
        keep: Indices of patches, counted row by row, int64 (B, n).
        patches: Patches, (B, H, W, C).

    Raises:
        ValueError: The shape or dtype is wrong. An index is out of range, or an image has an index twice.
        RuntimeError: The same for indices on a GPU or in a compiled program.
    """
    B, H, W, _ = patches.shape
    shape = tuple(keep.shape)
    if keep.dtype != torch.int64 or len(shape) != 2 or shape[0] != B or not 1 <= shape[1] <= H * W:
        raise ValueError(
            f"keep must be int64 (B, n), B = {B} and n from 1 to {H * W}, got {keep.dtype} {shape}"
        )
    numbers = keep.sort(1)[0]
    right = (numbers[:, 0] >= 0) & (numbers[:, -1] < H * W) & (numbers.diff() != 0).all(1)
    message = f"keep must have distinct indices 0 to {H * W - 1} in each image"
    if torch.compiler.is_compiling() or keep.device.type != "cpu":
        torch._assert_async(right.all(), message)  # a read of the result would wait for the GPU
    elif not all(right.tolist()):
        raise ValueError(f"{message}, got {keep.tolist()}")


def packed_intermediates(
    spatial: list[Tensor], prefix: list[Tensor] | None, final: Tensor | None, output_dict: bool
) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
    """Arrange intermediates as timm's ``forward_intermediates`` returns them.

    Args:
        spatial: Maps (B, C, H, W) or sequences (B, N, C) of patches.
        prefix: Prefix tokens of each intermediate, (B, num_prefix, C); None to leave them out.
        final: Final tokens, (B, L, C); None to leave them out.
        output_dict: Return a dictionary.
    """
    if output_dict:
        result: dict[str, Any] = {"image_intermediates": spatial}
        result |= {} if prefix is None else {"image_intermediates_prefix": prefix}
        return result | ({} if final is None else {"image_features": final})
    intermediates = spatial if prefix is None else list(zip(spatial, prefix, strict=True))
    return intermediates if final is None else (final, intermediates)
