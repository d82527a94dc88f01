"""The plan's questions as docs/results.md answers them: a sentence and a picture each.

What is said follows ``plan_results.judged``: found is what a test found, all judged together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.comparisons import SignFlip
from experiments.plan import BEST_CHANGE, QUESTIONS, Curve, Pair
from experiments.plan_results import Rows, judged, median_multiple, multiples, tuned_of
from experiments.plateau import SETTINGS
from experiments.records import Row, select
from experiments.vision_results import save

NAMES = {
    "longhorn": "Longhorn as the paper has it",
    "longhorn_exact": "the exact form",
    "deltanet": "DeltaNet",
    "linear_attention": "linear attention",
    "mamba": "Mamba",
    "longhorn+unit_keys": "Longhorn with keys of unit length",
    "longhorn+silu": "Longhorn with queries and keys after a SiLU",
    "longhorn+spread_steps": "Longhorn with step sizes that begin spread over a range",
    "longhorn+decay": "Longhorn with a decay before the write",
    "ViL, averaged tokens": "ViL with averaged tokens",
    BEST_CHANGE: "the best of four changes",
}


@dataclass(frozen=True)
class Answer:
    """What is said of one comparison of a question."""

    question: str
    sentence: str
    decided: bool
    complete: bool
    """All of its runs are there."""


def answers(rows: Rows) -> list[Answer]:
    """Return what is said of every comparison, in the order of the plan."""
    found = [
        _said(question, part, comparison, is_found)
        for question, part, comparison, is_found in judged(rows)
    ]
    found += [_said_of_curve(question, part, rows) for question, part in _curves()]
    return sorted(found, key=lambda answer: list(QUESTIONS).index(answer.question))


def decided_text(found: Sequence[Answer]) -> str:
    """Return a paragraph for every question of which something is decided, and its picture."""
    paragraphs = []
    for question, own in _by_question(found).items():
        said = [answer.sentence for answer in own if answer.decided]
        if said:
            paragraphs += [" ".join(said), picture_text(question)]
    return "\n\n".join(paragraphs) or "Nothing yet."


def undecided_text(found: Sequence[Answer]) -> str:
    """Return a list of the comparisons of which nothing is."""
    own = [f"- {answer.sentence}" for answer in found if not answer.decided]
    return "\n".join(own) or "Nothing: each comparison found a difference."


def undecided_pictures(found: Sequence[Answer]) -> str:
    """Return the pictures of questions that were run, and of which nothing is decided."""
    shown = [
        picture_text(question)
        for question, own in _by_question(found).items()
        if any(a.complete for a in own) and not any(a.decided for a in own)
    ]
    return "\n\n".join(shown)


def picture_text(question: str) -> str:
    """Return the line that shows a question's picture."""
    return f"![{question}: {' and '.join(_compared(question))}](images/plan_{question}.png)"


def _by_question(found: Sequence[Answer]) -> dict[str, list[Answer]]:
    return {name: [a for a in found if a.question == name] for name in QUESTIONS}


# --------------------------------------------------------------------------------------- sentences


def _said(question: str, part: Pair, found: SignFlip | None, is_found: bool) -> Answer:
    made = len(found.a) if found else 0
    first, second = (found.second, found.first) if found else (part.first, part.second)
    if found is None or made < len(part.seeds):
        said = (
            f"{_named(first)} and {NAMES.get(second, second)}: {made} of {len(part.seeds)} pairs."
        )
        return Answer(question, said, decided=False, complete=False)
    middle, (low, high) = found.difference, found.interval
    if middle < 0:  # the better is named first
        first, second, middle, low, high = second, first, -middle, -high, -low
    other = NAMES.get(second, second)
    if part.cells[0].task in SETTINGS:
        said = f"leaves recall's plateau {_figure(part, middle)} times as fast as {other}"
    else:
        said = f"has a held-out loss lower by {_figure(part, middle)} than {other}"
    figures = f"95 %: {_figure(part, low)} to {_figure(part, high)}; {made} pairs, p {found.p:.2g}"
    chance = "" if is_found else ", which chance may do"
    return Answer(question, f"{_named(first)} {said} ({figures}){chance}.", is_found, complete=True)


def _figure(part: Pair, number: float) -> str:
    return f"{2**number:.2f}" if part.cells[0].task in SETTINGS else f"{number:.3f}"


