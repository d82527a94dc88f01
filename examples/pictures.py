"""Save pictures that show predictions: below the ground truth, or on a photograph."""

from collections.abc import Sequence
from colorsys import hsv_to_rgb
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, make_grid, save_image

from vil.training.files import write_atomically

_PAINT = 0.6  # opacity of the colours of classes
_MARGIN = 4  # of a name in a picture, in pixels


def draw_masks(path: Path, images: Tensor, truth: Tensor, predicted: Tensor, num_classes: int) -> None:
    """Save images, (B, 3, H, W) in 0 to 1, above their true and predicted pixel classes, (B, H, W).

    Each class has a fixed colour. Pixels to ignore keep the colours of the image.
    """
    pixels, classes = _bytes(images), torch.arange(num_classes)[:, None, None]
    painted = [
        draw_segmentation_masks(image, mask == classes, alpha=_PAINT, colors=_colours(num_classes))
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
    threshold: float = 0.5,
) -> None:
    """Save images with their true boxes and, in the row below, their predicted boxes.

    Args:
        path: Output file, PNG.
        images: Images of one size, (3, H, W) each, in 0 to 1.
        truth: ``boxes``, (N, 4), and ``labels``, (N,), of each image.
        found: Predicted ``boxes`` and ``labels``, with ``scores``, (N,).
        names: Class names, indexed by label.
        threshold: Lowest score of a predicted box to draw.
    """
    sure = [{key: value[one["scores"] >= threshold] for key, value in one.items()} for one in found]
    drawn = [
        draw_bounding_boxes(_bytes(image), one["boxes"], [names[k] for k in one["labels"]], "white")
        if len(one["boxes"])  # torchvision warns about an empty set of boxes
        else _bytes(image)
        for targets in (truth, sure)
        for image, one in zip(images, targets, strict=True)
    ]
    _save(path, drawn, len(images))


def paint_mask(path: Path, photo: Tensor, mask: Tensor, names: Sequence[str]) -> None:
    """Save a photograph in the colours of its classes, with the names of its classes, the largest first.

    Args:
        path: Output file, PNG.
        photo: (3, H, W), uint8.
        mask: Class of each pixel, (H, W), int64.
        names: Class names.
    """
    colours = _colours(len(names))
    painted = to_pil_image(torch.tensor(colours, dtype=torch.uint8)[mask].permute(2, 0, 1))
    picture = Image.blend(to_pil_image(photo), painted, _PAINT)
    counts, below = mask.flatten().bincount(minlength=len(names)), 0
    for label in counts.argsort(descending=True, stable=True).tolist():
        if counts[label] and below < picture.height:
            below = _write(picture, names[label], (0, below), colours[label])
    _save_png(path, picture)


def paint_boxes(path: Path, photo: Tensor, found: dict[str, Tensor], names: Sequence[str]) -> None:
    """Save a photograph with boxes, and the name and score of each.

    Args:
        path: Output file, PNG.
        photo: (3, H, W), uint8.
        found: ``boxes``, (N, 4), in pixels of the photograph, ``labels``, (N,), and ``scores``, (N,).
        names: Class names, indexed by label.
    """
    picture, colours = to_pil_image(photo), _colours(len(names))
    draw, width = ImageDraw.Draw(picture), max(2, max(picture.size) // 300)
    boxes, labels, scores = (found[key].tolist() for key in ("boxes", "labels", "scores"))
    for box, label, score in reversed([*zip(boxes, labels, scores, strict=True)]):  # the surest lies on top
        draw.rectangle(box, outline=colours[label], width=width)
        _write(picture, f"{names[label]} {score:.2f}", box[:2], colours[label], above=True)
    _save_png(path, picture)


def _write(
    picture: Image.Image, text: str, place: Sequence[float], colour: tuple[int, int, int], above: bool = False
) -> int:
    """Write text on a colour, below or above its left corner but inside the picture; return its lower end."""
    font = ImageFont.load_default(max(10, max(picture.size) // 40))
    draw = ImageDraw.Draw(picture)
    width, height = round(draw.textlength(text, font)) + 2 * _MARGIN, sum(font.getmetrics()) + 2 * _MARGIN
    left, top = round(place[0]), round(place[1]) - (height if above else 0)
    left, top = max(0, min(left, picture.width - width)), max(0, min(top, picture.height - height))
    draw.rectangle((left, top, left + width - 1, top + height - 1), colour)
    light = sum(part * share for part, share in zip(colour, (0.3, 0.6, 0.1), strict=True)) > 128
    draw.text((left + _MARGIN, top + _MARGIN), text, "black" if light else "white", font)
    return top + height


def _colours(num_classes: int) -> list[tuple[int, int, int]]:
    """Return a colour for each class; class 0 is black."""
    hues = [hsv_to_rgb(k / num_classes, min(k, 1), min(k, 1)) for k in range(num_classes)]
    return [tuple(round(255 * part) for part in hue) for hue in hues]


def _save_png(path: Path, picture: Image.Image) -> None:
    write_atomically(path, lambda file: picture.save(file, format="png"))


def _bytes(images: Tensor) -> Tensor:
    return (images * 255).byte()


def _save(path: Path, pictures: Sequence[Tensor], columns: int) -> None:
    grid = make_grid(pictures, nrow=columns) / 255
    write_atomically(path, lambda file: save_image(grid, file, format="png"))
