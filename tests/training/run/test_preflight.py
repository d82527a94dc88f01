"""What is wrong with settings is told together, with what would be right, before torch is imported."""

import dataclasses
import math
from pathlib import Path

import pytest
from PIL import Image

from vil.training.config import TrainConfig
from vil.training.data.augment import train_transform
from vil.training.errors import SettingsError
from vil.training.recipes import load_config, read_recipe
from vil.training.run.preflight import check_settings

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"


def changed(config: TrainConfig, **settings: object) -> TrainConfig:
    """Return the settings with some of them, as section__name, replaced."""
    for key, value in settings.items():
        section, name = key.split("__")
        part = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def problems(config: TrainConfig, world_size: int = 1) -> list[str]:
    """Return what is told about the settings, a line each."""
    try:
        check_settings(changed(config, run__output="output/recipe"), world_size)
    except SettingsError as error:
        lines = str(error).splitlines()
        return lines if len(lines) == 1 else [line.removeprefix("  - ") for line in lines[1:]]
    return []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_right_but_for_what_a_user_adds(path: Path, image_folder: Path) -> None:
    config = read_recipe(path)
    if config.model.pretrained is not None:
        config = changed(config, model__pretrained=str(path))  # any file
    elif config.model.name is None:
        config = changed(config, model__name="vil_tiny")
    if config.data.dataset == "folder":
        config = changed(config, data__path=str(image_folder), data__batch_size=None)
        config = changed(config, augment__mix_size=None)
    assert problems(config) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"data__aug_repeats": -1}, "data.aug_repeats must be a whole number of at least 0 and at"),
        ({"data__max_bad_images": 1.0}, "at least 0 and below 1, got 1.0"),
        ({"data__max_bad_images": float("nan")}, "at least 0 and below 1, got nan"),
        ({"data__images_per_class": 0}, "at most 2147483647 or None, got 0"),
        ({"run__grad_accum_steps": 0}, "of at least 1 and at most 2147483647, got 0"),
        ({"run__save_minutes": -1.0}, "must be a finite number of at least 0, got -1.0"),
        ({"run__num_threads": 0}, "of at least 1 and at most 1024 or None, got 0"),
        ({"optim__layer_decay": 0.0}, "number above 0 and at most 1 or None, got 0.0"),
        ({"model__drop_path_rate": 1.0}, "of at least 0 and below 1, got 1.0"),
        (
            {"augment__scale": (0.5, 0.1)},
            "must be a list of two numbers, first <= second, got 0.5 0.1",
        ),
        ({"model__in_chans": 2}, "model.in_chans must be 1 or 3 or None, got 2"),
        ({"model__in_chans": 1}, "data.mean must have model.in_chans = 1 values, got"),
        (
            {"model__num_classes": 5},
            "the training data has 4 classes, model.num_classes is 5; leave",
        ),
        ({"model__args": ("pool",)}, "model.args takes key=value, got pool"),
        ({"model__args": ("depth=3",)}, "model.args: depth is a setting, model.depth"),
        ({"model__name": None}, "model.name is missing: a model of timm, vil_tiny say, or"),
        (
            {"model__name": "local-dir:x"},
            "takes no weights, got local-dir:x; pass --model.pretrained",
        ),
        ({"model__pretrained_ema": True}, "model.pretrained_ema has no use without"),
        ({"model__pretrained": "none.pt"}, "model.pretrained none.pt does not exist"),
        ({"model__pretrained": "local-dir:none"}, "model.pretrained local-dir:none does not exist"),
        ({"model__img_size": 20}, "20 is not covered by patches of 8 px every 8 px: 16 or 24 is"),
        (
            {"data__img_sizes": (16, 24, 16)},
            "must be a list of different sizes, at least one, got 16 24 16",
        ),
        (
            {"data__img_sizes": (0, 16)},
            "data.img_sizes[0] must be a whole number of at least 1 and",
        ),
        (
            {"data__img_sizes": (16, 28)},
            "data.img_sizes 28 is not covered by patches of 8 px every 8 px: 24 or 32 is",
        ),
        ({"model__patch_stride": 9}, "model.patch_stride must be at most the patch's 8 px, got 9"),
        ({"schedule__epochs": 0}, "schedule.epochs must be a whole number of at least 1 and at"),
        ({"schedule__warmup_epochs": 4}, "schedule.warmup_epochs 4 is longer than the run, sch"),
        ({"data__batch_size": 7}, "augment.mix_size must be even and divide the 7 images"),
        (
            {"data__batch_size": 64},
            "an epoch has 32 training images, fewer than data.batch_size 64",
        ),
        ({"data__images_per_class": 9}, "must be at most the 8 training images that class ash has"),
        (
            {"data__path": None},
            "data.dataset folder needs --data.path, the root folder of the data",
        ),
        ({"data__path": "/nowhere"}, "data.path /nowhere is not a folder"),
        ({"data__train_split": "trai"}, "has no folder trai"),
        ({"data__dataset": "digits"}, "data.path has no use for data.dataset digits, got"),
        ({"optim__best": "ema", "optim__model_ema_decay": None}, "optim.best ema needs averaged"),
        (
            {"optim__lr_base": math.inf},
            "optim.lr_base must be a finite number of at least 0, got inf",
        ),
        (
            {"data__crop_pct": math.inf},
            "data.crop_pct must be a finite number above 0 and at most 2 or",
        ),
        (
            {"optim__opt_eps": math.nan},
            "optim.opt_eps must be a finite number of at least 0, got nan",
        ),
        (
            {"augment__scale": (0.1, math.nan)},
            "augment.scale[1] must be a finite number above 0 and at most 1",
        ),
        ({"run__seed": 10**5000}, "at least 0 and at most 4294967295, got int"),
        ({"augment__aa": "rand-z9"}, "augment.aa rand-z9: rand of timm takes no 'z9'"),
        ({"augment__aa": "rand-m"}, "takes no 'm'"),  # which timm passes over
        ({"augment__aa": "rand-tfoo"}, "takes no 'tfoo'"),  # likewise
        ({"augment__aa": "random"}, "augment.aa must be None or begin with one of rand, augmix,"),
        ({"augment__aa": ""}, "augment.aa must be None or begin with"),
        ({"augment__aa": "v0-m9"}, "augment.aa v0-m9: v0 of timm takes no 'm9'"),
    ],
)
def test_each_is_told(config: TrainConfig, settings: dict[str, object], expected: str) -> None:
    told = problems(changed(config, **settings))
    assert any(expected in line for line in told), told


