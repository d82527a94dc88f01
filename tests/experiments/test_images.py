"""Experiments on images."""

import dataclasses
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from experiments import images

TINY = dataclasses.replace(images.DATA["digits"], steps=2, per_class=4)


@pytest.mark.ci
def test_a_run_trains_and_scores(tmp_path: Path) -> None:
    rows = [images.run(TINY, None, model="ViL", lr=1e-3, seed=seed) for seed in (0, 0, 1)]
    assert rows[0]["steps"] == 2
    assert rows[0]["parameters"] == 304_330
    assert rows[0]["loss"] == rows[1]["loss"] != rows[2]["loss"]
    every = dataclasses.replace(TINY, every_epoch=True)
    training, config, row = images.trained(every, "ViL", 1e-3, 0)
    assert row["loss"] == rows[0]["loss"]
    assert len(row["curve"]) == 2
    assert row["curve"][0][0] < row["curve"][1][0] == pytest.approx(row["ms_per_step"] * 2 / 1e3)
    assert row["curve"][1][1] == row["top1"]
    content = {"state_dict": training.model.state_dict(), "config": asdict(config)}
    torch.save(content, tmp_path / "weights.pt")
    start = str(tmp_path / "weights.pt")
    tuned, scratch = (
        images.run(TINY, start, model="ViL", lr=1e-3, seed=0, start=arm) for arm in images.STARTS
    )
    assert tuned["train_loss"] < scratch["train_loss"] == rows[0]["train_loss"]
