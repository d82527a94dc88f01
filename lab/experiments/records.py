"""Keep the runs of an experiment, each with its seed and figures, in one JSON file that can be resumed.

A record names the command and the versions, each run its commit and device. The file is written after every run,
so you can resume by repeating the command. A command with other settings or versions is refused.
"""

import itertools
import json
import multiprocessing
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks.budget import Budget
from lab.benchmarks.provenance import environment
from vil.training.files import write_text

Row = dict[str, Any]


class Record:
    """The runs of one experiment."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open a record, or create it.

        Args:
            path: JSON file, read if it exists.
            settings: Settings that all runs share.

        Raises:
            SystemExit: If the file holds runs of other settings or versions.
        """
        self.path = path
        versions = environment()
        self.origin = {name: versions.pop(name) for name in ("device", "commit")}
        self.head = {
            "command": f"python -m lab.experiments.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".strip(),
            "environment": versions,
            "settings": json.loads(json.dumps(settings)),
        }
        self.rows: list[Row] = []
        if path.exists():
            content = json.loads(path.read_text())
            for part in ("settings", "environment"):
                if content[part] != self.head[part]:
                    sys.exit(f"error: {path} has {part} {content[part]}, not {self.head[part]}")
            self.rows = content["runs"]

    def missing(self, runs: Iterable[Row]) -> list[Row]:
        """Return the runs that are not in the record yet."""
        return [run for run in runs if not any(run.items() <= row.items() for row in self.rows)]

    def add(self, row: Row) -> None:
        """Add a run and write the file."""
        self.rows.append(row | self.origin)
        write_text(self.path, dump(self.head, self.rows))


def dump(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return a record as JSON, with one line per run."""
    ordered = sorted(rows, key=lambda row: json.dumps(row))
    lines = ",\n".join("  " + json.dumps(row) for row in ordered)
    return json.dumps(head, indent=1)[:-2] + f',\n "runs": [\n{lines}\n ]\n}}\n'


def run_all(record: Record, function: Callable[..., Row], runs: Iterable[Row], jobs: int, budget: Budget) -> int:
    """Add the missing runs to a record.

    Args:
        record: Record that receives each run with its figures.
        function: Importable function from a run's keyword arguments to its figures.
        runs: Keyword arguments of each run; no two are equal.
        jobs: Number of processes; each makes one run at a time, with one thread.
        budget: No run starts once it is used up.

    Returns:
        Number of runs that are still missing.
    """
    missing = record.missing(runs)
    queue, futures, number = list(missing), {}, 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        while True:
            while queue and len(futures) < jobs and budget.left:
                run = queue.pop(0)
                futures[pool.submit(function, **run)] = run
            if not futures:
                return len(queue)
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                row = futures.pop(future) | future.result()
                record.add(row)
                number += 1
                print(f"{number}/{len(missing)}", json.dumps(row), flush=True)


def product(**axes: Sequence[Any]) -> list[Row]:
    """Return a run for every combination of values."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """Return the rows that have the given values."""
    return [row for row in rows if where.items() <= row.items()]
