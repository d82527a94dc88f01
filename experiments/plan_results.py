"""What the runs of ``plan.py`` say: how far each question is, and what was decided.

    python -m experiments.plan_results

A question is answered when all of its pairs are there, by the sign-flip test of one number for each seed.
All of the plan's tests are judged together (Holm at 5 %); one that is not answered yet counts as if it
had found nothing. So what was found is never taken back, and "no" is said only once all are answered.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence

from experiments.comparisons import SignFlip, holm
from experiments.plan import (
    QUESTIONS,
    TASKS,
    Curve,
    Pair,
    Tuned,
    record_path,
    reported,
    tasks_of,
)
from experiments.plateau import SETTINGS
from experiments.records import Row, select
from experiments.tuning import best_rate

Rows = Mapping[str, Sequence[Row]]


def load() -> dict[str, list[Row]]:
    """Return the runs of every task; none where none was made."""
    paths = {name: record_path(name) for name in TASKS}
    return {
        name: json.loads(path.read_text())["runs"] if path.exists() else []
        for name, path in paths.items()
    }


def tuned_of(question: str, rows: Rows) -> Tuned | None:
    """Return what the tuning of a question's tasks chose, None if it is not over."""
    names = tasks_of(question)
    if any(TASKS[name].trials(rows[name]) for name in names):
        return None
    return Tuned.of({name: rows[name] for name in names})


# ----------------------------------------------------------------------------------------- numbers


def number_of(rows: Rows, task: str, run: Row) -> float | None:
    """Return what a run is measured by, None if it was not made."""
    found = select(rows[task], **run)
    return TASKS[task].number(found[0]) if found else None


def compare(part: Pair, tuned: Tuned, rows: Rows) -> SignFlip:
    """Compare a pair over the seeds of which all runs are there: positive if the first is better."""
    firsts, seconds = [], []
    for seed in part.seeds:
        numbers = [
            [number_of(rows, cell.task, run) for run in part.runs(tuned, cell, seed)]
            for cell in part.cells
        ]
        if all(number is not None for cell in numbers for number in cell):
            first, second = zip(*numbers, strict=True)
            firsts.append(statistics.fmean(first))
            seconds.append(statistics.fmean(second))
    first, second = part.names(tuned)
    return SignFlip("", second, first, seconds, firsts)


def multiple_needed(target: float, losses: Mapping[int, float]) -> float:
    """Return the logarithm to base 2 of the multiple of the steps that reaches a loss.

    Between two multiples it is interpolated, linearly in the logarithm; what is above the target at the
    highest is given that one.

    Args:
        target: The loss to reach.
        losses: By multiple.
    """
    multiples = sorted(losses)
    for i, m in enumerate(multiples):
        if losses[m] <= target:
            before = multiples[i - 1]
            if i == 0 or math.isinf(losses[before]):
                return math.log2(m)
            share = (losses[before] - target) / (losses[before] - losses[m])
            return math.log2(before) + share * (math.log2(m) - math.log2(before))
    return math.log2(multiples[-1])


def multiples(part: Curve, tuned: Tuned, rows: Rows) -> list[float]:
    """Return the logarithm of the multiple that every seed needs of which all runs are there."""
    found = []
    for seed in part.seeds:
        target, *losses = (number_of(rows, part.task, run) for run in part.runs(tuned, seed))
        if target is not None and None not in losses:
            found.append(multiple_needed(target, dict(zip(part.multiples, losses, strict=True))))
    return found


def median_multiple(part: Curve, found: Sequence[float]) -> tuple[str, str]:
    """Return the median multiple, and of which seeds it is; a loss that was not reached needs more.

    Args:
        part: The curve.
        found: Of every seed, as of ``multiples``.
    """

    def text(number: float) -> str:
        most = part.multiples[-1]
        return f"more than {most}" if number >= math.log2(most) else f"{2**number:.1f}"

    low, middle, high = map(text, (min(found), statistics.median(found), max(found)))
    if low == high:
        return middle, f"all {len(found)} seeds"
    return middle, f"median of {len(found)} seeds, from {low} to {high}"


# ---------------------------------------------------------------------------------------- verdicts


def effect(part: Pair, found: SignFlip) -> str:
    """Return how much better the first is, and in brackets from where to where with 95 %."""
    numbers = (found.difference, *found.interval)
    if part.cells[0].task in SETTINGS:
        middle, low, high = (f"{2**number:.2f}" for number in numbers)
        return f"{middle} times as fast ({low} to {high})"
    middle, low, high = (f"{number:+.3f}" for number in numbers)
    return f"{middle} of loss ({low} to {high})"


def judged(rows: Rows) -> list[tuple[str, Pair, SignFlip | None, bool]]:
    """Return every test of the plan: question, pair, what there is of it, and whether it found something.

    Only a test with all of its pairs can have.
    """
    entries = []
    for question, parts in QUESTIONS.items():
        tuned = tuned_of(question, rows)
        for part in (part for part in parts if isinstance(part, Pair)):
            found = compare(part, tuned, rows) if tuned else None
            entries.append((question, part, found if found and found.a else None))
    complete = [c is not None and len(c.a) == len(part.seeds) for _, part, c in entries]
    ps = [c.p if done else 1.0 for (_, _, c), done in zip(entries, complete, strict=True)]
    return [(*entry, found) for entry, found in zip(entries, holm(ps), strict=True)]


