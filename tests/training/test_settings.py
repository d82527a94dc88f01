"""Every option declares its range; a value outside gives a one-line error and exit code 2."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import timm
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

import train_imagenet
from vil.timm_models import NOT_OF_A_MODEL
from vil.training.errors import ConfigError
from vil.training.evaluation import EvalConfig
from vil.training.make_shards import MakeOptions
from vil.training.program import run_script
from vil.training.recipes import from_dict, read_recipe
from vil.training.settings import TrainConfig

ROOT = Path(__file__).parents[2]
DIGITS = read_recipe(ROOT / "configs" / "digits.yaml")
FORMS = {
    f"{section.name}.{key}": form
    for section in dataclasses.fields(TrainConfig)
    for key, form in get_type_hints(section.default_factory, include_extras=True).items()
}
OPTIONS = {
    f"{kind.__name__}.{key}": form
    for kind in (EvalConfig, MakeOptions)
    for key, form in get_type_hints(kind, include_extras=True).items()
}


def parts_of(form: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the types that a value or its elements may have, with the rules that limit each."""
    origin, parts = get_origin(form), get_args(form)
    if origin in (Union, UnionType):
        for part in parts:
            yield from parts_of(part)
    elif origin is tuple:
        yield from parts_of(parts[0])
    elif origin is Annotated:
        rules = [rule for rule in parts[1:] if isinstance(rule, FieldInfo | AfterValidator)]
        if get_origin(parts[0]) is None and rules:
            yield parts[0], rules
        else:
            yield from parts_of(parts[0])
    else:
        yield form, []


def with_value(key: str, value: Any) -> dict[str, Any]:
    section, name = key.split(".")
    values = dataclasses.asdict(DIGITS)
    return values | {section: values[section] | {name: value}}


def told(key: str, value: Any) -> str:
    """Return the error message for a value of an option; empty if the value is valid."""
    try:
        from_dict(with_value(key, value), "")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", [*FORMS, *OPTIONS])
def test_every_setting_has_a_range_beside_it(key) -> None:
    for base, rules in parts_of((FORMS | OPTIONS)[key]):
        numbers = base in (int, float)
        assert not numbers or rules, f"{key} takes any {base.__name__}"
        assert base is not str or rules or key in OPTIONS, f"{key} takes an empty text"


def test_what_the_weights_of_timm_say_of_images_is_in_range() -> None:
    for name in timm.list_pretrained():
        cfg = timm.get_pretrained_cfg(name)
        for key in ("crop_pct", "mean", "std", "interpolation"):
            assert told(f"data.{key}", getattr(cfg, key)) == "", f"{name}: {key}"


@pytest.fixture
def start(monkeypatch, tmp_path) -> Callable[..., int]:
    """Return a function that runs train_imagenet.py in this process, up to its first step."""

    def run(*words: str) -> int:
        monkeypatch.setattr("vil.training.train.train_step", lambda *_: pytest.fail("it trains"))
        command = ["train_imagenet.py", "--run.output", str(tmp_path / "out"), *words]
        monkeypatch.setattr(sys, "argv", command)
        try:
            return run_script(train_imagenet.main)
        except SystemExit as error:  # from the parser, which has printed why
            return error.code

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--optim.clip-grad", "-1"], "optim.clip_grad must be greater than 0, got -1.0"),
        (["--optim.clip-grad", "0"], "optim.clip_grad must be greater than 0, got 0.0"),
        (["--data.std", "0", "0", "0"], "data.std[0] must be greater than 0, got 0.0; data.std[1]"),
        (["--run.seed", "-1"], "run.seed must be greater than or equal to 0, got -1"),
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
        (["--model.pretrained", "none.pt"], "none.pt is not a file, a folder, hf-hub:NAME or a"),
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
        (["--run.tracker", "wandb"], "run.tracker wandb needs its package; run pip install wandb"),
        (["--config", "none.yaml"], "--config none.yaml: No such file or directory"),
        *((["--model.args", f"{key}=True"], f"got {key}=True") for key in NOT_OF_A_MODEL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_fail_later_is_one_line(words, expected, start, capsys) -> None:
    code = start(*words)
    assert expected in (line := capsys.readouterr().err)
    assert code == (
        3
        if "classes" in expected or "batch_size 2000" in expected or "at most the" in expected
        else 2
    )
    assert line.startswith("error: ")
    assert line.count("\n") == 1
