"""Files that are whole or absent, and checkpoints that say what is wrong with them."""

import dataclasses
import io
import os
import re
import stat
import zipfile
from pathlib import Path
from typing import BinaryIO

import pytest
import timm
import torch

from vil.training.config import TrainConfig
from vil.training.distributed import World
from vil.training.errors import DamagedError, NonFiniteLossError, OutputError, UserError
from vil.training.files import (
    write_atomically,
    write_text,
)
from vil.training.run import checkpoint as checkpoint_module
from vil.training.run.checkpoint import About, load_checkpoint, save_checkpoint
from vil.training.run.evaluation import EvalConfig, load_subject
from vil.training.run.setup import Training, build_training
from vil.training.run.state import RunState
from vil.weights import check_finite


def about(config: TrainConfig) -> About:
    """Describe a run on four kinds of trees."""
    return About(
        config=config,
        asked=config,
        fingerprints={"training": "1", "validation": "2"},
        classes=("ash", "birch", "cedar", "dogwood"),
    )


def state(*reached_top1: float, step: int = 4) -> RunState:
    """Return the state of a run whose epochs reached the given top-1."""
    reached = RunState(step=step * len(reached_top1))
    for epoch, top1 in enumerate(reached_top1, 1):
        times = {"images_per_s": 100.0, "seconds": 1.0}
        counts = {"skipped_images": 0, "skipped_steps": 0}
        scores = {"train_loss": 1.0, "val_loss": 1.0, "top1": top1, "top5": 100.0}
        reached.end_epoch({"epoch": epoch, "lr": 1e-3, **scores, **counts, **times})
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


