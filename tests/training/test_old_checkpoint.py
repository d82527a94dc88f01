"""Checkpoints of the trainer's first version can always be resumed, evaluated and released.

``old_checkpoint.pt`` is ``previous.pt`` of the run below at commit 228e2c4: the state after the first of two epochs.
"""

import csv
import shutil
import sys
from pathlib import Path

import pytest
import torch

import release
import train_imagenet
import vil
from vil.training.errors import run_script

OLD = Path(__file__).with_name("old_checkpoint.pt")
RUN = (
    *("--model.embed-dim", "8", "--model.depth", "1", "--schedule.epochs", "2"),
    *("--schedule.warmup-epochs", "1", "--optim.model-ema-decay", "0.9", "--run.device", "cpu"),
)
LOSSES = [2.2475, 2.1518]  # held-out losses that this run logged


def test_old_checkpoint_resumes_evaluates_and_is_released(
    tmp_path, evaluate, monkeypatch, capsys
) -> None:
    folder, released = tmp_path / "run", tmp_path / "released"
    folder.mkdir()
    last = shutil.copy(OLD, folder / "last.pt")

    monkeypatch.setattr(sys, "argv", ["train_imagenet.py", *RUN, "--run.output", str(folder)])
    assert run_script(train_imagenet.main) == 0
    with (folder / "log.csv").open(newline="") as file:
        log = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in log] == pytest.approx(LOSSES, abs=0.02)

    capsys.readouterr()
    for weights, key in (((), "top1"), (("--ema",), "ema_top1")):
        assert evaluate(str(last), *weights, "--device", "cpu") == 0
        assert f"{float(log[-1][key]):.2f}" in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["release.py", str(OLD), str(released)])
    assert run_script(release.main) == 0
    images = torch.linspace(-1, 1, 512).view(2, 1, 16, 16)
    assert torch.equal(vil.load(released)(images), vil.load(OLD)(images))
