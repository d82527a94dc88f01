"""Files that are whole or absent, and checkpoints that say what is wrong with them."""

import dataclasses
import io
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
import timm
import torch

from vil.training import files
from vil.training.config import TrainConfig
from vil.training.distributed import World
from vil.training.errors import OutputError
from vil.training.files import (
    link_atomically,
    lock_folder,
    remove_temporaries,
    write_atomically,
    write_text,
)
from vil.training.run import checkpoint as checkpoint_module
from vil.training.run.checkpoint import About, load_checkpoint, load_weights, save_checkpoint
from vil.training.run.setup import Training, build_model, build_training
from vil.training.run.state import RunState


def about(config: TrainConfig) -> About:
    """Describe a run on four kinds of trees."""
    return About(
        config=config,
        asked=config,
        fingerprints={"training": "1", "validation": "2"},
        classes=("ash", "birch", "cedar", "dogwood"),
    )


def state(*scores: float, step: int = 4) -> RunState:
    """Return the state of a run whose epochs reached the given top-1."""
    reached = RunState(step=step * len(scores))
    for epoch, top1 in enumerate(scores, 1):
        reached.end_epoch({"epoch": epoch, "top1": top1})
    return reached


@pytest.fixture
def training(config: TrainConfig) -> Training:
    """Model and optimiser, and an average that differs from the model."""
    training = build_training(config, torch.device("cpu"), World())
    with torch.no_grad():
        training.ema.module.head.bias.add_(1.0)
    return training


@pytest.fixture
def saved(training: Training, config: TrainConfig, tmp_path: Path) -> Path:
    """A checkpoint."""
    save_checkpoint(tmp_path, training, about(config), state(50.0))
    return tmp_path / "last.pt"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("torn")])
