"""The tuner: what it prints is what was fastest, and it leaves the table as it was."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tune
from vil.kernels import tuning


def test_finds_the_fastest_blocks_of_every_kernel() -> None:
    before = copy.deepcopy(tuning.BLOCKS)
    fastest = {"exact_forward": (256, 4), "conv": (128, 2)}
    runs = {
        name: lambda name=name, block=block: tuning.blocks_for("gfx90a", name, 4096) == block
        for name, block in fastest.items()
    }
    best = tune.best_blocks("gfx90a", 64, runs, lambda run: 1.0 if run() else 2.0)
    assert best == {**fastest, "exact_summary": (256, 4)}
    assert before == tuning.BLOCKS


def test_every_kernel_of_the_table_is_timed() -> None:
    runs = tune.steps((1, 2, 4), torch.device("cpu"))
    for row in tuning.BLOCKS.values():
        assert set(row) == {*runs, "exact_summary"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_says_so() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "tune.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "benchmarks/tune.py needs a GPU"
