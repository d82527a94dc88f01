"""Block sizes and warps of the Triton kernels: the only home of such numbers.

Chosen by counting machine instructions ahead of time, not by timing at run time: the same on every
rank and in every run. One channel per lane, so BLOCK_D is 32 times the number of warps.
"""

import functools
import os

import torch

CHUNK = 16  # tokens per chunk of the exact form: the least that a matrix product takes

# Kernel -> (BLOCK_D, num_warps)
_BLOCKS = {
    "exact_forward": (128, 4),  # matrix products of 64 rows and more become wgmma
    "exact_backward": (32, 1),  # the leanest: no barriers, the fewest shared-memory round trips
}


def blocks(kernel: str, channels: int) -> tuple[int, int]:
    """Return (BLOCK_D, num_warps) of a kernel.

    Args:
        kernel: Its name in the table above.
        channels: Channels D of the scan; narrower blocks serve what a wide one would waste on.
    """
    block, warps = _BLOCKS[kernel]
    while block > 32 and block // 2 >= channels:
        block, warps = block // 2, warps // 2
    return block, warps


@functools.cache
def compiles_for_nvidia() -> bool:
    """Tell whether kernels are compiled for NVIDIA, where inline PTX may stand in them."""
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of matrix products of float32 operands that stem from a dtype.

    TF32 holds bfloat16 and float16 inputs exactly; float32 inputs are split in three.
    """
    if not compiles_for_nvidia():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
