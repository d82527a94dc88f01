"""What ``mqar.py`` makes of its runs: learning rates, tables and figures."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.comparisons import holm, p_value
from experiments.mixer import ALL
from experiments.records import Row, select, spread, values
from vil.training.files import write_atomically

BASELINE = "longhorn"


def best_mean(rows: Sequence[Row]) -> list[Row]:
    """Return the runs of the learning rate with the best mean accuracy for every recurrence."""
    best = []
    for name in names_of(rows):
        by_rate = {row["lr"]: select(rows, recurrence=name, lr=row["lr"]) for row in rows}
        tried = [runs for runs in by_rate.values() if runs]
        best += max(tried, key=lambda runs: statistics.fmean(run["accuracy"] for run in runs))
    return best


def best_of_rates(rows: Sequence[Row]) -> list[Row]:
    """Return the run of the best learning rate for every recurrence, length, dim and seed."""
    cells: dict[tuple, Row] = {}
    for row in sorted(rows, key=lambda row: (row["accuracy"], -row["lr"])):
        cells[tuple(row[name] for name in ("recurrence", "length", "dim", "seed"))] = row
    return [cells[cell] for cell in sorted(cells)]


def names_of(rows: Iterable[Row]) -> list[str]:
    """Return the recurrences in the order of ``mixer.ALL``."""
    names = {row["recurrence"] for row in rows}
    return [name for name in ALL if name in names]


def axis(rows: Sequence[Row], kind: str) -> list[int]:
    """Return the numbers of the figures "kind number"."""
    return sorted(int(figure.split()[1]) for figure in rows[0] if figure.startswith(f"{kind} "))


def table(rows: Sequence[Row]) -> str:
    """Return a small setting's accuracies in percent, mean ± standard deviation over seeds.

    The trained length is not shown again: it is the number of pairs in the middle. Of each recurrence the
    learning rate with the better mean; "other rate", where there is one, is the mean accuracy over the
    numbers of pairs at the other one. A star marks what differs from the baseline's at the 5 % level,
    by Welch's tests judged together (Holm) over the whole table.
    """
    best = best_mean(rows)
    names = names_of(rows)
    figures = [f"pairs {n}" for n in axis(rows, "pairs")]
    figures += [f"length {n}" for n in axis(rows, "length")[1:]]
    stars = significant(best, names, figures)
    tried_others = len(best) < len(rows)
    heads = ["recurrence", "parameters", "rate", *figures, *["other rate"] * tried_others]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in names:
        chosen = select(best, recurrence=name)
        others = [row for row in select(rows, recurrence=name) if row not in chosen]
        cells = [
            spread([100 * value for value in values(chosen, figure)])
            + (" *" if (name, figure) in stars else "")
            for figure in figures
        ]
        start = f"| {name} | {chosen[0]['parameters']:,} | {chosen[0]['lr']:g} |"
        if tried_others:
            cells.append(spread([100 * row["accuracy"] for row in others]))
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)


def significant(
    rows: Sequence[Row], names: Sequence[str], figures: Sequence[str]
) -> set[tuple[str, str]]:
    """Return the (recurrence, figure) that differ significantly from the baseline's."""
    cells, p_values = [], []
    for name in names:
        for figure in figures:
            ours = values(rows, figure, recurrence=BASELINE)
            theirs = values(rows, figure, recurrence=name)
            if name != BASELINE and min(len(ours), len(theirs)) > 1:
                cells.append((name, figure))
                p_values.append(p_value(ours, theirs))
    return {cell for cell, found in zip(cells, holm(p_values), strict=True) if found}


def published_table(rows: Sequence[Row]) -> str:
    """Return the accuracies in percent by length, recurrence and dim, at the best learning rates."""
    dims = sorted({row["dim"] for row in rows})
    lines = [
        f"| length | recurrence | {' | '.join(f'dim {dim}' for dim in dims)} |",
        "|---" * (2 + len(dims)) + "|",
    ]
    for length in sorted({row["length"] for row in rows}):
        for name in names_of(rows):
            where = {"recurrence": name, "length": length}
            accuracies = (values(rows, "accuracy", dim=dim, **where) for dim in dims)
            cells = (spread([100 * value for value in numbers]) for numbers in accuracies)
            lines.append(f"| {length} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracies, with a dot for each seed.

    The small setting has a panel of recurrences for each number of pairs, and one of accuracy
    against length; the published one has a panel of accuracy against dim for each length.

    Args:
        rows: Runs that are reported, of either setting.
        path: Destination, PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9), layout="constrained")
    axes = _draw_published(figure, rows) if "dim" in rows[0] else _draw_small(figure, rows)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


def _draw_published(figure: Any, rows: Sequence[Row]) -> Any:
    """Fill a figure of the published setting and return a panel with all lines."""
    lengths = sorted({row["length"] for row in rows})
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        chosen = select(rows, length=length)
        dims = sorted({row["dim"] for row in chosen})
        _draw_lines(axes, chosen, {dim: ("accuracy", {"dim": dim}) for dim in dims})
        axes.set(title=f"{length} tokens", xlabel="channels of the model")
    return panels[0]


def _draw_small(figure: Any, rows: Sequence[Row]) -> Any:
    """Fill a figure of the small setting and return a panel with all lines."""
    pairs, lengths = axis(rows, "pairs"), axis(rows, "length")
    grid = figure.add_gridspec(2, len(pairs))
    for i, number in enumerate(pairs):
        _draw_dots(figure.add_subplot(grid[0, i]), rows, f"pairs {number}")
    axes = figure.add_subplot(grid[1, :])
    _draw_lines(axes, rows, {length: (f"length {length}", {}) for length in lengths})
    axes.set(title=f"trained at {lengths[0]} tokens", xlabel="tokens of the test")
    return axes


def _draw_dots(axes: Any, rows: Sequence[Row], figure: str) -> None:
    """Draw a figure of every recurrence: its mean as a line, its seeds as dots."""
    names = names_of(rows)
    for i, name in enumerate(names):
        numbers = values(rows, figure, recurrence=name)
        axes.plot([i - 0.3, i + 0.3], [statistics.fmean(numbers)] * 2, color=f"C{i}")
        axes.plot([i] * len(numbers), numbers, "o", color=f"C{i}", alpha=0.6, markersize=5)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set(title=figure, ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.grid(axis="y", alpha=0.3)


def _draw_lines(
    axes: Any, rows: Sequence[Row], places: dict[int, tuple[str, dict[str, Any]]]
) -> None:
    """Draw a line through each recurrence's means and its seeds as dots.

    Args:
        axes: Panel.
        rows: Runs.
        places: Place on the abscissa -> figure, and the values that its rows have.
    """
    for i, name in enumerate(names_of(rows)):
        points = [
            (place, values(rows, figure, recurrence=name, **where))
            for place, (figure, where) in places.items()
        ]
        points = [(place, found) for place, found in points if found]
        style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"}
        means = [statistics.fmean(found) for _, found in points]
        axes.plot([place for place, _ in points], means, label=name, **style)
        for place, found in points:
            axes.plot([place] * len(found), found, "o", color=style["color"], markersize=3)
    axes.set(ylabel="accuracy", ylim=(-0.03, 1.03), xscale="log")
    axes.set_xticks(list(places), [str(place) for place in places])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
