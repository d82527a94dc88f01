"""Draw the pictures of docs/records.md from the commands in its comments.

    python -m lab.experiments.draw                     # draws all of them

A comment ``<!-- python -m lab.experiments.draw FILE ARGUMENTS -->`` names a file of docs/ and the arguments of a table
(``tables.py``). With ``--against``, the picture has a dot for each seed's difference, their mean and its 95 %
interval. If a column's title names both axes ("top-1 (%) over CPU seconds"), it has the mean of the seeds' curves.
Otherwise it has a line for each row through the columns, whose titles begin with their place ("2 x").
"""

import re
import shlex
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.experiments.statistics import difference
from lab.experiments.tables import PAGE, Column, Row, at, by_seed, groups, parse, select

COMMENT = re.compile(r"<!-- python -m lab.experiments\.draw (\S+) (.*?) -->")


def dots(axes: Axes, rows: dict[str, list[Row]], column: Column, against: str, times: bool) -> None:
    """Draw the difference of each row to the row ``against``, seed by seed."""
    base = by_seed(column, rows.pop(against), times)
    for i, own in enumerate(rows.values()):
        found = by_seed(column, own, times)
        seeds = sorted(found.keys() & base.keys())
        mean = difference([found[seed] for seed in seeds], [base[seed] for seed in seeds])
        shown = (lambda number: 2**-number) if times else float
        numbers = sorted(shown(found[seed] - base[seed]) for seed in seeds)
        heights = [i + 0.1 * (j % 5 - 2) for j in range(len(numbers))]
        axes.plot(numbers, heights, "o", color="C0", alpha=0.4, markersize=4)
        axes.plot([shown(mean.low), shown(mean.high)], [i, i], color="black", linewidth=2)
        axes.plot(shown(mean.mean), i, "D", color="black")
    axes.axvline(1 if times else 0, color="grey", linewidth=1, zorder=0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if times:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}")
    what = f"times as fast as {against}" if times else f"{column.title}: difference to {against}"
    axes.set_xlabel(what)


def lines(axes: Axes, rows: dict[str, list[Row]], columns: list[Column]) -> None:
    """Draw each row's means at the places named in the column titles."""
    for name, own in rows.items():
        points = [(float(c.title.split()[0]), c.numbers(own)) for c in columns]
        places = [place for place, numbers in points if numbers]
        means = [sum(numbers) / len(numbers) for _, numbers in points if numbers]
        axes.plot(places, means, "o-", label=name)
    axes.set_xlabel(columns[0].title.split(maxsplit=1)[1])
    axes.legend(fontsize=8)


def curves(axes: Axes, rows: dict[str, list[Row]], column: Column) -> None:
    """Draw the mean of each row's curves, point by point, with the seeds' curves behind it."""
    for i, (name, own) in enumerate(rows.items()):
        points = np.array([at(row, column.figure) for row in own])  # (seeds, points, 2)
        for places, heights in np.moveaxis(points, 2, 1):
            axes.plot(places, heights, color=f"C{i}", alpha=0.25, linewidth=1)
        axes.plot(*points.mean(0).T, "o-", color=f"C{i}", label=name)
    height, _, place = column.title.partition(" over ")
    axes.set(xlabel=place, ylabel=height)
    axes.legend(fontsize=8)


def draw(path: Path, arguments: list[str]) -> None:
    """Draw one picture.

    Args:
        path: SVG file to write.
        arguments: Arguments of ``tables.py``.
    """
    args = parse(arguments)
    found = groups([row for record in args.records for row in select(record, args)], args.by)
    rows = {", ".join(map(str, key)): own for key, own in found.items()}
    columns = [Column.parse(text) for text in args.show]
    height = 1 + 0.6 * len(rows) if args.against else 3.6
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="x" if args.against else "both", alpha=0.3)
    if args.against:
        dots(axes, rows, columns[-1], args.against, args.times)
    elif " over " in columns[0].title:
        curves(axes, rows, columns[0])
    else:
        lines(axes, rows, columns)
    with mpl.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draw all pictures of the page."""
    for file, arguments in COMMENT.findall(PAGE.read_text(encoding="utf-8")):
        draw(PAGE.parent / file, shlex.split(arguments))


if __name__ == "__main__":
    main()
