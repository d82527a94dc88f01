"""What ``scan.py`` makes of its times: rows, aims met or missed, tables and a picture."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.roofline import PASSES
from vil.training.files import write_atomically


@dataclass(frozen=True)
class Aim:
    """What a contestant should reach at (128, 197, 384) on an H200."""

    contestant: str
    pass_name: str
    figure: str
    at_most: float | None = None
    at_least: float | None = None


AIM_SHAPE, AIM_DEVICE = [128, 197, 384], "H200"
AIMS = (
    Aim("Longhorn exact (ours)", "inference", "of_roofline", at_most=1.35),
    Aim("Longhorn exact (ours)", "forward + backward", "of_roofline", at_most=1.5),
    Aim("Longhorn exact (ours)", "forward + backward", "faster_than_mamba_ssm", at_least=3.0),
    Aim("Longhorn diagonal (ours)", "forward + backward", "faster_than_mamba_ssm", at_least=1.3),
)


def judge(rows: list[dict[str, Any]], device_name: str) -> list[dict[str, Any]]:
    """Return each aim with its value and "met", "missed" or "not measured"."""
    judged = []
    for aim in AIMS:
        wanted = {"shape": AIM_SHAPE, "pass": aim.pass_name, "contestant": aim.contestant}
        found = [row for row in rows if wanted.items() <= row.items()]
        value = found[0].get(aim.figure) if found and AIM_DEVICE in device_name else None
        if value is None:
            verdict = "not measured"
        else:
            limit = aim.at_most if aim.at_least is None else aim.at_least
            met = value <= limit if aim.at_least is None else value >= limit
            verdict = "met" if met else "missed"
        judged.append({**asdict(aim), "value": value, "verdict": verdict})
    return judged


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; one that is not timed says why."""
    lines = [
        "| shape | pass | contestant | ms | IQR | x roofline | x faster than mamba-ssm | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shape = ", ".join(map(str, row["shape"]))
        start = f"| {shape} | {row['pass']} | {row['contestant']} |"
        if "ms" not in row:
            status = row["status"].replace("|", "/")
            emphasis = "**" if row["disagrees"] else ""
            lines.append(f"{start} {emphasis}{status}{emphasis} | | | | |")
            continue
        optional = (
            f"{row[name]:.2f}" if name in row else ""
            for name in ("of_roofline", "faster_than_mamba_ssm")
        )
        cells = (f"{row['ms']:.3f}", f"{row['iqr_ms']:.3f}", *optional, f"{row['peak_mib']:.0f}")
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)


def aims_table(aims: list[dict[str, Any]]) -> str:
    """Return the aims as a Markdown table."""
    lines = [f"| aim at {tuple(AIM_SHAPE)} on an {AIM_DEVICE} | value | |", "|---|---|---|"]
    for aim in aims:
        if aim["at_least"] is None:
            limit = f"at most {aim['at_most']} x the roofline"
        else:
            limit = f"at least {aim['at_least']} x faster than mamba-ssm"
        value = "" if aim["value"] is None else f"{aim['value']:.2f}"
        what = f"{aim['contestant']}, {aim['pass_name']}, {limit}"
        lines.append(f"| {what} | {value} | {aim['verdict']} |")
    return "\n".join(lines)


def draw(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draw the times of inference and of forward + backward by shape, our rooflines as lines.

    Args:
        path: Destination, PNG.
        rows: As of ``rows_of``.
        title: Above the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(row["contestant"] for row in rows))
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    width = 0.8 / len(names)
    figure = Figure(figsize=(4 + 3 * len(shapes), 9), layout="constrained")
    for axes, pass_name in zip(figure.subplots(2, 1), (PASSES[0], PASSES[2]), strict=True):
        axes.set(title=pass_name, ylabel="ms (log)", yscale="log")
        axes.set_xticks(range(len(shapes)), [f"B, L, D = {B}, {L}, {D}" for B, L, D in shapes])
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        for i, name in enumerate(names):
            _draw_bars(axes, [r for r in rows if r["pass"] == pass_name], name, shapes, width, i)
    handles = [Patch(color=f"C{i}", label=name) for i, name in enumerate(names)]
    handles.append(Line2D([], [], color="black", linewidth=2, label="roofline of ours"))
    figure.suptitle(title)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


def _draw_bars(
    axes: Any, rows: list[dict[str, Any]], name: str, shapes: list[tuple], width: float, i: int
) -> None:
    """Draw the bars of contestant ``i``; in the place of one not timed, say why."""
    for row in rows:
        if row["contestant"] != name:
            continue
        left = shapes.index(tuple(row["shape"])) - 0.4 + i * width
        if "ms" not in row:
            reason = "DISAGREES" if row["disagrees"] else row["status"].partition(":")[0]
            colour = "red" if row["disagrees"] else "grey"
            place = axes.get_xaxis_transform()
            where = {"rotation": 90, "ha": "center", "va": "bottom", "transform": place}
            axes.text(left + width / 2, 0.02, reason, color=colour, fontsize=9, **where)
            continue
        bars = axes.bar(left, row["ms"], width, align="edge", color=f"C{i}")
        axes.bar_label(bars, fmt="{:.3g}", fontsize=8)
        if "roofline_ms" in row:
            axes.plot([left, left + width], [row["roofline_ms"]] * 2, color="black", linewidth=2)


def refused(rows: list[dict[str, Any]]) -> str:
    """Return a line for each contestant that disagrees with the reference, and for ours if untimed.

    Empty if all is well; a contestant of others may be missing or fail.
    """
    bad = [row for row in rows if row["disagrees"] or (row["ours"] and "ms" not in row)]
    lines = (
        f"REFUSED: {row['contestant']} at {tuple(row['shape'])}: {row['status']}" for row in bad
    )
    return "\n".join(dict.fromkeys(lines))
