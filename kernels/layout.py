"""What the Triton kernels ask of their inputs' memory layout."""

from torch import Tensor


def adjacent_channels(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if neighbours on its last axis are not neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
