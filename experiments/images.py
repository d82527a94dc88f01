"""Train small models on images with one recipe, and compare accuracy, loss and time.

    python -m experiments.images digits --per-class 32 --steps 300 --rates 1e-3 2e-3 4e-3 --seeds 0 1 2
    python -m experiments.images fractals --models ViL ViM DeiT "DeiT x 4" --rates 1e-3
    python -m experiments.images fashion_mnist        # after apt-get install dataset-fashion-mnist; CPU hours
    python -m experiments.images photos --per-class 100        # a folder with train/<class>/ and val/<class>/
    python -m experiments.tables output/images_digits.json --by model lr --show top1:1 loss:3 --tuned loss

All models have about as many parameters and train for as many steps on the same images in the same order. A name
can change this: "DeiT x 4" trains for 4 times the steps, "ViL, averaged" averages tokens instead of using a class
token. If you give several rates, each model takes the rate with the lowest mean
loss over seeds that are not reported.

``--start WEIGHTS`` trains each model twice, from the weights ("fine-tuned") and without them ("from scratch").
Repeat the command to resume a record.
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
from typing import Any

import torch

from benchmarks.budget import UNFINISHED, Budget, add_seconds
from experiments import fashion_mnist
from experiments.fractals import VALIDATION_IMAGES, FractalSource
from experiments.records import Record, Row, product, run_all, select
from experiments.statistics import CHOICE_SEED
from vil.training.distributed import World, connect
from vil.training.draws import seed_everything
from vil.training.engine import Score, evaluate, train_step
from vil.training.images import Source
from vil.training.loader import TrainData, ValData, open_source
from vil.training.model import Trainee, build
from vil.training.recipes import load_config
from vil.training.resolve import fill_from_data, fill_from_weights, read_pretrained
from vil.training.settings import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
AVERAGED = ", averaged"
TIMES = " x "
TUNED, SCRATCH = STARTS = ("fine-tuned", "from scratch")
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
_COLOURS = (
    *("--model.in-chans", "3", "--data.interpolation", "bilinear"),
    *("--data.mean", "0.5", "0.5", "0.5", "--data.std", "0.25", "0.25", "0.25"),
)
_PLAIN = ("--augment.degrees", "0", "--augment.translate", "0", "--augment.zoom", "1", "1")


@dataclass(frozen=True)
class Images:
    """A data set, and settings to train on it."""

    arguments: tuple[str, ...]
    """Arguments of train_imagenet.py, on top of the recipe."""
    per_class: int | None
    """Training images of each class."""
    steps: int
    """Optimiser steps."""
    recipe: str = "configs/digits.yaml"
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments of train_imagenet.py, for models with other sizes on this data set."""
    choice: tuple[str, ...] = ()
    """Arguments of train_imagenet.py, for the runs that choose learning rates."""
    choice_steps: int | None = None
    """Optimiser steps of the runs that choose learning rates; None: ``steps``."""
    choice_seeds: int = 1
    every_epoch: bool = False
    """Whether the held-out images are scored after every epoch."""
    compared: tuple[str, ...] = ("ViL", "ViL exact", "ViM", "DeiT")
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    seeds: int = 3

    @property
    def to_choose(self) -> "Images":
        """The data and settings of the runs that choose learning rates."""
        steps = self.choice_steps or self.steps
        arguments = (*self.arguments, *self.choice)
        return dataclasses.replace(
            self, arguments=arguments, choice=(), steps=steps, every_epoch=False
        )


FASHION = Images(  # 4 epochs; rates: train on 10,000 training images, test on 10,000 more
    (),
    per_class=None,
    steps=3748,
    recipe="configs/fashion_mnist.yaml",
    models={  # as many parameters as ViL's 151,754, at most 10 % more
        "ViM": ("--model.name", "vim_tiny", "--model.embed-dim", "62"),
        "DeiT": ("--model.name", "deit_tiny_patch16_224", "--model.embed-dim", "57"),
    },
    choice=("--data.path", "output/fashion_mnist_tuning"),
    choice_steps=624,
    choice_seeds=2,
    every_epoch=True,
    compared=("ViL", "ViL exact", "ViM", "ViL, averaged", "DeiT", "ResNet"),
    rates=(1e-3, 2.5e-3, 6e-3, 1.5e-2),
    seeds=5,
)

DATA = {
    "digits": Images((), per_class=32, steps=800),
    "fractals": Images(
        (
            *("--data.dataset", "folder", "--data.path", "fractals", "--model.num-classes", "16"),
            *("--model.img-size", "64", "--model.patch-size", "8", *_COLOURS, *_PLAIN),
        ),
        per_class=60,
        steps=480,
    ),
    "fashion_mnist": FASHION,
    "fractals_224": Images(  # the full-size models, with DeiT tiny; for a GPU
        (
            *("--data.path", "fractals", "--model.num-classes", "100", "--data.batch-size", "256"),
            *("--data.num-workers", "14", "--run.amp"),
        ),
        per_class=300,
        steps=3000,
        recipe="configs/fractals.yaml",
    ),
}


