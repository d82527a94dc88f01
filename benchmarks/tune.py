"""Time the block sizes of the Triton kernels on this GPU and print its row for ``kernels/triton/tuning.py``.

    python -m benchmarks.tune [--shape 128 197 384] [--jobs 14] [--output FILE.json] [--seconds N]

Nothing is tuned when models run: what is printed here takes effect by being committed, and is then
the same on every rank and in every run. With an output, every time is written there as it is measured,
and the same command measures what is missing. With ``--jobs``, processes compile side by side what is
then timed in one, from Triton's cache of compiled kernels. ``--toy`` is for trying this without a GPU: a tiny shape
in Triton's interpreter, whose times mean nothing.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.budget import UNFINISHED, Budget, add_seconds
from benchmarks.provenance import revision
from vil.kernels import ops
from vil.kernels.triton import tuning
from vil.training.files import write_text

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


class Times:
    """Milliseconds by kernel and block, in a file or in none."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        """Open the record, or begin it where it is of another environment or shape.

        Args:
            path: JSON file, which need not exist.
            head: What the times depend on.
        """
        self.path, self.head = path, head
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            content = json.loads(path.read_text())
            if content["environment"] == head:
                self.rows = content["rows"]

    def get(self, kernel: str, block: tuple[int, int]) -> float | None:
        """Return a time, infinite if the block does not fit the GPU, None if it is not there."""
        wanted = {"kernel": kernel, "block": list(block)}
        found = [row["ms"] for row in self.rows if wanted.items() <= row.items()]
        return None if not found else math.inf if found[0] is None else found[0]

    def add(self, kernel: str, block: tuple[int, int], ms: float) -> None:
        """Add a time and write the file."""
        ms = ms if math.isfinite(ms) else None
        self.rows.append({"kernel": kernel, "block": list(block), "ms": ms})
        self.write()

    def write(self, **results: Any) -> None:
        """Write the file, with what was made of the times."""
        if self.path is not None:
            content = {"environment": self.head, "rows": self.rows} | results
            write_text(self.path, json.dumps(content, indent=1) + "\n")


def best_blocks(
    arch: str,
    lanes: int,
    runs: dict[str, Callable[[], object]],
    time_of: Callable[[Callable[[], object]], float],
    times: Times | None = None,
    budget: Budget | None = None,
) -> dict[str, tuple[int, int]] | None:
    """Return for every kernel the fastest (BLOCK_D, warps), printing each time.

    Args:
        arch: As named by ``tuning.architecture``.
        lanes: Lanes of a warp.
        runs: What runs each kernel.
        time_of: Milliseconds that a function takes.
        times: What was measured already, and receives the rest.
        budget: Time for all, None if there is no limit.

    Returns:
        None if the time was up before all were measured.
    """
    times = times or Times(None, {})
    best = {}
    for kernel, run in runs.items():
        found = {}
        for channels, warps in _CANDIDATES[kernel]:
            block = (channels * lanes, warps)
            ms = times.get(kernel, block)
            if ms is None:
                if budget is not None and not budget.left:
                    return None
                with blocks_of(arch, kernel, block):
                    ms = time_of(run)
                times.add(kernel, block, ms)
            found[block] = ms
            print(f"{kernel} {block}: {ms:.3f} ms", file=sys.stderr)
        best[kernel] = min(found, key=found.get)
    best["exact_summary"] = best["exact_forward"]
    return best


def warm(kernel: str, block: tuple[int, int], arch: str, shape: tuple[int, int, int]) -> None:
    """Compile what runs a kernel in a block, for the cache; of what fails the timing will tell."""
    device = torch.device("cuda", torch.cuda.current_device())
    with ops.use_backend("triton"), blocks_of(arch, kernel, block), contextlib.suppress(Exception):
        steps(shape, device)[kernel]()


def compile_all(
    missing: list[tuple[str, tuple[int, int]]],
    arch: str,
    shape: tuple[int, int, int],
    jobs: int,
    seconds: float,
) -> None:
    """Compile kernels side by side, for no longer than some time.

    Args:
        missing: Names and blocks.
        arch: As named by ``tuning.architecture``.
        shape: B, L and D.
        jobs: Processes.
        seconds: Time after which what is not begun is left out.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(warm, kernel, block, arch, shape) for kernel, block in missing]
        wait(futures, None if math.isinf(seconds) else seconds)
        pool.shutdown(cancel_futures=True)


def once(run: Callable[[], object]) -> float:
    """Return the milliseconds of one call on this machine's clock."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def do_bench(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a call on the GPU; infinite if it does not fit there."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(run, return_mode="median")
    except OutOfResources:
        return math.inf


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs=3, type=int, default=(128, 197, 384), metavar=tuple("BLD"))
    parser.add_argument("--output", type=Path, help="write every time there, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--toy", action="store_true", help="tiny, interpreted; times mean nothing")
    add_seconds(parser)
    return parser.parse_args()


def main() -> int:
    """Time everything, print the row, and return the exit status."""
    args = parse()
    budget, shape = Budget(args.seconds), tuple(args.shape)
    if not torch.cuda.is_available() and not args.toy:
        print("benchmarks.tune needs a GPU", file=sys.stderr)
        return 2
    if args.toy:
        device, arch, lanes, name, shape = torch.device("cpu"), "cpu", 32, "toy", (1, 3, 32)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        arch = tuning.architecture(device)
        lanes = torch.cuda.get_device_properties(device).warp_size
        name = torch.cuda.get_device_name()
    head = {"device": name, "arch": arch, "shape": list(shape), "torch": torch.__version__}
    times = Times(args.output, head | {"commit": revision()})
    blocks = [(name, (c * lanes, w)) for name, options in _CANDIDATES.items() for c, w in options]
    missing = [(name, block) for name, block in blocks if times.get(name, block) is None]
    if args.jobs > 1 and missing and not args.toy:
        compile_all(missing, arch, shape, args.jobs, budget.left / 2)
    with ops.use_backend("triton"):
        clock = once if args.toy else do_bench
        best = best_blocks(arch, lanes, steps(shape, device), clock, times, budget)
    if best is None:
        print("the time is up, the same command continues", file=sys.stderr)
        return UNFINISHED
    times.write(best=best)
    print(f"# {name}, (B, L, D) = {shape}, torch {torch.__version__}")
    print(f'"{arch}": {best},')
    return 0


if __name__ == "__main__":
    sys.exit(main())
