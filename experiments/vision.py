"""Train ViL, exact ViL, ViM and DeiT under one recipe; compare accuracy, loss and time.

    python -m experiments.vision digits --jobs 2
    python -m experiments.vision fractals --jobs 2
    python -m experiments.vision glyphs --jobs 2          # after python -m experiments.glyphs
    python -m experiments.vision ablations --jobs 2
    python -m experiments.vision fractals_large          # for a GPU

Every model of an experiment has about as many parameters and makes as many steps on the same images
in the same order. Where an experiment has several learning rates, each model takes the one that does
best with a seed that is not reported. Each is then evaluated as it ended; at other sizes by ``grids.py``.
The same command again continues an interrupted experiment.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments import variants
from experiments.records import CHOICE_SEED, Record, Row, product, run_all, select
from vil.training.config import TrainConfig
from vil.training.data.batches import TrainData, ValData
from vil.training.data.draws import seed_everything
from vil.training.distributed import World
from vil.training.recipes import load_config
from vil.training.run.engine import evaluate, train_step
from vil.training.run.resolve import fill_from_weights
from vil.training.run.setup import Training, build_training, resolve_device

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"

MODELS = {
    "ViL": ["--model.name", "vil_tiny"],
    "ViL exact": ["--model.name", "vil_tiny_exact"],
    "ViM": ["--model.name", "vim_tiny"],
    # As many parameters as ViL has with 96 channels.
    "DeiT": ["--model.name", "deit_tiny_patch16_224", "--model.embed-dim", "78"],
}
LARGE_MODELS = {
    "ViL": ["--model.name", "vil_tiny"],
    "ViL exact": ["--model.name", "vil_tiny_exact"],
    "ViM": ["--model.name", "vim_tiny"],
    "DeiT": ["--model.name", "deit_tiny_patch16_224"],
}


@dataclass(frozen=True)
class Experiment:
    """What the runs of a record share."""

    steps: int
    """Optimiser steps of every run."""
    models: dict[str, list[str]]
    """Arguments of train_imagenet.py by name of the model."""
    images_per_class: tuple[int, ...]
    """Sizes of the training set."""
    seeds: tuple[int, ...]
    """Of the runs that are reported."""
    rates: tuple[float, ...]
    """Values of optim.lr_base to choose from."""
    arguments: tuple[str, ...] = ()
    """Of train_imagenet.py, on top of the recipe."""
    recipe: str = "configs/digits.yaml"

    def search(self) -> list[Row]:
        """Return the runs that choose learning rates, with the training set in the middle."""
        if len(self.rates) == 1:
            return []
        size = self.images_per_class[len(self.images_per_class) // 2]
        axes = {"model": list(self.models), "images_per_class": [size], "lr": self.rates}
        return product(**axes, seed=[CHOICE_SEED])

    def reported(self, rows: list[Row]) -> list[Row]:
        """Return the runs to report, given those of the search."""
        runs = product(
            model=list(self.models), images_per_class=self.images_per_class, seed=self.seeds
        )
        return [{**run, "lr": self.best_rate(rows, run["model"])} for run in runs]

    def best_rate(self, rows: list[Row], model: str) -> float:
        """Return the rate with the lowest loss in the search."""
        if len(self.rates) == 1:
            return self.rates[0]
        return min(select(rows, model=model, seed=CHOICE_SEED), key=lambda row: row["loss"])["lr"]


FRACTALS = (
    *("--data.dataset", "fractals", "--data.interpolation", "bilinear", "--model.in-chans", "3"),
    *("--model.img-size", "64", "--model.patch-size", "8", "--model.num-classes", "16"),
    *("--data.mean", "0.5", "0.5", "0.5", "--data.std", "0.25", "0.25", "0.25"),
    *("--augment.degrees", "0", "--augment.translate", "0", "--augment.zoom", "1", "1"),
)
GLYPHS = (
    *("--data.dataset", "folder", "--data.path", "output/glyphs/images", "--data.batch-size", "16"),
    *("--optim.lr-base-size", "16", "--data.interpolation", "bilinear", "--model.in-chans", "3"),
    *("--model.img-size", "48", "--model.patch-size", "8", "--model.num-classes", "16"),
    *("--data.mean", "0.5", "0.5", "0.5", "--data.std", "0.25", "0.25", "0.25"),
    *("--augment.degrees", "0", "--augment.translate", "0.05", "--augment.zoom", "0.9", "1.1"),
)
EXPERIMENTS = {
    "digits": Experiment(
        steps=800,
        models=MODELS,
        images_per_class=(8, 32, 128),
        seeds=(0, 1, 2, 3),
        rates=(5e-4, 1e-3, 2e-3, 4e-3),
    ),
    "digits_lower_rate": Experiment(
        steps=800,
        models={name: MODELS[name] for name in ("ViL", "DeiT")},
        images_per_class=(128,),
        seeds=(0, 1, 2, 3),
        rates=(1e-3,),
    ),
    "fractals": Experiment(
        steps=480,
        models=MODELS,
        images_per_class=(60,),
        seeds=(0, 1, 2),
        rates=(1e-3,),
        arguments=FRACTALS,
    ),
    "glyphs": Experiment(
        steps=1536,
        models=MODELS,
        images_per_class=(256,),
        seeds=(0, 1, 2, 3, 4),
        rates=(1e-3, 2e-3, 4e-3),
        arguments=GLYPHS,
    ),
    "ablations": Experiment(
        steps=300,
        models={name: ["--model.name", name] for name in variants.MODELS},
        images_per_class=(32,),
        seeds=(0, 1, 2),
        rates=(2e-3,),
    ),
    "changes": Experiment(
        steps=300,
        models={name: ["--model.name", name] for name in (variants.UNCHANGED, *variants.CHANGED)},
        images_per_class=(32,),
        seeds=(0, 1, 2, 3, 4, 5, 6, 7),
        rates=(1e-3, 2e-3, 4e-3),
    ),
    "fractals_large": Experiment(
        steps=3000,
        models=LARGE_MODELS,
        images_per_class=(300,),
        seeds=(0, 1, 2),
        rates=(2e-3,),
        recipe="configs/fractals.yaml",
        arguments=(
            *("--model.num-classes", "100", "--data.batch-size", "256"),
            *("--data.num-workers", "14", "--run.amp"),
        ),
    ),
}


def configure(
    experiment: Experiment, model: str, images_per_class: int, lr: float, seed: int
) -> TrainConfig:
    """Return a run's configuration: the recipe, its epochs and warm-up stretched to the steps."""
    recipe = ROOT / experiment.recipe
    arguments = ["--config", str(recipe), *experiment.arguments, *experiment.models[model]]
    arguments += ["--data.images-per-class", str(images_per_class)]
    arguments += ["--optim.lr-base", str(lr), "--run.seed", str(seed)]
    config = fill_from_weights(load_config(arguments, recipe), None)
    length = TrainData(config, torch.device("cpu"), World()).steps_per_epoch
    epochs = max(round(experiment.steps / length), 1)
    warmup = max(round(epochs * config.schedule.warmup_epochs / config.schedule.epochs), 1)
    schedule = dataclasses.replace(config.schedule, epochs=epochs, warmup_epochs=warmup)
    return dataclasses.replace(config, schedule=schedule)


