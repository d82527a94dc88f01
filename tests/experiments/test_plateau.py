"""Steps to leave the plateau: what counts as having left, and what a run depends on."""

import dataclasses

import pytest

from experiments import plateau

TINY = plateau.Setting(
    length=16, pairs=(2, 4), d_state=2, limit=40, dim=8, vocabulary=16, batch_size=16
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plateau.SETTINGS, "tiny", TINY)
    monkeypatch.setattr(plateau, "WINDOW", 6)


def run(recurrence: str = "longhorn", lr: float = 1e-2, seed: int = 0, **setting: int) -> dict:
    plateau.SETTINGS["tiny"] = dataclasses.replace(TINY, **setting)
    figures = plateau.run("tiny", recurrence, lr, seed)
    assert figures.pop("cpu_seconds") >= 0
    return figures


def test_left_is_twice_the_share_of_naming_any_value() -> None:
    assert plateau.SETTINGS["short"].left_at == pytest.approx(2 * (1 / 2 + 1 / 4 + 1 / 8) / 3)
    assert plateau.SETTINGS["long"].left_at == pytest.approx(2 * (1 / 4 + 1 / 8 + 1 / 16) / 3)


def test_a_run_leaves_at_the_first_window_that_is_right_often_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plateau, "TIMES", 0.4)  # what so small a model reaches in so few steps
    left = run()
    assert left["left"]
    assert 6 < left["steps"] < TINY.limit
    assert left["accuracy"] >= TINY.left_at
    before = run(limit=left["steps"] - 1)
    assert not before["left"]
    assert before["steps"] == left["steps"] - 1
    assert before["accuracy"] < TINY.left_at
    assert run(limit=1000) == left  # what comes after a step changes nothing before it
