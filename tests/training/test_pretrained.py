"""Runs that start from pretrained weights: taken and new tensors, refusals, and resuming."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.run_files import at_step, die
from vil.training.settings import ModelConfig, TrainConfig

FROZEN = ("--optim.lr-base", "0", "--schedule.warmup-lr", "0", "--schedule.min-lr", "0")


@pytest.fixture
def open_config(config) -> TrainConfig:
    """Return the configuration with every option unset that weights and data can fill in."""
    unset = dict.fromkeys(("mean", "std", "interpolation", "crop_pct", "crop_mode"))
    return dataclasses.replace(config, model=ModelConfig(), data=dataclasses.replace(config.data, **unset))


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> set[str]:
    assert left.keys() == right.keys()
    return {key for key in left if not torch.equal(left[key], right[key])}


@pytest.mark.parametrize("kind", ["checkpoint", "averaged", "local-dir"])
def test_run_starts_from_the_weights(kind, open_config, checkpoint, released, train, capsys, tmp_path) -> None:
    source = f"local-dir:{released}" if kind == "local-dir" else checkpoint
    ema = ("--model.pretrained-ema",) if kind == "averaged" else ()
    arguments = ("--run.output", str(tmp_path / "tuned"), "--schedule.epochs", "1", *FROZEN, *ema)
    capsys.readouterr()
    assert train(open_config, "--model.pretrained", str(source), *arguments) == 0
    printed = capsys.readouterr().out
    assert f"from {source}" in printed
    assert "25 tensors taken\n" in printed
    last = load(tmp_path / "tuned" / "last.pt")
    expected = load(checkpoint)["state_dict_ema" if ema else "state_dict"]
    assert differing(last["state_dict"], expected) == set()
    assert differing(last["state_dict_ema"], expected) == set()
    model, data = last["config"]["model"], last["config"]["data"]
    assert (model["name"], model["embed_dim"]) == ("vil_tiny", 16)
    assert (data["crop_pct"], data["interpolation"]) == (0.8, "bilinear")
    assert data["crop_mode"] == "squash"
    assert tuple(data["mean"]) == last["pretrained_cfg"]["mean"] == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("kind", ["others", "order"])
def test_other_classes_get_a_new_head_and_nothing_else(
    kind, open_config, checkpoint, released, image_folder, train, capsys, tmp_path
) -> None:
    if kind == "others":
        classes = ["birch", "cedar", "elm"]
        for split in ("train", "val"):
            shutil.rmtree(image_folder / split / "dogwood")
            (image_folder / split / "ash").rename(image_folder / split / "elm")
    else:  # the same four in another order, which only the source's description shows
        classes = ["ash", "birch", "cedar", "dogwood"]
        path = released / "config.json"
        described = json.loads(path.read_text())
        path.write_text(json.dumps(described | {"label_names": classes[::-1]}))
    source = released if kind == "order" else checkpoint
    folder, count = tmp_path / "tuned", len(classes)
    arguments = ("--run.output", str(folder), "--schedule.epochs", "1", *FROZEN)
    capsys.readouterr()
    assert train(open_config, "--model.pretrained", str(source), *arguments) == 0
    assert f"; new head.weight ({count}, 16), head.bias ({count},)" in capsys.readouterr().out
    last, first = load(folder / "last.pt"), load(checkpoint)["state_dict"]
    assert last["pretrained_cfg"]["label_names"] == classes
    assert last["state_dict"]["head.weight"].shape == (count, 16)
    assert not torch.equal(last["state_dict"]["head.weight"], first["head.weight"][:count])
    for key in set(first) - {"head.weight", "head.bias"}:
        assert torch.equal(last["state_dict"][key], first[key]), key


def test_killed_run_of_the_same_command_continues_bit_for_bit(open_config, checkpoint, train, tmp_path) -> None:
    command = ("--model.pretrained", str(checkpoint), "--run.output")
    assert train(open_config, *command, str(tmp_path / "whole")) == 0
    with at_step(6, die):
        assert train(open_config, *command, str(tmp_path / "halves")) == 130
    checkpoint.rename(checkpoint.with_suffix(".gone"))
    assert train(open_config, *command, str(tmp_path / "halves")) == 0
    whole, halves = (load(tmp_path / name / "last.pt") for name in ("whole", "halves"))
    assert differing(whole["state_dict"], halves["state_dict"]) == set()
    assert train(open_config, *command, str(tmp_path / "new")) == 2


def test_what_does_not_fit_is_refused(open_config, checkpoint, released, train, capsys, tmp_path) -> None:
    bare = tmp_path / "bare.pth"
    torch.save(load(checkpoint)["state_dict"], bare)
    capsys.readouterr()
    for arguments, code, message in (
        ((str(checkpoint), "--model.name", "vil_tiny_exact"), 2, "(longhorn), but vil_tiny_exact"),
        ((str(checkpoint), "--model.embed-dim", "32"), 2, "patch_embed.proj.weight"),
        ((str(checkpoint), "--model.depth", "3"), 2, "blocks.2.norm.weight is missing"),
        ((str(released), "--model.pretrained-ema"), 2, "has no averaged weights"),
        (
            (str(checkpoint), "--model.args", "patch_drop_rate=0.5", "--model.img-size", "24"),
            2,
            "model.args patch_drop_rate=0.5 at 24 px: patch_drop_rate and keep need a",
        ),
        ((str(bare),), 2, "model.name is missing: "),
        ((str(checkpoint.parent),), 2, "it is the folder of a run: pass its checkpoint"),
        (("vil_tiny",), 5, "timm has no weights for vil_tiny"),
    ):
        folder = ("--run.output", str(tmp_path / "new"))
        assert train(open_config, "--model.pretrained", *arguments, *folder) == code, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
