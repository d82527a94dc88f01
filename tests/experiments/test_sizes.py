"""The experiment on other sizes: a toy run."""

import dataclasses

import pytest

pytest.importorskip("numba")

from experiments import images, sizes


@pytest.mark.ci
def test_a_toy_run_evaluates_every_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = dataclasses.replace(images.DATA["digits"], steps=2, per_class=4)
    monkeypatch.setattr(sizes, "grids_of", lambda trained, far: [(4, 4), (2, 4), (8, 6)])
    row = sizes.run_sizes(toy, "ViL, averaged", 1e-3, 0)
    assert set(row["grids"]) == {"4x4", "2x4", "8x6"}
    assert row["grids"]["4x4"] == [row["top1"], row["top1"]]
    assert row["grids"]["2x4"][0] == pytest.approx(row["grids"]["2x4"][1], abs=5)
    assert 0 <= row["finer"] <= 100
    assert "finer" not in sizes.run_sizes(toy, "DeiT x 2", 1e-3, 0)
