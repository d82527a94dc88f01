"""The plan: its runs are pairs, its tables are those of PLAN.md, and verdicts follow the tests."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.budget import Budget
from experiments import plan, vision
from experiments.comparisons import SignFlip
from experiments.records import Record, Row

PLAN = vision.ROOT / "experiments" / "PLAN.md"
SPEEDS = {"longhorn_exact": 100, "longhorn": 400, "longhorn+silu": 50}


def invented(contestant: str, lr: float, seed: int) -> Row:
    """Leave after some steps, sooner nearer to a rate of 4e-3; by how much the seed adds."""
    steps = SPEEDS.get(contestant, 800) * (1 + abs(lr - 4e-3)) + seed * (contestant == "longhorn")
    return {"steps": steps, "left": steps < 600, "train_loss": 1.0, "cpu_seconds": 1.0}


def images(contestant: str, lr: float, seed: int) -> Row:
    """Lose what depends on the steps, for ViL as much as DeiT at three times."""
    times = int(contestant.partition(plan.TIMES)[2] or 3)
    return {"loss": 1 / times + abs(lr - 2e-3) + seed / 1000, "train_loss": 0.5, "top1": 90.0}


def run_all(
    record: Record, function: Callable[..., Row], runs: list[Row], jobs: int, budget: Budget
) -> int:
    """As ``records.run_all``, here and unwritten."""
    missing = record.missing(runs)
    while missing and budget.left:
        run = missing.pop(0)
        record.rows.append(run | function(**run))
    return len(missing)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Record]:
    """Records of tasks that take no time."""
    monkeypatch.setattr(plan.vision, "RESULTS", tmp_path)
    monkeypatch.setattr(plan, "run_all", run_all)
    for name, task in plan.TASKS.items():
        run = images if name == "fractals" else invented
        monkeypatch.setitem(plan.TASKS, name, dataclasses.replace(task, run=run))
    return {name: plan.open_record(name) for name in plan.TASKS}


def test_sign_flips_by_hand() -> None:
    """Of four equal signs' 16 patterns two are as far from zero; a zero has either sign."""
    assert SignFlip("", "", "", [1.0, 2, 3, 4], [0.0] * 4).p == pytest.approx(2 / 16)
    assert SignFlip("", "", "", [1.0, 2, 3, 0], [0.0] * 4).p == pytest.approx(4 / 16)
    assert SignFlip("", "", "", [1.0, 1], [1.0, 1]).p == 1.0
    many = SignFlip("", "", "", [1.0] * 30, [0.0] * 30)
    assert many.p == SignFlip("", "", "", [1.0] * 30, [0.0] * 30).p == 1e-4
    # By hand: mean 2, standard error 1 / sqrt(3), t of 2 degrees of freedom 4.303.
    low, high = SignFlip("", "", "", [1.0, 2, 3], [0.0] * 3).interval
    assert (low, high) == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
