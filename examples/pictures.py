"""Pictures of what a model predicts, beside what is there."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from vil.training.files import write_atomically

_SURE = 0.5  # the least score of a box that is drawn


def draw_masks(path: Path, images: Tensor, truth: Tensor, predicted: Tensor) -> None:
    """Draw images, (B, 3, H, W), of 0 to 1, above their class indices and those predicted, (B, H, W)."""
    figure, lines = _grid(("image", "truth", "prediction"), len(images))
    for line, pictures in zip(lines, (images.permute(0, 2, 3, 1), truth, predicted), strict=True):
        for axes, picture in zip(line, pictures, strict=True):
            axes.imshow(picture.numpy(), "tab20", vmin=0, vmax=19, interpolation="nearest")
    _save(figure, path)


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
