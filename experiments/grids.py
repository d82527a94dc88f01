"""Evaluate trained models on images of other sizes: every grid from half to twice the side, and beyond.

    python -m experiments.glyphs              # the letters on photographs, once
    python -m experiments.grids --jobs 2

Small models are trained at one size (``trained_models.py``) on letters, digits and fractals, then evaluated
on the held-out images at other sizes, without further training: larger, smaller, wider and higher. A model
of this package takes them by its default. "Resized" is the same model on the same images, resized to the
trained size first. DeiT's position embedding is resampled. The last figure is of patches at half the stride,
on images as in training. The same command again continues an interrupted experiment.
"""

import argparse
import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from experiments import vision
from experiments.records import Record, Row, product, run_all
from experiments.trained_models import DEVICE, at_size, base, train, trained
from vil.training.config import TrainConfig
from vil.training.data.augment import Normalize
from vil.training.data.batches import ValData
from vil.training.distributed import World
from vil.training.run.setup import build_model

RESULT = vision.RESULTS / "grids.json"
FAR = (2.5, 3, 4)
"""Multiples of the side beyond twice it."""


@dataclass(frozen=True)
class Experiment:
    """The runs."""

    rates: dict[str, dict[str, float]]
    """optim.lr_base of each model by data set, chosen by a seed that is not reported."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    far: tuple[float, ...] = FAR

    def runs(self) -> list[Row]:
        """Return all runs, seed by seed, so that an unfinished record has every model."""
        return [
            run
            for seed in self.seeds
            for dataset, rates in self.rates.items()
            for model, lr in rates.items()
            for run in product(dataset=[dataset], model=[model], lr=[lr], seed=[seed])
        ]


DIGITS = {"ViL": 1e-3, "ViL exact": 4e-3, "ViM": 4e-3, "ViL, averaged": 1e-3, "DeiT x 4": 1e-3}
EXPERIMENT = Experiment(
    rates={
        "glyphs": dict.fromkeys(("ViL", "ViL exact", "ViM", "ViL, averaged"), 2e-3)
        | {"DeiT x 4": 1e-3},
        "digits": DIGITS,
        "fractals": DIGITS | {"ViL": 2e-3, "ViL, averaged": 2e-3},
    }
)


def grids_of(trained: int, far: tuple[float, ...] = FAR) -> list[tuple[int, int]]:
    """Return the grids (rows, columns) to evaluate at: square, wide and high ones."""
    sides = range(-(-trained // 2), 2 * trained + 1)
    squares = [(side, side) for side in (*sides, *(round(times * trained) for times in far))]
    others = [(trained, side) for side in sides if side != trained]
    return [*squares, *others, *(grid[::-1] for grid in others)]


def images_at(
    config: TrainConfig, size: tuple[int, int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of held-out images of (height, width) pixels, normalised, and their classes."""
    normalize = Normalize(config, DEVICE)
    batches = ValData(at_size(config, max(size)), DEVICE, World()).batches()
    return [(_resize(normalize(images), size), targets) for images, targets in batches]


def _resize(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if tuple(images.shape[-2:]) == tuple(size):
        return images
    return F.interpolate(images, size, mode="bicubic", antialias=True)


@torch.inference_mode()
def top1(net: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the top-1 of a model in percent."""
    right = [net(images).argmax(1) == targets for images, targets in batches]
    return 100 * torch.cat(right).double().mean().item()


def evaluate_grids(net: nn.Module, config: TrainConfig, far: tuple[float, ...]) -> Row:
    """Return top-1 by grid, "5x7" say: by default, and of images resized to the trained size."""
    found: Row = {}
    patch, side = config.model.patch_size, config.model.img_size
    for rows, columns in grids_of(side // patch, far):
        size = (rows * patch, columns * patch)
        batches = images_at(config, size)
        other = copy.deepcopy(net)
        if not hasattr(net, "trained_grid"):  # a model of timm takes one size at a time
            other.set_input_size(img_size=size)
        resized = [(_resize(images, (side, side)), targets) for images, targets in batches]
        found[f"{rows}x{columns}"] = [top1(other, batches), top1(net, resized)]
    return found


def at_half_stride(net: nn.Module, config: TrainConfig) -> float:
    """Return the top-1 of images as in training, in four times as many patches."""
    model = dataclasses.replace(config.model, patch_stride=config.model.patch_size // 2)
    finer = build_model(model).eval()
    finer.load_state_dict(net.state_dict())
    side = config.model.img_size
    return top1(finer, images_at(config, (side, side)))


def run(dataset: str, model: str, lr: float, seed: int, far: tuple[float, ...] = FAR) -> Row:
    """Train a model, unless its weights are there, and evaluate it at all grids.

    Args:
        dataset: Name of the experiment in ``vision.py``.
        model: Name of the model, as of ``trained_models.py``.
        lr: Peak learning rate.
        seed: Of weights, order and augmentation.
        far: Multiples of the side beyond twice it.

    Returns:
        The figures of ``train``, top-1 in percent by grid, and that of patches at half the stride.
    """
    row = train(dataset, model, lr, seed)
    net, config = trained(dataset, model, lr, seed)
    data = dataclasses.replace(config.data, validation_batch_size=80)
    config = dataclasses.replace(config, data=data)
    finer = {} if base(model) == "DeiT" else {"finer": at_half_stride(net, config)}
    return row | {"grids": evaluate_grids(net, config, far)} | finer


def main() -> None:
    """Run the experiment, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    record = Record(args.output, dataclasses.asdict(EXPERIMENT), in_pieces=True)
    run_all(record, run, EXPERIMENT.runs(), args.jobs)


if __name__ == "__main__":
    main()
