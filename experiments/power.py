"""What the questions of PLAN.md can see, and what they cost, before they are run.

    python -m experiments.power  # prints the tables of PLAN.md

The smallest effect that a test finds with 80 % probability, at the level that the first of all of the
plan's tests has to reach (Holm): by simulation. Per seed and cell the logarithms of two contestants' steps
are drawn independently, with the deviation that runs showed, censored at the limit; in images the
difference of losses, with the deviation of pairs that are recorded. The simulated test is the t-test of
the seeds' numbers, which the sign-flip test follows closely from ten seeds on.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import ttest_1samp

from experiments.comparisons import LEVEL
from experiments.plan import (
    IMAGES,
    QUESTIONS,
    TASKS,
    TIMES,
    Curve,
    Pair,
    base,
)
from experiments.plateau import SETTINGS

POWER = 0.8
SIMULATED = 4000  # experiments: a share of 0.8 is then within 0.013

# ------------------------------------------------------------------------------- what was measured


@dataclass(frozen=True)
class Recall:
    """Steps to leave the plateau, of pilot runs with seeds 900 to 902 at rates of 4.6e-3 and 1e-2."""

    median: float
    deviation: float
    """Of the logarithm to base 2, from seed to seed at one rate."""
    ms_per_step: float
    """CPU time on one thread of a Xeon that others used, too."""


PILOT = {"short": Recall(430, 0.7, 19.5), "long": Recall(900, 0.9, 38.0)}
LOSS_DEVIATION = 0.05  # of ViM less ViL with seeds 0 to 2, vision_fractals.json
MULTIPLE_DEVIATION = (
    0.7  # octaves: of DeiT's loss with 3 times the steps on fractals, over what doubling brings
)
IMAGE_MS = {"ViL": 136.0, "ViM": 169.0, "ViL, averaged tokens": 136.0, "DeiT": 90.0}
EXTRA_TRIALS = 2  # on top of the grid, as a guess

# ------------------------------------------------------------------------------------------ power


def tests() -> int:
    """Return how many tests the plan has, which are judged together."""
    return sum(isinstance(part, Pair) for parts in QUESTIONS.values() for part in parts)


def steps_differences(effect: float, tasks: list[str], seeds: int) -> np.ndarray:
    """Simulate the numbers of seeds, (SIMULATED, seeds): mean over cells of the log ratios of steps.

    Args:
        effect: How much faster the first is in truth, octaves.
        tasks: Of each cell.
        seeds: Pairs of an experiment.
    """
    rng = np.random.default_rng(0)
    total = np.zeros((SIMULATED, seeds))
    for name in tasks:
        pilot = PILOT[name]
        noise = rng.normal(0, pilot.deviation, (2, SIMULATED, seeds))
        steps = math.log2(pilot.median) + noise
        steps[0] -= effect / 2
        steps[1] += effect / 2
        steps = np.minimum(steps, math.log2(SETTINGS[name].limit))
        total += steps[1] - steps[0]
    return total / len(tasks)


def loss_differences(effect: float, seeds: int) -> np.ndarray:
    """Simulate the numbers of seeds, (SIMULATED, seeds): differences of losses."""
    return np.random.default_rng(0).normal(effect, LOSS_DEVIATION, (SIMULATED, seeds))


def power(differences: np.ndarray, level: float) -> float:
    """Return the share of experiments (axis 0) whose numbers (axis 1) differ from 0 at a level."""
    return float((ttest_1samp(differences, 0, axis=1).pvalue <= level).mean())


def smallest_effect(part: Pair) -> float:
    """Return the smallest effect that is found with a probability of ``POWER``: octaves, or loss."""
    tasks, seeds, level = [cell.task for cell in part.cells], len(part.seeds), LEVEL / tests()
    recall = tasks[0] in SETTINGS
    effect, step = 0.0, 0.05 if recall else 0.005
    while True:
        effect += step
        numbers = (
            steps_differences(effect, tasks, seeds) if recall else loss_differences(effect, seeds)
        )
        if power(numbers, level) >= POWER:
            return effect


def interval_width(part: Curve) -> float:
    """Return how many octaves lie between the lowest and the highest seed's number, in the mean."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(0, MULTIPLE_DEVIATION, (SIMULATED, len(part.seeds)))
    return float(np.ptp(drawn, axis=1).mean())


