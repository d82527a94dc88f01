"""The two scripts from end to end: what a run leaves, resuming, faults, exit codes."""

import csv
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from tests.training.run_files import assert_same, load, rows, signal_at, with_
from vil.training.config import TrainConfig
from vil.training.data.batches import Step
from vil.training.recipes import read_recipe
from vil.training.run import loop
from vil.training.run.engine import Score, StepResult
from vil.training.run.engine import evaluate as evaluate_of_engine
from vil.training.run.engine import train_step as train_step_of_engine
from vil.training.run.evaluation import EvalConfig, load_subject
from vil.training.run.setup import Training

ROOT = Path(__file__).parents[3]


@pytest.mark.usefixtures("rendered")
def test_run_leaves_everything_it_promises(
    config: TrainConfig, train: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    folder = tmp_path / "run"
    assert train(config, "--run.output", str(folder)) == 0
    assert {path.name for path in folder.iterdir()} == {
        ".vision-longhorn.lock",
        "best.pt",
        "last.pt",
        "previous.pt",
        "config.yaml",
        "log.csv",
        "steps.csv",
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


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LOADING = (("folder", 0), ("folder", 2), ("wds", 2))


@pytest.mark.parametrize(
    ("kind", "num_workers", "number"),
    [
        # Each signal and each way to load once, and every pair of them among the slow tests.
        pytest.param(*way, number, marks=[] if SIGNALS.index(number) == i else pytest.mark.slow)
        for i, way in enumerate(LOADING)
        for number in SIGNALS
    ],
)
def test_stopped_run_continues_and_equals_an_uninterrupted_one_bit_for_bit(
    config: TrainConfig,
    shard_config: TrainConfig,
    kind: str,
    num_workers: int,
    number: signal.Signals,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    chosen = with_(config if kind == "folder" else shard_config, "data", num_workers=num_workers)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(chosen, "--run.output", str(whole)) == 0
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 5, number)
        assert train(chosen, "--run.output", str(parts)) == 128 + number
    assert f"error: stopped by {number.name}" in capsys.readouterr().err
    assert load(parts / "last.pt")["run"]["step"] == 6  # the second step of the second epoch
    assert train(read_recipe(parts / "config.yaml")) == 0
    assert "resumed  after step 2 of epoch 2" in capsys.readouterr().out
    assert rows(parts) == rows(whole)
    for name in ("last.pt", "best.pt"):
        assert_same(load(parts / name), load(whole / name))


def test_run_at_several_sizes_continues_bit_for_bit_and_at_the_same_sizes(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    sizes = []

    def train_step(training: Training, step: Step, config: TrainConfig) -> StepResult:
        sizes.append(step.micro_batches[0][0].shape[-1])
        return train_step_of_engine(training, step, config)

    monkeypatch.setattr(loop, "train_step", train_step)
    several = with_(config, "data", img_sizes=(8, 16, 24))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(several, "--run.output", str(whole)) == 0
    assert "GMACs with scans at 16 px, trained at 8, 16, 24 px\n" in capsys.readouterr().out
    assert len(sizes) == 12
    assert set(sizes) == {8, 16, 24}
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 5, signal.SIGTERM)
        assert train(several, "--run.output", str(parts)) == 143
    changed = ("--run.output", str(parts), "--data.img-sizes", "8", "16", "--run.allow-changes")
    assert train(several, *changed) == 2
    assert "other data.img_sizes ((8, 16, 24) -> (8, 16)), which" in capsys.readouterr().err
    assert train(read_recipe(parts / "config.yaml")) == 0
    assert sizes[12:] == sizes[:12]
    assert rows(parts) == rows(whole)
    for name in ("last.pt", "best.pt"):
        assert_same(load(parts / name), load(whole / name))


def test_second_interrupt_stops_at_once(
    config: TrainConfig,
    train: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    original = loop.train_step

    def train_step(*arguments: object) -> StepResult:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(loop, "train_step", train_step)
    assert train(config, "--run.output", str(tmp_path / "run")) == 130
    assert not (tmp_path / "run" / "last.pt").exists()


def test_finished_run_is_not_trained_again(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    train(config, "--run.output", str(folder))
    before = (folder / "last.pt").read_bytes()
    assert train(config, "--run.output", str(folder)) == 0
    assert (folder / "last.pt").read_bytes() == before
    printed = capsys.readouterr().out
    assert "finished before; nothing is left to train" in printed
    assert printed.count("evaluate python eval.py") == 2


def test_best_is_named_that_a_killed_run_had_no_time_to(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder), "--schedule.epochs", "1")
    train(config, *arguments)
    (folder / "best.pt").unlink()
    assert train(config, *arguments) == 0
    assert (folder / "best.pt").samefile(folder / "last.pt")


@pytest.mark.parametrize("accumulation", ["2", "4"])
def test_accumulated_run_equals_the_plain_one_up_to_rounding(
    config: TrainConfig, accumulation: str, train: Callable[..., int], tmp_path: Path
) -> None:
    chosen = with_(with_(config, "augment", mix_size=2), "model", drop_path_rate=0.0)
    arguments = ("--run.grad-accum-steps", accumulation)
    for name, more in (("plain", ()), ("accumulated", arguments)):
        assert train(chosen, "--run.output", str(tmp_path / name), *more) == 0
    plain, accumulated = (rows(tmp_path / name) for name in ("plain", "accumulated"))
    for one, other in zip(plain, accumulated, strict=True):
        assert float(one["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-5)


def test_run_starts_from_the_weights_of_another_with_other_patches(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    train(config, "--run.output", str(tmp_path / "coarse"), "--schedule.epochs", "1")
    coarse = tmp_path / "coarse" / "last.pt"
    finer = ("--model.patch-stride", "4", "--model.pretrained", str(coarse))
    still = ("--optim.lr-base", "0", "--schedule.warmup-lr", "0", "--schedule.min-lr", "0")
    folder = tmp_path / "finer"
    assert train(config, "--run.output", str(folder), *finer, *still) == 0
    old, new = (load(path)["state_dict"] for path in (coarse, folder / "last.pt"))
    assert new.pop("pos_embed").shape[1] == 9 + 1
    assert old.pop("pos_embed").shape[1] == 4 + 1
    assert new.pop("trained_grid").tolist() == [2, 2]
    assert_same(dict(new), dict(old))
    assert train(config, "--run.output", str(tmp_path / "other"), *finer[:3], "none.pt") == 2


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
    arguments = ("--run.output", str(folder), "--optim.lr-base", "0.5")
    assert train(config, *arguments, "--data.batch-size", "4") == 2
    message = capsys.readouterr().err
    assert "data.batch_size (8 -> 4), optim.lr_base (0.001 -> 0.5)" in message
    assert message.count("\n") == 1
    assert (folder / "last.pt").read_bytes() == before


def test_resume_with_other_images_is_refused(
    config: TrainConfig,
    image_folder: Path,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    train(config, "--run.output", str(tmp_path / "run"))
    (image_folder / "train" / "ash" / "0.jpg").unlink()
    assert train(config, "--run.output", str(tmp_path / "run")) == 3
    assert "training images are not those that the run in" in capsys.readouterr().err


def test_folder_of_something_else_is_refused(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert train(config, "--run.output", str(folder)) == 5
    assert "holds notes.txt and no run to continue" in capsys.readouterr().err
    assert (folder / "notes.txt").read_text() == "mine"


def test_file_in_place_of_the_folder_is_refused(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("mine")
    assert train(config, "--run.output", str(tmp_path / "file")) == 5
    assert "cannot create output folder" in capsys.readouterr().err


def test_run_that_failed_before_training_does_not_block_its_folder(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    arguments = ("--run.output", str(tmp_path / "run"))
    assert train(with_(config, "model", num_classes=5), *arguments) == 3
    assert train(config, *arguments) == 0


def test_default_folder_is_named_after_the_recipe_and_found_again(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = with_(config, "schedule", epochs=1)
    assert train(chosen) == 0
    assert os.listdir("output") == ["recipe"]
    capsys.readouterr()
    assert train(chosen) == 0
    assert os.listdir("output") == ["recipe"]
    assert "finished before; nothing is left to train" in capsys.readouterr().out


@pytest.mark.parametrize("both", [False, True])
def test_damaged_checkpoint_is_bypassed_loudly(
    config: TrainConfig,
    both: bool,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    train(config, "--run.output", str(folder))
    before = load(folder / "last.pt")
    (folder / "best.pt").unlink()
    for name in ("last.pt", "previous.pt") if both else ("last.pt",):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
    for _ in range(2 if both else 1):
        assert train(config, "--run.output", str(folder)) == (5 if both else 0)
    told = capsys.readouterr()
    assert "last.pt is truncated or not a checkpoint" in (told.err if both else told.out)
    if both:  # and nothing is renamed, as nothing goes on
        assert "no checkpoint in" in told.err
        assert sorted(p.name for p in folder.glob("*.pt")) == ["last.pt", "previous.pt"]
    else:
        assert "resumed  after step 0 of epoch 3" in told.out
        assert_same(load(folder / "last.pt"), before)


def test_non_finite_steps_change_nothing_and_are_named(
    config: TrainConfig,
    train: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    chosen = with_(config, "optim", model_ema_decay=None)
    monkeypatch.setattr(loop, "train_step", poisoned({4, 6}))
    folder = tmp_path / "run"
    assert train(chosen, "--run.output", str(folder)) == 0
    last = load(folder / "last.pt")
    assert list(last["run"]["bad_steps"]) == [4, 6]
    assert last["optimizer"]["state"][0]["step"] == 12 - 2
    assert all(value.isfinite().all() for value in last["state_dict"].values())
    assert [row["skipped_steps"] for row in rows(folder)] == ["0", "2", "2"]
    named = (folder / "skipped.txt").read_text()
    assert "2 steps whose loss or gradient was not finite" in named
    assert "  step 1 of epoch 2, loss nan, its images:" in named
    assert named.count(".jpg") == 2 * 8


def poisoned(steps: set[int]) -> Callable[..., StepResult]:
    """Return train_step with a loss that is NaN at the given steps."""

    def train_step(training: Training, step: Step, config: TrainConfig) -> StepResult:
        if step.number in steps:
            training = dataclasses.replace(training, criterion=lambda *_: criterion(*_) * math.nan)
        return original(training, step, config)

    def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, targets)

    original = train_step_of_engine
    return train_step


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_too_many_non_finite_steps_end_the_run(
    config: TrainConfig,
    optimizer: str,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    chosen = with_(config, "optim", max_bad_steps=2, opt=optimizer)
    monkeypatch.setattr(loop, "train_step", poisoned(set(range(5, 100))))
    assert train(chosen, "--run.output", str(tmp_path / "run")) == 4
    message = capsys.readouterr().err
    assert re.fullmatch(
        r"error: 3 steps were skipped .*, optim\.max_bad_steps is 2; the last was step 4 of epoch 2,"
        r" loss nan; their images are in .*skipped\.txt\n",
        message,
    )
    last = load(tmp_path / "run" / "last.pt")
    assert last["epoch"] == 1
    assert all(value.isfinite().all() for value in last["state_dict"].values())


def test_useless_weights_end_the_run(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """One step an epoch: its loss is still finite, the weights it leaves are not usable."""
    # The first two epochs train at warmup_lr.
    arguments = ("--run.output", str(tmp_path / "run"), "--optim.lr-base", "1e30")
    assert train(config, *arguments, "--data.batch-size", "32") == 4
    assert re.fullmatch(
        r"error: the validation loss is (nan|inf) after epoch 3; .*\n", capsys.readouterr().err
    )
    assert load(tmp_path / "run" / "last.pt")["epoch"] == 2


def test_useless_weights_of_the_first_epoch_leave_no_word_of_earlier_ones(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def useless(*arguments: object) -> list[Score]:
        return [score._replace(loss=math.nan) for score in evaluate_of_engine(*arguments)]

    monkeypatch.setattr(loop, "evaluate", useless)
    assert train(config, "--run.output", str(tmp_path / "run")) == 4
    told = "error: the validation loss is nan after epoch 1; no checkpoint was written before\n"
    assert capsys.readouterr().err == told
    assert not list((tmp_path / "run").glob("*.pt"))


def test_seconds_of_an_epoch_are_those_of_all_its_parts(
    config: TrainConfig,
    train: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """And images per second are those of all its images, of which most cost follows."""
    hour = 3600.0
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(patch, 2, signal.SIGTERM)
        assert train(config, "--run.output", str(folder), "--run.log-interval", "1") == 143
    content = torch.load(folder / "last.pt", weights_only=True)
    assert 0 < content["run"]["seconds"] < 60
    content["run"]["seconds"] += hour
    torch.save(content, folder / "last.pt")
    with monkeypatch.context() as patch:
        signal_at(patch, 3, signal.SIGTERM)
        assert train(config, "--run.output", str(folder), "--run.log-interval", "1") == 143
    assert train(config, "--run.output", str(folder), "--run.log-interval", "1") == 0
    with (folder / "log.csv").open() as file:
        first, *others = csv.DictReader(file)
    assert hour < float(first["seconds"]) < hour + 60
    assert float(first["images_per_s"]) == pytest.approx(32 / hour, rel=0.02)
    assert all(float(row["seconds"]) < 60 for row in others)
    assert torch.load(folder / "last.pt", weights_only=True)["run"]["seconds"] == 0


def test_end_names_a_checkpoint_that_is_there(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder), "--schedule.epochs", "1")
    train(config, *arguments)
    (folder / "best.pt").unlink()
    (folder / "previous.pt").write_bytes((folder / "last.pt").read_bytes())
    content = torch.load(folder / "last.pt", weights_only=True)
    row = content["run"]["history"][0] | {"epoch": 2, "top1": -1.0}  # best.pt is of the first then
    content["run"] |= {"history": [*content["run"]["history"], row], "step": 8}
    content["config"]["schedule"]["epochs"] = content["asked"]["schedule"]["epochs"] = 2
    torch.save(content | {"epoch": 2}, folder / "last.pt")
    capsys.readouterr()
    assert train(config, *arguments[:2], "--schedule.epochs", "2") == 0
    told = capsys.readouterr().out
    assert "best.pt of epoch 1 is gone; only a better epoch will write it" in told
    assert f"files    {folder}: last.pt, config.yaml" in told
    assert told.endswith(f"evaluate python eval.py {folder / 'last.pt'}\n")


@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_unreadable_images_are_skipped_counted_and_named(
    config: TrainConfig,
    shard_config: TrainConfig,
    image_folder: Path,
    image_shards: Path,
    kind: str,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if kind == "folder":
        chosen = with_(config, "data", max_bad_images=0.05)
        (image_folder / "train" / "birch" / "1.jpg").write_bytes(b"")
    else:
        chosen = with_(shard_config, "data", max_bad_images=0.05)
        blank_first_image(image_shards / "train-0.tar")
    folder = tmp_path / "run"
    assert train(chosen, "--run.output", str(folder)) == 0
    assert rows(folder)[-1]["skipped_images"] == "1"
    named = (folder / "skipped.txt").read_text()
    where = "birch/1.jpg" if kind == "folder" else "train-0.tar: ash0"
    assert re.search(rf"1 images that could not be read so far.*\n  .*{where}: ", named)
    assert "skipped  1 images, 0 steps" in capsys.readouterr().out
    strict = with_(chosen, "data", max_bad_images=0.0)
    assert train(strict, "--run.output", str(tmp_path / "strict")) == 3
    assert "1 of 32 training images are no good, more than" in capsys.readouterr().err


def test_a_shard_that_is_whole_again_has_nothing_skipped(
    shard_config: TrainConfig, image_shards: Path, train: Callable[..., int], tmp_path: Path
) -> None:
    shard, output = image_shards / "train-0.tar", str(tmp_path / "run")
    whole = shard.read_bytes()
    blank_first_image(shard)
    assert train(shard_config, "--run.output", output) == 3
    assert "1 images that could not" in (tmp_path / "run" / "skipped.txt").read_text()
    shard.write_bytes(whole)
    assert train(shard_config, "--run.output", output) == 0
    assert not (tmp_path / "run" / "skipped.txt").exists()


def test_names_that_are_no_text_are_named(
    config: TrainConfig, image_folder: Path, train: Callable[..., int], tmp_path: Path
) -> None:
    """File systems take any bytes but / and NUL."""
    image = image_folder / "train" / "birch" / "1.jpg"
    image.unlink()
    image.with_name(os.fsdecode(b"1\xff.jpg")).write_bytes(b"")
    chosen = with_(config, "data", max_bad_images=0.05)
    assert train(chosen, "--run.output", str(tmp_path / "run")) == 0
    assert r"birch/1\udcff.jpg: " in (tmp_path / "run" / "skipped.txt").read_text()
    strict = with_(chosen, "data", max_bad_images=0.0)
    assert train(strict, "--run.output", str(tmp_path / "strict")) == 3


def blank_first_image(shard: Path) -> None:
    """Overwrite the first image of a shard with zeros."""
    with tarfile.open(shard) as archive:
        member = next(member for member in archive if member.name.endswith(".jpg"))
    content = bytearray(shard.read_bytes())
    content[member.offset_data : member.offset_data + member.size] = bytes(member.size)
    shard.write_bytes(bytes(content))


def test_failed_saves_are_told_and_the_last_must_succeed(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    original, calls = torch.save, []

    def full_disk(checkpoint: dict, file: object) -> None:
        calls.append(len(checkpoint["run"]["history"]))
        if calls[-1] < 3:
            raise OSError(28, "No space left on device")
        original(checkpoint, file)

    monkeypatch.setattr(torch, "save", full_disk)
    assert train(config, "--run.output", str(tmp_path / "freed")) == 0
    assert capsys.readouterr().out.count("No space left on device; training goes on without") == 2
    assert load(tmp_path / "freed" / "last.pt")["epoch"] == 3
    monkeypatch.setattr(torch, "save", lambda *_: full_disk({"run": {"history": []}}, None))
    assert train(config, "--run.output", str(tmp_path / "full")) == 5
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "full").glob("*.tmp"))


def test_training_without_average_mixing_and_repeats(
    shard_config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    plain = with_(shard_config, "augment", mixup=0.0, cutmix=0.0)
    plain = with_(plain, "data", aug_repeats=0)
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
    row = torch.load(path, weights_only=True)["run"]["history"][-1]
    assert evaluate(str(path), "--device", "cpu") == 0
    result = json.loads((folder / f"{name}-eval.json").read_text())
    assert (result["top1"], result["top5"]) == (row["top1"], row["top5"])
    assert (result["loss"], result["num_images"]) == (row["val_loss"], 12)
    assert evaluate(str(path), "--device", "cpu", "--ema") == 0
    averaged = json.loads((folder / f"{name}-ema-eval.json").read_text())
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
        (
            (path, "--model", "test_vit"),
            2,
            "last.pt has weights of vil_tiny (longhorn), and test_vit",
        ),
        ((path, "--img-size", "17"), 2, "img_size must be covered by patches of 8 px"),
        ((path, "--device", "nonsense"), 2, "device nonsense is not available"),
        ((path, "--data.path", "/nowhere"), 3, "data.path /nowhere is not a folder"),
        ((str(folder / "none.pt"),), 2, "none.pt is no file, no folder, no hf-hub:NAME"),
        (("vil_gigantic",), 2, "vil_gigantic is no file, no folder, no hf-hub:NAME and no model"),
        (("vil_tiny", "--ema"), 2, "--ema and --model need weights, vil_tiny has none"),
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
        # Imports PyTorch before it knows, for seconds.
        pytest.param(
            *(["eval.py", "none.pt"], 2, "error: none.pt is no file, no folder, no hf-hub:NAME"),
            marks=pytest.mark.slow,
        ),
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
