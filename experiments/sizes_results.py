"""What ``sizes.py`` makes of its runs: top-1 by the number of tokens, shares of the trained one, pictures."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.comparisons import Comparison, beyond_noise
from experiments.records import Row, select, spread
from experiments.sizes import BOTH, METHODS, PLAIN
from experiments.vision_results import save

SCANS = ("ViL", "ViL exact", "ViM")
DEITS = ("DeiT", "DeiT x 3")
AT_SIZES = ("ViL, sizes", "ViL, sizes, plain")
WIDE, HIGH, FINER = "twice as wide", "twice as high", "half the stride"
AIMS = {  # percent of the top-1 at the trained size, set before anything was measured
    "digits": {"2.25": 96, "4": 96, "9": 93, "16": 85, FINER: 85},
    "fractals": {"4": 70, FINER: 85},
}


def sized(rows: Sequence[Row]) -> list[Row]:
    """Return the runs that were scored at other sizes."""
    return select(rows, part="sizes")


def factors(rows: Sequence[Row]) -> list[str]:
    """Return the numbers of tokens scored, as multiples of those in training."""
    found = {factor for row in sized(rows) for tops in row["resized"].values() for factor in tops}
    return sorted(found, key=float)


def names(rows: Sequence[Row], among: Sequence[str]) -> list[str]:
    """Return which of some models there are."""
    return [name for name in among if select(sized(rows), model=name)]


def own_method(model: str) -> str:
    """Return the method that a model is scored by in the end."""
    return BOTH if model in (*SCANS, AT_SIZES[0]) else PLAIN


def top1(row: Row, method: str, where: str) -> float | None:
    """Return the top-1 of a run on images of some kind, None if it was not scored on these."""
    if where in (WIDE, HIGH):
        return row["stretched"][{WIDE: "wide", HIGH: "high"}[where]].get(method)
    if where == FINER:
        return row.get("finer", {}).get(method)
    return row["resized"].get(method, {}).get(where)


def tops(rows: Sequence[Row], model: str, method: str, where: str) -> list[float]:
    """Return the top-1 of the seeds that were scored there."""
    found = (top1(row, method, where) for row in select(sized(rows), model=model))
    return [number for number in found if number is not None]


def shares(rows: Sequence[Row], model: str, where: str) -> list[float]:
    """Return top-1 in percent of that at the trained size, by seed."""
    chosen = select(sized(rows), model=model)
    found = [(top1(row, own_method(model), where), row["top1"]) for row in chosen]
    return [100 * number / trained for number, trained in found if number is not None]


def title(where: str) -> str:
    """Name a kind of images in a table."""
    return where if where in (WIDE, HIGH, FINER) else f"{round(float(where), 2):g} x the tokens"


def rates_table(rows: Sequence[Row]) -> str:
    """Return loss and top-1 at the trained size of the seed that chose rates, by rate."""
    tried = select(rows, part="rate")
    rates = sorted({row["lr"] for row in tried})
    lines = [f"| | {' | '.join(f'{lr:g}' for lr in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for name in (*SCANS, DEITS[0]):
        found = [select(tried, model=name, lr=lr) for lr in rates]
        cells = [f"{f[0]['loss']:.3f} ({f[0]['top1']:.1f})" if f else "" for f in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- top-1


def _table(head: Sequence[str], arms: Sequence[Sequence[str]], cells: Sequence[Sequence]) -> str:
    """Return numbers by seed as means ± deviations, a line for each arm."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm, numbers in zip(arms, cells, strict=True):
        texts = [spread(n) if n else "" for n in numbers]
        lines.append(f"| {' | '.join((*arm, *texts))} |")
    return "\n".join(lines)


def resized_table(rows: Sequence[Row]) -> str:
    """Return top-1 on images of other sizes by model and method."""
    arms = [(name, method) for name in names(rows, SCANS) for method in (PLAIN, BOTH)]
    arms += [(name, PLAIN) for name in names(rows, DEITS)]
    head = ("model", "", *map(title, factors(rows)))
    cells = [[tops(rows, *arm, where) for where in factors(rows)] for arm in arms]
    return _table(head, arms, cells)


