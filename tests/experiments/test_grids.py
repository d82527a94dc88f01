"""The experiment on other grids: a toy run, and what its results say."""

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("numba")

from experiments import grids, grids_results, trained_models, vision
from experiments.records import Row


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Name a data set of few steps, and keep its weights elsewhere."""
    settings = vision.EXPERIMENTS["digits"]
    settings = dataclasses.replace(settings, steps=2, images_per_class=(4,))
    monkeypatch.setitem(vision.EXPERIMENTS, "toy", settings)
    monkeypatch.setattr(trained_models, "WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(grids, "grids_of", lambda trained, far: [(4, 4), (2, 4), (8, 6)])
    return "toy"


def test_grids_are_square_wide_and_high() -> None:
    found = grids.grids_of(4, (3,))
    assert set(found) >= {(2, 2), (8, 8), (12, 12), (4, 2), (8, 4), (4, 7)}
    assert len(found) == len(set(found)) == 8 + 6 + 6


def test_a_toy_run_evaluates_every_grid(toy: str) -> None:
    row = grids.run(toy, "ViL, averaged", 1e-3, 0)
    assert set(row["grids"]) == {"4x4", "2x4", "8x6"}
    assert row["grids"]["4x4"] == [row["top1"], row["top1"]]
    assert row["grids"]["2x4"][0] == pytest.approx(row["grids"]["2x4"][1], abs=5)
    assert 0 <= row["finer"] <= 100
    assert "finer" not in grids.run(toy, "DeiT x 2", 1e-3, 0)
    config = trained_models.configure(toy, "DeiT x 2", 1e-3, 0)
    assert (
        config.schedule.epochs == 2 * trained_models.configure(toy, "DeiT", 1e-3, 0).schedule.epochs
    )
    assert trained_models.configure(toy, "ViL, sizes", 1e-3, 0).data.img_sizes == (16, 24, 32)
    assert trained_models.train(toy, "ViL, averaged", 1e-3, 0)["loss"] == row["loss"]  # kept


def rows_of(model: str, seed: int, low: float) -> Row:
    names = {f"{r}x{c}": [90.0, 92.0] for r, c in grids.grids_of(4)}
    names |= {"4x4": [100.0, 100.0], "5x5": [low, 99.0], "3x3": [91.0, 89.0], "2x4": [95.0, 94.0]}
    shared = {"dataset": "digits", "model": model, "seed": seed, "lr": 1e-3}
    return {**shared, "grids": names, "finer": 95.0}


def test_missed_aims_are_told(tmp_path: Path) -> None:
    rows = [rows_of("ViL", 0, 80.0), rows_of("ViL", 1, 90.0)]
    lines = grids_results.missed(rows)
    assert lines[0] == "digits, ViL: keeps less than 90 % at 5x5 (85 %)"
    assert "2x2 (by 2.0)" in lines[1]
    assert "3x3" not in lines[1]
    assert "2x4" not in lines[1]
    assert lines[2] == "digits, ViL: loses 5.0 points with patches at half the stride"
    table = grids_results.table(rows)
    assert "| digits | ViL | 2 |" in table
    assert "85.0 ± 7.1" in table
    grids_results.draw(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert grids_results.missed_text([]) == "Not run yet."
    assert grids_results.figures(rows)["glyphs_half"] == "not run"
