"""Every Triton kernel compiles for one architecture of each vendor, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.ci
@pytest.mark.parametrize("arch", ["90", "gfx942"])
def test_kernels_compile(arch: str) -> None:
    """The cost of kernels is recorded per Triton version, as every version compiles differently."""
    # Use a separate process: kernels imported under Triton's interpreter cannot be compiled.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "lab.benchmarks.kernels", "--arch", arch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exact = "fragments" if arch == "90" else "exact"
    for kernel in (
        "diagonal_backward, vil_tiny, batch, train",
        "diagonal_backward, vim_tiny, long, train",
        f"{exact}_backward, vil_tiny_exact, batch, train",
        f"{exact}_states, vil_tiny_exact, long, train",
        "conv_backward, vil_tiny, grid, train",
    ):
        assert f"| {arch} {kernel} |" in done.stdout
