"""Evaluate models on images of other sizes than they were trained on, as they are and with another measure.

    python -m experiments.sizes digits --jobs 2
    python -m experiments.sizes fractals --jobs 2

Each model is trained as in ``vision.py`` at the rate that does best for a seed that is not reported
(``sizes_training.py``; the weights stay in output/sizes, and are not trained again). It is then scored on
the held-out images at 0.25 to 16 times the tokens, stretched, with patches at half the stride, and in the
middle of an empty image. A scan is scored by four methods: as it is ("plain"), with the distance of the
convolution's taps in patches of the trained grid ("taps"), with step sizes divided by the area ("steps"),
and with "both", which is what models do by default (``kernels/grid.py``). The last figures are of a few
steps of fine-tuning at 4 times the tokens, and of models that were trained at several sizes.
The same command again continues an interrupted experiment.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torchvision.transforms.functional import resize

from experiments import vision
from experiments.records import CHOICE_SEED, Record, Row, product, run_all, select
from experiments.sizes_training import (
    DEVICE,
    at_input_size,
    at_size,
    base,
    configure,
    train,
    trained,
)
from vil.kernels import operators
from vil.kernels.grid import Layout, layout_of
from vil.training.config import TrainConfig
from vil.training.data.augment import Normalize
from vil.training.data.batches import TrainData, ValData
from vil.training.data.draws import seed_everything
from vil.training.distributed import World
from vil.training.run.engine import evaluate, train_step
from vil.training.run.setup import build_model, build_training

PLAIN, TAPS, STEPS, BOTH = METHODS = ("plain", "taps", "steps", "both")
SEEDS = (0, 1, 2, 3, 4)
TUNED_SIDE = 2  # of the images of fine-tuning and of padded ones, as a multiple of the trained side


@dataclass(frozen=True)
class Experiment:
    """What the runs of a record share; the data and the training are those of ``vision.py``."""

    models: tuple[str, ...] = ("ViL", "ViM", "ViL exact", "DeiT")
    """Each at a rate of its own."""
    seeds: tuple[int, ...] = SEEDS
    """Of the runs that are reported."""
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    """Values of optim.lr_base to choose from."""
    more: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Seeds of models that are trained in another way (``sizes_training.py``), at the rate of theirs."""
    sides: tuple[float, ...] = (0.5, 0.75, 1, 1.5, 2, 3, 4)
    """Multiples of height and width to evaluate at."""
    ingredients: tuple[float, ...] = (1.5, 2, 3, 4)
    """Those at which a scan is also scored by one of two ingredients."""
    far: tuple[float, ...] = ()
    """Those that take so long that only the first two seeds are scored at them."""
    tuned: Sequence[int] = SEEDS
    """Seeds of ViL that are fine-tuned."""
    tuning: tuple[int, ...] = (0, 5, 10, 20, 40, 80)
    """Steps of fine-tuning after which it is scored."""
    tuning_batch: int = 32
    """Images of each."""

    def rates_of(self, rows: Sequence[Row], model: str) -> list[Row]:
        """Return the runs that choose a rate.

        The comparator gets one rate more where its best so far is the lowest or the highest.
        """
        rates, found = list(self.rates), select(rows, part="rate", model=model)
        if model == "DeiT" and len({row["lr"] for row in found} & set(rates)) == len(rates) > 1:
            known = [row for row in found if row["lr"] in rates]
            best = min(known, key=lambda row: row["loss"])["lr"]
            rates += {min(rates): [best / 2], max(rates): [best * 2]}.get(best, [])
        return product(part=["rate"], model=[model], lr=rates, seed=[CHOICE_SEED])

    def best_rate(self, rows: Sequence[Row], model: str) -> float:
        """Return the rate with the lowest loss in the search."""
        found = select(rows, part="rate", model=base(model))
        return min(found, key=lambda row: row["loss"])["lr"]

    def reported(self, rows: Sequence[Row], model: str, seeds: Sequence[int]) -> list[Row]:
        """Return the runs that score a model at other sizes, given those of the search."""
        lr = self.best_rate(rows, model)
        return product(part=["sizes"], model=[model], lr=[lr], seed=seeds)

    def fine_tuned(self, rows: Sequence[Row]) -> list[Row]:
        """Return the runs that fine-tune ViL."""
        axes = {"part": ["fine-tuning"], "model": ["ViL"], "lr": [self.best_rate(rows, "ViL")]}
        return product(**axes, method=[PLAIN, BOTH], seed=self.tuned)


EXPERIMENTS = {
    "digits": Experiment(more={"ViL, sizes": SEEDS, "ViL, sizes, plain": SEEDS}),
    "fractals": Experiment(
        more={"DeiT x 3": SEEDS[:3], "ViL, sizes": SEEDS[:1], "ViL, sizes, plain": SEEDS[:1]},
        ingredients=(1.5, 2),
        far=(4,),
        tuned=SEEDS[:3],
        tuning=(0, 5, 10, 20, 40),
        tuning_batch=64,
    ),
}


