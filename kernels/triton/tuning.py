"""Block sizes, warps and splits of the Triton kernels: the only home of such numbers.

Chosen by counting machine instructions ahead of time, not by timing at run time: the same on every
rank and in every run.
"""

import functools
import os

import torch

CHUNK = 16  # tokens per chunk of a scan: the least that a matrix product takes

# Architecture -> kernel -> (channels of a program, warps). One channel per lane in the scans, whose
# warps have 32 lanes on NVIDIA GPUs and 64 on AMD's gfx9. An architecture that is not named takes
# the first row; benchmarks/tune.py prints a row for the GPU that it runs on.
_DEFAULT = {
    "exact_forward": (128, 4),
    "exact_backward": (32, 1),  # no barriers, the fewest shared-memory round trips
    "exact_backward_float32": (32, 1),  # products in three parts: more would spill
    "exact_summary": (128, 4),
    "recurrent_forward": (128, 4),
    "recurrent_backward": (64, 2),
    # Two channels per lane: their loads are vectors, and even with 8 taps the backward pass still
    # fits in the registers.
    "conv": (64, 1),
}
# Products of 64 rows and more become those of whole warp groups: 99 instructions per token, channel and
# direction on sm_90. Where there are none, on sm_80, the same block takes 129 and the narrow one 122.
_WARP_GROUPS = {**_DEFAULT, "exact_backward": (128, 4)}
# With four warps, products there would go through tensor memory, which no kernel of ours has run through
# yet, neither on a GPU nor emulated: two warps take the products of sm_80.
_WITHOUT_TENSOR_MEMORY = {**_DEFAULT, "exact_forward": (64, 2), "exact_summary": (64, 2)}
BLOCKS = {
    "default": _DEFAULT,
    "sm_90": _WARP_GROUPS,
    **dict.fromkeys(("sm_100", "sm_101", "sm_103", "sm_110"), _WITHOUT_TENSOR_MEMORY),
    "gfx942": {
        "exact_forward": (128, 2),
        "exact_backward": (64, 1),
        "exact_backward_float32": (64, 1),
        "exact_summary": (128, 2),
        "recurrent_forward": (128, 2),
        "recurrent_backward": (64, 1),
        "conv": (128, 1),
    },
}

_WARPS_PER_PROCESSOR = 8  # that keep a multiprocessor busy: two for each of its schedulers
SHORTEST_SEGMENT = 4  # chunks


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the name of a GPU's architecture, as in "sm_90" or "gfx942", or "cpu"."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def blocks(kernel: str, channels: int, device: torch.device) -> tuple[int, int]:
    """Return (BLOCK_D, num_warps) of a kernel.

    Args:
        kernel: Its name in the table above.
        channels: Channels D of the scan; narrower blocks serve what a wide one would waste on.
        device: Where it runs.
    """
    return blocks_for(architecture(device), kernel, channels)


def blocks_for(arch: str, kernel: str, channels: int) -> tuple[int, int]:
    """Return (BLOCK_D, num_warps) of a kernel on an architecture, which need not be at hand."""
    block, warps = BLOCKS.get(arch, BLOCKS["default"])[kernel]
    while warps > 1 and block // 2 >= channels:
        block, warps = block // 2, warps // 2
    return block, warps


def num_splits(warps: int, chunks: int, device: torch.device, overhead: float) -> tuple[int, int]:
    """Return into how many splits to cut a sequence, and how many chunks are in each.

    Args:
        warps: Warps of the scan in one piece.
        chunks: Chunks of the sequence.
        device: Where it runs.
        overhead: How many times the work a scan in splits takes.
    """
    if device.type != "cuda":
        return 1, chunks
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return splits_for(processors, warps, chunks, overhead)


def splits_for(processors: int, warps: int, chunks: int, overhead: float) -> tuple[int, int]:
    """Return what ``num_splits`` does for a GPU of so many multiprocessors.

    A scan in one piece takes the same time however few its warps are, up to what fills the GPU. In
    splits it takes ``overhead`` times the work, which pays if at least twice that would fit.
    """
    fitting = _WARPS_PER_PROCESSOR * processors / max(warps, 1)  # an empty batch has none
    count = min(int(fitting), chunks // SHORTEST_SEGMENT)
    if count < 2 * overhead:
        return 1, chunks
    length = -(-chunks // count)
    return -(-chunks // length), length


@functools.cache
def compiles_for_nvidia() -> bool:
    """Tell whether kernels are compiled for NVIDIA, where inline PTX may stand in them."""
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None


def fast(device: torch.device) -> int:
    """Return the compute capability whose PTX may stand in kernels, as 80 or 90; 0 for none."""
    return int(architecture(device).removeprefix("sm_")) if compiles_for_nvidia() else 0


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of matrix products of float32 operands that stem from a dtype.

    TF32 holds bfloat16 and float16 inputs exactly, and what is computed from them is rounded to it;
    float32 inputs are split in three.
    """
    if not compiles_for_nvidia():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
