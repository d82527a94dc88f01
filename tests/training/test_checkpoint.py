"""Files that are whole or absent, and checkpoints that say what is wrong with them."""

import dataclasses
from pathlib import Path
from typing import BinaryIO

import pytest
import timm
import torch

from vil.training import checkpoint as checkpoint_module
from vil.training.checkpoint import load_checkpoint, load_weights, save_checkpoint
from vil.training.config import RunConfig, TrainConfig
from vil.training.errors import OutputError
from vil.training.files import open_run_folder, write_atomically, write_text
from vil.training.setup import Training, build_model, build_training


@pytest.fixture
def training(config: TrainConfig) -> Training:
    """Model and optimiser, and an average that differs from the model."""
    training = build_training(config)
    with torch.no_grad():
        training.ema.module.head.bias.add_(1.0)
    return training


@pytest.fixture
def saved(training: Training, config: TrainConfig, tmp_path: Path) -> Path:
    """A checkpoint."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, training, config, [{"epoch": 1, "top1": 50.0}], best=50.0)
    return path


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
        raise RuntimeError("unexpected pos 64")

    monkeypatch.setattr(checkpoint_module.torch, "save", fail)
    with pytest.raises(OutputError, match="unexpected pos"):
        save_checkpoint(saved, training, config, [], best=0.0)
    assert load_checkpoint(saved)["metric"] == 50.0


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
    with pytest.raises(OutputError, match=r"other\.pt was not written by .* it lacks arch, opt"):
        load_checkpoint(tmp_path / "other.pt")


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"state_dict": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(OutputError, match=r"code\.pt is truncated or not a checkpoint: Weights"):
        load_checkpoint(tmp_path / "code.pt")


def test_checkpoint_of_another_architecture_is_named(saved: Path, config: TrainConfig) -> None:
    other = build_model(dataclasses.replace(config.model, depth=3))
    weights = load_checkpoint(saved)["state_dict"]
    with pytest.raises(OutputError, match=r"last\.pt does not fit model vil_tiny: Missing key"):
        load_weights(other, weights, saved, "vil_tiny")


def test_default_output_folder_is_new_and_named_after_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = open_run_folder(RunConfig(), "digits")
    assert folder.parent == Path("output")
    assert folder.name.startswith("digits-20")
    assert folder.is_dir()


def test_occupied_output_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"is not empty; choose another --run\.output"):
        open_run_folder(RunConfig(output=str(tmp_path)), "digits")


def test_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"there is no .*last\.pt to resume from"):
        open_run_folder(RunConfig(output=str(tmp_path), resume=True), "digits")


def test_file_in_place_of_output_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot create output folder"):
        open_run_folder(RunConfig(output=str(tmp_path / "file")), "digits")
