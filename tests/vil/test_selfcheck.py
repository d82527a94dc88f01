"""The self check passes here, and fails where a backend is wrong or ends its process."""

import subprocess
import sys

import pytest

pytest.importorskip("numba")

# Runs the check at small sizes, in forked processes, which have what this script changes.
CHECK = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from vil import selfcheck
from vil.kernels.cpu import backend

selfcheck.SMALL, selfcheck.MODEL = (2, 9, 10, 4), (1, 11, 12, 4)
selfcheck._process = lambda: ProcessPoolExecutor(1, get_context("fork"))
selfcheck.available_backends = lambda: {"cpu": "cpu"}
right = backend.ScanPlan.backward

def backward(plan, args, *rest, **options):
    grads = right(plan, args, *rest, **options)
    if grads.z is not None:
        return grads._replace(z=grads.z * float(sys.argv[1]))
    if sys.argv[2] != "right" and args.x.shape == (1, 2, 9, 10) and args.A is not None:
        os._exit(7) if sys.argv[2] == "crash" else 1 / 0
    return grads

backend.ScanPlan.backward = backward
sys.exit(selfcheck.main())
"""


def check(factor: float, one_way: str) -> tuple[int, list[str]]:
    """Return the exit status and the lines of a check, with wrong gates and wrong scans of one direction."""
    command = [sys.executable, "-c", CHECK, str(factor), one_way]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.ci
def test_passes_and_counts_every_case() -> None:
    status, lines = check(1.0, "right")
    assert status == 0, lines
    # 16: a convolution and 3 scans both ways, in 4 dtypes. 20: the small size in 2 of them, with each
    # scan also one way, twice. 4: a mixer at another grid, in these 2 dtypes at both sizes.
    assert lines[-1] == "40 passed, 0 failed"


@pytest.mark.parametrize(
    ("factor", "one_way", "told"),
    [
        (2.0, "crash", "BrokenProcessPool: A process in the process pool was terminated abruptly"),
        (float("nan"), "error", "ZeroDivisionError: division by zero"),
    ],
)
def test_fails_on_a_wrong_gradient_and_goes_on_after_a_crash(factor: float, one_way: str, told: str) -> None:
    status, lines = check(factor, one_way)
    assert status == 1
    assert lines[-1] == "18 passed, 22 failed"  # 18 for the gate, and mamba both ways in 2 dtypes
    assert any("FAIL  bfloat16  cpu bidirectional_scan mamba" in line for line in lines)
    ended = [line for line in lines if f"error inf, {told}" in line]
    assert [line.split()[:5] for line in ended] == [
        ["FAIL", dtype, "cpu", "scan", "mamba"] for dtype in ("float64", "float32") for reverse in (False, True)
    ]
