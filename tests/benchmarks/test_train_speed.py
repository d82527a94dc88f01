"""The trainer's speed: rows of models that took turns, and what they make of 300 epochs."""

import argparse

import pytest

from benchmarks import train_speed


def test_models_take_turns_and_are_compared_with_the_first() -> None:
    args = argparse.Namespace(batch_size=2, img_size=32, steps=1, amp=False, compile=False)
    names = ("vil_tiny", "vim_tiny")
    contestants = [train_speed.Contestant(name, args) for name in names]
    rows = train_speed.measure(contestants, rounds=2, steps=1)
    assert [row.model for row in rows] == list(names)
    assert rows[0].ratio == 1.0
    assert rows[1].images_per_s > 0
    assert [contestant.steps for contestant in contestants] == [3, 3]


def test_hours_are_those_of_the_recipes_epochs() -> None:
    """1,251 steps of 1,024 images, 300 times."""
    row = train_speed.Row("m", 1000.0, 1.0, 2.0)
    assert row.hours == pytest.approx(300 * 1251 * 1024 / 1000 / 3600, rel=1e-3)
    assert train_speed.table([row]).splitlines()[-1] == "| m | 1000 | 1.00 | 2.00 | 107 |"
