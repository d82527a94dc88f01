"""Unset options are filled in from the weights and the data; no other option changes."""

from types import SimpleNamespace

import numpy as np
import pytest

from vil.training.errors import DataError
from vil.training.resolve import fill_from_data, fill_from_weights
from vil.training.settings import DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from vil.weights.files import Weights

DESCRIBED = {
    "num_classes": 7,
    "input_size": (3, 64, 64),
    "mean": (0.1, 0.2, 0.3),
    "std": (0.4, 0.5, 0.6),
    "interpolation": "bilinear",
    "crop_pct": 0.9,
    "crop_mode": "squash",
}


def make_weights(
    architecture: str | None = "vil_tiny", input_size: tuple[int, ...] = (3, 64, 64), **args: object
) -> Weights:
    """Return a description of weights without any tensors."""
    return Weights(
        state_dict={},
        origin="best.pt",
        architecture=architecture,
        model_args={"num_classes": 7, "in_chans": 3, "img_size": 64, **args},
        pretrained_cfg=DESCRIBED | {"input_size": input_size},
    )


def source(classes: tuple[str, ...] | None, labels: list[int]) -> SimpleNamespace:
    """Return a stand-in for a data source."""
    return SimpleNamespace(classes=classes, labels=np.array(labels), num_images=len(labels))


def test_weights_say_what_the_settings_do_not() -> None:
    filled = fill_from_weights(TrainConfig(), make_weights(embed_dim=48, depth=3, patch_size=8))
    model, data = filled.model, filled.data
    assert (model.name, model.in_chans, model.img_size) == ("vil_tiny", 3, 64)
    assert (model.embed_dim, model.depth, model.patch_size) == (48, 3, 8)
    assert model.num_classes is None  # it comes from the new data, not from the weights
    assert (data.mean, data.std) == (DESCRIBED["mean"], DESCRIBED["std"])
    assert (data.interpolation, data.crop_pct, data.crop_mode) == ("bilinear", 0.9, "squash")


def test_settings_win_over_weights() -> None:
    asked = TrainConfig(
        model=ModelConfig(name="vil_tiny", img_size=96, in_chans=1, patch_size=16),
        data=DataConfig(mean=(0.7,), crop_pct=1.0),
    )
    filled = fill_from_weights(asked, make_weights(patch_size=8))
    assert (filled.model.img_size, filled.model.patch_size) == (96, 16)
    assert (filled.data.mean, filled.data.crop_pct) == ((0.7,), 1.0)
    assert filled.data.std == pytest.approx((0.5,))  # grey has the mean over the colours


def test_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="there is one class"):
        fill_from_data(TrainConfig(), source(("a",), [0, 0]), source(("a",), [0]))


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
