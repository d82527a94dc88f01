"""Patches that are left out of the sequence: at random while training, or all but those that are named.

They are gone before the blocks, which is what makes it fast. The others keep their order and their
positions, the class token stands in the middle of them, and the taps of the convolution meet whoever is
next. At another grid than the trained one they
would have to be found by their rows and columns, which the kernels do for whole grids alone
(``kernels/grid.py``): there it is refused.

Letters: B batch, H W grid of patches, N = H W patches, n of them that remain, C channels.
"""

import torch
from timm.layers import PatchDropout
from torch import Tensor, nn


def patch_drop(rate: float) -> nn.Module:
    """Return what leaves out patches (B, N, C) at random while training, as many of each image.

    Raises:
        ValueError: The rate is none of a part that leaves something.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"patch_drop_rate must be at least 0 and below 1, got {rate}")
    return PatchDropout(rate, num_prefix_tokens=0, ordered=True) if rate > 0 else nn.Identity()


def refuse_other_grid(grid: list[int], trained_grid: tuple[int, int], grid_aware: bool) -> None:
    """Raise where patches cannot be left out.

    Args:
        grid: Rows and columns of patches.
        trained_grid: As of the backbone.
        grid_aware: As of the backbone.

    Raises:
        ValueError: The grid is not the trained one, and distances are to be measured in that.
    """
    if grid_aware and (grid[0] != trained_grid[0] or grid[1] != trained_grid[1]):
        raise ValueError(
            f"patches can be left out (patch_drop_rate, keep) at the trained grid, "
            f"{trained_grid[0]} x {trained_grid[1]} patches, and with grid_aware=False at any, got "
            f"{grid[0]} x {grid[1]}"
        )


def check_keep(keep: Tensor, patches: Tensor) -> None:
    """Check the numbers of patches that remain; a compiled program checks their shape alone.

    Args:
        keep: Numbers, int64 (B, n).
        patches: (B, H, W, C).

    Raises:
        ValueError: They are of another shape or dtype, or one is of no patch or there twice.
    """
    B, H, W, _ = patches.shape
    shape = tuple(keep.shape)
    if keep.dtype != torch.int64 or len(shape) != 2 or shape[0] != B or not 1 <= shape[1] <= H * W:
        raise ValueError(
            f"keep must be int64 (B, n) with B = {B} and n of 1 to {H * W}, got {keep.dtype} {shape}"
        )
    if torch.compiler.is_compiling():
        return
    numbers = keep.sort(1)[0]
    if (numbers[:, 0] < 0).any() or (numbers[:, -1] >= H * W).any() or (numbers.diff() == 0).any():
        raise ValueError(
            f"keep must have different numbers of 0 to {H * W - 1} for each image, got {keep.tolist()}"
        )


def taken(x: Tensor, numbers: Tensor) -> Tensor:
    """Return those of tokens (B, N, C) that have the numbers (B, n)."""
    return x.take_along_dim(numbers[..., None], 1)