def test_contents_are_on_the_disk_before_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss in between, the new name would be that of an empty file."""
    calls = []

    def note(name: str) -> None:
        original = getattr(os, name)

        def noted(*arguments: object) -> object:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            calls.append("fsync of the folder" if is_folder else name)
            return original(*arguments)

        monkeypatch.setattr(os, name, noted)

    note("fsync")
    note("replace")
    write_text(tmp_path / "file", "new")
    assert calls == ["fsync", "replace", "fsync of the folder"]


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


def test_flipped_bit_is_detected(saved: Path, training: Training) -> None:
    content = bytearray(saved.read_bytes())
    weight = training.model.head.weight.detach().numpy().tobytes()
    content[content.index(weight) + 10] ^= 1
    saved.write_bytes(bytes(content))
    torch.load(saved, weights_only=True)  # does not notice
    with pytest.raises(OutputError, match=r"last\.pt is damaged: wrong checksum"):
        load_checkpoint(saved)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"state_dict": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(OutputError, match=r"code\.pt .* what could execute code is not read"):
        load_checkpoint(tmp_path / "code.pt")


def replaced(content: dict, path: str, value: object) -> dict:
    """Return nested dictionaries and lists with another value at a place; ABSENT removes it."""
    key, _, rest = path.partition(".")
    place = int(key) if isinstance(content, list) else key
    changed = content.copy()
    if rest:
        changed[place] = replaced(content[place], rest, value)
    elif value is ABSENT:
        del changed[place]
    else:
        changed[place] = value
    return changed


ABSENT = object()
WRONG = (
    ("config", [], "it.config must be dict, got list"),
    ("config.schedule", [], "it.config['schedule'] must be dict, got list"),
    ("config.schedule.epochs", "three", "it.config.schedule.epochs must be a whole number of"),
    ("config.augment.scale", [0.1], "it.config.augment.scale must have 2 values, got 1"),
    ("asked", "x", "it.asked must be dict, got 'x'"),
    ("state_dict", [], "it.state_dict must be dict, got list"),
    ("state_dict.head\nbias", 1, "it.state_dict"),
    (
        "state_dict_ema",
        {"head.bias": 1.0},
        "it.state_dict_ema['head.bias'] must be Tensor, got 1.0",
    ),
    ("optimizer", "adamw", "it.optimizer must be dict, got 'adamw'"),
    ("optimizer.param_groups", {}, "it.optimizer.param_groups must be list, got dict"),
    ("optimizer.param_groups.0.params", ["a"], "params[0] must be int, got 'a'"),
    ("optimizer.state", {"x": {}}, "a key of it.optimizer.state must be int, got 'x'"),
    ("run", [], "it.run must be dict, got list"),
    ("run.best_epoch", ABSENT, "its run lacks best_epoch"),
    ("run.best_epoch", 7, "its best epoch is 7 of 1"),
    ("run.best_epoch", 0, "its best epoch is 0 of 1"),
    ("run.step", -1, "fewer steps than none"),
    ("run.step", True, "it.run.step must be int, got True"),
    ("run.history", {}, "it.run.history must be list, got dict"),
    ("run.history.0", "row", "it.run.history[0] must be dict, got 'row'"),
    ("run.history.0.top1", ABSENT, "it.run.history[0] lacks top1"),
    ("run.bad_images", [1], "it.run.bad_images must be dict, got list"),
    ("run.changes", [{"step": 1}], "it.run.changes[0] lacks epoch, setting, before, after"),
    ("epoch", "1", "it.epoch must be a whole number of at least 0"),
    ("epoch", 10**30, "it.epoch must be a whole number of at least 0 and at most"),
    ("metric", "best", "it.metric must be float or None, got 'best'"),
    ("data", ABSENT, "it lacks data"),
    ("data.training", 1, "it.data.training must be str, got 1"),
    ("arch", None, "it.arch must be str, got None"),
    ("model_args", [], "it.model_args must be dict, got list"),
    ("pretrained_cfg.input_size", 16, "it.pretrained_cfg.input_size must be tuple"),
)


def test_content_of_another_form_is_damage(saved: Path) -> None:
    """Though its checksums are right."""
    content = torch.load(saved, weights_only=True)
    for path, value, told in WRONG:
        torch.save(replaced(content, path, value), saved)
        with pytest.raises(DamagedError, match=re.escape(told)) as caught:
            load_checkpoint(saved)
        assert "\n" not in str(caught.value)
        if path.split(".")[0] in ("arch", "model_args", "config", "pretrained_cfg"):
            with pytest.raises(UserError) as caught:  # as eval.py and release.py read it
                load_subject(EvalConfig(checkpoint=str(saved)))
            assert caught.value.exit_code == 5, path


def test_limits_may_be_infinite() -> None:
    """As timm's gemma4_vit has them."""
    check_finite({"input_max": torch.tensor(torch.inf), "index": torch.tensor(3)}, "it")
    for value in (torch.tensor(torch.nan), torch.tensor([torch.inf])):
        with pytest.raises(ValueError, match=r"it: input_max is not finite$"):
            check_finite({"bias": torch.zeros(2), "input_max": value}, "it")


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_weights_that_are_not_finite_are_not_saved(
    ema: bool, first: bool, training: Training, config: TrainConfig, tmp_path: Path
) -> None:
    if not first:
        save_checkpoint(tmp_path, training, about(config), state(50.0))
    with torch.no_grad():
        (training.ema.module if ema else training.model).head.bias[2] = torch.nan
    kept = "no checkpoint was written before" if first else "best.pt, last.pt in .* are from before"
    message = rf"the weights after step 8: head\.bias is not finite; {kept}"
    with pytest.raises(NonFiniteLossError, match=message):
        save_checkpoint(tmp_path, training, about(config), state(50.0, 60.0))
    assert len(list(tmp_path.glob("*.pt"))) == (0 if first else 2)


def test_tensors_that_claim_more_than_they_hold_are_refused(saved: Path) -> None:
    """A few bytes can claim terabytes, which no check may allocate."""
    content = torch.load(saved, weights_only=True)
    for path, value in (
        ("state_dict", content["state_dict"] | {"huge": torch.zeros(1).expand(1 << 40)}),
        ("state_dict", content["state_dict"] | {"sparse": torch.zeros(3).to_sparse()}),
        ("optimizer.state", {0: {"exp_avg": torch.zeros(1).expand(1 << 40)}}),
    ):
        torch.save(replaced(content, path, value), saved)
        with pytest.raises(DamagedError, match=r"has not the numbers for|is no plain tensor"):
            load_checkpoint(saved)


@pytest.mark.ci
def test_archive_that_torch_does_not_write_is_refused(saved: Path) -> None:
    """Compressed, it could unpack to a thousand times its size; overlapping, to any."""
    with zipfile.ZipFile(saved) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(DamagedError, match="is compressed"):
        load_checkpoint(saved)
    with zipfile.ZipFile(saved, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
        archive.infolist().extend([archive.infolist()[-1]] * 10_000)
    with pytest.raises(DamagedError, match=r"is damaged: its parts are larger|two of its parts"):
        load_checkpoint(saved)