def run(experiment: str, model: str, images_per_class: int, lr: float, seed: int) -> Row:
    """Train one model of a named experiment and return its figures, as ``train_and_score``."""
    return train_and_score(EXPERIMENTS[experiment], model, images_per_class, lr, seed)


def train_and_score(
    settings: Experiment, model: str, images_per_class: int, lr: float, seed: int
) -> Row:
    """Train one model and return its figures.

    Args:
        settings: The experiment.
        model: Name of the model in the experiment.
        images_per_class: Training images of each class.
        lr: Peak learning rate of a batch of optim.lr_base_size images.
        seed: Of weights, order and augmentation.

    Returns:
        Validation loss and top-1 in percent, parameters, steps, CPU ms per training step, and mean
        loss of the last tenth of the steps.
    """
    config = configure(settings, model, images_per_class, lr, seed)
    world = World()
    device = resolve_device(config.run, world)
    seed_everything(seed)
    training = build_training(config, device, world)
    data = TrainData(config, device, world)
    losses, seconds = train(training, data, config)
    held_out = ValData(config, device, world)
    [score] = evaluate([training.model], held_out, training.augment.normalize, config.run.amp)
    return {
        "loss": score.loss,
        "top1": score.top1,
        "train_loss": statistics.fmean(losses[-max(len(losses) // 10, 1) :]),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "steps": len(losses),
        "ms_per_step": 1e3 * seconds / len(losses),
    }


def train(training: Training, data: TrainData, config: TrainConfig) -> tuple[list[float], float]:
    """Train to the end; return the loss of every step and the CPU or GPU seconds that they took."""
    clock = time.perf_counter if training.device.type == "cuda" else time.process_time
    losses = []
    start = clock()
    for step in data.steps(0):
        if step.number % data.steps_per_epoch == 0:
            training.set_epoch(step.number // data.steps_per_epoch)
            training.model.train()
        losses.append(train_step(training, step, config).loss)
    losses = torch.stack(losses).tolist()  # waits for the device
    return losses, clock() - start


def main() -> None:
    """Run an experiment, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on CPUs")
    parser.add_argument("--output", type=Path, help="default: results/vision_<experiment>.json")
    args = parser.parse_args()
    name = args.experiment
    experiment = EXPERIMENTS[name]
    settings = dataclasses.asdict(experiment)
    record = Record(args.output or RESULTS / f"vision_{name}.json", settings)
    one = functools.partial(run, name)
    run_all(record, one, experiment.search(), args.jobs)
    run_all(record, one, experiment.reported(record.rows), args.jobs)


if __name__ == "__main__":
    main()