def data_named(name: str) -> Images:
    """Return a data set by its name, or the one in a folder."""
    if name in DATA:
        return DATA[name]
    if not (Path(name) / "train").is_dir():
        raise SystemExit(
            f"error: data must be {', '.join(DATA)} or a folder with train/, got {name!r}"
        )
    classes = sum(path.is_dir() for path in (Path(name) / "train").iterdir())
    arguments = (
        *("--data.dataset", "folder", "--data.path", name, "--model.num-classes", str(classes)),
        *("--model.img-size", "64", "--model.patch-size", "8", *_COLOURS, "--augment.degrees", "0"),
    )
    return Images(arguments, per_class=100, steps=1000)


def base(model: str) -> str:
    """Return a model's name without the changes " x N" and ", averaged"."""
    return model.partition(TIMES)[0].partition(AVERAGED)[0]


def configure(data: Images, model: str, lr: float, seed: int, start: str | None) -> TrainConfig:
    """Return a run's configuration: the recipe, with epochs and warm-up scaled to the steps."""
    recipe = ROOT / data.recipe
    arguments = ["--config", str(recipe), *data.arguments, *(MODELS | data.models)[base(model)]]
    if data.per_class:
        arguments += ["--data.images-per-class", str(data.per_class)]
    arguments += ["--optim.lr-base", str(lr), "--run.seed", str(seed)]
    if AVERAGED in model:
        arguments += ["--model.args", "class_token=False", "global_pool=avg"]
    if start:
        arguments += ["--model.pretrained", start]
    config = load_config(arguments, recipe)
    config = fill_from_weights(config, read_pretrained(config.model) if start else None)
    steps = data.steps * int(model.partition(TIMES)[2] or 1)
    length = TrainData(config, opened(config, training=True), World()).steps_per_epoch
    epochs = max(round(steps / length), 1)
    warmup = max(round(epochs * config.schedule.warmup_epochs / config.schedule.epochs), 1)
    schedule = dataclasses.replace(config.schedule, epochs=epochs, warmup_epochs=warmup)
    return dataclasses.replace(config, schedule=schedule)


def opened(config: TrainConfig, training: bool) -> Source:
    """Open one split of the images; fractals are computed when they are read."""
    model, data = config.model, config.data
    if data.path != "fractals":
        return open_source(data, model, training)
    count = data.images_per_class if training else VALIDATION_IMAGES
    return FractalSource(0, model.num_classes, count, model.img_size, training)


def train(
    trainee: Trainee, data: TrainData, held_out: ValData, config: TrainConfig, every_epoch: bool
) -> tuple[list[float], list[tuple[float, Score]]]:
    """Train, and score the held-out images at the end, or after every epoch.

    Returns:
        The loss of every step; pairs of training seconds so far (CPU time, or wall time on a GPU) and score.
    """
    clock = time.perf_counter if trainee.world.device.type == "cuda" else time.process_time
    losses, scores, seconds = [], [], 0.0
    trainee.model.train()
    start = clock()
    for step in data.steps(0):
        trainee.set_step(step.number)
        losses.append(train_step(trainee, step, config).loss)
        if len(losses) == data.num_steps or (
            every_epoch and len(losses) % data.steps_per_epoch == 0
        ):
            losses[-1].item()  # waits for the device
            seconds += clock() - start
            scores += [(seconds, *evaluate(trainee.scoring_passes[:1], held_out))]
            trainee.model.train()
            start = clock()
    return torch.stack(losses).tolist(), scores