# ----------------------------------------------------------------------------------------- methods


@contextlib.contextmanager
def measured(method: str) -> Iterator[None]:
    """Let models that are ``grid_aware`` measure only the taps, or only the steps, in trained patches."""
    change = {
        TAPS: lambda layout: layout._replace(area=1.0),
        STEPS: lambda layout: Layout(area=layout.area),
    }.get(method)
    if change is None:
        yield
        return
    before = operators._layout_of
    operators._layout_of = functools.lru_cache(64)(lambda *args: change(layout_of(*args)))
    try:
        yield
    finally:
        operators._layout_of = before


class Arm(nn.Module):
    """A model by one of the methods."""

    def __init__(self, model: nn.Module, method: str, mask: torch.Tensor | None = None) -> None:
        """Copy the model.

        Args:
            model: Any of timm's, if the method is PLAIN.
            method: One of METHODS.
            mask: Pixels that belong to every image, bool (height, width); None for all.
        """
        super().__init__()
        self.model, self.method, self.mask = copy.deepcopy(model), method, mask
        if hasattr(model, "grid_aware"):
            self.model.grid_aware = method != PLAIN

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of images (B, C, height, width)."""
        with measured(self.method):
            if self.mask is None:
                return self.model(images)
            return self.model(images, self.mask.expand(len(images), -1, -1))


def methods_of(model: str) -> tuple[str, ...]:
    """Return the methods that a model is scored by: all, or the one that it is trained with."""
    if model.endswith(", plain") or base(model) == "DeiT":
        return (PLAIN,)
    return (BOTH,) if ", sizes" in model else METHODS


# -------------------------------------------------------------------------------------- evaluation


class PaddedData(ValData):
    """Validation images in the middle of a larger, empty one."""

    def __init__(self, config: TrainConfig, device: torch.device, size: int) -> None:
        """Open the data.

        Args:
            config: Of the images as they are.
            device: Of the model.
            size: Height and width of the padded images in pixels.
        """
        super().__init__(config, device, World())
        before = (size - config.model.img_size) // 2
        after = size - config.model.img_size - before
        self.margins = (before, after, before, after)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield images, uint8 (B, C, size, size), and their classes, (B,)."""
        for images, targets in super().batches():
            yield functional.pad(images, self.margins), targets

    def mask(self) -> torch.Tensor:
        """Return which pixels are the images', bool (size, size)."""
        side = self.config.model.img_size
        return functional.pad(torch.ones(side, side, dtype=torch.bool), self.margins)


