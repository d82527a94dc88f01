"""Train small models at one image size, and evaluate them at other sizes.

    python -m experiments.sizes digits --models ViL ViM "DeiT x 4" --rates 1e-3 2e-3 4e-3 --jobs 2
    python -m experiments.tables output/sizes_digits.json --by model --show "2 x=grids.8x8.0:1"

Models and data are the same as in ``images.py``. The held-out images are stretched to every patch grid from half to
twice the trained side (square, wide and tall), and to some larger squares. Each grid has two figures: top-1 of the
model as it is, and top-1 on the same images resized to the trained size first. DeiT's position embedding is
resampled. "finer" is top-1 with patches at half the stride, on images of the trained size.
"""

import copy
import dataclasses
import functools
import sys

import torch
from torch import nn
from torch.nn import functional as F

from experiments.images import Images, asked, base, execute, opened, parse, run, trained
from experiments.records import Record, Row
from vil.training.distributed import World
from vil.training.loader import ValData
from vil.training.model import build_model
from vil.training.settings import TrainConfig
from vil.training.transforms import Normalize

DEVICE = torch.device("cpu")
FAR = (2.5, 3, 4)
"""Sides of the larger squares, in multiples of the trained side."""


def grids_of(trained: int, far: tuple[float, ...] = FAR) -> list[tuple[int, int]]:
    """Return the grids (rows, columns) to evaluate at: square, wide and tall."""
    sides = range(-(-trained // 2), 2 * trained + 1)
    squares = [(side, side) for side in (*sides, *(round(times * trained) for times in far))]
    others = [(trained, side) for side in sides if side != trained]
    return [*squares, *others, *(grid[::-1] for grid in others)]


def images_at(
    config: TrainConfig, size: tuple[int, int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of normalised held-out images of (height, width) pixels, and their classes."""
    normalize = Normalize(config, DEVICE)
    model = dataclasses.replace(config.model, img_size=max(size))
    config = dataclasses.replace(config, model=model)
    batches = ValData(config, opened(config, training=False), World()).batches()
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
    """Return two top-1 values for each grid, such as "5x7": as is, and with resized images."""
    found: Row = {}
    patch, side = config.model.patch_size, config.model.img_size
    for rows, columns in grids_of(side // patch, far):
        size = (rows * patch, columns * patch)
        batches = images_at(config, size)
        other = copy.deepcopy(net)
        if not hasattr(net, "ref_feat_shape"):  # timm's models take one size at a time
            other.set_input_size(img_size=size)
        resized = [(_resize(images, (side, side)), targets) for images, targets in batches]
        found[f"{rows}x{columns}"] = [top1(other, batches), top1(net, resized)]
    return found


def at_half_stride(net: nn.Module, config: TrainConfig) -> float:
    """Return the top-1 on images of the trained size with four times as many patches."""
    model = dataclasses.replace(config.model, patch_stride=config.model.patch_size // 2)
    finer = build_model(model).eval()
    finer.load_state_dict(net.state_dict())
    side = config.model.img_size
    return top1(finer, images_at(config, (side, side)))


def run_sizes(data: Images, model: str, lr: float, seed: int, far: tuple[float, ...] = FAR) -> Row:
    """Train a model and evaluate it at all grids.

    Args:
        data: The images.
        model: Model, as in ``images.trained``.
        lr: Peak learning rate.
        seed: Seed of weights, order and augmentation.
        far: Sides of the larger squares, in multiples of the trained side.

    Returns:
        The figures of ``images.trained``, top-1 in percent by grid, and "finer" except for DeiT.
    """
    trainee, config, row = trained(data, model, lr, seed)
    net = trainee.model.eval()
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, validation_batch_size=80)
    )
    finer = {} if base(model) == "DeiT" else {"finer": at_half_stride(net, config)}
    return row | {"grids": evaluate_grids(net, config, far)} | finer


def main() -> int:
    """Make the runs that a record lacks, and return the exit status."""
    args, data = asked(parse(__doc__.splitlines()[0]), "sizes")
    record = Record(args.output, dataclasses.asdict(data))
    one, final = functools.partial(run, data, None), functools.partial(run_sizes, data)
    return execute(record, one, final, {"model": args.models}, args)


if __name__ == "__main__":
    sys.exit(main())