def verdict_table(rows: Rows) -> str:
    """Return a row for each comparison: pairs, effect with its interval, p and what was decided."""
    lines = [
        "| question | compared | pairs | how much better the first is (95 %) | p | decided |",
        "|---" * 6 + "|",
    ]
    entries = judged(rows)
    answered = all(found and len(found.a) == len(part.seeds) for _, part, found, _ in entries)
    for question, part, found, is_found in entries:
        pairs = f"{len(found.a) if found else 0} of {len(part.seeds)}"
        names = (found.second, found.first) if found else (part.first, part.second)
        cells = [f"`{question}`", f"{names[0]} against {names[1]}", pairs]
        if found and len(found.a) == len(part.seeds):
            better = names[0] if found.difference > 0 else names[1]
            cells += [effect(part, found), f"{found.p:.2g}"]
            cells += [f"{better} is better" if is_found else "no" if answered else "open"]
        else:
            cells += ["", "", "not run yet" if not found else "not all run yet"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *map(str.strip, _curve_rows(rows))])


def _curve_rows(rows: Rows) -> list[str]:
    lines = []
    for question, parts in QUESTIONS.items():
        for part in (part for part in parts if isinstance(part, Curve)):
            tuned = tuned_of(question, rows)
            found = multiples(part, tuned, rows) if tuned else []
            cells = [f"`{question}`", f"steps of {part.second} for the loss of {part.first}"]
            cells += [f"{len(found)} of {len(part.seeds)}"]
            if len(found) == len(part.seeds):
                middle, of = median_multiple(part, found)
                cells += [f"{middle} times ({of})", "", "an estimate"]
            else:
                cells += ["", "", "not all run yet" if found else "not run yet"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


# ------------------------------------------------------------------------------------------ tables


def tuning_table(rows: Rows, task: str) -> str:
    """Return the score of every trial by contestant and rate, and what was chosen once all are tuned."""
    scores = TASKS[task].scores(rows[task])
    tuned = not TASKS[task].trials(rows[task])
    rates = sorted({rate for own in scores.values() for rate in own})
    lines = [
        f"| | {' | '.join(f'{rate:g}' for rate in rates)} | chosen |",
        "|---" * (len(rates) + 2) + "|",
    ]
    for name, own in scores.items():
        cells = [_score_text(task, own[rate][0]) if rate in own else "" for rate in rates]
        chosen = f"{best_rate(own):g}" if tuned else "not yet"
        lines.append(f"| {name} | {' | '.join(cells)} | {chosen} |")
    return "\n".join(lines)


def _score_text(task: str, score: float) -> str:
    return f"{2**score:.0f}" if task in SETTINGS else f"{score:.3f}"


def runs_table(rows: Rows, task: str) -> str:
    """Return the reported runs by contestant and rate: how well they trained, and how well they fit."""
    own = [row for row in rows[task] if row["seed"] not in TASKS[task].tuning_seeds]
    recall = task in SETTINGS
    head = ["left the plateau", "median steps"] if recall else ["held-out loss", "top-1"]
    lines = [
        f"| contestant | rate | runs | {' | '.join(head)} | training loss |",
        "|---" * (4 + len(head)) + "|",
    ]
    for name, rate in sorted({(row["contestant"], row["lr"]) for row in own}):
        runs = select(own, contestant=name, lr=rate)
        losses = [row["train_loss"] for row in runs if row["train_loss"] is not None]
        if recall:
            steps = statistics.median(row["steps"] for row in runs)
            censored = steps >= SETTINGS[task].limit
            cells = [f"{sum(row['left'] for row in runs)}", f"{'> ' * censored}{steps:.0f}"]
        else:
            cells = [
                f"{statistics.fmean(row[key] for row in runs):.{d}f}" for key, d in IMAGE_FIGURES
            ]
        loss = f"{statistics.fmean(losses):.3f}" if losses else "not finite"
        lines.append(f"| {name} | {rate:g} | {len(runs)} | {' | '.join(cells)} | {loss} |")
    return "\n".join(lines)


IMAGE_FIGURES = (("loss", 3), ("top1", 1))


def answered_runs(rows: Rows) -> dict[str, list[Row]]:
    """Return the runs of the questions that are complete, by task: the others' would show an effect."""
    found: dict[str, list[Row]] = {name: [] for name in rows}
    for question in QUESTIONS:
        tuned = tuned_of(question, rows)
        needed = reported(question, tuned) if tuned else {}
        own = {
            name: [row for run in runs for row in select(rows[name], **run)]
            for name, runs in needed.items()
        }
        if all(len(own[name]) == len(runs) for name, runs in needed.items()):
            for name, made in own.items():
                found[name] += [row for row in made if row not in found[name]]
    return found


def runs_text(rows: Rows) -> str:
    """Return the tables of every task that runs were made of, and where they were made."""
    found, answered = [], answered_runs(rows)
    for task, own in rows.items():
        if own:
            where = sorted({(row["device"], row["commit"]) for row in own})
            made = ", ".join(f"{device} at commit {commit}" for device, commit in where)
            record = f"[`plan_{task}.json`](../experiments/results/plan_{task}.json)"
            scores = "geometric means of the steps to leave" if task in SETTINGS else "losses"
            found += [f"Rates tried in `{task}`, {scores}; {len(own)} runs in {record}, on {made}:"]
            found += [tuning_table(rows, task)]
        if answered[task]:
            found += [f"Reported runs of `{task}`:", runs_table(answered, task)]
    return "\n\n".join(found) or "None was made yet."


def main() -> None:
    """Print what there is."""
    rows = load()
    print(f"{verdict_table(rows)}\n\n{runs_text(rows)}")


if __name__ == "__main__":
    main()
