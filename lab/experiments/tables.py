"""Print tables of records, and update the tables of docs/records.md.

    python -m lab.experiments.tables RECORD... --by KEY... --show COLUMN...   # print one table
    python -m lab.experiments.tables --write                                  # update all tables of the page

A cell is the mean ± the standard deviation over seeds. COLUMN is ``[TITLE=]FIGURE[*FACTOR][:DIGITS]``. A FIGURE
with dots is nested in the run, as in ``grids.4x4.0``. ``curve@250`` is a curve's height at 250, interpolated. Runs
with a seed of 100 or more chose learning rates and are not shown.

``--against ROW`` compares the last column with another row's, seed by seed, since runs of a seed share their data.
It adds the mean difference with its 95 % interval, and p (``lab/experiments/statistics.py``). p is for one comparison:
if you read many, require p below 0.05 divided by their number.
"""

import argparse
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.experiments.statistics import CHOICE_SEED, difference, spread

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "records.md"
RESULTS = ROOT / "lab" / "experiments" / "results"
BLOCK = re.compile(r"<!-- python -m lab\.experiments\.tables (.*?) -->\n\n(.*?)\n(?=\n)", re.DOTALL)


@dataclass(frozen=True)
class Column:
    """A figure of runs, and its title and format."""

    title: str
    figure: str
    factor: float
    digits: int

    @staticmethod
    def parse(text: str) -> "Column":
        """Read ``[TITLE=]FIGURE[*FACTOR][:DIGITS]``."""
        title, _, rest = text.rpartition("=")
        rest, _, digits = rest.partition(":")
        figure, _, factor = rest.partition("*")
        return Column(title or figure, figure, float(factor or 1), int(digits or 0))

    def numbers(self, rows: Sequence[Row]) -> list[float]:
        """Return the figure, times ``factor``, of every run that has it."""
        found = [at(row, self.figure) for row in rows]
        return [self.factor * number for number in found if number is not None]

    def cell(self, rows: Sequence[Row]) -> str:
        """Return mean ± standard deviation as text, or the mean alone of a true-or-false figure."""
        numbers = self.numbers(rows)
        if numbers and isinstance(at(rows[0], self.figure), bool):
            return f"{statistics.fmean(numbers):.{self.digits}f}"
        return spread(numbers, self.digits) if numbers else ""


def at(row: Row, path: str) -> Any:
    """Return the value at a dotted path of keys and indices, or None; ``@x`` interpolates a curve."""
    path, _, place = path.partition("@")
    found: Any = row
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else (found or {}).get(key)
    return float(np.interp(float(place), *zip(*found, strict=True))) if place else found


# ------------------------------------------------------------------------------------------- rows


def groups(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple, list[Row]]:
    """Group runs by their values of ``keys``, in the order of the record."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(at(row, key) for key in keys), []).append(row)
    return found


def tuned(rows: Sequence[Row], keys: Sequence[str], figure: str) -> list[Row]:
    """Return the runs at each group's best rate: the lowest mean figure of the seeds that chose rates.

    Args:
        rows: Runs.
        keys: Keys that define a group.
        figure: Name of the figure; the mean of "steps" is geometric.
    """
    scale = math.log2 if figure == "steps" else float

    def score(runs: Sequence[Row]) -> float:
        return statistics.fmean(scale(run[figure]) for run in runs)

    found = []
    for own in groups(rows, keys).values():
        tried = groups([row for row in own if row["seed"] >= CHOICE_SEED], ["lr"])
        if tried:
            (best,) = min(tried, key=lambda lr: score(tried[lr]))
            found += [row for row in own if row["lr"] == best]
    return found


def unfold(rows: Sequence[Row], paths: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each key of a dictionary in a run, with the key as ``each`` and its value added.

    Args:
        rows: Runs.
        paths: Paths of dictionaries with equal keys. A value that is no dictionary is named by its path.
    """
    for row in rows:
        for key in at(row, paths[0]):
            more: Row = {"each": key}
            for path in paths:
                value = at(row, path)[key]
                more |= value if isinstance(value, dict) else {path.rpartition(".")[2]: value}
            yield row | more


