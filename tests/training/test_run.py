"""The two scripts from end to end: files of a run, resuming, faults, exit codes."""

import re
import signal
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.training.run_files import (
    assert_same,
    at_step,
    die,
    load,
    poisoned,
    rows,
    train_data,
)
from vil.training import train as loop
from vil.training.engine import Score, interval
from vil.training.recipes import read_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("rendered")
def test_run_leaves_everything_it_promises(config, train, capsys, tmp_path) -> None:
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
    assert read_recipe(folder / "config.yaml") == config.changed("run", output=str(folder))
    assert [row["epoch"] for row in rows(folder)] == ["1", "2", "3"]
    assert [float(row["lr"]) for row in rows(folder)][:2] == [1e-4, 1e-4]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "32 images to train on, 12 held out, 4 classes" in printed
    assert "3 of 4 batches of 8, peak lr 0.001" in printed
    assert "device   cpu, float32\n" in printed
    assert "12 images held out: with so few, the accuracy is uncertain by up to 28 po" in printed
    assert "epoch 1/3 step 3/4" in printed
    assert f"python eval.py {folder / 'best.pt'}" in printed
    best = max(float(row["top1"]) for row in rows(folder))
    low, high = interval(best, 12)
    assert f"interval {low:.1f} to {high:.1f}% (95%) for the best, chosen among 3 epochs" in printed
    lines = [line for line in printed.splitlines() if line.startswith("epoch ")]
    speed = re.compile(r"[\d,]+ images/s|[\d.]+ GiB  ")  # as wide as the machine is fast
    assert max(len(speed.sub("", line)) for line in lines) <= 100


def test_the_summary_is_of_the_best_epoch_and_of_the_last(config, train, capsys, monkeypatch, tmp_path) -> None:
    scores = iter([[Score(1.0, top1, 100.0, 12, 1.0)] * 2 for top1 in (25.0, 75.0, 50.0)])
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: next(scores))
    assert train(config, "--run.output", str(tmp_path / "run")) == 0
    told = capsys.readouterr().out
    low, high = interval(75.0, 12)
    assert "top-1 75.00% (best, epoch 2) and 50.00% (last, EMA 50.00%) on 12 held-out" in told
    assert f"interval {low:.1f} to {high:.1f}% (95%) for the best, chosen among 3 epochs" in told


@pytest.mark.parametrize(("minutes", "step"), [("9999", 4), ("0", 6)])
def test_checkpoints_within_an_epoch_come_by_the_clock(config, minutes, step, train, tmp_path) -> None:
    with at_step(6, die):
        arguments = ("--run.output", str(tmp_path / "run"), "--run.save-minutes", minutes)
        assert train(config, *arguments) == 130
    assert load(tmp_path / "run" / "last.pt")["run"]["step"] == step


@pytest.mark.parametrize(
    ("kind", "num_workers", "number"),
    [("folder", 0, signal.SIGTERM), ("folder", 2, signal.SIGUSR1), ("wds", 2, signal.SIGINT)],
)
def test_stopped_run_continues_and_equals_an_uninterrupted_one_bit_for_bit(
    config, shard_config, kind, num_workers, number, train, capsys, tmp_path
) -> None:
    chosen = (config if kind == "folder" else shard_config).changed("data", num_workers=num_workers)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(chosen, "--run.output", str(whole)) == 0
    with at_step(5, partial(signal.raise_signal, number)):
        assert train(chosen, "--run.output", str(parts)) == 128 + number
    assert capsys.readouterr().err.startswith(f"stopped by {number.name}")
    assert load(parts / "last.pt")["run"]["step"] == 6  # the second step of the second epoch
    assert train(read_recipe(parts / "config.yaml")) == 0
    assert "resumed  after step 2 of epoch 2" in capsys.readouterr().out
    assert rows(parts) == rows(whole)
    for name in ("last.pt", "best.pt"):
        assert_same(load(parts / name), load(whole / name))


def test_resume_with_other_images_is_refused(config, image_folder, train, capsys, tmp_path) -> None:
    train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1")
    for split in ("train", "val"):
        (image_folder / split / "ash").rename(image_folder / split / "oak")
    assert train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1") == 3
    told = capsys.readouterr().err
    assert re.search("training images differ from .*; missing classes: ash; new classes: oak; res", told)
    (image_folder / "train" / "oak" / "0.jpg").unlink()
    for split in ("train", "val"):
        (image_folder / split / "oak").rename(image_folder / split / "ash")
    assert train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1") == 3
    told = capsys.readouterr().err
    assert re.search("training images differ from those that the run in .* started with; res", told)


