"""Train small models on images with one recipe, and compare accuracy, loss and time.

    python -m lab.experiments.images digits --seeds 0 1 2
    python -m lab.experiments.images fractals --models ViL ViM DeiT "DeiT x 4" --rates 1e-3
    python -m lab.experiments.images fashion_mnist        # after apt-get install dataset-fashion-mnist; CPU hours
    python -m lab.experiments.tables output/images_digits.json --by model lr --show top1:1 loss:3 --tuned loss

All models have about as many parameters and train for as many steps on the same images in the same order. A name
can change this: "DeiT x 4" trains for 4 times the steps, "ViL, averaged" averages tokens instead of using a class
token. If you give several rates, each model takes the rate with the lowest mean loss over seeds that are not
reported. Repeat the command to resume a record.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from examples import fashion_mnist, fractals
from lab.benchmarks.budget import UNFINISHED, Budget, add_seconds
from lab.experiments.records import Record, Row, product, run_all, select
from lab.experiments.statistics import CHOICE_SEED
from vil.training.distributed import connect
from vil.training.engine import Score, evaluate, train_step
from vil.training.loader import TrainData, ValData
from vil.training.recipes import load_config
from vil.training.resolve import complete, read_source
from vil.training.sampler import seed_everything
from vil.training.settings import TrainConfig
from vil.training.setup import TrainSetup, build
from vil.training.splits import open_splits

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path("output")
AVERAGED = ", averaged"
TIMES = " x "
MODELS = {
    "ViL": ("--model.name", "vil_tiny"),
    "ViL exact": ("--model.name", "vil_tiny_exact"),
    "ViM": ("--model.name", "vim_tiny"),
    "DeiT tiny": ("--model.name", "deit_tiny_patch16_224"),
    # As many parameters as ViL has with 96 channels.
    "DeiT": ("--model.name", "deit_tiny_patch16_224", "--model.embed-dim", "78"),
    "ResNet": (  # timm's ResNet-18 with one block in a stage and few channels
        *("--model.name", "resnet18", "--model.patch-size", "None", "--model.embed-dim", "None"),
        *("--model.depth", "None", "--model.args", "layers=[1,1,1,1]", "channels=[11,22,44,88]"),
    ),
}


@dataclass(frozen=True)
class Images:
    """A data set, and settings to train on it."""

    arguments: tuple[str, ...]
    """Arguments of train_imagenet.py, on top of the recipe."""
    steps: int
    """Optimiser steps."""
    recipe: str = "configs/digits.yaml"
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments of train_imagenet.py, for models with other sizes on this data set."""
    choice: "Images | None" = None
    """Data and settings of the runs that choose learning rates; None: these."""
    choice_seeds: int = 1
    every_epoch: bool = False
    """Whether the held-out images are scored after every epoch."""
    compared: tuple[str, ...] = ("ViL", "ViL exact", "ViM", "DeiT")
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    seeds: int = 3


