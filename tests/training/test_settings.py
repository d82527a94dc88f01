"""Every option declares its range; a value outside gives a one-line error and exit code 2."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import timm

import train_imagenet
from vil.timm_models import NOT_OF_A_MODEL
from vil.training.errors import ConfigError
from vil.training.evaluation import EvalConfig
from vil.training.recipes import flat, from_dict, read_recipe

DIGITS = read_recipe(Path(__file__).parents[2] / "configs" / "digits.yaml")
VALID = [DIGITS, EvalConfig(checkpoint="a.pt")]


def told(key: str, value: Any, valid: Any = DIGITS) -> str:
    """Return the error message for a value of an option; empty if the value is valid."""
    values = dataclasses.asdict(valid)
    *section, name = key.split(".")
    (values[section[0]] if section else values)[name] = value
    try:
        from_dict(values, "", type(valid))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("valid", VALID, ids=lambda valid: type(valid).__name__)
def test_every_setting_has_a_range(valid) -> None:
    for key in flat(valid):
        for value in (math.nan, -1e30, -(10**30), *([""] if valid is DIGITS else [])):
            for many in (value, [value], [value] * 2, [value] * 3):
                assert key in told(key, many, valid), (key, many)


def test_what_the_weights_of_timm_say_of_images_is_in_range() -> None:
    cfgs = [timm.get_pretrained_cfg(name) for name in timm.list_pretrained()]
    for key in ("crop_pct", "mean", "std", "interpolation"):
        for value in {getattr(cfg, key) for cfg in cfgs}:
            assert told(f"data.{key}", value) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--optim.clip-grad", "0"], "optim.clip_grad must be greater than 0, got 0.0"),
        (["--data.std", "0", "0", "0"], "data.std[0] must be greater than 0, got 0.0; data.std[1]"),
        (["--run.seed", "4294967296"], "less than or equal to 4294967295, got 4294967296"),
        (["--model.args", "norm_layer=nope"], "norm_layer must be None, a class, or a name that"),
        (["--model.args", "pool"], "model.args takes key=value, got pool"),
        (["--model.args", "depth=3"], "depth, use the option model.depth"),
        (["--data.mean", "0.5", "0.5"], "data.mean must have model.in_chans = 1 values, got (0.5,"),
        (["--data.img-sizes", "16", "16"], "must be different sizes, at least one, got 16 16"),
        (["--augment.scale", "0.5", "0.1"], "must be two numbers, first <= second, got 0.5 0.1"),
        (["--augment.aa", "random"], "augment.aa 'random' is not a policy of timm"),
        (["--model.img-size", "18"], "img_size must be covered by whole patches of 4 px"),
        (["--data.img-sizes", "16", "18"], "data.img_sizes 18: vil_tiny does not support images"),
        (["--model.patch-stride", "9"], "patch_stride must be from 1 to patch_size (4), got 9"),
        (["--model.name", "local-dir:x"], "got local-dir:x; pass --model.pretrained local-dir:x"),
        (["--model.pretrained-ema"], "model.pretrained_ema needs --model.pretrained"),
        (
            ["--model.pretrained", "none.pt"],
            "none.pt is not a file, a folder with config.json and weights, hf-hub:NAME or a",
        ),
        (["--model.num-classes", "5"], "training data has 10 classes, but model.num_classes is 5"),
        (
            ["--schedule.epochs", "1"],
            "schedule.warmup_epochs 2 is longer than the run, schedule.ep",
        ),
        (
            ["--data.batch-size", "2000"],
            "fewer than data.batch_size 2000; try --data.batch-size 64",
        ),
        (
            ["--run.grad-accum-steps", "3"],
            "must be a multiple of 1 processes x run.grad_accum_steps",
        ),
        (["--augment.mixup", "1", "--augment.mix-size", "5"], "must be even and divide the 32"),
        (["--data.images-per-class", "999"], "data.images_per_class must be at most the"),
        (["--data.val-fraction", "0.1"], "data.val_fraction needs data.dataset folder, got digits"),
        (
            ["--data.dataset", "folder", "--data.val-fraction", "0.1", "--data.val-split", "test"],
            "data.train_split and data.val_split have no effect with data.val_fraction",
        ),
        (
            ["--schedule.by", "step", "--schedule.warmup-lr", "1e-5"],
            "schedule.warmup_lr has no effect",
        ),
        (["--data.path", "x"], "data.dataset digits needs no data.path, got x"),
        (["--data.dataset", "folder"], "data.dataset folder needs --data.path, the root folder"),
        (["--optim.best", "ema"], "optim.best ema needs averaged weights, such as --optim.model-"),
        (["--optim.opt", "nope"], "cannot create optimizer nope"),
        (["--optim.opt", "adahessian"], "adahessian needs second derivatives"),
        (["--optim.opt-betas", "0.9", "0.9", "0.9"], "opt_betas must be 2 numbers, got (0.9"),
        (["--run.device", "nope"], "run.device nope is not available"),
        (
            ["--run.tracker", "tensorboard"],
            "run.tracker tensorboard needs its package; run pip inst",
        ),
        (["--config", "none.yaml"], "--config none.yaml: No such file or directory"),
        *((["--model.args", f"{key}=True"], f"got {key}=True") for key in NOT_OF_A_MODEL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_fail_later_is_one_line(words, expected, program, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    code = program(train_imagenet.main, "--run.output", tmp_path / "out", *words)
    assert expected in (line := capsys.readouterr().err)
    of_the_data = any(part in expected for part in ("classes", "batch_size 2000", "at most the"))
    assert code == (3 if of_the_data else 2)
    assert line.startswith("error: ")
    assert line.count("\n") == 1


def test_the_help_breaks_lines_at_the_edge_alone(program, monkeypatch, capsys) -> None:
    """Not where the docstring of an option does."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        program(train_imagenet.main, "--help")
    told = capsys.readouterr().out
    assert "a state dict (such as official Vision Mamba weights), local-dir:FOLDER, hf-hub:NAME" in told
    assert "uses the value of model.pretrained, else 0.875." in told
