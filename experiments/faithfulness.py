"""Ask which maps are faithful to the model: by deleting and inserting the patches that they say matter most.

    python -m experiments.faithfulness digits
    python -m experiments.faithfulness fractals

The models are those of ``trained_models.py``, ViL at a rate chosen by a seed that is not reported, trained where
their weights are not there. Of held-out images patches are replaced by the mean of the data, or by black, in the order of
a map, those of the highest value first (deletion), or put into an image that is nothing else (insertion). The figure is the
area under the curve of the mean probability of the class that the model names for the whole image: a
faithful map has a low one in deletion and a high one in insertion. Maps that need no model, brightness and a random
order, tell what that is worth. Grad-CAM is of pytorch-grad-cam and left out where that is not installed.
The same command again continues an interrupted experiment.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.records import Record, Row, product, run_all
from experiments.trained_models import DEVICE, train, trained
from experiments.vision import RESULTS
from vil.maps import decay, evidence, pooled_reads, rollout, step_size, token_matrix
from vil.training.config import TrainConfig
from vil.training.data.augment import Normalize
from vil.training.data.batches import ValData
from vil.training.distributed import World

BRIGHTNESS, RANDOM, GRAD_CAM = "brightness", "random", "Grad-CAM"
MEAN, BLACK = FILLS = ("mean", "black")  # what patches are replaced by


@dataclass(frozen=True)
class Experiment:
    """What the runs of a record share; the data and the training are those of ``vision.py``."""

    lr: float
    """Chosen by a seed that is not reported."""
    images: int
    """Held-out images, evenly spaced among all."""
    patches: int
    """Replaced from point to point of a curve."""
    model: str = "ViL"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def reported(self) -> list[Row]:
        """Return the runs."""
        return product(model=[self.model], lr=[self.lr], fill=FILLS, seed=self.seeds)


EXPERIMENTS = {
    "digits": Experiment(lr=1e-3, images=120, patches=1),
    "fractals": Experiment(lr=8e-3, images=32, patches=8),
}


def maps_of(
    model: nn.Module, images: Tensor, target: Tensor, empty: Tensor, seed: int
) -> dict[str, Tensor]:
    """Return every map of images, (B, H, W) each, the more important patches higher.

    Args:
        model: Of this package.
        images: (B, C, height, width).
        target: Classes, (B,).
        empty: What patches are replaced by, (1, C, 1, 1).
        seed: Of the random order.
    """
    patch = model.patch_embed.patch_size
    brightness = F.avg_pool2d(images.mean(1, keepdim=True), patch)[:, 0]
    generator = torch.Generator().manual_seed(seed)
    found = {
        "evidence": evidence(model, images, target, patch),
        "evidence, steps=0": evidence(model, images, target, patch, steps=0),
        "rollout": pooled_reads(model, images, rollout(model, images)),
        "token_matrix": pooled_reads(model, images, token_matrix(model, images)),
        "step_size": step_size(model, images),
        "decay": decay(model, images),
        BRIGHTNESS: brightness,
        RANDOM: torch.rand(brightness.shape, generator=generator),
    }
    if empty.any():
        found["evidence, baseline"] = evidence(model, images, target, patch, baseline=empty)
    if importlib.util.find_spec("pytorch_grad_cam") is not None:
        found[GRAD_CAM] = F.avg_pool2d(grad_cam(model, images, target)[:, None], patch)[:, 0]
    return found


def grad_cam(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    """Return Grad-CAM as docs/features.md computes it, (B, height, width)."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(number) for number in target.tolist()]
    layers, reshape = [model.blocks[-1].norm], model.reshape_transform
    with GradCAM(model, layers, reshape_transform=reshape) as cam:
        return torch.from_numpy(cam(images, targets=targets))


@torch.no_grad()
def area(
    probability: Callable[[Tensor], Tensor],
    images: Tensor,
    empty: Tensor,
    values: Tensor,
    patches: int,
    is_insertion: bool,
) -> float:
    """Return the area under a curve of deletion or insertion, between 0 and 1.

    Args:
        probability: Of the class, (B,), given images.
        images: (B, C, height, width).
        empty: What patches are replaced by, (1, C, 1, 1).
        values: The map, (B, H, W).
        patches: Replaced from point to point.
        is_insertion: Whether patches come in instead of going out.
    """
    order = values.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1).unflatten(1, values.shape[1:])
    curve = []
    for count in range(0, order.shape[1] + 1, patches):
        shown = (rank < count) if is_insertion else (rank >= count)
        pixels = F.interpolate(shown[:, None].to(images), images.shape[-2:], mode="nearest")
        curve.append(probability(torch.where(pixels > 0, images, empty)).mean())
    return torch.trapezoid(torch.stack(curve)).item() / (len(curve) - 1)


def run(experiment: str, model: str, lr: float, fill: str, seed: int) -> Row:
    """Train one model, unless it is there, and return the figures of every map.

    Args:
        experiment: Name of the experiment.
        model: As of ``trained_models.py``.
        lr: Peak learning rate.
        fill: What patches are replaced by, MEAN or BLACK.
        seed: Of the training and of the random order.

    Returns:
        Top-1 in percent of all held-out images, the commit that the weights were trained at, and by map the
        areas of deletion and insertion.
    """
    settings = EXPERIMENTS[experiment]
    figures = train(experiment, model, lr, seed)
    net, config = trained(experiment, model, lr, seed)
    images = held_out(config, settings.images)
    empty = torch.zeros(1, images.shape[1], 1, 1)
    if fill == BLACK:
        empty = Normalize(config, DEVICE)(torch.zeros_like(empty, dtype=torch.uint8))
    with torch.no_grad():
        target = net(images).argmax(1)

    def probability(images: Tensor) -> Tensor:
        return net(images).softmax(1).gather(1, target[:, None])

    row: Row = {
        "top1": figures["top1"],
        "trained_at": figures["commit"],
        "deletion": {},
        "insertion": {},
    }
    for name, values in maps_of(net, images, target, empty, seed).items():
        for measure, is_insertion in (("deletion", False), ("insertion", True)):
            row[measure][name] = area(
                probability, images, empty, values, settings.patches, is_insertion
            )
    return row


def held_out(config: TrainConfig, count: int) -> Tensor:
    """Return so many held-out images, evenly spaced, as models take them."""
    data, normalize = ValData(config, DEVICE, World()), Normalize(config, DEVICE)
    images = torch.cat([normalize(batch) for batch, _ in data.batches()])
    return images[torch.linspace(0, len(images) - 1, count).round().long()]


def main() -> None:
    """Run an experiment, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--output", type=Path, help="default: results/faithfulness_<experiment>.json"
    )
    args = parser.parse_args()
    name, is_there = args.experiment, importlib.util.find_spec("pytorch_grad_cam") is not None
    version = importlib.metadata.version("grad-cam") if is_there else None
    settings = dataclasses.asdict(EXPERIMENTS[name]) | {"grad_cam": version}
    record = Record(args.output or RESULTS / f"faithfulness_{name}.json", settings)
    run_all(record, functools.partial(run, name), EXPERIMENTS[name].reported(), args.jobs)


if __name__ == "__main__":
    main()
