"""What ``grids.py`` makes of its runs: a picture, a table, and every aim that is missed."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.records import Row, select, spread
from experiments.vision_results import save

DATASETS = {"glyphs": 6, "digits": 4, "fractals": 8}
"""Patches along a side in training."""
MODELS = ("ViL", "ViL exact", "ViM", "ViL, averaged", "DeiT x 4")
SHAPES = ("square", "wide", "high")
DEFAULT, RESIZED = 0, 1
KEPT = 90.0
"""Percent of the accuracy at the trained grid that every grid from 5/6 to 2 times its side is to keep."""
BEHIND = 3.0
"""Points that patches at half the stride may be behind."""


def grid_name(shape: str, side: int, trained: int) -> str:
    """Return the name of a grid with one side, or both, of so many patches."""
    rows, columns = (trained if shape == s else side for s in ("wide", "high"))
    return f"{rows}x{columns}"


def sides_of(rows: Sequence[Row], shape: str, trained: int) -> list[int]:
    """Return the sides that were evaluated in a shape, the trained one among them."""
    found = rows[0]["grids"] if rows else {}
    return [side for side in range(1, 5 * trained) if grid_name(shape, side, trained) in found]


def tops(rows: Sequence[Row], grid: str, way: int = DEFAULT) -> list[float]:
    """Return top-1 of every seed at a grid."""
    return [row["grids"][grid][way] for row in sorted(rows, key=lambda row: row["seed"])]


def mean_top(rows: Sequence[Row], grid: str, way: int = DEFAULT) -> float:
    """Return the mean of ``tops``."""
    return fmean(tops(rows, grid, way))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw top-1 by side for every data set and shape; dotted, ViL on images resized to the trained size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(len(SHAPES), len(DATASETS), sharey=True)
    for column, (dataset, trained) in enumerate(DATASETS.items()):
        for axes, shape in zip(panels[:, column], SHAPES, strict=True):
            axes.set(ylim=(0, 101), title=f"{dataset}, {shape}")
            axes.axvline(1, color="grey", linewidth=0.8)
            axes.grid(alpha=0.3)
            for number, model in enumerate(MODELS):
                chosen = select(rows, dataset=dataset, model=model)
                sides = sides_of(chosen, shape, trained)
                names = [grid_name(shape, side, trained) for side in sides]
                places = [side / trained for side in sides]
                means = [mean_top(chosen, name) for name in names]
                axes.plot(places, means, ".-", color=f"C{number}", label=model)
                if model == MODELS[0]:
                    means = [mean_top(chosen, name, RESIZED) for name in names]
                    label = f"{model}, image resized"
                    axes.plot(places, means, ":", color="black", label=label)
    figure.supxlabel("side, as a multiple of training's")
    figure.supylabel("top-1 (%)")
    panels[0, 0].legend(fontsize=7)
    save(figure, path)


def table(rows: Sequence[Row]) -> str:
    """Return top-1 at the trained grid, at multiples of its side, and at half the stride."""
    times = (0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 3, 4)
    heads = ("", "model", "seeds", *(f"{t:g} x" for t in times), "half the stride")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for dataset, trained in DATASETS.items():
        for model in MODELS:
            chosen = select(rows, dataset=dataset, model=model)
            if not chosen:
                continue
            names = [grid_name("square", round(t * trained), trained) for t in times]
            exact = [abs(round(t * trained) - t * trained) < 1e-6 for t in times]
            cells = [
                spread(tops(chosen, name)) if there else ""
                for name, there in zip(names, exact, strict=True)
            ]
            finer = [row["finer"] for row in chosen if "finer" in row]
            cells += [spread(finer) if finer else ""]
            lines.append(f"| {' | '.join((dataset, model, str(len(chosen)), *cells))} |")
    return "\n".join(lines)


def missed(rows: Sequence[Row]) -> list[str]:
    """Return a line for every aim that the mean over seeds misses, of the models of this package."""
    lines = []
    for dataset, trained in DATASETS.items():
        for model in MODELS[:-1]:
            chosen = select(rows, dataset=dataset, model=model)
            if chosen:
                lines += _missed(chosen, f"{dataset}, {model}", trained)
    return lines


def _missed(rows: Sequence[Row], who: str, trained: int) -> list[str]:
    best = mean_top(rows, f"{trained}x{trained}")
    low, behind = [], []
    for shape in SHAPES:
        for side in sides_of(rows, shape, trained):
            name = grid_name(shape, side, trained)
            top, resized = mean_top(rows, name), mean_top(rows, name, RESIZED)
            if 5 / 6 <= side / trained <= 2 and top < KEPT / 100 * best:
                low.append(f"{name} ({100 * top / best:.0f} %)")
            if side < trained and top < resized:
                behind.append(f"{name} (by {resized - top:.1f})")
    finer = best - fmean(row["finer"] for row in rows)
    lines = [f"{who}: keeps less than {KEPT:g} % at {', '.join(dict.fromkeys(low))}"] if low else []
    if behind:
        lines.append(f"{who}: is behind resizing at {', '.join(dict.fromkeys(behind))}")
    if finer > BEHIND:
        lines.append(f"{who}: loses {finer:.1f} points with patches at half the stride")
    return lines


def missed_text(rows: Sequence[Row]) -> str:
    """Return ``missed`` as a list, or that nothing is."""
    if not rows:
        return "Not run yet."
    return "\n".join(f"- {line}." for line in missed(rows)) or "None."


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return the numbers that the text names: means over seeds, of ViL unless they say otherwise."""
    found = {}
    for dataset, trained in DATASETS.items():
        chosen = select(rows, dataset=dataset, model=MODELS[0])
        for name, times in (("half", 0.5), ("one", 1), ("double", 2)):
            grid = grid_name("square", round(times * trained), trained)
            found[f"{dataset}_{name}"] = f"{mean_top(chosen, grid):.1f}" if chosen else "not run"
    return found
