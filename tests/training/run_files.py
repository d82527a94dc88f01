"""Helpers for tests of whole runs: read the files of a run, and act at a step of a run."""

import csv
import dataclasses
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vil.training import train as loop
from vil.training.distributed import World
from vil.training.engine import StepResult
from vil.training.loader import Step, TrainData, ValData
from vil.training.resolve import complete
from vil.training.settings import TrainConfig
from vil.training.setup import TrainSetup
from vil.training.splits import open_source
from vil.weights.sources import Weights

TIMES = ("images_per_s", "data_wait", "seconds")
terminate = partial(signal.raise_signal, signal.SIGTERM)


def completed(config: TrainConfig, weights: Weights | None = None) -> TrainConfig:
    """Complete settings as for 32 images of four classes, which are not opened."""
    source = SimpleNamespace(classes=("ash", "birch", "cedar", "dogwood"), num_images=32)
    return complete(config, weights, source, source)


def train_data(config: TrainConfig, world: World = World()) -> TrainData:  # noqa: B008
    return TrainData(config, open_source(config.data, config.model.num_classes, True), world)


def val_data(config: TrainConfig, world: World = World()) -> ValData:  # noqa: B008
    source = open_source(config.data, config.model.num_classes, training=False)
    return ValData(source, config.images, config.data, world)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint without the entries that must differ between equal runs."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["config"], checkpoint["asked"]  # they name the output folder
    del checkpoint["run"]["seconds"]
    for row in checkpoint["run"]["history"]:
        for key in TIMES:
            row.pop(key, None)
    return checkpoint


def rows(folder: Path, name: str = "log.csv") -> list[dict[str, str]]:
    """Read a log of a run without its times."""
    with (folder / name).open() as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def assert_same(left: object, right: object) -> None:
    """Compare nested dictionaries and lists of tensors and numbers, bit for bit."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


@contextmanager
def at_step(step: int, act: Callable[[], object]) -> Iterator[None]:
    """Within the block, call ``act`` when a run has done ``step`` steps and begins the next one."""

    def acting(training: TrainSetup, number: int) -> TrainSetup:
        if number == step:
            act()
        return training

    with _before_steps(acting):
        yield


@contextmanager
def poisoned(steps: set[int]) -> Iterator[None]:
    """Within the block, the loss of these steps is NaN."""

    def poison(training: TrainSetup, number: int) -> TrainSetup:
        loss = training.training_pass
        spoilt = dataclasses.replace(training, training_pass=lambda *_: loss(*_) * math.nan)
        return spoilt if number in steps else training

    with _before_steps(poison):
        yield


@contextmanager
def _before_steps(prepare: Callable[[TrainSetup, int], TrainSetup]) -> Iterator[None]:
    original = loop.train_step

    def train_step(training: TrainSetup, step: Step, config: TrainConfig) -> StepResult:
        return original(prepare(training, step.number), step, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        yield


def die() -> None:
    """End a run without a checkpoint, like SIGKILL."""
    raise KeyboardInterrupt
