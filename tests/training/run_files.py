"""Helpers for tests of whole runs: read the files of a run, and act at a step of a run."""

import csv
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vil.training import train as loop
from vil.training.distributed import World
from vil.training.engine import StepResult
from vil.training.loader import Step, TrainData, ValData, open_source
from vil.training.model import TrainSetup
from vil.training.settings import TrainConfig

TIMES = ("images_per_s", "seconds")
terminate = partial(signal.raise_signal, signal.SIGTERM)


def train_data(config: TrainConfig, world: World = World()) -> TrainData:  # noqa: B008
    return TrainData(config, open_source(config.data, config.model, training=True), world)


def val_data(config: TrainConfig, world: World = World()) -> ValData:  # noqa: B008
    return ValData(config, open_source(config.data, config.model, training=False), world)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint without the entries that must differ between equal runs."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["config"], checkpoint["asked"]  # they name the output folder
    del checkpoint["run"]["seconds"]
    for row in checkpoint["run"]["history"]:
        for key in TIMES:
            del row[key]
    return checkpoint


def rows(folder: Path) -> list[dict[str, str]]:
    """Read a log without its times."""
    with (folder / "log.csv").open() as file:
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
    original = loop.train_step

    def train_step(training: TrainSetup, images: Step, config: TrainConfig) -> StepResult:
        if images.number == step:
            act()
        return original(training, images, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        yield


def die() -> None:
    """End a run without a checkpoint, like SIGKILL."""
    raise KeyboardInterrupt
