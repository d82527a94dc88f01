"""What ``dense_sizes.py`` makes of its runs: scores by model, way and size, times, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from experiments.comparisons import Paired
from experiments.dense_sizes import BACKBONES, OURS, PLAIN, SHRUNK, STEPS, WAYS, WHOLE, WINDOWS
from experiments.records import CHOICE_SEED, Row, select, spread
from experiments.vision_results import save

TITLES = {"miou": "mean IoU", "small": "IoU of small letters", "large": "IoU of other letters"}
STYLES = {WHOLE: "-", PLAIN: "-.", STEPS: (0, (4, 1, 1, 1, 1, 1)), SHRUNK: ":", WINDOWS: "--"}


def reported(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that did not choose a rate, in the order of seeds."""
    return sorted((r for r in rows if r["seed"] != CHOICE_SEED), key=lambda row: row["seed"])


def sizes(rows: Sequence[Row]) -> list[str]:
    """Return the sizes of images, that of the crops first."""
    return sorted({size for row in reported(rows) for size in row["scores"]}, key=int)


def scores(rows: Sequence[Row], backbone: str, way: str, size: str, figure: str) -> list[float]:
    """Return a figure of each seed; images of the crops' size have only the way ``whole``."""
    found = (row["scores"].get(size, {}) for row in select(reported(rows), backbone=backbone))
    way = WHOLE if size == sizes(rows)[0] else way
    return [one[way][figure] for one in found if way in one]


def arms(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the backbones and ways that there are figures of."""
    last = sizes(rows)[-1]
    return [(b, w) for b in BACKBONES for w in WAYS if scores(rows, b, w, last, "miou")]


def scores_table(rows: Sequence[Row], figure: str) -> str:
    """Return a figure by backbone, way and size, mean ± deviation over seeds."""
    heads = ["backbone", "way", *(f"{size} px" for size in sizes(rows))]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for backbone, way in arms(rows):
        cells = [spread(scores(rows, backbone, way, size, figure)) for size in sizes(rows)]
        lines.append(f"| {' | '.join((backbone, way, *cells))} |")
    return "\n".join(lines)


def times_table(rows: Sequence[Row]) -> str:
    """Return the CPU time of an image, as a multiple of that of the same backbone's ``whole``."""
    larger = sizes(rows)[1:]
    heads = ["backbone", "way", *(f"{size} px" for size in larger)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for backbone, way in arms(rows):
        if way == WHOLE:
            continue
        cells = []
        for size in larger:
            own, base = (scores(rows, backbone, w, size, "ms") for w in (way, WHOLE))
            cells.append(spread([a / b for a, b in zip(own, base, strict=True)], 2))
        lines.append(f"| {' | '.join((backbone, way, *cells))} |")
    return "\n".join(lines)


def training_table(rows: Sequence[Row]) -> str:
    """Return learning rate, training loss, CPU seconds and parameters of each backbone."""
    heads = ["backbone", "rate", "training loss", "CPU seconds of training"]
    heads += ["parameters of the backbone", "and of the decoder"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for backbone in BACKBONES:
        found = select(reported(rows), backbone=backbone)
        cells = [f"{found[0]['lr']:g}", spread([row["loss"] for row in found], 2)]
        cells += [spread([row["train_seconds"] for row in found], 0)]
        cells += [f"{found[0][key]:,}" for key in ("parameters", "head_parameters")]
        lines.append(f"| {' | '.join((backbone, *cells))} |")
    return "\n".join(lines)


def search_table(rows: Sequence[Row]) -> str:
    """Return the mean IoU of the seed that chose rates on images of the crops' size, by rate."""
    tried = select(rows, seed=CHOICE_SEED)
    rates = sorted({row["lr"] for row in tried})
    lines = [f"| | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for backbone in BACKBONES:
        found = [select(tried, backbone=backbone, lr=rate)[0] for rate in rates]
        cells = [f"{row['scores'][sizes(rows)[0]][WHOLE]['miou']:.1f}" for row in found]
        lines.append(f"| {' | '.join((backbone, *cells))} |")
    return "\n".join(lines)


def differences(rows: Sequence[Row]) -> list[Paired]:
    """Compare our ``steps`` with our other ways and with the ``whole`` of peers, seed by seed."""
    others = [arm for arm in arms(rows) if OURS in arm or WHOLE in arm]
    return [
        Paired(
            f"mean IoU at {size} px",
            f"{OURS}, {STEPS}",
            ", ".join(other),
            scores(rows, OURS, STEPS, size, "miou"),
            scores(rows, *other, size, "miou"),
        )
        for size in sizes(rows)[1:]
        for other in others
        if other != (OURS, STEPS)
    ]


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return means over seeds of mean IoU and small letters, by short names of what they are of."""
    short = dict(zip(BACKBONES, ("vil", "deit", "resnet"), strict=True))
    return {
        f"{figure}_{short[backbone]}_{way}_{size}": f"{fmean(found):.1f}"
        for backbone, way in arms(rows)
        for size in sizes(rows)
        for figure in ("miou", "small")
        if (found := scores(rows, backbone, way, size, figure))
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw mean IoU, and the IoU of small letters, against the size of images, by backbone and way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    colours = {backbone: f"C{i}" for i, backbone in enumerate(BACKBONES)}
    for axes, name in zip(figure.subplots(1, 2), ("miou", "small"), strict=True):
        for backbone, way in arms(rows):
            found = {int(s): scores(rows, backbone, way, s, name) for s in sizes(rows)}
            means = [fmean(numbers) for numbers in found.values()]
            look = {"linestyle": STYLES[way], "color": colours[backbone]}
            axes.plot(list(found), means, label=f"{backbone}, {way}", **look)
            for size, numbers in found.items():
                axes.plot([size] * len(numbers), numbers, ".", color=colours[backbone], alpha=0.3)
        ticks = [int(size) for size in sizes(rows)]
        axes.set(xlabel="height and width of the images (px)", ylabel=f"{TITLES[name]} (%)")
        axes.set(xscale="log", ylim=(0, None))
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