class StretchedData(ValData):
    """Validation images of a height and a width."""

    def __init__(self, config: TrainConfig, device: torch.device, size: tuple[int, int]) -> None:
        """Open the data.

        Args:
            config: Of the images as they are.
            device: Of the model.
            size: Height and width, at most those of the images that are opened to be made smaller.
        """
        self.size = size
        super().__init__(at_size(config, max(size)), device, World())

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield images, uint8 (B, C, height, width), and their classes, (B,)."""
        for images, targets in super().batches():
            yield resize(images, list(self.size), antialias=True), targets


def score(arms: dict[str, nn.Module], data: ValData) -> dict[str, float]:
    """Return the top-1 of every model in percent, on the same batches."""
    normalize = Normalize(data.config, DEVICE)
    scores = evaluate(list(arms.values()), data, normalize, False)
    return {name: found.top1 for name, found in zip(arms, scores, strict=True)}


def resized(
    net: nn.Module, config: TrainConfig, settings: Experiment, methods: Sequence[str]
) -> Row:
    """Return top-1 by method and by the number of tokens as a multiple of the trained one."""
    found: Row = {method: {} for method in methods}
    left_out = settings.far if config.run.seed not in settings.seeds[:2] else ()
    for side in (side for side in settings.sides if side not in left_out):
        size = round(side * config.model.img_size)
        larger = at_input_size(net, size)
        used = [m for m in methods if m in (PLAIN, BOTH) or side in settings.ingredients]
        data = ValData(at_size(config, size), DEVICE, World())
        for method, top1 in score({m: Arm(larger, m) for m in used}, data).items():
            found[method][f"{side**2:g}"] = top1
    return found


def stretched(net: nn.Module, config: TrainConfig, methods: Sequence[str]) -> Row:
    """Return top-1 by method of images twice as wide, or as high, as in training."""
    side, found = config.model.img_size, {}
    for name, size in (("wide", (side, 2 * side)), ("high", (2 * side, side))):
        arms = {m: Arm(at_input_size(net, size), m) for m in methods}
        found[name] = score(arms, StretchedData(config, DEVICE, size))
    return found


def padded(net: nn.Module, config: TrainConfig, methods: Sequence[str]) -> Row:
    """Return top-1 of images in the middle of one with 4 times the patches, without and with a mask."""
    size = TUNED_SIDE * config.model.img_size
    data = PaddedData(config, DEVICE, size)
    arms = {PLAIN: Arm(at_input_size(net, size), PLAIN)} if PLAIN in methods else {}
    if BOTH in methods:
        arms["mask"] = Arm(net, BOTH, data.mask())
    return score(arms, data)


def finer(net: nn.Module, config: TrainConfig, methods: Sequence[str]) -> Row:
    """Return top-1 by method with patches at half the stride, on images as in training."""
    model = dataclasses.replace(config.model, patch_stride=config.model.patch_size // 2)
    overlapping = build_model(model)
    overlapping.load_state_dict(net.state_dict())
    arms = {m: Arm(overlapping, m) for m in methods}
    return score(arms, ValData(config, DEVICE, World()))


def evaluate_sizes(experiment: str, model: str, lr: float, seed: int) -> Row:
    """Train one model, or take its weights, and score it at other sizes.

    Args:
        experiment: Name of the experiment.
        model: Name of the model, and how it is trained.
        lr: Peak learning rate.
        seed: Of weights, order and augmentation.

    Returns:
        The figures of ``train``, and top-1 in percent of resized, stretched, padded and overlapping images.
    """
    row = train(experiment, model, lr, seed)
    net, config = trained(experiment, model, lr, seed)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, validation_batch_size=80)
    )
    methods = methods_of(model)
    outer = [m for m in methods if m in (PLAIN, BOTH)]
    found = {
        "resized": resized(net, config, EXPERIMENTS[experiment], methods),
        "stretched": stretched(net, config, outer),
        "padded": padded(net, config, outer),
    }
    return row | found | ({} if base(model) == "DeiT" else {"finer": finer(net, config, outer)})


def fine_tune(experiment: str, model: str, lr: float, method: str, seed: int) -> Row:
    """Train a trained model a few steps more, on images with 4 times the tokens.

    Args:
        experiment: Name of the experiment.
        model: Name of the model.
        lr: Rate that it was trained at; that of fine-tuning is the same for all.
        method: PLAIN or BOTH.
        seed: Of the weights that are taken, and of order and augmentation.

    Returns:
        The top-1 in percent by the number of steps.
    """
    settings = EXPERIMENTS[experiment]
    train(experiment, model, lr, seed)
    net, _ = trained(experiment, model, lr, seed)
    config = configure(experiment, model, lr, seed)
    size, steps = TUNED_SIDE * config.model.img_size, max(settings.tuning)
    batches = dataclasses.replace(
        config.data, batch_size=settings.tuning_batch, validation_batch_size=80
    )
    schedule = dataclasses.replace(config.schedule, epochs=steps)  # as many steps or more
    config = dataclasses.replace(at_size(config, size), data=batches, schedule=schedule)
    seed_everything(seed)
    training = build_training(config, DEVICE, World())
    net = at_input_size(net, size)
    net.grid_aware = method == BOTH
    training.model.load_state_dict(net.state_dict())
    training.model.grid_aware = net.grid_aware
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=5e-4, weight_decay=0.05)
    training = dataclasses.replace(training, optimizer=optimizer)
    held_out, curve = ValData(config, DEVICE, World()), {}
    data = TrainData(config, DEVICE, World()).steps(0)
    for number in range(steps + 1):
        if number in settings.tuning:
            curve[str(number)] = score({method: training.model}, held_out)[method]
            training.model.train()
        if number < steps:
            train_step(training, next(data), config)
    return {"curve": curve}


# -------------------------------------------------------------------------------------------- runs

PARTS = {"rate": train, "sizes": evaluate_sizes, "fine-tuning": fine_tune}


def run(experiment: str, part: str, **arguments: object) -> Row:
    """Return the figures of a run of one of PARTS."""
    return PARTS[part](experiment, **arguments)


def execute(name: str, output: Path, jobs: int) -> None:
    """Do what the record lacks.

    Args:
        name: Of the experiment.
        output: The record.
        jobs: Runs at a time.
    """
    settings = EXPERIMENTS[name]
    record = Record(output, dataclasses.asdict(settings))
    begin = functools.partial(run_all, record, functools.partial(run, name), jobs=jobs)
    for model in settings.models:
        begin(settings.rates_of(record.rows, model))
        begin(settings.rates_of(record.rows, model))  # one more, where the first ask for it
        begin(settings.reported(record.rows, model, settings.seeds))
    begin(settings.fine_tuned(record.rows))
    for model, seeds in settings.more.items():
        begin(settings.reported(record.rows, model, seeds))


def main() -> None:
    """Run an experiment, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, help="default: results/sizes_<experiment>.json")
    args = parser.parse_args()
    name = args.experiment
    execute(name, args.output or vision.RESULTS / f"sizes_{name}.json", args.jobs)


if __name__ == "__main__":
    main()
