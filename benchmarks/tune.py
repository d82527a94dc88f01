"""Time the block sizes of the Triton kernels on this GPU and print its row for ``kernels/triton/tuning.py``.

    python -m benchmarks.tune [--shape 128 197 384] [--jobs 14] [--output FILE.json] [--seconds N]

Models tune nothing when they run. Commit the printed row, and every rank and every run uses the
same block sizes. With ``--output``, each time is written as soon as it is measured; repeat the
command to measure the rest. With ``--jobs``, several processes compile in parallel into Triton's
cache. One process then does the timing. ``--toy`` tries this without a GPU: a tiny shape in
Triton's interpreter, whose times mean nothing.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.budget import UNFINISHED, Budget, add_seconds
from benchmarks.provenance import revision
from vil.kernels import ops
from vil.kernels.triton import tuning
from vil.training.files import write_text

# The scans have one channel per lane, the convolution may have several.
_SCAN = ((1, 1), (2, 2), (4, 4), (8, 8))  # (BLOCK_D / lanes of a warp, warps)
_CANDIDATES = {
    "exact_forward": _SCAN,
    "exact_backward": _SCAN,
    "exact_backward_float32": _SCAN,
    "recurrent_forward": _SCAN,
    "recurrent_backward": _SCAN,
    "conv": ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)),
}
_D_STATE = 16
Trial = tuple[str, tuple[int, int]]  # a kernel and its (BLOCK_D, warps)


@contextmanager
def blocks_of(arch: str, kernel: str, block: tuple[int, int]) -> Iterator[None]:
    """Override a kernel's block size on an architecture within a ``with`` block."""
    before = dict(tuning.BLOCKS)
    tuning.BLOCKS[arch] = {**before.get(arch, before["default"]), kernel: block}
    try:
        yield
    finally:
        tuning.BLOCKS.clear()
        tuning.BLOCKS.update(before)


def steps(shape: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Return a function that runs each kernel: the forward pass, or forward and backward.

    Args:
        shape: (B, L, D) of the scan.
        device: Device of the inputs.
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

    def forward(recurrence: str) -> None:
        with torch.no_grad():
            scan(recurrence)

    def both(recurrence: str, dtype: torch.dtype = torch.bfloat16) -> object:
        return torch.autograd.grad(scan(recurrence, dtype).sum(), (x, q))

    def conv() -> object:
        y = ops.causal_conv1d_bidirectional(u, taps, bias)
        return torch.autograd.grad(y.sum(), (u, taps))

    return {
        "exact_forward": lambda: forward("longhorn_exact"),
        "exact_backward": lambda: both("longhorn_exact"),
        "exact_backward_float32": lambda: both("longhorn_exact", torch.float32),
        "recurrent_forward": lambda: forward("longhorn"),
        "recurrent_backward": lambda: both("longhorn"),
        "conv": conv,
    }


def warm(kernel: str, block: tuple[int, int], arch: str, shape: tuple[int, int, int]) -> None:
    """Compile a kernel with one block size into Triton's cache; the timing will show any error."""
    device = torch.device("cuda", torch.cuda.current_device())
    with ops.use_backend("triton"), blocks_of(arch, kernel, block), contextlib.suppress(Exception):
        steps(shape, device)[kernel]()


def compile_all(trials: Sequence[Trial], *where: object, jobs: int, seconds: float) -> None:
    """Compile in parallel for at most ``seconds``; ``where`` are the last arguments of ``warm``."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(warm, *trial, *where) for trial in trials]
        wait(futures, None if math.isinf(seconds) else seconds)
        pool.shutdown(cancel_futures=True)


def once(run: Callable[[], object]) -> float:
    """Return the wall time of one call in milliseconds."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def on_gpu(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a call on the GPU; infinity if the kernel does not fit."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(run, return_mode="median")
    except OutOfResources:
        return math.inf


def main() -> int:
    """Time everything, print the row, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs=3, type=int, default=(128, 197, 384), metavar=tuple("BLD"))
    parser.add_argument("--output", type=Path, help="write every time there, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--toy", action="store_true", help="tiny, interpreted; times mean nothing")
    add_seconds(parser)
    args = parser.parse_args()
    budget, shape = Budget(args.seconds), tuple(args.shape)
    if not torch.cuda.is_available() and not args.toy:
        print("benchmarks.tune needs a GPU", file=sys.stderr)
        return 2
    if args.toy:
        device, arch, lanes, name, shape = torch.device("cpu"), "cpu", 32, "toy", (1, 3, 32)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        arch, name = tuning.architecture(device), torch.cuda.get_device_name()
        lanes = torch.cuda.get_device_properties(device).warp_size
    head = {"device": name, "arch": arch, "shape": list(shape), "torch": torch.__version__}
    record = {"environment": head | {"commit": revision()}, "ms": {}}
    if args.output and args.output.exists():
        content = json.loads(args.output.read_text())
        record = content if content["environment"] == record["environment"] else record
    times: dict[str, float | None] = record["ms"]  # None if a block does not fit the GPU
    trials = [(k, (c * lanes, w)) for k, options in _CANDIDATES.items() for c, w in options]
    missing = [trial for trial in trials if str(trial) not in times]
    if args.jobs > 1 and missing and not args.toy:
        compile_all(missing, arch, shape, jobs=args.jobs, seconds=budget.left / 2)
    with ops.use_backend("triton"):
        runs = steps(shape, device)
        for kernel, block in missing:
            if not budget.left:
                print("the time is up; repeat the command to continue", file=sys.stderr)
                return UNFINISHED
            with blocks_of(arch, kernel, block):
                ms = (once if args.toy else on_gpu)(runs[kernel])
            times[str((kernel, block))] = ms if math.isfinite(ms) else None
            print(f"{kernel} {block}: {ms:.3f} ms", file=sys.stderr)
            if args.output:
                write_text(args.output, json.dumps(record, indent=1) + "\n")
    fitting = {trial: times[str(trial)] for trial in trials if times[str(trial)] is not None}
    best = {
        kernel: min((t for t in fitting if t[0] == kernel), key=fitting.get)[1]
        for kernel in _CANDIDATES
    }
    best["exact_summary"] = best["exact_forward"]
    print(f'# {name}, (B, L, D) = {shape}, torch {torch.__version__}\n"{arch}": {best},')
    return 0


if __name__ == "__main__":
    sys.exit(main())