def trained(
    data: Images, model: str, lr: float, seed: int, start: str | None = None, load: bool = True
) -> tuple[Trainee, TrainConfig, Row]:
    """Train one model; return it, its configuration and its figures.

    Args:
        data: The images.
        model: A key of ``MODELS``, with optional changes such as " x 4" or ", averaged".
        lr: Peak learning rate for a batch of optim.lr_base_size images.
        seed: Seed of weights, order and augmentation.
        start: File of weights, which decide the model's sizes.
        load: Whether to load the weights.

    Returns:
        The figures are held-out loss and top-1 in percent, mean training loss of the last tenth of the steps,
        parameters, steps, and CPU ms of a step. If scored every epoch, "curve" is top-1 over CPU seconds.
    """
    config = configure(data, model, lr, seed, start)
    with connect(config.run) as world:
        images, held_out = (opened(config, training) for training in (True, False))
        config = fill_from_data(config, images, held_out)
        train_data = TrainData(config, images, world)
        seed_everything(seed)
        weights = read_pretrained(config.model) if start and load else None
        trainee = build(config, world, train_data.steps_per_epoch, weights, images.classes)
        val_data = ValData(config, held_out, world)
        losses, scores = train(trainee, train_data, val_data, config, data.every_epoch)
    seconds, score = scores[-1]
    row = {
        "loss": score.loss,
        "top1": score.top1,
        "train_loss": statistics.fmean(losses[-max(len(losses) // 10, 1) :]),
        "parameters": sum(p.numel() for p in trainee.model.parameters()),
        "steps": len(losses),
        "ms_per_step": 1e3 * seconds / len(losses),
    }
    if data.every_epoch:
        row["curve"] = [(seconds, score.top1) for seconds, score in scores]
    return trainee, config, row


def run(data: Images, weights: str | None, *, start: str = TUNED, **chosen: Any) -> Row:
    """Train one model and return its figures.

    Args:
        data: The images.
        weights: File to start from, if any.
        start: ``TUNED`` or ``SCRATCH``.
        **chosen: Arguments model, lr and seed of ``trained``.
    """
    return trained(data, **chosen, start=weights, load=start == TUNED)[2]


def execute(
    record: Record,
    one: Callable[..., Row],
    final: Callable[..., Row],
    axes: Row,
    args: argparse.Namespace,
    choice_seeds: int = 1,
) -> int:
    """Make the runs that a record lacks, and return the exit status.

    Args:
        record: Record of the runs.
        one: Function of a run that chooses a rate, if there are several; its seed is not reported.
        final: Function of a run that is reported.
        axes: Values for the runs, except rates and seeds.
        args: Arguments of ``parse``'s parser.
        choice_seeds: Number of seeds that choose a rate, by the lowest mean loss.
    """
    budget = Budget(args.seconds)
    seeds = range(CHOICE_SEED, CHOICE_SEED + choice_seeds)
    trials = product(seed=seeds, **axes, lr=args.rates) if len(args.rates) > 1 else []
    if run_all(record, one, trials, args.jobs, budget=budget):
        return UNFINISHED
    runs = []
    for seed, own in itertools.product(args.seeds, product(**axes)):
        tried = [row for row in select(record.rows, **own) if row["seed"] >= CHOICE_SEED]
        loss = {lr: sum(row["loss"] for row in select(tried, lr=lr)) for lr in args.rates}
        runs.append({**own, "lr": min(args.rates, key=loss.get), "seed": seed})
    return UNFINISHED if run_all(record, final, runs, args.jobs, budget=budget) else 0


def parse(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that ``images`` and ``sizes`` share."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("data", help=f"{', '.join(DATA)}, or a folder of images")
    add("--models", nargs="+", help=f"of {', '.join(MODELS)}; default: as for {', '.join(DATA)}")
    add("--per-class", type=int, help="training images of each class")
    add("--steps", type=int, help="optimiser steps")
    add("--rates", nargs="+", type=float, help="of optim.lr_base")
    add("--seeds", nargs="+", type=int)
    add("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    add("--output", type=Path, help="the record; default: output/PROGRAM_DATA.json")
    add("--recipe", help="default: configs/digits.yaml")
    add_seconds(parser)
    add(
        "--with",
        dest="more",
        nargs=argparse.REMAINDER,
        default=[],
        help="options of train_imagenet.py",
    )
    return parser


def asked(parser: argparse.ArgumentParser, program: str) -> tuple[argparse.Namespace, Images]:
    """Read the command line with ``parse``'s parser; return it and its data set."""
    args = parser.parse_args()
    if args.data.startswith("fashion_mnist"):
        fashion_mnist.unpack()
    data = data_named(args.data)
    args.models = args.models or data.compared
    args.rates = args.rates or data.rates
    args.seeds = args.seeds or range(data.seeds)
    unknown = [model for model in args.models if base(model) not in MODELS]
    if unknown:
        parser.error(f"--models must be names of {', '.join(MODELS)}, got {unknown}")
    changes = {"per_class": args.per_class, "steps": args.steps, "recipe": args.recipe}
    data = dataclasses.replace(data, **{k: v for k, v in changes.items() if v is not None})
    data = dataclasses.replace(data, arguments=(*data.arguments, *args.more))
    if args.output is None:
        args.output = ROOT / "output" / f"{program}_{Path(args.data).name}.json"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    return args, data


def main() -> int:
    """Make the runs that a record lacks, and return the exit status."""
    parser = parse(__doc__.splitlines()[0])
    parser.add_argument("--start", help="weights to fine-tune: a file that eval.py reads")
    args, data = asked(parser, "images")
    record = Record(args.output, dataclasses.asdict(data) | {"start": args.start})
    axes: Row = {"model": args.models}
    axes |= {"start": STARTS} if args.start else {}
    one, final = (functools.partial(run, kind, args.start) for kind in (data.to_choose, data))
    return execute(record, one, final, axes, args, data.choice_seeds)


if __name__ == "__main__":
    sys.exit(main())
