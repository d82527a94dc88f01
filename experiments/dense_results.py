"""What ``dense.py`` makes of its runs: metrics by backbone, the rates tried, and paired differences."""

from collections.abc import Sequence
from statistics import fmean

from experiments.comparisons import Paired
from experiments.dense import BACKBONES, DEIT, FOUR, OURS, RESNET, SEARCHED, TASKS
from experiments.records import CHOICE_SEED, Row, select, spread, values

TITLES = {"segment": "mean IoU", "detect": "AP50"}


def reported(rows: Sequence[Row], task: str) -> list[Row]:
    """Return the rows of a task that did not choose a rate."""
    return [row for row in select(rows, task=task) if row["seed"] != CHOICE_SEED]


def metrics_table(rows: Sequence[Row], task: str) -> str:
    """Return the metric, training loss, parameters and CPU seconds of every backbone, over seeds."""
    metric = TASKS[task]
    extra = ["ap"] if task == "detect" else []
    heads = [TITLES[task], *(name.upper() for name in extra), "training loss", "rate"]
    heads += ["parameters of the backbone", "CPU seconds"]
    lines = [f"| backbone | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in _names(rows, task):
        found = select(reported(rows, task), backbone=name)
        cells = [spread([100 * v for v in values(found, figure)]) for figure in (metric, *extra)]
        cells += [spread(values(found, "loss"), 3), f"{found[0]['lr']:g}"]
        cells += [f"{found[0]['parameters']:,}", spread(values(found, "cpu_seconds"), 0)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _names(rows: Sequence[Row], task: str) -> list[str]:
    """Return the backbones that a task is reported of."""
    return [name for name in BACKBONES if select(reported(rows, task), backbone=name)]


def search_table(rows: Sequence[Row]) -> str:
    """Return the metric of the seed that chose rates, by rate."""
    tried = select(rows, seed=CHOICE_SEED)
    rates = sorted({row["lr"] for row in tried})
    lines = [f"| | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for name in dict.fromkeys(row["backbone"] for row in tried):
        found = [select(tried, backbone=name, lr=rate)[0] for rate in rates]
        cells = [f"{100 * row[TASKS[SEARCHED]]:.1f}" for row in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(rows: Sequence[Row]) -> list[Paired]:
    """Compare our pyramid from the last block with every other backbone, seed by seed."""
    return [
        Paired(
            f"{task}: {TITLES[task]}",
            OURS,
            other,
            *(
                [100 * v for v in values(reported(rows, task), TASKS[task], backbone=name)]
                for name in (OURS, other)
            ),
        )
        for task in TASKS
        for other in _names(rows, task)
        if other != OURS
    ]


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return the means of the metrics in percent by task and backbone, and how large backbones are."""
    ours, resnet = (select(rows, backbone=name)[0]["parameters"] for name in (OURS, RESNET))
    sizes = {"millions": f"{ours / 1e6:.2f}", "times": f"{resnet / ours:.0f}"}
    short = {OURS: "last", FOUR: "four", DEIT: "deit", RESNET: "resnet"}
    return sizes | {
        f"{task}_{short[name]}": f"{100 * fmean(values(reported(rows, task), TASKS[task], backbone=name)):.1f}"
        for task in TASKS
        for name in _names(rows, task)
    }
