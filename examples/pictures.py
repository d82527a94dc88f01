"""Pictures of what a model predicts, beside what is there."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from folders import IGNORED
from vil.training.files import write_atomically

_COLOURS = colormaps["tab20"]
_SURE = 0.5  # the least score of a box that is drawn


def draw_masks(
    path: Path, images: Tensor, truth: Tensor, predicted: Tensor, names: Sequence[str]
) -> None:
    """Draw images above the classes of their pixels, and those above the classes predicted.

    Args:
        path: The file.
        images: (B, 3, H, W), of 0 to 1.
        truth: Class indices, (B, H, W).
        predicted: The same.
        names: Of the classes.
    """
    figure, lines = _grid(("image", "truth", "prediction"), len(images))
    rows = images.permute(0, 2, 3, 1).numpy(), _coloured(truth), _coloured(predicted)
    for line, pictures in zip(lines, rows, strict=True):
        for axes, picture in zip(line, pictures, strict=True):
            axes.imshow(picture, interpolation="nearest")
    present = torch.cat([truth, predicted]).unique().tolist()
    named = {i: name for i, name in enumerate(names) if i in present}
    patches = [Patch(color=_COLOURS(i % _COLOURS.N), label=name) for i, name in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=8)
    _save(figure, path)


def _coloured(classes: Tensor) -> np.ndarray:
    """Return colours, (B, H, W, 3), of class indices, (B, H, W); black where they are to be ignored."""
    colours = _COLOURS(classes.numpy() % _COLOURS.N)[..., :3]
    colours[(classes == IGNORED).numpy()] = 0
    return colours


def draw_boxes(
    path: Path,
    images: Sequence[Tensor],
    truth: Sequence[dict[str, Tensor]],
    found: Sequence[dict[str, Tensor]],
    names: Sequence[str],
) -> None:
    """Draw images with what is there, above the same with what was found and is probably there.

    Args:
        path: The file.
        images: Each (3, H, W), of 0 to 1.
        truth: The ``boxes``, (N, 4), and ``labels``, (N,), of each image.
        found: The same, and their ``scores``, (N,).
        names: Of the labels.
    """
    figure, lines = _grid(("truth", "prediction"), len(images))
    for line, targets in zip(lines, (truth, found), strict=True):
        for axes, image, target in zip(line, images, targets, strict=True):
            _, height, width = image.shape
            axes.imshow(image.permute(1, 2, 0).numpy(), extent=(0, width, height, 0))
            scores = target.get("scores", [1.0] * len(target["labels"]))
            for box, label, score in zip(target["boxes"], target["labels"], scores, strict=True):
                if score >= _SURE:
                    left, top, right, bottom = box.tolist()
                    sides = right - left, bottom - top
                    axes.add_patch(Rectangle((left, top), *sides, fill=False, color="white"))
                    axes.text(left, top, names[label], color="white", fontsize=7)
    _save(figure, path)


def _grid(names: Sequence[str], columns: int) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    """Return a figure and its axes, a line for each name."""
    figure = Figure(figsize=(2 * columns + 0.5, 2.1 * len(names)), layout="constrained")
    bare = {"xticks": [], "yticks": []}
    lines = figure.subplots(len(names), columns, squeeze=False, subplot_kw=bare)
    for line, name in zip(lines, names, strict=True):
        line[0].set_ylabel(name)
    return figure, lines


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))
