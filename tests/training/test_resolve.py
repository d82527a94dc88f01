"""Unset options are filled in from the weights and the data; no other option changes."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vil.preprocess import ImageSpec
from vil.training.errors import DataError
from vil.training.images import FolderSource
from vil.training.listing import choose_exceptions
from vil.training.resolve import complete
from vil.training.settings import DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from vil.weights.sources import Weights

DESCRIBED = {
    "num_classes": 7,
    "input_size": (3, 64, 64),
    "mean": (0.1, 0.2, 0.3),
    "std": (0.4, 0.5, 0.6),
    "interpolation": "bilinear",
    "crop_pct": 0.9,
    "crop_mode": "squash",
}


NAMED = TrainConfig(model=ModelConfig(name="vil_tiny"))


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
    data = source(("a", "b"), [0, 1])
    weights = make_weights(embed_dim=48, depth=3, patch_size=8)
    filled = complete(TrainConfig(), weights, data, data)
    model, data = filled.model, filled.data
    assert (model.name, model.in_chans, model.img_size) == ("vil_tiny", 3, 64)
    assert (model.embed_dim, model.depth, model.patch_size) == (48, 3, 8)
    assert model.num_classes == 2  # it comes from the new data, not from the weights
    assert (data.mean, data.std) == (DESCRIBED["mean"], DESCRIBED["std"])
    assert (data.interpolation, data.crop_pct, data.crop_mode) == ("bilinear", 0.9, "squash")


def test_settings_win_over_weights() -> None:
    asked = TrainConfig(
        model=ModelConfig(name="vil_tiny", img_size=96, in_chans=1, patch_size=16),
        data=DataConfig(mean=(0.7,), crop_pct=1.0),
    )
    train = source(("a", "b"), [0, 1])
    filled = complete(asked, make_weights(patch_size=8), train, train)
    assert (filled.model.img_size, filled.model.patch_size) == (96, 16)
    assert (filled.data.mean, filled.data.crop_pct) == ((0.7,), 1.0)
    assert filled.data.std == pytest.approx((0.5,))  # grey has the mean over the colours


def test_one_class_is_refused() -> None:
    with pytest.raises(DataError, match="there is one class"):
        complete(NAMED, None, source(("a",), [0, 0]), source(("a",), [0]))


def test_data_say_the_number_of_classes_the_batch_and_the_warm_up() -> None:
    rates = {"warmup_lr": 0.0, "min_lr": 0.0}  # below the peak of a small batch
    asked = dataclasses.replace(
        NAMED,
        data=DataConfig(batch_size=None),
        schedule=ScheduleConfig(epochs=40, warmup_epochs=None, **rates),
    )
    train = source(("a", "b", "c"), [0, 1, 2] * 100)
    filled = complete(asked, None, train, train)
    assert filled.model.num_classes == 3
    assert (filled.data.batch_size, filled.schedule.warmup_epochs) == (16, 4)
    for epochs, warmup in ((300, 5), (9, 0)):
        chosen = asked.changed("schedule", epochs=epochs)
        assert complete(chosen, None, train, train).schedule.warmup_epochs == warmup
    assert complete(filled, None, train, train) == filled  # as a resumed run does


def add_images(folder: Path, counts: dict[str, int], first: int = 0) -> None:
    for name, count in counts.items():
        (folder / name).mkdir(exist_ok=True)
        for number in range(first, first + count):
            (folder / name / f"{number}.jpg").touch()


def held_out(config: TrainConfig, exceptions: Sequence[str]) -> set[str]:
    """Return the images held out; every image is on one side."""
    train, val = (FolderSource(config.data, training, exceptions) for training in (True, False))
    names, others = ({one.name(i) for i in range(one.num_images)} for one in (val, train))
    assert not names & others
    assert len(names | others) == len(list(Path(config.data.path).glob("*/*")))
    return names


def per_class(names: set[str]) -> dict[str, int]:
    return dict(Counter(Path(name).parent.name for name in names))


def test_a_fraction_of_every_class_is_held_out_and_stays_so(tmp_path) -> None:
    add_images(tmp_path, {"a": 1, "b": 2, "c": 6, "d": 57, "e": 200})
    new = TrainConfig(data=DataConfig(path=str(tmp_path), val_fraction=0.1))
    chosen = choose_exceptions(new.data, None)
    before = held_out(new, chosen)
    found = per_class(before)
    assert (found["b"], found["c"]) == (1, 1)
    assert (found["d"], found["e"]) == (pytest.approx(6, abs=1), pytest.approx(20, abs=2))
    double = new.changed("data", val_fraction=0.2)
    twice = held_out(double, choose_exceptions(double.data, None))
    found = per_class(twice)
    assert (found["d"], found["e"]) == (pytest.approx(11, abs=1), pytest.approx(40, abs=4))
    assert before < twice

    old = {Path(name) for name in tmp_path.glob("*/*")}
    few = {"g": 2, "h": 2, "i": 2}
    add_images(tmp_path, {"c": 20, "d": 20, "f": 50} | few, first=500)
    described = ImageSpec().pretrained_cfg(val_fraction=0.1) | {"label_names": [*"abcde"]}
    weights = dataclasses.replace(make_weights(), config=dataclasses.asdict(new), pretrained_cfg=described)
    weights = dataclasses.replace(weights, val_exceptions=chosen)
    exceptions = choose_exceptions(new.data, weights)
    assert held_out(new, exceptions) & {*map(str, old)} == before
    found = per_class(held_out(new, exceptions))
    assert found["f"] == pytest.approx(5, abs=1)
    assert [found[name] for name in few] == [1, 1, 1]
    assert choose_exceptions(DataConfig(path=str(tmp_path)), weights) == ()
