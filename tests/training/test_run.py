"""The two scripts from end to end: what a run leaves, resuming, faults, exit codes."""

import csv
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from vil.training import loop
from vil.training.config import TrainConfig
from vil.training.engine import StepReport
from vil.training.evaluation import EvalConfig, load_subject
from vil.training.recipes import read_recipe
from vil.training.report import Report

ROOT = Path(__file__).parents[2]
TIMES = ("images_per_s", "seconds")


def with_(config: TrainConfig, section: str, **changes: object) -> TrainConfig:
    """Return the configuration with one section changed."""
    changed = dataclasses.replace(getattr(config, section), **changes)
    return dataclasses.replace(config, **{section: changed})


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint without what must differ between equal runs."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["config"]
    for row in checkpoint["history"]:
        for key in TIMES:
            del row[key]
    return checkpoint


def rows(folder: Path) -> list[dict[str, str]]:
    """Read a log without its times."""
    with (folder / "log.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def assert_same(left: object, right: object) -> None:
    """Compare nested dictionaries and lists of tensors and numbers, bit for bit."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def interrupt_in_epoch(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """Press Ctrl-C in the middle of an epoch, counted from 0."""
    original = Report.step

    def step(self: Report, progress: StepReport) -> None:
        original(self, progress)
        if len(self.history) == epoch:
            raise KeyboardInterrupt

    monkeypatch.setattr(Report, "step", step)


def test_run_leaves_everything_it_promises(
    config: TrainConfig, train: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    folder = tmp_path / "run"
    assert train(config, "--run.output", str(folder)) == 0
    assert {path.name for path in folder.iterdir()} == {
        "best.pt",
        "last.pt",
        "config.yaml",
        "log.csv",
        "curve.png",
    }
    assert read_recipe(folder / "config.yaml") == with_(config, "run", output=str(folder))
    assert [row["epoch"] for row in rows(folder)] == ["1", "2", "3"]
    assert [float(row["lr"]) for row in rows(folder)][:2] == [1e-4, 1e-4]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "32 images to train on, 12 held out, 4 classes" in printed
    assert "3 of 4 batches of 8, peak lr 0.001" in printed
    assert "epoch 1/3 step 3/4" in printed
    assert f"python eval.py {folder / 'best.pt'}" in printed


def test_best_is_the_first_epoch_with_the_best_top1(
    config: TrainConfig,
    train: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    original = loop.run_epoch
    scores = iter([25.0, 50.0, 50.0])
    monkeypatch.setattr(
        loop, "run_epoch", lambda *arguments: original(*arguments) | {"top1": next(scores)}
    )
    train(config, "--run.output", str(tmp_path / "run"))
    best, last = (load(tmp_path / "run" / name) for name in ("best.pt", "last.pt"))
    assert (best["epoch"], best["metric"]) == (2, 50.0)
    assert (last["epoch"], last["metric"]) == (3, 50.0)


@pytest.mark.parametrize(("kind", "num_workers"), [("folder", 0), ("folder", 2), ("wds", 0)])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(
    config: TrainConfig,
    shard_config: TrainConfig,
    kind: str,
    num_workers: int,
    train: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    chosen = with_(config if kind == "folder" else shard_config, "data", num_workers=num_workers)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(chosen, "--run.output", str(whole)) == 0
    with monkeypatch.context() as patch:
        interrupt_in_epoch(patch, 1)
        assert train(chosen, "--run.output", str(parts)) == 130
    assert load(parts / "last.pt")["epoch"] == 1
    assert train(read_recipe(parts / "config.yaml"), "--run.resume") == 0
    assert rows(parts) == rows(whole)
    for name in ("last.pt", "best.pt"):
        assert_same(load(parts / name), load(whole / name))


def test_two_seeds_differ(config: TrainConfig, train: Callable[..., int], tmp_path: Path) -> None:
    for seed in ("0", "1"):
        train(config, "--run.output", str(tmp_path / seed), "--run.seed", seed)
    assert rows(tmp_path / "0") != rows(tmp_path / "1")


def test_resume_with_another_configuration_is_refused(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    train(config, "--run.output", str(folder))
    before = (folder / "last.pt").read_bytes()
    arguments = ("--run.output", str(folder), "--run.resume", "--optim.lr", "0.5")
    assert train(config, *arguments, "--data.batch-size", "4") == 2
    message = capsys.readouterr().err
    assert "data.batch_size (8 -> 4), optim.lr (0.001 -> 0.5)" in message
    assert message.count("\n") == 1
    assert (folder / "last.pt").read_bytes() == before


def test_second_run_does_not_touch_the_first(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(config, "--run.output", str(folder))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert train(config, "--run.output", str(folder)) == 5
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("batch_size", "message"),
    [
        ("8", r"error: the loss is (nan|inf) at step [2-4] of epoch 3; .*\n"),
        # One step an epoch: its loss is still finite, the weights it leaves are not usable.
        ("32", r"error: the validation loss is (nan|inf) after epoch 3; .*\n"),
    ],
)
def test_non_finite_loss_stops_and_keeps_the_checkpoints(
    config: TrainConfig,
    batch_size: str,
    message: str,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    # The first two epochs train at warmup_lr.
    arguments = ("--run.output", str(folder), "--optim.lr", "1e30")
    assert train(config, *arguments, "--data.batch-size", batch_size) == 4
    assert re.fullmatch(message, capsys.readouterr().err)
    last = load(folder / "last.pt")
    assert last["epoch"] == 2
    assert all(value.isfinite().all() for value in last["state_dict"].values())


def test_gradient_is_clipped(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    for name, arguments in (("free", ()), ("clipped", ("--optim.clip-grad", "1e-12"))):
        assert train(config, "--run.output", str(tmp_path / name), *arguments) == 0
    free, clipped = (load(tmp_path / name / "last.pt") for name in ("free", "clipped"))
    moments = [c["optimizer"]["state"][0]["exp_avg"].norm() for c in (free, clipped)]
    assert moments[1] < 1e-11 < moments[0]


def test_training_without_average_mixing_and_repeats(
    shard_config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    plain = with_(shard_config, "augment", mixup=0.0, cutmix=0.0)
    plain = with_(with_(plain, "optim", model_ema_decay=None), "run", amp=True)
    assert train(plain, "--run.output", str(tmp_path / "run")) == 0
    assert "state_dict_ema" not in load(tmp_path / "run" / "last.pt")


@pytest.mark.parametrize("name", ["last", "best"])
@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_evaluation_gives_the_number_of_the_run(
    config: TrainConfig,
    shard_config: TrainConfig,
    kind: str,
    name: str,
    train: Callable[..., int],
    evaluate: Callable[..., int],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    train(config if kind == "folder" else shard_config, "--run.output", str(folder))
    path = folder / f"{name}.pt"
    row = torch.load(path, weights_only=True)["history"][-1]
    assert evaluate(str(path), "--device", "cpu") == 0
    result = json.loads((folder / f"{name}-eval.json").read_text())
    assert (result["top1"], result["top5"]) == (row["top1"], row["top5"])
    assert (result["loss"], result["num_images"]) == (row["val_loss"], 12)
    assert evaluate(str(path), "--device", "cpu", "--ema") == 0
    averaged = json.loads((folder / f"{name}-eval.json").read_text())
    assert averaged["loss"] == row["ema_loss"] != result["loss"]


def test_evaluation_does_not_overwrite_another_file(
    config: TrainConfig, train: Callable[..., int], evaluate: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(config, "--run.output", str(folder), "--schedule.epochs", "1")
    notes = tmp_path / "notes.json"
    notes.write_text("{}")
    assert evaluate(str(folder / "last.pt"), "--json", str(notes)) == 5
    assert notes.read_text() == "{}"
    for _ in range(2):
        assert evaluate(str(folder / "last.pt"), "--json", str(tmp_path / "new.json")) == 0


def test_evaluation_takes_other_data_size_and_batch(
    config: TrainConfig, train: Callable[..., int], evaluate: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(config, "--run.output", str(folder), "--schedule.epochs", "1")
    options = ["--data.val-split", "train", "--data.validation-batch-size", "5"]
    assert evaluate(str(folder / "last.pt"), "--img-size", "32", *options) == 0
    result = json.loads((folder / "last-eval.json").read_text())
    assert (result["img_size"], result["num_images"]) == (32, 32)


def test_evaluation_options_that_do_not_fit_are_refused(
    config: TrainConfig,
    train: Callable[..., int],
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    plain = with_(config, "optim", model_ema_decay=None)
    train(plain, "--run.output", str(folder), "--schedule.epochs", "1")
    path = str(folder / "last.pt")
    capsys.readouterr()
    for arguments, code, message in (
        ((path, "--ema"), 2, "has no averaged weights"),
        ((path, "--model", "test_vit"), 5, "does not fit model test_vit"),
        ((path, "--img-size", "17"), 2, "--img-size 17"),
        ((path, "--device", "nonsense"), 2, "device nonsense is not available"),
        ((path, "--data.path", "/nowhere"), 3, "data.path /nowhere is not a folder"),
        ((str(folder / "none.pt"),), 5, "none.pt does not exist"),
        (("vil_gigantic",), 2, "neither a file nor a model of timm"),
        (("vil_tiny", "--ema"), 2, "need a checkpoint file"),
    ):
        assert evaluate(*arguments) == code, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_model_by_name_takes_its_own_preprocessing() -> None:
    subject = load_subject(EvalConfig(checkpoint="vil_tiny"))
    assert "RANDOM" in subject.weights
    data = subject.config.data
    assert (data.crop_pct, data.interpolation) == (0.875, "bicubic")
    assert data.mean == (0.485, 0.456, 0.406)


def test_weights_of_another_program_are_loaded(tmp_path: Path) -> None:
    weights = timm.create_model("test_vit2").state_dict()
    torch.save({"model": weights}, tmp_path / "other.pth")
    options = EvalConfig(checkpoint=str(tmp_path / "other.pth"), model="test_vit2")
    loaded = load_subject(options).model.state_dict()
    assert_same(dict(loaded), dict(weights))


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["train_imagenet.py", "--config", "none.yaml"], 2, "error: --config none.yaml: No such"),
        (["eval.py", "none.pt"], 5, "error: checkpoint none.pt does not exist"),
    ],
    ids=["train", "eval"],
)
def test_command_line_error_is_one_line(
    command: list[str], code: int, message: str, tmp_path: Path
) -> None:
    script = [sys.executable, str(ROOT / command[0]), *command[1:]]
    process = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == code
    assert process.stderr.startswith(message)
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""
