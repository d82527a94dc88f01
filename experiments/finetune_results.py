"""What ``finetune.py`` makes of its runs: the rates tried, accuracies, and differences paired by seed."""

import statistics
from collections.abc import Sequence

from experiments.comparisons import Paired, beyond_noise
from experiments.finetune import FINE_TUNED, SCRATCH, STARTS
from experiments.records import CHOICE_SEED, Row, select, spread, values

FIGURES = {"top1": (1, 1), "loss": (3, -1)}  # decimals, and the sign of what is better
Arm = dict[str, str | float | None]


def arms(rows: Sequence[Row]) -> list[Arm]:
    """Return the settings of reported runs, each once: the recipe's, then the chosen."""
    stated, *_ = (row for row in rows if row["start"] == SCRATCH and row["layer_decay"] is not None)
    found = [
        {"start": start, **{key: stated[key] for key in ("lr", "layer_decay")}} for start in STARTS
    ]
    for start in STARTS:
        for row in select(rows, start=start):
            arm = {key: row[key] for key in found[0]}
            found += [arm] if arm not in found else []
    return found


def title(arm: Arm) -> str:
    """Name the settings."""
    decay = arm["layer_decay"]
    return f"{arm['start']}, rate {arm['lr']:g}" + (", no layer decay" if decay is None else "")


def search_table(rows: Sequence[Row]) -> str:
    """Return loss and top-1 of the seed that chose rates, by rate."""
    tried = select(rows, seed=CHOICE_SEED)
    rates = sorted({row["lr"] for row in tried})
    lines = [f"| | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for start in STARTS:
        found = [select(tried, start=start, lr=rate)[0] for rate in rates]
        cells = [f"{row['loss']:.3f} ({row['top1']:.1f})" for row in found]
        lines.append(f"| {start} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_table(rows: Sequence[Row]) -> str:
    """Return top-1 and loss of every setting, mean ± deviation over seeds."""
    lines = [f"| | {' | '.join(FIGURES)} |", "|---" * (len(FIGURES) + 1) + "|"]
    for arm in arms(rows):
        cells = [
            spread(values(rows, figure, **arm), digits) for figure, (digits, _) in FIGURES.items()
        ]
        lines.append(f"| {title(arm)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(rows: Sequence[Row]) -> list[Paired]:
    """Compare fine-tuning with training from scratch, seed by seed: each setting with each."""
    found = arms(rows)
    return [
        Paired(
            figure,
            title(first),
            title(second),
            values(rows, figure, **first),
            values(rows, figure, **second),
        )
        for figure in FIGURES
        for first in select(found, start=FINE_TUNED)
        for second in select(found, start=SCRATCH)
    ]


def differences_table(compared: Sequence[Paired]) -> str:
    """Return differences, judged together, as a Markdown table."""
    lines = [
        "| what | difference | better with | p | exceeds the noise |",
        "|---|---|---|---|---|",
    ]
    for pair, is_found in zip(compared, beyond_noise(compared), strict=True):
        digits, sign = FIGURES[pair.what]
        better = sum(sign * number > 0 for number in pair.by_seed)
        cells = (
            f"{pair.what}: {pair.first} less {pair.second}",
            f"{pair.difference:+.{digits}f} ± {statistics.stdev(pair.by_seed):.{digits}f}",
            f"{better} of {len(pair.by_seed)} seeds",
            f"{pair.p:.2g}",
            "yes" if is_found else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
