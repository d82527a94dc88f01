"""Draw the README's picture from records of lab.benchmarks.models: `python -m lab.benchmarks.picture`."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ("resolution", "resolution_2048")
IMAGE = ROOT / "docs" / "images" / "cost.svg"
MODELS = {"deit_tiny_patch16_224": ("DeiT-Tiny", "#757575"), "vil_tiny": ("ViL-Tiny", "#c62828")}


def draw(axes: Axes, title: str, rows: list[dict[str, Any]], figure: str, unit: float) -> None:
    """Draw one line for each model, with its name and last value at the end.

    Args:
        axes: Where to draw.
        title: Title of the axes, with the unit.
        rows: Rows of one pass.
        figure: "seconds" or "bytes".
        unit: Amount that the axis shows as 1.
    """
    for model, (label, colour) in MODELS.items():
        own = [row for row in rows if row["model"] == model]
        sizes, values = [row["size"] for row in own], [row[figure] / unit for row in own]
        axes.plot(sizes, values, "o-", color=colour, linewidth=3.5, markersize=8)
        axes.annotate(
            f"{label}\n{values[-1]:.2g}",
            (sizes[-1], values[-1]),
            xytext=(12, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            weight="bold",
            fontsize=19,
        )
    axes.set_title(title, loc="left", fontsize=19, pad=16)
    axes.set_xlim(right=2700)  # room for the labels
    axes.set_xticks([224, 512, 1024, 2048])
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw time above memory and write the picture."""
    records = [ROOT / "lab" / "benchmarks" / "results" / f"{name}.json" for name in RECORDS]
    rows = [row for path in records for row in json.loads(path.read_text())["rows"]]
    plt.rcParams |= {"font.size": 16, "svg.hashsalt": "cost"}
    figure, (time, memory) = plt.subplots(2, 1, figsize=(7, 8.4), layout="constrained")
    inference, training = ([row for row in rows if row["pass"] == name] for name in ("inference", "training"))
    draw(time, "CPU seconds to classify one image", inference, "seconds", 1)
    draw(memory, "GiB of memory to train on one image", training, "bytes", 2**30)
    memory.set_xlabel("height and width of the image in pixels")
    figure.savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
