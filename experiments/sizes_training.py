"""The models that ``sizes.py`` asks about: each trained once, kept in output/sizes with its figures.

A name says how: "DeiT x 3" is DeiT with 3 times the steps; "ViL, sizes" is ViL on images of three sizes
in turn, "ViL, sizes, plain" the same without ``grid_aware``.
"""

import copy
import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.transforms.functional import resize

from benchmarks.provenance import environment
from experiments import vision
from experiments.records import Row
from vil.training.config import TrainConfig
from vil.training.data.batches import Step, TrainData, ValData
from vil.training.data.draws import seed_everything
from vil.training.distributed import World
from vil.training.run.engine import evaluate
from vil.training.run.setup import build_model, build_training

WEIGHTS = vision.ROOT / "output" / "sizes"
SIDES = (1.0, 1.5, 2.0)  # of "sizes", by step in turn, as multiples of the trained side
DEVICE = torch.device("cpu")


def base(model: str) -> str:
    """Return the name of the model that is trained in another way."""
    return model.partition(" x ")[0].partition(", ")[0]


def configure(experiment: str, model: str, lr: float, seed: int) -> TrainConfig:
    """Return a run's configuration: that of ``vision.py`` with the largest training set."""
    settings = vision.EXPERIMENTS[experiment]
    times = int(model.partition(" x ")[2] or 1)
    settings = dataclasses.replace(settings, steps=settings.steps * times)
    return vision.configure(settings, base(model), max(settings.images_per_class), lr, seed)


def at_size(config: TrainConfig, size: int) -> TrainConfig:
    """Return the configuration with images of another height and width."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, img_size=size))


class RandomSizes(TrainData):
    """Training images of the sides ``SIDES`` in turn, made small from those of the largest."""

    def __init__(self, config: TrainConfig, device: torch.device, world: World) -> None:
        """Open the data; arguments as of TrainData, the configuration with the trained size."""
        self.sizes = [round(side * config.model.img_size) for side in SIDES]
        super().__init__(at_size(config, max(self.sizes)), device, world)

    def steps(self, first: int) -> Iterator[Step]:
        """Yield all steps from the given one to the end of the run."""
        for step in super().steps(first):
            size = self.sizes[step.number % len(self.sizes)]
            parts = [
                (resize(images, [size, size], antialias=True), targets)
                for images, targets in step.micro_batches
            ]
            yield step._replace(micro_batches=parts)


def path_of(experiment: str, model: str, lr: float, seed: int) -> Path:
    """Return the file of a model's weights."""
    return WEIGHTS / f"{experiment}_{model.replace(' ', '_')}_{lr:g}_{seed}.safetensors"


def train(experiment: str, model: str, lr: float, seed: int) -> Row:
    """Train one model at the trained size, unless its weights are there, and return its figures.

    Args:
        experiment: Name of the experiment in ``vision.py``.
        model: Name of the model, and how it is trained.
        lr: Peak learning rate of a batch of optim.lr_base_size images.
        seed: Of weights, order and augmentation.

    Returns:
        Loss and top-1 in percent of the held-out images, mean loss of the last tenth of the steps,
        steps, and the commit that it was trained at.
    """
    path = path_of(experiment, model, lr, seed)
    if path.exists():
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["row"])
    config, world = configure(experiment, model, lr, seed), World()
    seed_everything(seed)
    training = build_training(config, DEVICE, world)
    if model.endswith(", plain"):
        training.model.grid_aware = False
    data = (RandomSizes if ", sizes" in model else TrainData)(config, DEVICE, world)
    losses, _ = vision.train(training, data, config)
    held_out = ValData(config, DEVICE, world)
    [score] = evaluate([training.model], held_out, training.augment.normalize, config.run.amp)
    row = {
        "model": model,
        "lr": lr,
        "seed": seed,
        "loss": score.loss,
        "top1": score.top1,
        "train_loss": statistics.fmean(losses[-max(len(losses) // 10, 1) :]),
        "steps": len(losses),
        "commit": environment()["commit"],
    }
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a file of this name is whole
    save_file(training.model.state_dict(), part, {"row": json.dumps(row)})
    part.rename(path)
    return row


def trained(experiment: str, model: str, lr: float, seed: int) -> tuple[nn.Module, TrainConfig]:
    """Return a model as its training ended, and its configuration; arguments as of ``train``."""
    config = configure(experiment, model, lr, seed)
    net = build_model(config.model)
    net.load_state_dict(load_file(path_of(experiment, model, lr, seed)))
    return net.eval(), config


def at_input_size(model: nn.Module, size: int | tuple[int, int]) -> nn.Module:
    """Return a copy for images of another size, its position embedding resampled as timm does it."""
    model = copy.deepcopy(model)
    model.set_input_size(img_size=size)
    return model
