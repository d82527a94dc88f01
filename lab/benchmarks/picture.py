"""Draw the README's picture of cost from a record of lab.benchmarks.models: `python -m lab.benchmarks.picture`."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "lab" / "benchmarks" / "results" / "cpu.json"
IMAGE = ROOT / "docs" / "images" / "cost.svg"
BATCHES = {224: 8, 512: 2, 1024: 1, 2048: 1}
MODELS = {"deit_tiny_patch16_224": ("DeiT-Tiny", "#757575"), "vil_tiny": ("ViL-Tiny", "#c62828")}


def draw(axes: Axes, title: str, rows: list[dict[str, Any]], figure: str, unit: float) -> None:
    """Draw one line for each model over the side of the image, both logarithmic, with names and values.

    Args:
        axes: Where to draw.
        title: Title of the axes, with the unit.
        rows: Rows of one pass.
        figure: "seconds" or "bytes"; divided by the batch.
        unit: Amount that the axis shows as 1.
    """
    values = {(row["model"], row["size"]): row[figure] / row["batch"] / unit for row in rows}
    for model, (label, colour) in MODELS.items():
        heights = [values[model, size] for size in BATCHES]
        axes.plot(list(BATCHES), heights, "o-", color=colour, linewidth=2.5, markersize=6)
        for size, height in zip(BATCHES, heights, strict=True):
            above = height == max(values[other, size] for other in MODELS)
            place = {"xytext": (0, 9 if above else -18), "textcoords": "offset points", "ha": "center"}
            axes.annotate(_rounded(height), (size, height), color=colour, fontsize=11, **place)
        end = (max(BATCHES), heights[-1])
        axes.annotate(label, end, (12, 2 if above else -12), textcoords="offset points", color=colour, weight="bold")
    axes.set_title(title, loc="left", fontsize=13)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(180, 4200)  # room for the labels
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.6, high * 1.6)
    axes.set_xticks(list(BATCHES), [f"{size:,}" for size in BATCHES])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("height and width in pixels")
    axes.spines[["top", "right"]].set_visible(False)


def _rounded(number: float) -> str:
    """Return a number with two digits, without an exponent."""
    return f"{float(f'{number:.2g}'):,g}"


def main() -> None:
    """Draw time beside memory and write the picture."""
    rows = [row for row in json.loads(RECORD.read_text())["rows"] if row["batch"] == BATCHES.get(row["size"])]
    plt.rcParams |= {"font.size": 12, "svg.hashsalt": "cost"}
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    inference, training = (
        [row for row in rows if row["pass"] == name and row["way"] == "eager"] for name in ("inference", "training")
    )
    draw(time, "CPU seconds to classify an image", inference, "seconds", 1)
    draw(memory, "MiB of memory to train on an image", training, "bytes", 2**20)
    figure.savefig(IMAGE, metadata={"Date": None})


if __name__ == "__main__":
    main()
