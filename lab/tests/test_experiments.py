"""Experiments on images."""

import dataclasses

import pytest

from lab.experiments import images, small_data

TINY = dataclasses.replace(images.DATA["digits"], arguments=("--data.images-per-class", "4"), steps=2)


@pytest.mark.ci
def test_a_run_trains_and_scores() -> None:
    rows = [images.run(TINY, "ViL", 1e-3, seed) for seed in (0, 0, 1)]
    assert rows[0]["steps"] == 2
    assert rows[0]["parameters"] == 304_330
    assert rows[0]["loss"] == rows[1]["loss"] != rows[2]["loss"]
    every = dataclasses.replace(TINY, every_epoch=True)
    _, _, row = images.trained(every, "ViL", 1e-3, 0)
    assert row["loss"] == rows[0]["loss"]
    assert len(row["curve"]) == 2
    assert row["curve"][0][0] < row["curve"][1][0] == pytest.approx(row["ms_per_step"] * 2 / 1e3)
    assert row["curve"][1][1] == row["top1"]


@pytest.mark.ci
def test_small_data_scores_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small_data.SMALL, "digits", dataclasses.replace(TINY, choice=TINY))
    for model in ("ViL exact, averaged", "DeiT", "ResNet"):
        row = small_data.run("digits", model, 1e-3, 0)
        assert {"twice", "shrunk"} <= row.keys()
        assert row["seconds"] == pytest.approx(row["ms_per_step"] * 2 / 1e3)
    assert "twice" not in small_data.run("digits", "ResNet", 1e-3, small_data.CHOICE_SEED)
