"""What the Triton kernels ask of their inputs' memory layout."""

import torch.nn.functional as F
from torch import Tensor


def adjacent_channels(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if neighbours on its last axis are not neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def padded_tokens(least: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return tensors (..., L, D) with zeros after their tokens if L is less than ``least``.

    A token of zeros at either end of a scan changes nothing: its key is zero.
    """
    missing = max(least - next(t for t in tensors if t is not None).shape[-2], 0)
    if not missing:
        return tensors
    return tuple(None if t is None else F.pad(t, (0, 0, 0, missing)) for t in tensors)
