"""What settings leave open is filled in from the weights and the data, and nothing else is touched."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from vil.training.config import (
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TrainConfig,
    parse_args,
)
from vil.training.errors import ConfigError, DataError
from vil.training.run.resolve import fill_from_data, fill_from_weights, model_arguments
from vil.weights import Weights

DESCRIBED = {
    "num_classes": 7,
    "input_size": (3, 64, 64),
    "mean": (0.1, 0.2, 0.3),
    "std": (0.4, 0.5, 0.6),
    "interpolation": "bilinear",
    "crop_pct": 0.9,
}


def make_weights(
    architecture: str | None = "vil_tiny", input_size: tuple[int, ...] = (3, 64, 64), **args: object
) -> Weights:
    """Describe weights without any."""
    return Weights(
        state_dict={},
        origin="best.pt",
        architecture=architecture,
        model_args={"num_classes": 7, "in_chans": 3, "img_size": 64, **args},
        pretrained_cfg=DESCRIBED | {"input_size": input_size},
    )


def source(classes: tuple[str, ...] | None, labels: list[int]) -> SimpleNamespace:
    """Stand in for data."""
    return SimpleNamespace(classes=classes, labels=np.array(labels), num_images=len(labels))


def test_weights_say_what_the_settings_do_not() -> None:
    filled = fill_from_weights(TrainConfig(), make_weights(embed_dim=48, depth=3, patch_size=8))
    model, data = filled.model, filled.data
    assert (model.name, model.in_chans, model.img_size) == ("vil_tiny", 3, 64)
    assert (model.embed_dim, model.depth, model.patch_size) == (48, 3, 8)
    assert model.num_classes is None  # of the data to come, not of the data they are from
    assert (data.mean, data.std) == (DESCRIBED["mean"], DESCRIBED["std"])
    assert (data.interpolation, data.crop_pct) == ("bilinear", 0.9)


def test_settings_win_over_weights() -> None:
    asked = TrainConfig(
        model=ModelConfig(name="vil_tiny", img_size=96, in_chans=1, patch_size=16),
        data=DataConfig(mean=(0.7,), crop_pct=1.0),
    )
    filled = fill_from_weights(asked, make_weights(patch_size=8))
    assert (filled.model.img_size, filled.model.patch_size) == (96, 16)
    assert (filled.data.mean, filled.data.crop_pct) == ((0.7,), 1.0)
    assert filled.data.std == pytest.approx((0.5,))  # grey has the mean of the colours'


def test_nothing_is_open_where_everything_is_said() -> None:
    filled = fill_from_weights(TrainConfig(model=ModelConfig(name="vil_tiny")), None)
    assert fill_from_weights(filled, None) == filled
    assert fill_from_weights(filled, make_weights("vil_tiny", (3, 224, 224))) == filled


def test_sizes_that_a_run_trains_at_are_not_resized() -> None:
    def args(weights: Weights | None, img_size: int | None = None, **data: object) -> dict:
        config = TrainConfig(
            model=ModelConfig(name="vil_tiny", img_size=img_size), data=DataConfig(**data)
        )
        return parse_args(fill_from_weights(config, weights).model.args)

    assert "resize_below" not in args(None) | args(make_weights()) | args(make_weights(), 64)
    assert args(make_weights(), 72)["resize_below"] == 0
    assert args(None, img_sizes=(64, 80))["resize_below"] == 0


def test_defaults_are_those_of_imagenet() -> None:
    filled = fill_from_weights(TrainConfig(model=ModelConfig(name="vil_tiny")), None)
    assert (filled.model.in_chans, filled.model.img_size) == (3, 224)
    assert filled.data.mean == (0.485, 0.456, 0.406)
    assert (filled.data.interpolation, filled.data.crop_pct) == ("bicubic", 0.875)


def test_other_arguments_of_the_model_go_on_as_arguments() -> None:
    asked = TrainConfig(model=ModelConfig(args=("global_pool=avg",)))
    weights = make_weights(global_pool="token", norm_layer="layernorm", class_token=True)
    filled = fill_from_weights(asked, weights)
    arguments = model_arguments(dataclasses.replace(filled.model, num_classes=2))
    assert arguments["global_pool"] == "avg"
    assert (arguments["norm_layer"], arguments["class_token"]) == ("layernorm", True)
    assert (arguments["num_classes"], arguments["img_size"]) == (2, 64)


def test_model_that_nobody_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.name is missing: best\.pt does not say it"):
        fill_from_weights(TrainConfig(), make_weights(None))
    with pytest.raises(ConfigError, match=r"model\.name is missing: name a model of timm"):
        fill_from_weights(TrainConfig(), None)


def test_size_that_is_not_one_number_has_to_be_said() -> None:
    weights = make_weights(input_size=(3, 32, 64))
    with pytest.raises(ConfigError, match=r"model\.img_size is missing: best\.pt is of 32 x 64 px"):
        fill_from_weights(TrainConfig(), weights)
    asked = TrainConfig(model=ModelConfig(img_size=48))
    assert fill_from_weights(asked, weights).model.img_size == 48


@pytest.mark.parametrize(
    ("word", "value"),
    [("a=1", 1), ("a=1e-3", 1e-3), ("a=None", None), ("a=(2, 3)", (2, 3)), ("a=x=y", "x=y")],
)
def test_argument_is_a_literal_or_text(word: str, value: object) -> None:
    assert parse_args((word,)) == {"a": value}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pool", "model.args takes key=value, got pool"),
        ("a b=1", "model.args takes key=value, got a b=1"),
        ("embed_dim=3", r"model.args: embed_dim is a setting, model\.embed_dim"),
    ],
)
def test_wrong_argument_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args((word,))


def test_data_say_the_number_of_classes_the_batch_and_the_warm_up() -> None:
    asked = TrainConfig(
        data=DataConfig(batch_size=None), schedule=ScheduleConfig(epochs=40, warmup_epochs=None)
    )
    train = source(("a", "b", "c"), [0, 1, 2] * 100)
    filled = fill_from_data(asked, train, train)
    assert filled.model.num_classes == 3
    assert (filled.data.batch_size, filled.schedule.warmup_epochs) == (16, 4)
    stated = TrainConfig(model=ModelConfig(num_classes=9))
    assert fill_from_data(stated, train, train) == stated


def test_classes_without_names_have_to_be_counted_by_the_user() -> None:
    train, val = source(None, [0, 1]), source(None, [0, 4])
    with pytest.raises(DataError, match=r"up to 4; pass --model\.num-classes 5 if that is all"):
        fill_from_data(TrainConfig(), train, val)
