"""The many-step benchmark: what it measures, and that it fails where it should."""

import math

import torch

from benchmarks import train_steps


def test_learns_by_heart_and_says_so() -> None:
    row = train_steps.train("vil_tiny", 8, 2, 32, torch.device("cpu"), seen=1)
    assert row.finite_steps == 8
    assert row.passed(8)
    assert "| 8 of 8 | - | - | - | passed |" in train_steps.table([row], 8)


def test_a_loss_that_is_not_finite_or_does_not_fall_fails() -> None:
    steady = train_steps.Row("m", 2.3, 2.2, 10, 100.0, 1.0)
    broken = train_steps.Row("m", 2.3, math.nan, 4, 50.0, 1.0)
    assert not steady.passed(10)
    assert not broken.passed(10)
    lines = train_steps.table([steady, broken], 10).splitlines()
    assert lines[-1] == "| m | 2.300 | nan | 4 of 10 | 50 | 0.50 | 1.00 | FAILED |"
