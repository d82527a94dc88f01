"""The questions of PLAN.md: make the runs that answer one, as far as they are missing.

    python -m experiments.plan exact [--seconds 3600] [--jobs 1]
    python -m experiments.plan_results  # what there is, and what was decided

A question compares two contestants seed by seed: its number is the mean over the question's cells of the
difference of what a run is measured by. A cell is a task at each contestant's own learning rate, or at the
geometric middle of the two. All contestants of a task are tuned together (``tuning.py``) before the first
reported run. Runs are recorded one by one, in results/plan_<task>.json, seed after seed; the same
command continues, on any machine.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.budget import UNFINISHED, Budget, add_seconds
from experiments import plateau, vision
from experiments.longhorn_changes import CHANGES
from experiments.records import CHOICE_SEED, Record, Row, product, run_all, select
from experiments.tuning import Score, best_rate, missing_trials

Rate = Literal["own", "middle"]

# ------------------------------------------------------------------------------------------ tasks

IMAGES = dataclasses.replace(
    vision.EXPERIMENTS["fractals"],
    models={
        **vision.MODELS,
        "ViL, averaged tokens": ["--model.name", "both_none_diagonal"],
    },
)
TIMES = " x "  # "DeiT x 4" makes 4 times the steps


def train_images(contestant: str, lr: float, seed: int) -> Row:
    """Train on fractals, for a multiple of the steps if the name says so.

    Returns:
        The figures of ``vision.train_and_score``; losses that are not finite are None.
    """
    model, _, times = contestant.partition(TIMES)
    settings = dataclasses.replace(IMAGES, steps=IMAGES.steps * int(times or 1))
    row = vision.train_and_score(settings, model, *IMAGES.images_per_class, lr, seed)
    losses = {name: row[name] for name in ("loss", "train_loss")}
    return row | {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}


@dataclass(frozen=True)
class Task:
    """What contestants are trained to do, and what a run is measured by."""

    run: Callable[..., Row]
    """Returns the figures of a run, given contestant, lr and seed."""
    contestants: tuple[str, ...]
    """That are tuned, together."""
    rates: tuple[float, ...]
    """Grid of learning rates."""
    tuning_seeds: tuple[int, ...]
    """Of the runs that choose rates, which are not reported."""
    number: Callable[[Row], float]
    """What a run is measured by: lower is better."""
    settings: dict[str, Any]
    """For the record."""

    def score(self, trial: Sequence[Row]) -> Score:
        """Return what a trial is judged by: the mean number, and the training loss among equals."""
        losses = [_finite(row["train_loss"]) for row in trial]
        return statistics.fmean(map(self.number, trial)), statistics.fmean(losses)

    def scores(self, rows: Sequence[Row]) -> dict[str, dict[float, Score]]:
        """Return the scores of every contestant's finished trials, by rate."""
        found: dict[str, dict[float, Score]] = {name: {} for name in self.contestants}
        tried = [row for row in rows if row["seed"] in self.tuning_seeds]
        for name, own in found.items():
            for rate in dict.fromkeys(row["lr"] for row in select(tried, contestant=name)):
                trial = select(tried, contestant=name, lr=rate)
                if len(trial) == len(self.tuning_seeds):
                    own[rate] = self.score(trial)
        return found

    def trials(self, rows: Sequence[Row]) -> list[Row]:
        """Return the next runs of the tuning, given those made; none once all are tuned."""
        missing = missing_trials(self.scores(rows), self.rates)
        return [
            run
            for name, rates in missing.items()
            for run in product(contestant=[name], lr=rates, seed=self.tuning_seeds)
        ]

    def chosen(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the rate of every contestant, by its name without a multiple of the steps.

        Raises:
            ValueError: the tuning is not over.
        """
        if self.trials(rows):
            raise ValueError(f"no rates are chosen yet of {', '.join(self.contestants)}")
        return {base(name): best_rate(own) for name, own in self.scores(rows).items()}


def base(contestant: str) -> str:
    """Return the name of a contestant without the multiple of the steps."""
    return contestant.partition(TIMES)[0]


def _log_steps(row: Row) -> float:
    return math.log2(row["steps"])


def _loss(row: Row) -> float:
    return _finite(row["loss"])


def _finite(loss: float | None) -> float:
    return math.inf if loss is None else loss


PEERS = ("deltanet", "linear_attention", "mamba")
FORMS = ("longhorn", "longhorn_exact")
CHANGED = tuple(f"longhorn+{change}" for change in CHANGES)
MULTIPLES = (1, 2, 4, 8)
TUNED_AT = 4  # multiple of the steps at which DeiT's rate is chosen


def _recall(setting: str, contestants: tuple[str, ...]) -> Task:
    return Task(
        run=partial(plateau.run, setting),
        contestants=contestants,
        rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        tuning_seeds=(CHOICE_SEED, CHOICE_SEED + 1, CHOICE_SEED + 2),
        number=_log_steps,
        settings=dataclasses.asdict(plateau.SETTINGS[setting])
        | {"window": plateau.WINDOW, "times": plateau.TIMES, "warmup": plateau.WARMUP},
    )


TASKS = {
    "short": _recall("short", (*FORMS, *PEERS, *CHANGED)),
    "long": _recall("long", (*FORMS, *PEERS)),
    "fractals": Task(
        run=train_images,
        contestants=("ViL", "ViM", "ViL, averaged tokens", f"DeiT{TIMES}{TUNED_AT}"),
        rates=(1e-3, 2e-3, 4e-3, 8e-3),
        tuning_seeds=(CHOICE_SEED, CHOICE_SEED + 1),
        number=_loss,
        settings=dataclasses.asdict(IMAGES),
    ),
}

# -------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Cell:
    """Where a pair is compared."""

    task: str
    rate: Rate = "own"


@dataclass(frozen=True)
class Pair:
    """Two contestants that are compared, and the seeds."""

    first: str
    second: str
    cells: tuple[Cell, ...]
    seeds: range

    def runs(self, tuned: "Tuned", cell: Cell, seed: int) -> list[Row]:
        """Return the runs of the first and the second in a cell with a seed."""
        names = self.names(tuned)
        rates = [tuned.rates[cell.task][name] for name in names]
        if cell.rate == "middle":
            rates = [float(f"{math.sqrt(rates[0] * rates[1]):.3g}")] * 2
        return [
            {"contestant": name, "lr": rate, "seed": seed}
            for name, rate in zip(names, rates, strict=True)
        ]

    def names(self, tuned: "Tuned") -> tuple[str, str]:
        """Return the two contestants, the best change by its name."""
        return tuned.best_change if self.first == BEST_CHANGE else self.first, self.second


@dataclass(frozen=True)
class Curve:
    """How many times the steps of one contestant another needs for its loss."""

    first: str
    second: str
    task: str
    multiples: tuple[int, ...]
    seeds: range

    def runs(self, tuned: "Tuned", seed: int) -> list[Row]:
        """Return the runs with a seed: the first, and the second at every multiple."""
        names = [self.first, *(f"{self.second}{TIMES}{m}" for m in self.multiples)]
        rates = tuned.rates[self.task]
        return [{"contestant": name, "lr": rates[base(name)], "seed": seed} for name in names]


@dataclass(frozen=True)
class Tuned:
    """What the tuning of tasks chose."""

    rates: dict[str, dict[str, float]]
    """Learning rates by task and contestant."""
    best_change: str | None
    """Of ``CHANGED`` the one with the best score in recall of short sequences, if those were tuned."""

    @staticmethod
    def of(rows: Mapping[str, Sequence[Row]]) -> "Tuned":
        """Read the choices off the runs of tasks.

        Raises:
            ValueError: the tuning of a task is not over.
        """
        rates = {name: TASKS[name].chosen(own) for name, own in rows.items()}
        if "short" not in rows:
            return Tuned(rates, None)
        scores = TASKS["short"].scores(rows["short"])
        return Tuned(rates, min(CHANGED, key=lambda name: min(scores[name].values())))


BEST_CHANGE = "the best change"
OWN = (Cell("short"), Cell("long"))
QUESTIONS: dict[str, tuple[Pair | Curve, ...]] = {
    "exact": (
        Pair(
            "longhorn_exact",
            "longhorn",
            (*OWN, Cell("short", "middle"), Cell("long", "middle")),
            range(24),
        ),
    ),
    "peers": tuple(Pair("longhorn", peer, OWN, range(24)) for peer in PEERS),
    "vim": (Pair("ViL", "ViM", (Cell("fractals"),), range(10)),),
    "deit": (Curve("ViL", "DeiT", "fractals", MULTIPLES, range(6)),),
    "averaging": (Pair("ViL, averaged tokens", "ViL", (Cell("fractals"),), range(10)),),
    "change": (Pair(BEST_CHANGE, "longhorn", (Cell("short"),), range(32)),),
}


def tasks_of(question: str) -> list[str]:
    """Return the tasks that a question has cells in."""
    found: list[str] = []
    for part in QUESTIONS[question]:
        found += [part.task] if isinstance(part, Curve) else [cell.task for cell in part.cells]
    return list(dict.fromkeys(found))


def reported(question: str, tuned: Tuned) -> dict[str, list[Row]]:
    """Return the runs that a question needs, by task, seed after seed, each once."""
    parts = QUESTIONS[question]
    found: dict[str, list[Row]] = {name: [] for name in tasks_of(question)}
    for seed in range(max(part.seeds.stop for part in parts)):
        for part in (part for part in parts if seed in part.seeds):
            if isinstance(part, Curve):
                found[part.task] += part.runs(tuned, seed)
            else:
                for cell in part.cells:
                    found[cell.task] += part.runs(tuned, cell, seed)
    return {
        name: [run for i, run in enumerate(runs) if run not in runs[:i]]
        for name, runs in found.items()
    }


# ------------------------------------------------------------------------------------------- runs


def record_path(task: str) -> Path:
    """Return the file of a task's runs."""
    return vision.RESULTS / f"plan_{task}.json"


def open_record(task: str) -> Record:
    """Open the record of a task, or begin it."""
    return Record(record_path(task), TASKS[task].settings, in_pieces=True)


def execute(question: str, records: Mapping[str, Record], jobs: int, budget: Budget) -> int:
    """Make the runs that a question lacks, tuning first; return how many are left, at least."""
    for name, record in records.items():
        task = TASKS[name]
        while trials := task.trials(record.rows):
            left = run_all(record, task.run, trials, jobs, budget=budget)
            if left:
                return left
    tuned = Tuned.of({name: record.rows for name, record in records.items()})
    return sum(
        run_all(records[name], TASKS[name].run, runs, jobs, budget=budget)
        for name, runs in reported(question, tuned).items()
    )


def main() -> int:
    """Make the runs of a question as far as there is time, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    add_seconds(parser)
    args = parser.parse_args()
    records = {name: open_record(name) for name in tasks_of(args.question)}
    left = execute(args.question, records, args.jobs, Budget(args.seconds))
    return UNFINISHED if left else 0


if __name__ == "__main__":
    sys.exit(main())
