"""Time the block sizes of the Triton kernels on this GPU and print its row for ``kernels/tuning.py``.

    python benchmarks/tune.py [--shape 128 197 384]

Nothing is tuned when models run: what is printed here takes effect by being committed, and is then
the same on every rank and in every run.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vil.kernels import ops, tuning

# The scans have one channel per lane, the convolution may have several.
_SCAN = ((1, 1), (2, 2), (4, 4), (8, 8))  # (warps' worth of channels, warps)
_CANDIDATES = {
    "exact_forward": _SCAN,
    "exact_backward": _SCAN,
    "exact_backward_float32": _SCAN,
    "sequential_forward": _SCAN,
    "sequential_backward": _SCAN,
    "conv": ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)),
}
_D_STATE = 16


@contextmanager
def blocks_of(arch: str, kernel: str, block: tuple[int, int]) -> Iterator[None]:
    """Let a kernel have other blocks on an architecture within a ``with`` block."""
    before = dict(tuning.BLOCKS)
    tuning.BLOCKS[arch] = {**before.get(arch, before["default"]), kernel: block}
    try:
        yield
    finally:
        tuning.BLOCKS.clear()
        tuning.BLOCKS.update(before)


def steps(shape: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Return what runs each kernel: the forward pass, or forward and backward.

    Args:
        shape: B, L and D of the scan.
        device: A GPU.
    """
    B, L, D = shape

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    x, dt, z, u = randn(2, B, L, D), randn(2, B, L, D), randn(B, L, D), randn(B, L, D)
    q, k = randn(2, B, L, _D_STATE), randn(2, B, L, _D_STATE)
    skip, bias, taps = randn(2, D), randn(2, D), randn(2, D, 4)

    def scan(recurrence: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        tensors = (t.to(dtype) for t in (q, k, skip, bias, z))
        return ops.bidirectional_scan(x.to(dtype), dt.to(dtype), None, *tensors, recurrence)

    def without_gradient(recurrence: str) -> None:
        with torch.no_grad():
            scan(recurrence)

    return {
        "exact_forward": lambda: without_gradient("longhorn_exact"),
        "exact_backward": lambda: torch.autograd.grad(scan("longhorn_exact").sum(), (x, q)),
        "exact_backward_float32": lambda: torch.autograd.grad(
            scan("longhorn_exact", torch.float32).sum(), (x, q)
        ),
        "sequential_forward": lambda: without_gradient("longhorn"),
        "sequential_backward": lambda: torch.autograd.grad(scan("longhorn").sum(), (x, q)),
        "conv": lambda: torch.autograd.grad(
            ops.causal_conv1d_bidirectional(u, taps, bias).sum(), (u, taps)
        ),
    }


def best_blocks(
    arch: str,
    lanes: int,
    runs: dict[str, Callable[[], object]],
    time_of: Callable[[Callable[[], object]], float],
) -> dict[str, tuple[int, int]]:
    """Return for every kernel the fastest (BLOCK_D, warps), printing each time.

    Args:
        arch: As named by ``tuning.architecture``.
        lanes: Lanes of a warp.
        runs: What runs each kernel.
        time_of: Milliseconds that a function takes.
    """
    best = {}
    for kernel, run in runs.items():
        times = {}
        for channels, warps in _CANDIDATES[kernel]:
            block = (channels * lanes, warps)
            with blocks_of(arch, kernel, block):
                times[block] = time_of(run)
            print(f"{kernel} {block}: {times[block]:.3f} ms", file=sys.stderr)
        best[kernel] = min(times, key=times.get)
    best["exact_summary"] = best["exact_forward"]
    return best


def main() -> int:
    """Time everything, print the row, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs=3, type=int, default=(128, 197, 384), metavar=tuple("BLD"))
    shape = tuple(parser.parse_args().shape)
    if not torch.cuda.is_available():
        print("benchmarks/tune.py needs a GPU", file=sys.stderr)
        return 2
    from triton.testing import do_bench

    device = torch.device("cuda", torch.cuda.current_device())
    arch, lanes = tuning.architecture(device), torch.cuda.get_device_properties(device).warp_size
    with ops.use_backend("triton"):
        best = best_blocks(
            arch, lanes, steps(shape, device), lambda run: do_bench(run, return_mode="median")
        )
    print(f"# {torch.cuda.get_device_name()}, (B, L, D) = {shape}, torch {torch.__version__}")
    print(f'"{arch}": {best},')
    return 0


if __name__ == "__main__":
    sys.exit(main())
