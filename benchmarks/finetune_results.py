"""What ``finetune.py`` makes of its runs: the rates tried, accuracies, and differences paired by seed."""

import statistics
from collections.abc import Sequence

from comparisons import Paired, beyond_noise
from finetune import FINE_TUNED, SCRATCH, STARTS
from records import CHOICE_SEED, Row, select, spread, values

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
    lines = ["| | top-1 | loss |", "|---|---|---|"]
    for arm in arms(rows):
        top1, loss = (values(rows, figure, **arm) for figure in ("top1", "loss"))
        lines.append(f"| {title(arm)} | {spread(top1)} | {spread(loss, 3)} |")
    return "\n".join(lines)


def differences(rows: Sequence[Row]) -> list[Paired]:
    """Compare fine-tuning with training from scratch, seed by seed: each setting with each."""
    found = arms(rows)
    return [
        Paired(
            "top-1",
            title(first),
            title(second),
            values(rows, "top1", **first),
            values(rows, "top1", **second),
        )
        for first in select(found, start=FINE_TUNED)
        for second in select(found, start=SCRATCH)
    ]


def differences_table(compared: Sequence[Paired]) -> str:
    """Return differences, judged together, as a Markdown table."""
    lines = [
        "| top-1 | difference | seeds ahead | p | exceeds the noise |",
        "|---|---|---|---|---|",
    ]
    for pair, is_found in zip(compared, beyond_noise(compared), strict=True):
        by_seed = pair.by_seed
        ahead = f"{sum(number > 0 for number in by_seed)} of {len(by_seed)}"
        lines.append(
            f"| {pair.first} less {pair.second} | {pair.difference:+.1f} ± "
            f"{statistics.stdev(by_seed):.1f} | {ahead} | {pair.p:.2g} | {'yes' if is_found else 'no'} |"
        )
    return "\n".join(lines)