_FASHION = Images(  # 4 epochs
    (),
    steps=3748,
    recipe="configs/fashion_mnist.yaml",
    models={  # as many parameters as ViL's 151,754, at most 10 % more
        "ViM": ("--model.name", "vim_tiny", "--model.embed-dim", "62"),
        "DeiT": ("--model.name", "deit_tiny_patch16_224", "--model.embed-dim", "57"),
    },
    choice_seeds=2,
    compared=("ViL", "ViL exact", "ViM", "ViL, averaged", "DeiT", "ResNet"),
    rates=(1e-3, 2.5e-3, 6e-3, 1.5e-2),
    seeds=5,
)
_TUNING = ("--data.path", str(OUTPUT / "fashion_mnist_tuning"))  # of the training images
DATA = {
    "digits": Images(("--data.images-per-class", "32"), steps=800),
    "fractals": Images(
        (
            *("--data.dataset", "folder", "--data.path", str(OUTPUT / "fractals_64px")),
            *("--model.num-classes", "16", "--model.in-chans", "3"),
            *("--model.img-size", "64", "--model.patch-size", "8"),
            *("--data.mean", "0.5", "0.5", "0.5", "--data.std", "0.25", "0.25", "0.25"),
            *("--data.interpolation", "bilinear", "--augment.degrees", "0"),
            *("--augment.translate", "0", "--augment.zoom", "1", "1"),
        ),
        steps=480,
    ),
    "fashion_mnist": dataclasses.replace(
        _FASHION,
        choice=dataclasses.replace(_FASHION, arguments=_TUNING, steps=624),
        every_epoch=True,
    ),
    "fractals_224": Images(  # the full-size models, with DeiT tiny; for a GPU
        (
            *("--data.path", str(OUTPUT / "fractals_224px"), "--model.num-classes", "100"),
            *("--data.batch-size", "256", "--data.num-workers", "14", "--run.amp"),
        ),
        steps=3000,
        recipe="configs/fractals.yaml",
    ),
}
WRITE: dict[str, Callable[[], None]] = {
    "fractals": lambda: fractals.write(OUTPUT / "fractals_64px", 16, {"train": 60, "val": 50}, size=64),
    "fractals_224": lambda: fractals.write(
        OUTPUT / "fractals_224px", 100, {"train": 300, "val": 50}, size=224, jobs=None
    ),
    "fashion_mnist": fashion_mnist.unpack,
}
"""Functions that write the images of a data set, unless they exist."""


def base(model: str) -> str:
    """Return a model's name without the changes " x N" and ", averaged"."""
    return model.partition(TIMES)[0].partition(AVERAGED)[0]


def configure(data: Images, model: str, lr: float, seed: int) -> TrainConfig:
    """Return the settings of a run's command line."""
    recipe = ROOT / data.recipe
    arguments = ["--config", str(recipe), *data.arguments, *(MODELS | data.models)[base(model)]]
    arguments += ["--optim.lr-base", str(lr), "--run.seed", str(seed)]
    if AVERAGED in model:
        arguments += ["--model.args", "class_token=False", "global_pool=avg"]
    return load_config(arguments, recipe)


def scaled(config: TrainConfig, steps: int, steps_per_epoch: int) -> TrainConfig:
    """Return a configuration with epochs and warm-up scaled to a number of steps."""
    epochs = max(round(steps / steps_per_epoch), 1)
    warmup = max(round(epochs * config.schedule.warmup_epochs / config.schedule.epochs), 1)
    schedule = dataclasses.replace(config.schedule, epochs=epochs, warmup_epochs=warmup)
    return dataclasses.replace(config, schedule=schedule)


def train(
    setup: TrainSetup, data: TrainData, held_out: ValData, config: TrainConfig, every_epoch: bool
) -> tuple[list[float], list[tuple[float, Score]]]:
    """Train, and score the held-out images at the end, or after every epoch.

    Returns:
        The loss of every step; pairs of training seconds so far (CPU time, or wall time on a GPU) and score.
    """
    clock = time.perf_counter if setup.world.device.type == "cuda" else time.process_time
    losses, scores, seconds = [], [], 0.0
    setup.model.train()
    start = clock()
    for step in data.steps(0):
        setup.set_step(step.number)
        losses.append(train_step(setup, step, config).loss)
        if len(losses) == data.num_steps or (every_epoch and len(losses) % data.steps_per_epoch == 0):
            losses[-1].item()  # waits for the device
            seconds += clock() - start
            scores += [(seconds, *evaluate(setup.scoring_passes[:1], held_out))]
            setup.model.train()
            start = clock()
    return torch.stack(losses).tolist(), scores


