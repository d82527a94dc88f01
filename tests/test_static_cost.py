"""Budgets on the machine code of the Triton kernels, so that one that gets worse is noticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent

# Kernel -> most registers, spills and instructions per unit on sm_90, a little above what it takes.
BUDGETS = {
    "exact_forward": (160, 0, 50),
    "exact_forward_saving": (160, 0, 55),
    "exact_backward": (255, 165, 142),
    "conv_forward": (96, 0, 40),
    "conv_backward": (168, 0, 72),
}
OTHER_ARCHITECTURES = ("80", "100", "120", "gfx942")


def costs(*arguments: str) -> list[list[str]]:
    """Return the rows of the table that the tool prints, in a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "benchmarks/static_cost.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BUDGETS)
def test_cost_on_sm_90_stays_within_budget(kernel: str) -> None:
    (row,) = costs("--arch", "90", "--kernel", kernel)
    registers, spills, per_unit = int(row[3]), int(row[4]), float(row[8].split()[0])
    assert registers <= BUDGETS[kernel][0]
    assert spills <= BUDGETS[kernel][1]
    assert per_unit <= BUDGETS[kernel][2]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["exact_forward", "conv_forward", "conv_backward"])
def test_compiles_for_every_architecture_without_spills(kernel: str) -> None:
    rows = costs("--arch", *OTHER_ARCHITECTURES, "--kernel", kernel)
    assert [row[1] for row in rows] == list(OTHER_ARCHITECTURES)
    assert all(int(row[4]) == 0 for row in rows)