def select(record: str, args: argparse.Namespace) -> list[Row]:
    """Return the runs of a record that the arguments ask for."""
    path = Path(record) if record.endswith(".json") else RESULTS / f"{record}.json"
    rows = json.loads(path.read_text())["runs"]
    for condition in args.where:
        key, _, allowed = condition.partition("=")
        rows = [row for row in rows if str(at(row, key)) in allowed.split("|")]
    keys = [key for key in args.by if key not in ("lr", "each")]
    rows = tuned(rows, keys, args.tuned) if args.tuned else rows
    rows = [row for row in rows if row["seed"] < CHOICE_SEED]
    return list(unfold(rows, args.each)) if args.each else rows


# ----------------------------------------------------------------------------------------- tables


def by_seed(column: Column, rows: Sequence[Row], logarithm: bool) -> dict[int, float]:
    """Return each seed's mean of a figure over records and rates, or the mean of its base-2 logarithm."""
    found = {seed: column.numbers(own) for (seed,), own in groups(rows, ["seed"]).items()}
    return {
        seed: statistics.fmean(map(math.log2, numbers) if logarithm else numbers) for seed, numbers in found.items()
    }


def compared(column: Column, own: Sequence[Row], base: Sequence[Row], times: bool) -> list[str]:
    """Return two cells that compare runs: the difference (or how many times fewer), and p."""
    first, second = (by_seed(column, rows, times) for rows in (own, base))
    seeds = sorted(first.keys() & second.keys())
    found = difference([first[seed] for seed in seeds], [second[seed] for seed in seeds])
    numbers = (found.mean, found.low, found.high)
    if times:
        middle, high, low = (f"{2**-number:.2f}" for number in numbers)
    else:
        middle, low, high = (f"{number:+.{column.digits}f}" for number in numbers)
    return [f"{middle} ({low} to {high})", found.p_text]


def table(args: argparse.Namespace) -> str:
    """Return the table that the arguments ask for.

    Raises:
        SystemExit: If ``--against`` names no row.
    """
    own = groups([row for record in args.records for row in select(record, args)], args.by)
    columns = [Column.parse(text) for text in args.show]
    heads = [*args.by, "seeds", *(column.title for column in columns)]
    base = None
    if args.against:
        named = {", ".join(map(str, key)): runs for key, runs in own.items()}
        if args.against not in named:
            raise SystemExit(f"error: --against must be one of {[*named]}, got {args.against!r}")
        base = named[args.against]
        what = "times as fast as" if args.times else f"{columns[-1].title}: difference to"
        heads += [f"{what} {args.against} (95 %)", "p"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for key, runs in own.items():
        cells = [*map(str, key), str(len({run["seed"] for run in runs}))]
        cells += [column.cell(runs) for column in columns]
        if base is not None:
            cells += ["", ""] if runs is base else compared(columns[-1], runs, base, args.times)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("records", nargs="*", help="files, or names in lab/experiments/results")
    for option, value, what in (
        ("--by", "KEY", "a row for each combination of values"),
        ("--show", "COLUMN", "figures"),
        ("--where", "KEY=VALUE|VALUE", "runs with one of the values"),
        ("--each", "PATH", "a row for each key of dictionaries in a run"),
    ):
        add(option, nargs="+", default=[], metavar=value, help=what)
    add("--tuned", metavar="FIGURE", help="the rate with the lowest mean of the seeds that chose it")
    add("--against", metavar="ROW", help="compare the last column with that of this row")
    add("--times", action="store_true", help="compare ratios: how many times fewer")
    add("--write", action="store_true", help="print all tables of docs/records.md anew, in place")
    args = parser.parse_args(arguments)
    if args.write == bool(args.records):
        parser.error("pass either records or --write")
    return args


def rewrite(page: str) -> str:
    """Return a page with every table rebuilt by the command in the comment above it."""

    def block(match: re.Match[str]) -> str:
        printed = table(parse(shlex.split(match[1])))
        return f"<!-- python -m lab.experiments.tables {match[1]} -->\n\n{printed}\n"

    return BLOCK.sub(block, page)


def main() -> None:
    """Print a table, or update the page."""
    args = parse(None)
    if args.write:
        PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(args))


if __name__ == "__main__":
    main()