def shapes_table(rows: Sequence[Row]) -> str:
    """Return top-1 on images of other shapes, with patches that overlap, and in an empty image."""
    arms = [(name, method) for name in names(rows, SCANS) for method in (PLAIN, BOTH)]
    arms += [(name, PLAIN) for name in names(rows, DEITS)]
    head = ("model", "", WIDE, HIGH, FINER, "padded")
    cells = []
    for name, method in arms:
        inside = [row["padded"].get("mask" if method == BOTH else PLAIN) for row in _of(rows, name)]
        padded = [number for number in inside if number is not None]
        cells.append([*(tops(rows, name, method, w) for w in (WIDE, HIGH, FINER)), padded])
    return _table(head, arms, cells)


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return select(sized(rows), model=name)


def ingredients_table(rows: Sequence[Row]) -> str:
    """Return top-1 by model and every method, where all of them were scored."""
    at = [f for f in factors(rows) if tops(rows, SCANS[0], METHODS[1], f)]
    arms = [(name, method) for name in names(rows, SCANS) for method in METHODS]
    cells = [[tops(rows, *arm, where) for where in at] for arm in arms]
    return _table(("model", "", *map(title, at)), arms, cells)


def several_sizes_table(rows: Sequence[Row]) -> str:
    """Return top-1 of ViL as trained at one size, and at several."""
    if not names(rows, AT_SIZES):
        return "Not run."
    arms = [("ViL", BOTH), ("ViL", PLAIN)]
    arms += [(name, own_method(name)) for name in names(rows, AT_SIZES)]
    labels = [
        (
            "several sizes" if name in AT_SIZES else "one size",
            method,
            f"{len(_of(rows, name))}",
        )
        for name, method in arms
    ]
    wheres = [*factors(rows), WIDE, HIGH, FINER]
    cells = [[tops(rows, *arm, where) for where in wheres] for arm in arms]
    return _table(("trained at", "", "seeds", *map(title, wheres)), labels, cells)


def curve_table(rows: Sequence[Row]) -> str:
    """Return top-1 by the number of steps of fine-tuning."""
    tuned = select(rows, part="fine-tuning")
    if not tuned:
        return "Not run."
    steps = list(tuned[0]["curve"])
    head = ("", *(f"{number} steps" for number in steps))
    found = {m: select(tuned, method=m) for m in (PLAIN, BOTH)}
    cells = [
        [[row["curve"][number] for row in chosen] for number in steps] for chosen in found.values()
    ]
    return _table(head, [(method,) for method in found], cells)


# ------------------------------------------------------------------------------------------ shares


def shares_table(rows: Sequence[Row], aims: dict[str, float]) -> str:
    """Return top-1 in percent of that at the trained size, by where, beside what was aimed at.

    Args:
        rows: Of the experiment.
        aims: Percent by where.
    """
    models = names(rows, (*SCANS, *DEITS))
    head = ("", "aim", *models)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for where in (*(f for f in factors(rows) if f != "1"), WIDE, HIGH, FINER):
        aim, cells = aims.get(where), []
        for name in models:
            numbers = shares(rows, name, where)
            text = spread(numbers) if numbers else ""
            if numbers and aim is not None and name in SCANS:
                short = aim - statistics.fmean(numbers)
                text += ", met" if short <= 0 else f", short by {short:.1f}"
            cells.append(text)
        lines.append(f"| {' | '.join((title(where), '' if aim is None else f'{aim}', *cells))} |")
    return "\n".join(lines)


def against_deit(rows: Sequence[Row]) -> list[Comparison]:
    """Compare the share that each scan keeps with that of each DeiT, wherever both were scored."""
    wheres = [*(f for f in factors(rows) if f != "1"), WIDE, HIGH]
    return [
        Comparison(
            title(where),
            name,
            deit,
            shares(rows, name, where),
            shares(rows, deit, where),
        )
        for where in wheres
        for name in names(rows, SCANS)
        for deit in names(rows, DEITS)
    ]