def trained(data: Images, model: str, lr: float, seed: int) -> tuple[TrainSetup, TrainConfig, Row]:
    """Train one model; return it, its configuration and its figures.

    Args:
        data: The images.
        model: A key of ``MODELS``, with optional changes such as " x 4" or ", averaged".
        lr: Peak learning rate for a batch of optim.lr_base_size images.
        seed: Seed of weights, order and augmentation.

    Returns:
        The figures are held-out loss and top-1 in percent, mean training loss of the last tenth of the steps,
        parameters, steps, and CPU ms of a step. If scored every epoch, "curve" is top-1 over CPU seconds.
    """
    config = configure(data, model, lr, seed)
    weights, pretrained = None, config.model.pretrained
    if pretrained is not None:
        weights = read_source(pretrained, config.model.pretrained_ema)
    with connect(config.run) as world:
        images, held_out = open_splits(config.data, config.model.num_classes, world)
        config = complete(config, weights, images, held_out, world.size)
        length = TrainData(config, images, world).steps_per_epoch
        config = scaled(config, data.steps * int(model.partition(TIMES)[2] or 1), length)
        train_data = TrainData(config, images, world)
        seed_everything(seed)
        setup = build(config, world, train_data.steps_per_epoch, weights, images.classes)
        val_data = ValData(held_out, config.images, config.data, world)
        losses, scores = train(setup, train_data, val_data, config, data.every_epoch)
    seconds, score = scores[-1]
    row = {
        "loss": score.loss,
        "top1": score.top1,
        "train_loss": statistics.fmean(losses[-max(len(losses) // 10, 1) :]),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "steps": len(losses),
        "ms_per_step": 1e3 * seconds / len(losses),
    }
    if data.every_epoch:
        row["curve"] = [(seconds, score.top1) for seconds, score in scores]
    return setup, config, row


def run(data: Images, model: str, lr: float, seed: int) -> Row:
    """Train one model and return its figures; same arguments as ``trained``."""
    return trained(data, model, lr, seed)[2]


def compare(program: str, description: str, final: Callable[..., Row]) -> int:
    """Make the runs that a record lacks, as the command line says, and return the exit status.

    Args:
        program: First part of the record's file name.
        description: Description of the program.
        final: Function of a run that is reported, with the arguments of ``run``.
    """
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("data", choices=DATA)
    add("--models", nargs="+", help=f"of {', '.join(MODELS)}; default: as in the records")
    add("--rates", nargs="+", type=float, help="of optim.lr_base")
    add("--seeds", nargs="+", type=int)
    add("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    add("--output", type=Path, help="the record; default: output/PROGRAM_DATA.json")
    add_seconds(parser)
    args = parser.parse_args()
    data = DATA[args.data]
    models, rates = args.models or data.compared, args.rates or data.rates
    unknown = [model for model in models if base(model) not in MODELS]
    if unknown:
        parser.error(f"--models must be names of {', '.join(MODELS)}, got {unknown}")
    output = args.output or OUTPUT / f"{program}_{args.data}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    WRITE.get(args.data, lambda: None)()
    record, budget = Record(output, dataclasses.asdict(data)), Budget(args.seconds)
    seeds = range(CHOICE_SEED, CHOICE_SEED + data.choice_seeds)
    trials = product(seed=seeds, model=models, lr=rates) if len(rates) > 1 else []
    one = functools.partial(run, data.choice or data)
    if run_all(record, one, trials, args.jobs, budget):
        return UNFINISHED
    runs = []
    for seed, model in itertools.product(args.seeds or range(data.seeds), models):
        tried = [row for row in select(record.rows, model=model) if row["seed"] >= CHOICE_SEED]
        loss = {lr: sum(row["loss"] for row in select(tried, lr=lr)) for lr in rates}
        runs.append({"model": model, "lr": min(rates, key=loss.get), "seed": seed})
    final = functools.partial(final, data)
    return UNFINISHED if run_all(record, final, runs, args.jobs, budget) else 0


if __name__ == "__main__":
    sys.exit(compare("images", __doc__.splitlines()[0], run))
