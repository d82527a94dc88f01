"""Train the small models that other experiments ask about, each once, and keep their weights.

A name says how a model is trained: "DeiT x 3" for 3 times the steps; "ViL, averaged" without a class token,
the tokens averaged; "ViL, sizes" on images of three sizes, a random one for each step. Weights and figures
stay in output/trained_models.
"""

import dataclasses
import json
import statistics
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.provenance import environment
from experiments import vision
from experiments.records import Row
from vil.training.config import TrainConfig
from vil.training.data.batches import TrainData, ValData
from vil.training.data.draws import seed_everything
from vil.training.distributed import World
from vil.training.run.engine import evaluate
from vil.training.run.setup import build_model, build_training

WEIGHTS = vision.ROOT / "output" / "trained_models"
SIDES = (1.0, 1.5, 2.0)  # of "sizes", one drawn for each step, as multiples of the trained side
DEVICE = torch.device("cpu")


def base(model: str) -> str:
    """Return the name of the model that is trained in another way."""
    return model.partition(" x ")[0].partition(", ")[0]


def configure(experiment: str, model: str, lr: float, seed: int) -> TrainConfig:
    """Return a run's configuration: that of ``vision.py`` with the largest training set."""
    settings = vision.EXPERIMENTS[experiment]
    times = int(model.partition(" x ")[2] or 1)
    settings = dataclasses.replace(settings, steps=settings.steps * times)
    config = vision.configure(settings, base(model), max(settings.images_per_class), lr, seed)
    if ", averaged" in model:
        args = (*config.model.args, "class_token=False", "global_pool=avg")
        return dataclasses.replace(config, model=dataclasses.replace(config.model, args=args))
    if ", sizes" in model:
        sizes = tuple(round(side * config.model.img_size) for side in SIDES)
        return dataclasses.replace(config, data=dataclasses.replace(config.data, img_sizes=sizes))
    return config


def at_size(config: TrainConfig, size: int) -> TrainConfig:
    """Return the configuration with images of another height and width."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, img_size=size))


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
    losses, _ = vision.train(training, TrainData(config, DEVICE, world), config)
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