def _said_of_curve(question: str, part: Curve, rows: Rows) -> Answer:
    tuned = tuned_of(question, rows)
    found = multiples(part, tuned, rows) if tuned else []
    if len(found) < len(part.seeds):
        said = f"The steps that {part.second} needs for the loss of {part.first}"
        said = f"{said}: {len(found)} of {len(part.seeds)} seeds."
        return Answer(question, said, decided=False, complete=False)
    middle, of = median_multiple(part, found)
    said = f"{part.second} needs {middle} times the steps of {part.first} for its held-out loss"
    said = f"{said} ({of}; an estimate, and no test)."
    return Answer(question, said, decided=True, complete=True)


def _named(contestant: str) -> str:
    name = NAMES.get(contestant, contestant)
    return name[0].upper() + name[1:]


def _compared(question: str) -> list[str]:
    parts = QUESTIONS[question]
    return list(dict.fromkeys(name for part in parts for name in (part.first, part.second)))


def _curves() -> Iterator[tuple[str, Curve]]:
    for question, parts in QUESTIONS.items():
        yield from ((question, part) for part in parts if isinstance(part, Curve))


# ---------------------------------------------------------------------------------------- pictures


def draw_all(rows: Rows, folder: Path) -> None:
    """Draw a picture for every question of which a comparison is complete."""
    complete: dict[str, list[tuple[Pair, SignFlip]]] = {}
    for question, part, found, _ in judged(rows):
        if found and len(found.a) == len(part.seeds):
            complete.setdefault(question, []).append((part, found))
    for question, pairs in complete.items():
        draw_pairs(pairs, folder / f"plan_{question}.png")
    for question, part in _curves():
        tuned = tuned_of(question, rows)
        if tuned and len(multiples(part, tuned, rows)) == len(part.seeds):
            runs = [
                [select(rows[part.task], **run)[0] for run in part.runs(tuned, seed)]
                for seed in part.seeds
            ]
            draw_curve(part, runs, folder / f"plan_{question}.png")


def draw_pairs(pairs: Sequence[tuple[Pair, SignFlip]], path: Path) -> None:
    """Draw a row for each comparison: a dot for each seed, their mean, and where it is with 95 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 0.9 + 0.75 * len(pairs)), layout="constrained")
    axes = figure.subplots()
    recall = pairs[0][0].cells[0].task in SETTINGS
    shown = (lambda number: 2**number) if recall else (lambda number: number)
    for i, (_, found) in enumerate(pairs):
        numbers = sorted(found.by_seed)
        height = [i + 0.2 * ((j % 5) - 2) / 2 for j in range(len(numbers))]
        axes.plot([shown(n) for n in numbers], height, "o", color="C0", alpha=0.4, markersize=4)
        axes.plot([shown(n) for n in found.interval], [i, i], color="k", linewidth=2)
        axes.plot(shown(found.difference), i, "D", color="k", markersize=6)
    axes.axvline(shown(0), color="0.6", linewidth=1, zorder=0)
    names = [f"{found.second}\nagainst {found.first}" for _, found in pairs]
    axes.set_yticks(range(len(pairs)), names, fontsize=8)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    if recall:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axes.set_xlabel("times as fast off the plateau; a dot for each seed, the mean with 95 %")
    else:
        axes.set_xlabel("held-out loss lower by; a dot for each seed, the mean with 95 %")
    axes.grid(axis="x", alpha=0.3)
    save(figure, path)


def draw_curve(part: Curve, runs: Sequence[Sequence[Row]], path: Path) -> None:
    """Draw losses by multiples of the steps: a line of the second for each seed, and the first's range.

    Beside the held-out loss is that of training, which tells who fits.

    Args:
        part: Who is compared.
        runs: Of each seed the first's, and the second's at every multiple.
        path: Destination, PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, name in zip(
        panels, ("loss", "train_loss"), ("held-out", "training"), strict=True
    ):
        targets = [own[0][key] for own in runs]
        axes.axhspan(min(targets), max(targets), color="C0", alpha=0.3, label=part.first)
        for i, own in enumerate(runs):
            losses, label = [row[key] for row in own[1:]], None if i else part.second
            axes.plot(
                part.multiples, losses, "o-", color="C1", alpha=0.6, markersize=4, label=label
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(part.multiples, [f"{m}" for m in part.multiples])
        axes.set(xlabel=f"times the steps of {part.first}", ylabel=f"{name} loss")
        axes.grid(alpha=0.3)
    panels[0].legend()
    save(figure, path)
