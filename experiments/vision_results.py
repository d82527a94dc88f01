"""What ``vision.py`` makes of its runs: tables, pictures and the differences that exceed the noise."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import variants
from experiments.comparisons import Comparison
from experiments.records import Row, select, spread, values
from vil.training.files import write_atomically

COMPARED = ("digits", "fractals", "fractals_large")
DIGITS = {"top1": 1, "loss": 3, "train_loss": 3}  # decimals
TITLES = {"top1": "top1", "loss": "loss", "train_loss": "training loss"}


def models(rows: Sequence[Row]) -> list[str]:
    """Return the models of a comparison in its order."""
    order = ("ViL", "ViL exact", "ViM", "DeiT")
    return [name for name in order if select(rows, model=name)]


def sizes(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of training images of each class."""
    return sorted({row["images_per_class"] for row in rows})


def accuracy_table(rows: Sequence[Row]) -> str:
    """Return top-1, losses and time by model and size of the training set, mean ± deviation."""
    columns = [f"{TITLES[figure]}, {size} a class" for figure in DIGITS for size in sizes(rows)]
    lines = [
        f"| model | parameters | {' | '.join(columns)} | time of a step |",
        "|---" * (len(columns) + 3) + "|",
    ]
    base = statistics.median(row["ms_per_step"] for row in select(rows, model=models(rows)[-1]))
    for name in models(rows):
        chosen = select(rows, model=name)
        cells = [
            spread(values(chosen, figure, images_per_class=size), digits)
            for figure, digits in DIGITS.items()
            for size in sizes(rows)
        ]
        time = statistics.median(row["ms_per_step"] for row in chosen) / base
        start = f"| {name} | {chosen[0]['parameters']:,} |"
        lines.append(f"{start} {' | '.join(cells)} | {time:.2f} |")
    return "\n".join(lines)


def pairwise(rows: Sequence[Row], figure: str = "top1") -> list[Comparison]:
    """Compare every two models at every size of the training set."""
    return [
        Comparison(
            f"{figure}, {size} a class",
            first,
            second,
            values(rows, figure, model=first, images_per_class=size),
            values(rows, figure, model=second, images_per_class=size),
        )
        for size in sizes(rows)
        for first, second in itertools.combinations(models(rows), 2)
    ]


# --------------------------------------------------------------------------------------- ablations


def ablation_rows(form: str) -> list[tuple[str, str, str]]:
    """Return what is changed, the value, and the name of the model, for one form."""
    return [(c.what, c.value, name) for name, (f, c) in variants.MODELS.items() if f == form]


def ablations(rows: Sequence[Row], form: str, figure: str = "top1") -> dict[str, Comparison]:
    """Compare every variant of a form with the model itself, by the variant's name."""
    base = values(rows, figure, model=f"{variants.AS_PUBLISHED.name}_{form}")
    return {
        name: Comparison(
            f"{figure}, {form}", value, "as published", values(rows, figure, model=name), base
        )
        for _, value, name in ablation_rows(form)[1:]
        if select(rows, model=name)
    }


def ablation_table(rows: Sequence[Row], found: dict[str, bool]) -> str:
    """Return top-1 and losses of every variant.

    Args:
        rows: Of the experiment.
        found: By model, whether its top-1 differs from the published choice beyond the noise.
    """
    heads = ["form", "changed", "to", "parameters", *TITLES.values()]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for form in variants.FORMS:
        for changed, value, name in ablation_rows(form):
            chosen = select(rows, model=name)
            if not chosen:
                continue
            figures = [spread(values(chosen, f), digits) for f, digits in DIGITS.items()]
            star = " *" if found.get(name) else ""
            start = f"| {form} | {changed} | {value} | {chosen[0]['parameters']:,} |"
            lines.append(f"{start} {figures[0]}{star} | {' | '.join(figures[1:])} |")
    return "\n".join(lines)


def changes_table(rows: Sequence[Row]) -> str:
    """Return figures of Longhorn with every change, and its loss less the unchanged one's seed by seed."""
    heads = ["change", "rate", *TITLES.values(), "loss, less unchanged", "lower with"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    base = values(rows, "loss", model=variants.UNCHANGED)
    for name in (variants.UNCHANGED, *variants.CHANGED):
        chosen = select(rows, model=name)
        figures = [spread(values(chosen, f), digits) for f, digits in DIGITS.items()]
        cells = [variants.CHANGED.get(name, "none"), f"{chosen[0]['lr']:g}", *figures]
        if name in variants.CHANGED:
            less = [own - other for own, other in zip(values(chosen, "loss"), base, strict=True)]
            lower = sum(number < 0 for number in less)
            cells += [spread(less, 3), f"{lower} of {len(less)} seeds"]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------- pictures


def draw_accuracy(rows: Sequence[Row], path: Path) -> None:
    """Draw top-1 by model, a panel for each size of the training set, a dot for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(sizes(rows)) + 1, 3.2), layout="constrained")
    panels = figure.subplots(1, len(sizes(rows)), squeeze=False)[0]
    for axes, size in zip(panels, sizes(rows), strict=True):
        for i, name in enumerate(models(rows)):
            numbers = values(rows, "top1", model=name, images_per_class=size)
            axes.plot([i - 0.3, i + 0.3], [statistics.fmean(numbers)] * 2, color=f"C{i}")
            axes.plot([i] * len(numbers), numbers, "o", color=f"C{i}", alpha=0.6, markersize=5)
        axes.set_xticks(range(len(models(rows))), models(rows), fontsize=8)
        axes.set(title=f"{size} training images a class", ylabel="top-1 (%)")
        axes.grid(axis="y", alpha=0.3)
    save(figure, path)


def draw_ablations(rows: Sequence[Row], path: Path) -> None:
    """Draw top-1 of every variant, a panel for each form, a dot for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(1, len(variants.FORMS), sharex=True)
    for axes, form in zip(panels, variants.FORMS, strict=True):
        shown = [row for row in ablation_rows(form) if select(rows, model=row[2])]
        for i, (changed, _, name) in enumerate(shown):
            numbers = values(rows, "top1", model=name)
            color = f"C{['', 'beta', 'd_state', 'directions, class token'].index(changed)}"
            axes.plot([statistics.fmean(numbers)] * 2, [i - 0.3, i + 0.3], color=color)
            axes.plot(numbers, [i] * len(numbers), "o", color=color, alpha=0.6, markersize=4)
        labels = [f"{changed.split(',')[0]} {value}".strip() for changed, value, _ in shown]
        axes.set_yticks(range(len(shown)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.set(title=form, xlabel="top-1 (%)")
        axes.grid(axis="x", alpha=0.3)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
