"""Draw maps over their image, readable on a page or a phone."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_COLUMNS = 2  # panels per row, readable on a phone
_PANEL = 2.9  # inches; 13-point letters are then a sixteenth of a panel
_SIDES = {2: ("left", "right"), 3: ("left", "center", "right")}  # label alignment on a colour bar
_DARKEST = 0.65  # darkest grey of the image below a map; black would hide the colours
_DECADES = 1e-3  # lower end of a logarithmic scale, relative to the largest value


class Panel(NamedTuple):
    """A map with its title, label and colour scale."""

    title: str
    values: Tensor
    """Map (h, w) of any size, stretched over the image; each value becomes a rectangle of one colour."""
    label: str
    """Label of the colour bar: what the values are."""
    scale: Literal["linear", "signed", "log"] = "linear"
    """Colour scale. "linear": from the smallest to the largest value. "signed": 0 in the middle, blue below,
    red above. "log": logarithmic, for non-negative values; all values below a thousandth of the largest get
    the lowest colour."""


def draw(image: Tensor, panels: Sequence[Panel], title: str) -> "Figure":
    """Draw an image and its maps, two panels per row.

    Args:
        image: Image (C, height, width) before normalisation, with 1 or 3 channels and values in [0, 1].
        panels: Maps to draw over the image.
        title: Title of the figure, such as the class and its probability.

    Returns:
        A matplotlib figure; save it with ``savefig``.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra to install.
        ValueError: If the image or a map has the wrong shape, or a map has a non-finite value.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing needs matplotlib: pip install 'vision-longhorn[train]' or 'vision-longhorn[examples]'",
            name=error.name,
        ) from error
    _check(image, panels)
    rows = -(-(len(panels) + 1) // _COLUMNS)
    height, width = image.shape[1:]
    size = (_COLUMNS * _PANEL, rows * (_PANEL * height / width + 1.1) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    # Class names can be long and contain a $, which matplotlib would parse as a formula.
    figure.suptitle(textwrap.fill(title, 36), fontsize=16, parse_math=False)
    # Each row of panels takes three rows of the grid: maps, colour bars and a gap.
    grid = figure.subplots(3 * rows, _COLUMNS, squeeze=False, height_ratios=(20, 1, 1) * rows)
    for axes in grid.flat:
        axes.set_axis_off()
    places = [
        pair for row in range(rows) for pair in zip(*grid[3 * row : 3 * row + 2], strict=True)
    ]
    places[0][0].imshow(_pixels(image), cmap="gray", vmin=0, vmax=1)
    places[0][0].set_title("image", fontsize=13)
    for (axes, below), panel in zip(places[1:], panels, strict=False):
        _draw_panel(axes, below, image, panel)
    return figure


def _check(image: Tensor, panels: Sequence[Panel]) -> None:
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(
            f"image must be (C, height, width) with C 1 or 3, got {tuple(image.shape)}"
        )
    for title, values, *_ in panels:
        if values.ndim != 2:
            raise ValueError(f"values of {title!r} must be (h, w), got {tuple(values.shape)}")
        if not values.isfinite().all():
            raise ValueError(f"values of {title!r} must be finite, got NaN or infinity")


def _pixels(image: Tensor) -> object:
    """Return an image (C, height, width) as an array for matplotlib, (height, width) or (height, width, 3)."""
    return image.detach().float().cpu().permute(1, 2, 0).squeeze(-1).numpy()


def _draw_panel(axes: "Axes", below: "Axes", image: Tensor, panel: Panel) -> None:
    """Draw a map, darkened where the image is dark, with a colour bar below."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    values = panel.values.detach().float().cpu()
    norm, ticks = _scaled(values, panel.scale)
    colours = ScalarMappable(norm, colormaps["RdBu_r" if panel.scale == "signed" else "YlOrRd"])
    stretched = F.interpolate(values[None, None], image.shape[1:], mode="nearest")[0, 0]
    grey = _pixels(_DARKEST + (1 - _DARKEST) * image.mean(0, keepdim=True))
    axes.imshow(colours.to_rgba(stretched.numpy())[..., :3] * grey[..., None])
    axes.set_title(panel.title, fontsize=13, parse_math=False)
    below.set_axis_on()
    extend = "min" if panel.scale == "log" else "neither"
    bar = axes.figure.colorbar(colours, cax=below, orientation="horizontal", extend=extend)
    bar.set_label(textwrap.fill(panel.label, 28), fontsize=12, parse_math=False)
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    for label, side in zip(bar.ax.get_xticklabels(), _SIDES[len(ticks)], strict=True):
        label.set(fontsize=11, horizontalalignment=side)
    bar.ax.minorticks_off()


def _scaled(values: Tensor, scale: str) -> tuple["Normalize", list[float]]:
    """Return the colour normalisation and the ticks of the colour bar."""
    from matplotlib.colors import LogNorm, Normalize

    least, most = values.min().item(), values.max().item()
    if scale == "log":
        most = most or 1.0
        return LogNorm(_DECADES * most, most, clip=True), [_DECADES * most, most]
    if scale == "signed":
        most = max(-least, most) or 1.0
        least = -most
    elif least == most:
        least, most = least - 0.5, most + 0.5
    return Normalize(least, most), [least, (least + most) / 2, most]
