"""The tuner: what it prints is what was fastest, and it leaves the table as it was."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import tune
from benchmarks.budget import Budget
from vil.kernels.triton import tuning


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


def test_what_was_timed_is_not_timed_again(tmp_path: Path) -> None:
    """A record of the same environment is continued, within the time; of another it is begun anew."""
    path, runs = tmp_path / "tune.json", {"conv": lambda: None, "exact_forward": lambda: None}
    milliseconds = iter(range(1, 100))

    def best(head: dict, budget: Budget | None = None) -> dict | None:
        times = tune.Times(path, head)
        return tune.best_blocks("gfx90a", 32, runs, lambda run: next(milliseconds), times, budget)

    assert best({"device": "a"}, Budget(0)) is None
    assert best({"device": "a"})["conv"] == (32, 1)
    count = next(milliseconds)
    assert best({"device": "a"}, Budget(0))["conv"] == (32, 1)
    assert next(milliseconds) == count + 1
    rows = json.loads(path.read_text())["rows"]
    assert rows[0] == {"kernel": "conv", "block": [32, 1], "ms": 1}
    best({"device": "b"})
    assert next(milliseconds) == count + 2 + len(rows)


def test_every_kernel_of_the_table_is_timed() -> None:
    runs = tune.steps((1, 2, 4), torch.device("cpu"))
    for row in tuning.BLOCKS.values():
        assert set(row) == {*runs, "exact_summary"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune.py"])
    assert tune.main() == 2
    assert capsys.readouterr().err.strip() == "benchmarks.tune needs a GPU"
