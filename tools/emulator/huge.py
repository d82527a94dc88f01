"""Check offsets over 2^31 with tensors that use address space but little memory.

    python tools/emulator/huge.py [--arch 80] [--ops conv longhorn mamba]

Only the last batch element is written, only its programs run, and only forward kernels are tested.
Results are compared with the float64 reference. Needs over 40 GB of address space.
"""

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import cases
import runtime

B, L, D, M = 28400, 197, 384, 4  # B * L * D > 2^31
CHUNKS = -(-L // 16)


def zeros(*shape: int) -> torch.Tensor:
    """Return zeros whose pages take no memory until they are accessed."""
    make = torch.empty if torch.Size(shape).numel() > 1 << 29 else torch.zeros
    return make(*shape, dtype=torch.bfloat16)


def last(programs: int) -> Callable[[str, int], list[int]]:
    """Return a function that picks the programs of a launch for the last batch element."""

    def chosen(name: str, total: int) -> list[int]:
        if name == "pack_kernel":  # of both directions
            return [*range(total // 2 - CHUNKS, total // 2), *range(total - CHUNKS, total)]
        return list(range(total - programs, total))

    return chosen


def conv_error() -> float:
    """Return the error of the convolution in the last batch element."""
    from vil.kernels import reference
    from vil.kernels.plan import conv_key
    from vil.kernels.triton import conv

    x = zeros(B, L, D)
    x[-1] = torch.randn(L, D)
    w, b = torch.randn(2, D, 4), torch.randn(2, D)
    runtime.STATE.cta_filter = last(CHUNKS * -(-D // 64))
    out = conv.ConvPlan(conv_key(x, w, None)).forward(x, w, b, None)[:, -1:]
    truth = reference.causal_conv1d_bidirectional(x[-1:].double(), w.double(), b.double())
    return cases.relative(out, truth)


def scan_error(recurrence: str) -> float:
    """Return the error of a token-by-token scan in the last batch element."""
    from vil.kernels import reference
    from vil.kernels.args import ScanArgs
    from vil.kernels.plan import scan_key
    from vil.kernels.triton import backend

    x, dt = zeros(2, B, L, D), zeros(2, B, L, D)
    q, k = zeros(2, B, L, M), zeros(2, B, L, M)
    z = zeros(B, L, D)
    for t in (x, dt, q, k):
        t[:, -1] = torch.randn(t.shape[0], *t.shape[2:])
    z[-1] = torch.randn(L, D)
    A = -torch.randn(2, D, M).exp() if recurrence == "mamba" else None
    skip, bias = torch.randn(2, D), torch.randn(2, D)
    runtime.STATE.cta_filter = last(-(-D // 128))
    args = ScanArgs(x, dt, A, q, k, skip, bias, z)
    out, *_ = backend.scan_plan(scan_key(args, recurrence, False, 1.0)).forward(args, True)
    x, dt, q, k = (t[:, -1:] for t in (x, dt, q, k))
    last_one = args._replace(x=x, dt=dt, q=q, k=k, z=z[-1:]).to(torch.float64)
    return cases.relative(out[-1:], reference.scan(last_one, recurrence)[0])


def main() -> int:
    """Return how many operations were wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, default=80)
    parser.add_argument("--ops", nargs="+", default=["conv", "longhorn", "mamba"])
    args = parser.parse_args()
    runtime.install(args.arch)
    runtime.install_project()
    bad = 0
    torch.manual_seed(0)
    for op in args.ops:
        runtime.clear()
        error = conv_error() if op == "conv" else scan_error(op)
        faults = runtime.faults()
        ok = error < 2**-7 and not faults
        bad += not ok
        print(
            f"{'ok  ' if ok else 'FAIL'} sm_{args.arch} {op} {B * L * D:,} elements,"
            f" last batch element, error {error:.1e}",
            flush=True,
        )
        for kernel, f in faults[:8]:
            print(f"       {f['kind']} in {kernel}, {f['tensor']}: `{f['text']}` ({f['source']})")
    return bad


if __name__ == "__main__":
    sys.exit(main() > 0)