def test_failed_write_leaves_the_old_file(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half of the new")
        raise error

    with pytest.raises(OutputError, match=r"cannot write .*file \(\d+ MiB free\)"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_write_leaves_no_temporary(tmp_path: Path) -> None:
    def interrupt(file: BinaryIO) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_the_old_checkpoint(
    saved: Path, training: Training, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, file: BinaryIO) -> None:
        file.write(b"PK")
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 64 vs 16")

    monkeypatch.setattr(checkpoint_module.torch, "save", fail)
    with pytest.raises(OutputError, match="the disk took only a part of it"):
        save_checkpoint(saved.parent, training, about(config), state(50.0, 60.0))
    assert load_checkpoint(saved)["metric"] == 50.0
    assert load_checkpoint(saved.with_name("best.pt"))["metric"] == 50.0


def test_checkpoint_that_does_not_read_back_does_not_replace_the_old_one(
    saved: Path, training: Training, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.save

    def write_rotten(checkpoint: dict, file: BinaryIO) -> None:
        content = io.BytesIO()
        original(checkpoint, content)
        rotten = bytearray(content.getvalue())
        rotten[len(rotten) // 2] ^= 1
        file.write(rotten)

    monkeypatch.setattr(checkpoint_module.torch, "save", write_rotten)
    with pytest.raises(OutputError, match=r"last\.pt.*\.tmp is (damaged|truncated)"):
        save_checkpoint(saved.parent, training, about(config), state(50.0, 60.0))
    assert load_checkpoint(saved)["metric"] == 50.0
    assert not list(saved.parent.glob(".*.tmp"))


def test_the_checkpoint_before_is_kept(
    saved: Path, training: Training, config: TrainConfig
) -> None:
    for scores in ((50.0, 40.0), (50.0, 40.0, 60.0)):
        save_checkpoint(saved.parent, training, about(config), state(*scores))
    epochs = {
        name: load_checkpoint(saved.with_name(f"{name}.pt"))["epoch"]
        for name in ("last", "previous", "best")
    }
    assert epochs == {"last": 3, "previous": 2, "best": 3}


def test_best_is_not_renewed_within_an_epoch(
    saved: Path, training: Training, config: TrainConfig
) -> None:
    within = dataclasses.replace(state(50.0), step=5, loss_sum=1.0, loss_count=1)
    save_checkpoint(saved.parent, training, about(config), within)
    runs = [load_checkpoint(saved.with_name(f"{n}.pt"))["run"]["step"] for n in ("last", "best")]
    assert runs == [5, 4]


def test_checkpoint_is_plain_and_complete(saved: Path, config: TrainConfig) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["arch"] == "vil_tiny"
    assert checkpoint["epoch"] == 1
    assert checkpoint["config"] == dataclasses.asdict(config)
    assert set(checkpoint["versions"]) == {"vil", "python", "torch", "timm", "pillow"}


def test_timm_reads_the_averaged_weights(saved: Path, training: Training) -> None:
    model = timm.create_model(
        "vil_tiny",
        checkpoint_path=str(saved),
        num_classes=4,
        img_size=16,
        patch_size=8,
        embed_dim=16,
        depth=2,
    )
    assert torch.equal(model.head.bias, training.ema.module.head.bias)
    assert not torch.equal(model.head.bias, training.model.head.bias)


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"checkpoint .*none\.pt does not exist"):
        load_checkpoint(tmp_path / "none.pt")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_checkpoint_is_named(saved: Path, share: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(OutputError, match=r"last\.pt is truncated or not a checkpoint"):
        load_checkpoint(saved)


def test_flipped_bit_is_detected(saved: Path, training: Training) -> None:
    content = bytearray(saved.read_bytes())
    weight = training.model.head.weight.detach().numpy().tobytes()
    content[content.index(weight) + 10] ^= 1
    saved.write_bytes(bytes(content))
    torch.load(saved, weights_only=True)  # does not notice
    with pytest.raises(OutputError, match=r"last\.pt is damaged: wrong checksum"):
        load_checkpoint(saved)


def test_file_of_another_program_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(OutputError, match=r"other\.pt was not written by .* it lacks arch, model"):
        load_checkpoint(tmp_path / "other.pt")


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"state_dict": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(OutputError, match=r"code\.pt is truncated or not a checkpoint: Weights"):
        load_checkpoint(tmp_path / "code.pt")


def test_checkpoint_of_another_architecture_is_named(saved: Path, config: TrainConfig) -> None:
    other = build_model(dataclasses.replace(config.model, depth=3))
    weights = load_checkpoint(saved)["state_dict"]
    message = r"last\.pt does not fit model vil_tiny: blocks are 2 in the state dict and 3 in the"
    with pytest.raises(OutputError, match=message):
        load_weights(other, weights, saved, "vil_tiny")


def test_link_is_a_second_name(tmp_path: Path) -> None:
    write_text(tmp_path / "one", "content")
    write_text(tmp_path / "two", "other")
    for _ in range(2):  # the second time it is that already
        link_atomically(tmp_path / "one", tmp_path / "two")
        assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}
    write_text(tmp_path / "one", "new")
    assert (tmp_path / "two").read_text() == "content"


def test_where_links_do_not_exist_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", refuse)
    write_text(tmp_path / "one", "content")
    link_atomically(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "content"
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def test_link_that_cannot_take_its_name_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a full disk is told and outlived."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_text(tmp_path / "one", "content")
    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(OutputError, match=r"cannot write .*two: No space left"):
        link_atomically(tmp_path / "one", tmp_path / "two")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_disk_without_locks_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "lockf", refuse)
    with pytest.raises(OutputError, match="cannot be locked: No locks available"):
        lock_folder(tmp_path)


def test_folder_is_locked_against_other_processes(tmp_path: Path) -> None:
    def lock_in_another_process() -> None:
        # Forked: what starts anew imports for seconds.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            pool.submit(_lock, tmp_path).result()

    with lock_folder(tmp_path):
        told = re.escape(f"{tmp_path} is in use by process {os.getpid()} on")
        with pytest.raises(OutputError, match=told):
            lock_in_another_process()
    lock_in_another_process()


def _lock(folder: Path) -> None:
    lock_folder(folder)


def test_leftovers_of_killed_writes_are_removed(tmp_path: Path) -> None:
    for name in (".last.pt.123.tmp", "last.pt"):
        (tmp_path / name).write_text("x")
    remove_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
