"""Train small models at one image size, and evaluate them at other sizes.

    python -m lab.experiments.sizes digits --models ViL ViM "DeiT x 4" --rates 1e-3 2e-3 4e-3
    python -m lab.experiments.tables output/sizes_digits.json --by model --show "2 x=grids.8x8.0:1"

Models and data are the same as in ``images.py``. The held-out images are stretched to every square patch grid from
half to twice the trained side, and to some larger ones. Each grid has two figures: top-1 of the model as it is, and
top-1 on the same images resized to the trained size first. DeiT's position embedding is resampled. "finer" is top-1
with patches at half the stride, on images of the trained size.
"""

import copy
import dataclasses
import sys

import torch
from torch import nn
from torch.nn import functional as F

from lab.experiments.images import Images, base, compare, trained
from lab.experiments.records import Row
from vil.training.distributed import World
from vil.training.loader import ValData
from vil.training.settings import TrainConfig
from vil.training.setup import build_model
from vil.training.splits import open_source

DEVICE = torch.device("cpu")
FAR = (2.5, 3, 4)
"""Sides of the larger squares, in multiples of the trained side."""


def images_at(config: TrainConfig, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of normalised held-out images of a side in pixels, and their classes."""
    images = dataclasses.replace(config.images, img_size=(size, size))
    normalize = images.normalizer(DEVICE)
    data = dataclasses.replace(config.data, validation_batch_size=80)
    source = open_source(data, config.model.num_classes, training=False)
    batches = ValData(source, images, data, World()).batches()
    return [(resized(normalize(pixels), size), targets) for pixels, targets in batches]


def resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return images resized to a side in pixels."""
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, (size, size), mode="bicubic", antialias=True)


def for_size(net: nn.Module, size: int) -> nn.Module:
    """Return a model that takes images of a side in pixels: timm's ViTs take one size at a time."""
    if hasattr(net, "ref_feat_shape") or not hasattr(net, "set_input_size"):
        return net
    other = copy.deepcopy(net)
    other.set_input_size(img_size=size)
    return other


@torch.inference_mode()
def top1(net: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the top-1 of a model in percent."""
    right = [net(images).argmax(1) == targets for images, targets in batches]
    return 100 * torch.cat(right).double().mean().item()


def evaluate_grids(net: nn.Module, config: TrainConfig) -> Row:
    """Return two top-1 values for each grid, such as "5x5": as is, and with resized images."""
    found: Row = {}
    patch, side = config.model.patch_size, config.model.img_size
    trained = side // patch
    near = range(-(-trained // 2), 2 * trained + 1)
    for rows in (*near, *(round(times * trained) for times in FAR)):
        batches = images_at(config, rows * patch)
        at_trained_size = [(resized(images, side), targets) for images, targets in batches]
        found[f"{rows}x{rows}"] = [top1(for_size(net, rows * patch), batches), top1(net, at_trained_size)]
    return found


def run_sizes(data: Images, model: str, lr: float, seed: int) -> Row:
    """Train a model and evaluate it at all grids; same arguments as ``images.trained``.

    Returns:
        The figures of ``images.trained``, top-1 in percent by grid, and "finer" except for DeiT.
    """
    setup, config, row = trained(data, model, lr, seed)
    net = setup.model.eval()
    row["grids"] = evaluate_grids(net, config)
    if base(model) != "DeiT":
        halved = dataclasses.replace(config.model, patch_stride=config.model.patch_size // 2)
        finer = build_model(halved)[0].eval()
        finer.load_state_dict(net.state_dict())
        row["finer"] = top1(finer, images_at(config, config.model.img_size))
    return row


if __name__ == "__main__":
    sys.exit(compare("sizes", __doc__.splitlines()[0], run_sizes))