def test_a_first_start_on_own_images_tells_all_that_is_wrong_at_once(image_folder: Path) -> None:
    arguments = ["--config", str(CONFIGS / "vil_tiny.yaml"), "--data.path", str(image_folder)]
    arguments += [
        "--schedule.epochs",
        "3",
        "--model.num-classes",
        "1000",
        "--run.log-interval",
        "0",
    ]
    config = load_config(arguments, CONFIGS / "digits.yaml")
    told = problems(config, world_size=3)
    assert [line.split(",")[0] for line in told] == [
        "run.log_interval must be a whole number of at least 1 and at most 2147483647",
        "schedule.warmup_epochs 5 is longer than the run",
        "the training data has 4 classes",
        "the validation data has 4 classes",
        "an epoch has 32 training images",
        "data.batch_size must be a multiple of 3 processes x run.grad_accum_steps 1",
    ]
    assert "pass --data.batch-size 8, say" in told[4]


@pytest.mark.ci
@pytest.mark.parametrize(
    "policy",
    [
        *("rand", "rand-m9-mstd0.5-inc1", "rand-n3-p0.5-mmax12-tweights", "rand-t3a-inc0-p1.0"),
        *(
            "augmix-m5-w4-d2",
            "augmix-b1-a1.5-mstd1",
            "original",
            "originalr-mstd0.5",
            "v0",
            "v0r-mstd1",
        ),
        "3a",
    ],
)
def test_policy_of_timm_is_one_here(config: TrainConfig, policy: str) -> None:
    config = changed(config, augment__aa=policy)
    assert problems(config) == []
    transform = train_transform(config)
    assert transform(Image.new("RGB", (30, 20))).shape == (3, 16, 16)
