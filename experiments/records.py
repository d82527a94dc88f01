"""Records of experiments: runs, each with its seed and figures, in one JSON file that can be continued.

A record names the command and the versions, each run its commit and device. The record is written after every run, so
that the same command finishes what an interrupted one began; with other settings or versions it refuses.
"""

import itertools
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.provenance import environment
from vil.training.files import write_text

Row = dict[str, Any]


class Record:
    """The runs of one experiment."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open a record, or begin it.

        Args:
            path: JSON file, read if it exists.
            settings: What all runs share.

        Raises:
            SystemExit: the file holds runs of other settings or versions.
        """
        self.path = path
        versions = environment()
        self.origin = {name: versions.pop(name) for name in ("device", "commit")}
        self.head = {
            "command": f"python -m experiments.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}".strip(),
            "environment": versions,
            "settings": json.loads(json.dumps(settings)),
        }
        self.rows: list[Row] = []
        if path.exists():
            content = json.loads(path.read_text())
            for part in ("settings", "environment"):
                if content[part] != self.head[part]:
                    sys.exit(f"{path} has {part} {content[part]}, now they are {self.head[part]}")
            self.rows = content["runs"]

    def missing(self, runs: Iterable[Row]) -> list[Row]:
        """Return the runs that are not in the record yet."""
        return [run for run in runs if not any(run.items() <= row.items() for row in self.rows)]

    def add(self, row: Row) -> None:
        """Add a run and write the file."""
        self.rows.append(row | self.origin)
        write_text(self.path, dump(self.head, self.rows))


def dump(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return a record as JSON, a line for each run."""
    ordered = sorted(rows, key=lambda row: json.dumps(row))
    lines = ",\n".join("  " + json.dumps(row) for row in ordered)
    return json.dumps(head, indent=1)[:-2] + f',\n "runs": [\n{lines}\n ]\n}}\n'


def run_all(
    record: Record,
    function: Callable[..., Row],
    runs: Iterable[Row],
    jobs: int,
    threads: int = 1,
    budget: Budget | None = None,
) -> int:
    """Add the missing runs to a record.

    Args:
        record: Receives each run with its figures.
        function: Returns the figures of a run, given it as keyword arguments; importable by name.
        runs: What distinguishes each run; distinct from each other.
        jobs: Runs at a time, each in a process of its own.
        threads: Threads of each.
        budget: No run is begun once it is used up.

    Returns:
        How many runs are missing still.
    """
    missing = record.missing(runs)
    queue, futures, number = list(missing), {}, 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_begin, initargs=(threads,)
    ) as pool:
        while True:
            while queue and len(futures) < jobs and (budget is None or budget.left):
                run = queue.pop(0)
                futures[pool.submit(function, **run)] = run
            if not futures:
                return len(queue)
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                row = futures.pop(future) | future.result()
                record.add(row)
                number += 1
                print(f"{number}/{len(missing)}", json.dumps(row), flush=True)


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)


def product(**axes: Sequence[Any]) -> list[Row]:
    """Return a run for every combination of values."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """Return the rows that have the given values."""
    return [row for row in rows if where.items() <= row.items()]
