"""A released folder gives timm the same model and the same preprocessing."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config

import release as release_script
import vil  # noqa: F401  registers the models
from vil.training.config import TrainConfig
from vil.training.errors import OutputError, run_script
from vil.training.release import ReleaseConfig, release


@pytest.fixture
def checkpoint(config: TrainConfig, train: Callable[..., int], tmp_path: Path) -> Path:
    """The last checkpoint of a short run."""
    train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1")
    return tmp_path / "run" / "last.pt"


@pytest.mark.parametrize("ema", [False, True])
def test_timm_loads_what_was_released(checkpoint: Path, ema: bool, tmp_path: Path) -> None:
    folder = tmp_path / "released"
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder), ema=ema))
    files = {"model.safetensors", "config.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == files
    saved = torch.load(checkpoint, weights_only=True)["state_dict_ema" if ema else "state_dict"]
    assert load_file(folder / "model.safetensors").keys() == saved.keys()
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    data = resolve_model_data_config(model)
    assert (data["input_size"], data["crop_pct"]) == ((3, 16, 16), 0.875)
    assert (data["interpolation"], tuple(data["mean"])) == ("bicubic", (0.485, 0.456, 0.406))
    assert create_transform(**data) is not None


def test_script_says_how_to_load(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    capsys.readouterr()
    arguments = ["release.py", str(checkpoint), str(tmp_path / "released")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert run_script(release_script.main) == 0
    assert f"local-dir:{tmp_path / 'released'}" in capsys.readouterr().out
    assert run_script(release_script.main) == 5
    assert "released exists; choose another folder" in capsys.readouterr().err


def test_failure_leaves_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(model: torch.nn.Module, folder: Path, **_: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vil.training.release.save_for_hf", fail)
    options = ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "released"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OutputError, match="No space left on device"):
        release(options)
    assert sorted(tmp_path.iterdir()) == before