def against_deit_text(rows: Sequence[Row]) -> str:
    """Tell where scans keep a larger share than DeiT beyond the noise, and where a smaller one."""
    compared = against_deit(rows)
    judged = list(zip(compared, beyond_noise(compared), strict=True))
    lines = []
    for deit in names(rows, DEITS):
        own = [(c, found) for c, found in judged if c.second == deit]
        more = [c for c, found in own if found and c.difference > 0]
        less = [c for c, found in own if found and c.difference < 0]
        lines.append(
            f"Of {len(own)} differences between the share that a scan keeps and that of {deit}, beyond "
            f"the noise and in favour of the scan: {len(more)}{_by_place(more)}; in favour of {deit}: "
            f"{len(less)}{_by_place(less)}; within the noise: {len(own) - len(more) - len(less)}."
        )
    return "\n".join(lines)


def _by_place(compared: Sequence[Comparison]) -> str:
    places = {c.what: [d.first for d in compared if d.what == c.what] for c in compared}
    text = "; ".join(f"{where}: {', '.join(scans)}" for where, scans in places.items())
    return f" ({text})" if text else ""


def range_text(numbers: Sequence[float], digits: int = 0) -> str:
    """Return the lowest and the highest of some numbers as text."""
    low, high = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def aims_text(rows: Sequence[Row], aims: dict[str, float]) -> str:
    """Tell how many aims are met, and which are missed, by whom and by how much."""
    met, missed = 0, []
    for where, aim in aims.items():
        kept = {name: statistics.fmean(shares(rows, name, where)) for name in names(rows, SCANS)}
        short = [f"{name} by {aim - k:.1f}" for name, k in kept.items() if k < aim]
        met += len(kept) - len(short)
        missed += [f"{title(where)}: {', '.join(short)}"] if short else []
    text = f"{met} of {len(aims) * len(names(rows, SCANS))} are met"
    return f"{text} (missed, in points: {'; '.join(missed)})" if missed else text


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return the numbers that the text names: ranges over the scans of means over seeds."""
    found, scans = {}, names(rows, SCANS)
    for where in factors(rows):
        name = where.replace(".", "_")
        for method in METHODS:
            numbers = [tops(rows, model, method, where) for model in scans]
            if all(numbers):
                found[f"{method}_{name}"] = range_text([statistics.fmean(n) for n in numbers])
        found[f"deit_kept_{name}"] = f"{statistics.fmean(shares(rows, DEITS[0], where)):.0f}"
    places = {where.replace(".", "_"): where for where in factors(rows)}
    places |= {"wide": WIDE, "high": HIGH, "finer": FINER}
    for name, where in places.items():
        kept = [statistics.fmean(shares(rows, model, where)) for model in scans]
        found[f"kept_{name}"] = range_text(kept)
    for method in (PLAIN, BOTH):
        curves = [row["curve"] for row in select(rows, part="fine-tuning", method=method)]
        for steps in curves[0] if curves else ():
            mean = statistics.fmean(curve[steps] for curve in curves)
            found[f"tuned_{method}_{steps}"] = f"{mean:.0f}"
        [name] = [name for name in AT_SIZES if own_method(name) == method]
        for where in factors(rows):
            numbers = tops(rows, name, method, where)
            if numbers:
                found[f"several_{method}_{where.replace('.', '_')}"] = (
                    f"{statistics.fmean(numbers):.0f}"
                )
    return found


# ----------------------------------------------------------------------------------------- picture


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw top-1 against the number of tokens: by both, dashed as it is; a dot for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names(rows, (*SCANS, *DEITS))):
        for method in dict.fromkeys((PLAIN, own_method(name))):
            found = {f: tops(rows, name, method, f) for f in factors(rows)}
            found = {float(f): numbers for f, numbers in found.items() if numbers}
            style = "-" if method == own_method(name) else "--"
            label = name if method == own_method(name) else None
            means = [statistics.fmean(numbers) for numbers in found.values()]
            axes.plot(list(found), means, style, color=f"C{i}", label=label)
            for factor, numbers in found.items():
                axes.plot([factor] * len(numbers), numbers, "o", color=f"C{i}", alpha=0.4, ms=3)
    axes.set(xlabel="tokens, as a multiple of training's", ylabel="top-1 (%)")
    axes.set(xscale="log", ylim=(0, 101))
    ticks = [float(f) for f in factors(rows)]
    axes.set_xticks(ticks, [f"{round(tick, 2):g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
