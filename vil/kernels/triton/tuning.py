"""Block sizes, warps and splits of all Triton kernels.

They were chosen by counting machine instructions ahead of time. Nothing is timed at run time, so
they are the same on every rank and in every run.
"""

import functools
import os

import torch

# Tokens of a chunk, from one saved state to the next. The exact form needs 16 for a matrix product.
# The other scans keep 2 KB of scratch memory per program and token in the backward pass: with 16
# tokens, all programs that an H200 runs at a time need 26 MB, which stays in L2.
CHUNK = 16

# Architecture -> kernel -> (channels per program, warps). Scans have one channel per lane; warps
# have 32 lanes on NVIDIA GPUs and 64 on AMD's gfx9. An architecture without a row uses the first
# row. `python -m lab.benchmarks.gpu_kernels blocks FILE` times the kernels, with the sizes given
# here.
_DEFAULT = {
    "exact_forward": (128, 4),
    "exact_backward": (32, 1),  # no barriers, the fewest shared-memory round trips
    "exact_backward_float32": (32, 1),  # products in three parts: more would spill
    "exact_states": (32, 1),
    "exact_gradients": (32, 1),  # lanes, each with four states of a channel
    # A channel per lane on average: the warps of a program only share what the caches hold.
    "fragments_forward": (128, 4),
    "fragments_backward": (128, 4),
    "fragments_states": (32, 1),
    "diagonal_forward": (128, 4),
    "diagonal_backward": (32, 1),  # sums over channels stay in a warp
    # Two channels per lane: loads are vectors, and even with 8 taps the backward pass still fits in
    # the registers.
    "conv": (64, 1),
}
# Measured on an H200, microseconds of the backward pass and of keys_kernel, which adds up the sums
# of blocks: (128, 4) 285 + 23, (64, 2) 288 + 38, (32, 1) 310 + 68 at 224 px, batch 128; 459 + 25,
# 414 + 43, 445 + 76 at 512 px, batch 32.
_HOPPER = {**_DEFAULT, "exact_backward": (128, 4)}
# With four warps, products would use tensor memory there. That is untested, both on a GPU and
# emulated, so two warps use the products of sm_80. Revisit this with Triton's issues 9871 (with
# four warps, products differ from run to run; fixed after Triton 3.6) and 10590.
_WITHOUT_TENSOR_MEMORY = {**_DEFAULT, "exact_forward": (64, 2)}
BLOCKS = {
    "default": _DEFAULT,
    "sm_90": _HOPPER,
    **dict.fromkeys(("sm_100", "sm_101", "sm_103", "sm_110"), _WITHOUT_TENSOR_MEMORY),
    "gfx942": {
        "exact_forward": (128, 2),
        "exact_backward": (64, 1),
        "exact_backward_float32": (64, 1),
        "exact_states": (64, 1),
        "exact_gradients": (64, 1),
        "diagonal_forward": (128, 2),
        "diagonal_backward": (64, 1),
        "conv": (128, 1),
    },
}

# Registers with which three warps fit on every scheduler of an NVIDIA GPU. As a limit, it is also
# an aim: left alone, ptxas takes fewer. Forward scans then wait for one load after another, 1.2 to
# 12 times as long (sm_90).
THREE_WARPS = 168

SHORTEST_SPLIT = 4  # fewest chunks of a split
SHORTEST_BACK_SPLIT = 16  # the same if states after splits are saved
# Warps of a kernel that run on a multiprocessor at a time, by registers: 168, or 255 in the exact
# backward pass.
_RESIDENT = {"exact_backward": 8, "exact_backward_float32": 8, "fragments_backward": 8}
_RESIDENT_OTHERS = 12


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the name of a GPU's architecture, such as "sm_90" or "gfx942", or "cpu"."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def blocks(kernel: str, channels: int, device: torch.device) -> tuple[int, int]:
    """Return (BLOCK_D, num_warps) of a kernel.

    Args:
        kernel: Name of the kernel in the table above.
        channels: Channels D of the scan. Few channels get a narrower block, to avoid waste.
        device: Device of the kernel.
    """
    return blocks_for(architecture(device), kernel, channels)


def blocks_for(arch: str, kernel: str, channels: int) -> tuple[int, int]:
    """Return (BLOCK_D, num_warps) of a kernel on an architecture, which need not be present."""
    block, warps = BLOCKS.get(arch, BLOCKS["default"])[kernel]
    while warps > 1 and block // 2 >= channels:
        block, warps = block // 2, warps // 2
    return block, warps


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_splits(kernel: str, warps: int, chunks: int, device: torch.device, min_fit: float) -> tuple[int, int]:
    """Return the number of splits of a sequence and the number of chunks per split.

    Args:
        kernel: Name of the kernel that scans, in the table above.
        warps: Warps of the scan in one piece.
        chunks: Chunks of the sequence.
        device: Device of the scan.
        min_fit: Times that a scan in one piece must fit onto the device for splits to be worth
            their own work.
    """
    resident = _RESIDENT.get(kernel, _RESIDENT_OTHERS) * processors(device)
    fitting = resident / max(warps, 1)  # an empty batch has no warps
    shortest = SHORTEST_BACK_SPLIT if kernel == "fragments_backward" else SHORTEST_SPLIT
    count = min(int(fitting), chunks // shortest)
    if fitting < min_fit or count < 2:
        return 1, chunks
    length = -(-chunks // count)
    return -(-chunks // length), length


@functools.cache
def compiles_for_nvidia() -> bool:
    """Return whether kernels are compiled for NVIDIA and may contain inline PTX."""
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None


def fast(device: torch.device) -> int:
    """Return the compute capability whose PTX kernels may contain, such as 80 or 90; 0 for none."""
    return int(architecture(device).removeprefix("sm_")) if compiles_for_nvidia() else 0


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of matrix products of float32 operands that come from a dtype.

    TF32 holds bfloat16 and float16 inputs exactly, and values computed from them are rounded to
    TF32. float32 inputs are split in three.
    """
    if not compiles_for_nvidia():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