# ------------------------------------------------------------------------------------------- cost


def seconds(task: str, contestant: str) -> float:
    """Return the CPU seconds that a reported run is expected to take."""
    if task in PILOT:
        pilot = PILOT[task]
        drawn = np.random.default_rng(0).normal(math.log2(pilot.median), pilot.deviation, SIMULATED)
        return np.minimum(2**drawn, SETTINGS[task].limit).mean() * pilot.ms_per_step / 1e3
    times = int(contestant.partition(TIMES)[2] or 1)
    return IMAGES.steps * times * IMAGE_MS[base(contestant)] / 1e3


def tuning_hours(task: str) -> float:
    """Return the CPU hours that the tuning of a task takes at most; in recall, where nobody leaves."""
    found = TASKS[task]
    trials = len(found.rates) + EXTRA_TRIALS
    one = sum(seconds(task, name) for name in found.contestants)
    if task in PILOT:
        one = len(found.contestants) * SETTINGS[task].limit * PILOT[task].ms_per_step / 1e3
    return trials * len(found.tuning_seeds) * one / 3600


def reported_hours(question: str) -> float:
    """Return the CPU hours of a question's own runs, as if no other question shared any."""
    total = 0.0
    for part in QUESTIONS[question]:
        if isinstance(part, Curve):
            names = [part.first, *(f"{part.second}{TIMES}{m}" for m in part.multiples)]
            one = sum(seconds(part.task, name) for name in names)
        else:
            one = sum(
                seconds(c.task, name) for c in part.cells for name in (part.first, part.second)
            )
        total += len(part.seeds) * one / 3600
    return total


# ---------------------------------------------------------------------------------------- tables


def effect_text(part: Pair | Curve) -> str:
    """Tell what a question can see."""
    if isinstance(part, Curve):
        return f"interval of about {2 ** interval_width(part):.1f} times, end to end"
    effect = smallest_effect(part)
    return (
        f"{2**effect:.2f} times the steps"
        if part.cells[0].task in PILOT
        else f"{effect:.3f} of loss"
    )


def table() -> str:
    """Return a row for each comparison: contestants, cells, seeds, smallest effect, hours."""
    lines = [
        "| question | first | second | cells | seeds | smallest effect at 80 % | CPU hours |",
        "|---" * 7 + "|",
    ]
    for question, parts in QUESTIONS.items():
        for i, part in enumerate(parts):
            cells = (
                "a curve"
                if isinstance(part, Curve)
                else ", ".join(f"{cell.task} ({cell.rate})" for cell in part.cells)
            )
            hours = f"{reported_hours(question):.1f}" if i == 0 else ""
            seeds = f"{part.seeds.start} to {part.seeds.stop - 1}"
            cells = (
                f"`{question}`",
                part.first,
                part.second,
                cells,
                seeds,
                effect_text(part),
                hours,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tuning_table() -> str:
    """Return a row for each task: contestants, grid, seeds, hours."""
    lines = ["| task | tuned together | grid | seeds | CPU hours, at most |", "|---" * 5 + "|"]
    for name, task in TASKS.items():
        cells = (
            name,
            ", ".join(task.contestants),
            ", ".join(f"{rate:g}" for rate in task.rates),
            ", ".join(map(str, task.tuning_seeds)),
            f"{tuning_hours(name):.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> str:
    """Return both tables and the sum of the hours."""
    hours = sum(map(tuning_hours, TASKS)) + sum(map(reported_hours, QUESTIONS))
    return f"{table()}\n\n{tuning_table()}\n\nTogether about {hours:.1f} CPU hours, runs that questions share counted for each."


if __name__ == "__main__":
    print(tables())
