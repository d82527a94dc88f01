"""Save pictures that show predictions below the ground truth."""

from collections.abc import Sequence
from colorsys import hsv_to_rgb
from pathlib import Path

import torch
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, make_grid, save_image

from vil.training.files import write_atomically

_SURE = 0.5  # lowest score of a predicted box to draw


def draw_masks(path: Path, images: Tensor, truth: Tensor, predicted: Tensor, num_classes: int) -> None:
    """Save images, (B, 3, H, W) in 0 to 1, above their true and predicted pixel classes, (B, H, W).

    Each class has a fixed colour. Pixels to ignore keep the colours of the image.
    """
    pixels, classes = _bytes(images), torch.arange(num_classes)[:, None, None]
    hues = [hsv_to_rgb(k / num_classes, min(k, 1), min(k, 1)) for k in range(num_classes)]
    colours = [tuple(round(255 * part) for part in hue) for hue in hues]  # class 0 is black
    painted = [
        draw_segmentation_masks(image, mask == classes, alpha=0.6, colors=colours)
        for masks in (truth, predicted)
        for image, mask in zip(pixels, masks, strict=True)
    ]
    _save(path, [*pixels, *painted], len(images))


def draw_boxes(
    path: Path,
    images: Sequence[Tensor],
    truth: Sequence[dict[str, Tensor]],
    found: Sequence[dict[str, Tensor]],
    names: Sequence[str],
) -> None:
    """Save images with their true boxes and, in the row below, their predicted boxes.

    Args:
        path: Output file, PNG.
        images: Images of one size, (3, H, W) each, in 0 to 1.
        truth: ``boxes``, (N, 4), and ``labels``, (N,), of each image.
        found: Predicted ``boxes`` and ``labels``, with ``scores``, (N,).
        names: Class names, indexed by label.
    """
    sure = [{key: value[one["scores"] >= _SURE] for key, value in one.items()} for one in found]
    drawn = [
        draw_bounding_boxes(_bytes(image), one["boxes"], [names[k] for k in one["labels"]], "white")
        if len(one["boxes"])  # torchvision warns about an empty set of boxes
        else _bytes(image)
        for targets in (truth, sure)
        for image, one in zip(images, targets, strict=True)
    ]
    _save(path, drawn, len(images))


def _bytes(images: Tensor) -> Tensor:
    return (images * 255).byte()


def _save(path: Path, pictures: Sequence[Tensor], columns: int) -> None:
    grid = make_grid(pictures, nrow=columns) / 255
    write_atomically(path, lambda file: save_image(grid, file, format="png"))
