"""Tokens in a sequence: the place of the class token, patches to keep, intermediates as timm returns them.

Letters: B batch, H W grid of patches, N = H W patches, L = N + prefix tokens, C channels.
"""

from typing import Any

import torch
from torch import Tensor


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
        raise ValueError(f"keep must be int64 (B, n), B = {B} and n from 1 to {H * W}, got {keep.dtype} {shape}")
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
