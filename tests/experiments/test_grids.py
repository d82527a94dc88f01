"""The experiment on other grids: a toy run, and what its results say."""

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("numba")

from experiments import grids, trained_models, vision


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Name a data set of few steps, and keep its weights elsewhere."""
    settings = vision.EXPERIMENTS["digits"]
    settings = dataclasses.replace(settings, steps=2, images_per_class=(4,))
    monkeypatch.setitem(vision.EXPERIMENTS, "toy", settings)
    monkeypatch.setattr(trained_models, "WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(grids, "grids_of", lambda trained, far: [(4, 4), (2, 4), (8, 6)])
    return "toy"


@pytest.mark.ci
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