def test_non_finite_steps_change_nothing_and_are_named(config, train, tmp_path) -> None:
    chosen = config.changed("optim", model_ema_decay=None)
    folder = tmp_path / "run"
    with poisoned({4, 6}):
        assert train(chosen, "--run.output", str(folder)) == 0
    last = load(folder / "last.pt")
    assert list(last["run"]["bad_steps"]) == [4, 6]
    assert last["optimizer"]["state"][0]["step"] == 12 - 2
    assert all(value.isfinite().all() for value in last["state_dict"].values())
    assert [row["skipped_steps"] for row in rows(folder)] == ["0", "2", "2"]
    named = (folder / "skipped.txt").read_text()
    assert "2 steps whose loss or gradient was not finite" in named
    assert "  step 1 of epoch 2, loss nan, its images:" in named
    for step, listed in zip((4, 6), named.split("its images:\n")[1:], strict=True):
        assert [line.strip() for line in listed.splitlines()[:8]] == train_data(chosen).names(step)
    assert named.count(".jpg") == 2 * 8


def test_too_many_non_finite_steps_end_the_run(config, train, capsys, tmp_path) -> None:
    chosen = config.changed("optim", max_bad_steps=2)
    with poisoned(set(range(5, 100))):
        assert train(chosen, "--run.output", str(tmp_path / "run")) == 4
    message = capsys.readouterr().err
    assert re.fullmatch(
        r"error: 3 steps were skipped .* more than optim\.max_bad_steps 2; the last was step 4 of "
        r"epoch 2, loss nan; .*skipped\.txt lists their images\n",
        message,
    )
    last = load(tmp_path / "run" / "last.pt")
    assert last["epoch"] == 1
    assert all(value.isfinite().all() for value in last["state_dict"].values())


@pytest.mark.ci
def test_useless_weights_end_the_run(config, train, capsys, tmp_path) -> None:
    """An epoch has one step: its loss is still finite, but the weights after it are not usable."""
    # The first two epochs train at warmup_lr.
    arguments = ("--run.output", str(tmp_path / "run"), "--optim.lr-base", "1e30")
    assert train(config, *arguments, "--data.batch-size", "32") == 4
    assert re.fullmatch(r"error: the validation loss is (nan|inf) after epoch 3; .*\n", capsys.readouterr().err)
    assert load(tmp_path / "run" / "last.pt")["epoch"] == 2


@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_unreadable_images_are_skipped_counted_and_named(
    config, shard_config, image_folder, image_shards, kind, train, capsys, tmp_path
) -> None:
    if kind == "folder":
        chosen = config.changed("data", max_bad_images=0.05)
        (image_folder / "train" / "birch" / "1.jpg").write_bytes(b"")
    else:
        chosen = shard_config.changed("data", max_bad_images=0.05)
        blank_first_image(image_shards / "train-0.tar")
    folder = tmp_path / "run"
    assert train(chosen, "--run.output", str(folder)) == 0
    assert rows(folder)[-1]["skipped_images"] == "1"
    named = (folder / "skipped.txt").read_text()
    where = "birch/1.jpg" if kind == "folder" else "train-0.tar: ash0"
    assert re.search(rf"1 image that could not be read so far.*\n  .*{where}: ", named)
    printed = capsys.readouterr().out
    assert "skipped  1 image, 0 steps" in printed
    assert len(re.findall(rf"1 training image cannot be read, replaced by others: .*{where}: ", printed)) == 1
    strict = chosen.changed("data", max_bad_images=0.0)
    assert train(strict, "--run.output", str(tmp_path / "strict")) == 3
    assert "1 of 32 training images are unusable, more than" in capsys.readouterr().err


def blank_first_image(shard: Path) -> None:
    """Overwrite the first image of a shard with zeros."""
    with tarfile.open(shard) as archive:
        member = next(member for member in archive if member.name.endswith(".jpg"))
    content = bytearray(shard.read_bytes())
    content[member.offset_data : member.offset_data + member.size] = bytes(member.size)
    shard.write_bytes(bytes(content))


def test_failed_saves_are_told_and_the_last_must_succeed(config, train, capsys, monkeypatch, tmp_path) -> None:
    original, calls = torch.save, []

    def full_disk(checkpoint: dict, file: object) -> None:
        calls.append(len(checkpoint["run"]["history"]))
        if 0 < calls[-1] < 3:
            raise OSError(28, "No space left on device")
        original(checkpoint, file)

    monkeypatch.setattr(torch, "save", full_disk)
    assert train(config, "--run.output", str(tmp_path / "freed")) == 0
    assert capsys.readouterr().out.count("No space left on device; training continues") == 2
    assert load(tmp_path / "freed" / "last.pt")["epoch"] == 3

    def failing_now_and_then(checkpoint: dict, file: object) -> None:
        if checkpoint["run"]["step"] % 2:  # six times, but never twice in a row
            raise OSError(28, "No space left on device")
        original(checkpoint, file)

    monkeypatch.setattr(torch, "save", failing_now_and_then)
    often = ("--run.output", str(tmp_path / "often"), "--run.save-minutes", "0")
    assert train(config, *often) == 0
    assert capsys.readouterr().out.count("No space left on device; training continues") == 6
    monkeypatch.setattr(torch, "save", lambda *_: full_disk({"run": {"history": [1]}}, None))
    assert train(config, "--run.output", str(tmp_path / "full")) == 5
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "full").glob("*.tmp"))
