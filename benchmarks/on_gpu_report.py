"""Tables of what ``on_gpu.py`` found, from its records alone."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.on_gpu_parts import PARTS

Record = dict[str, Any]
NOT_RUN = "not run yet"

COLUMNS = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
# What each column is called in the records of the parts.
SCANS = ("Longhorn diagonal (ours)", "Longhorn exact (ours)", "Mamba (ours, Triton)")
RECURRENCES = ("longhorn", "longhorn_exact", "mamba")
CLASSIFIERS = ("ViL", "ViL exact", "ViM")
SHAPE = [128, 197, 384]
SIZES, MODES = (224, 512, 1024), ("eager", "graphs", "compile")
RIVALS = (  # in the records, and in the table
    ("mamba-ssm, both directions", "mamba-ssm's"),
    ("Mamba (ours, Triton)", "our own Mamba kernel's"),
    ("flash attention (SDPA)", "flash attention's"),
    ("PyTorch, compiled (diagonal)", "the compiled reference's"),
)


def load(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by the name of their part, "on_gpu" being the command's own."""
    files = {"on_gpu": "on_gpu.json"} | {part.name: part.record for part in PARTS if part.record}
    paths = {name: folder / file for name, file in files.items()}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def report(folder: Path) -> str:
    """Return everything to print of a folder of records."""
    records = load(folder)
    if "on_gpu" not in records:
        return f"{folder} has no on_gpu.json"
    environment = records["on_gpu"]["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in environment.items() if k not in ("device", "toy"))
    title = f"{environment['device'] or 'no GPU'}, {versions}"
    if environment["toy"]:
        title = f"TOY: nothing below was measured on a GPU, nor means anything. {title}"
    return "\n\n".join((title, parts_table(records["on_gpu"]), main_table(records)))


def parts_table(record: Record) -> str:
    """Return how every part ended, as a Markdown table."""
    lines = ["| part | | s | commit |", "|---|---|---|---|"]
    for part in PARTS:
        entry = record["parts"].get(part.name, {"status": NOT_RUN, "seconds": 0, "commit": ""})
        what = f"{part.name}: {part.what}"
        lines.append(f"| {what} | {entry['status']} | {entry['seconds']:.0f} | {entry['commit']} |")
    return "\n".join(lines)


# ---------------------------------------------------------------------------- the table of docs/speed.md


def main_table(records: dict[str, Record]) -> str:
    """Return the table of docs/speed.md; what was not run says so.

    Args:
        records: As of ``load``; may be empty.
    """
    lines = [f"| | {' | '.join(f'`{name}`' for name in COLUMNS)} |", "|---|---|---|---|"]
    rows = [
        *_scan_rows(records.get("scans", {"rows": []})["rows"]),
        *_model_rows(records.get("models", {"rows": []})["rows"]),
        _recall_row(records.get("recall")),
        _fractals_row(records.get("fractals")),
    ]
    lines += [f"| {what} | {' | '.join(cells)} |" for what, cells in rows]
    return "\n".join(lines)


def _cells(names: Iterable[str], value: Callable[[str], str | None]) -> list[str]:
    return [value(name) or NOT_RUN for name in names]


def _scan_rows(rows: list[Record]) -> list[tuple[str, list[str]]]:
    timed = {(r["contestant"], r["pass"]): r for r in rows if r["shape"] == SHAPE and "ms" in r}
    rivals = [rival for rival in RIVALS if (rival[0], "forward + backward") in timed]
    found = []
    for pass_name in ("inference", "forward + backward"):

        def of_roofline(name: str, pass_name: str = pass_name) -> str | None:
            row = timed.get((name, pass_name))
            return row and f"{row['of_roofline']:.2f}"

        what = f"scan, (B, L, D) = {tuple(SHAPE)}, {pass_name}: times the roofline"
        found.append((what, _cells(SCANS, of_roofline)))
    for rival, label in rivals or RIVALS[:1]:

        def faster(name: str, rival: str = rival) -> str | None:
            row = timed.get((name, "forward + backward"))
            if row is None:
                return None
            return "1" if name == rival else f"{row['faster_than'][rival]:.2f}"

        what = f"scan, forward + backward: speed relative to {label}"
        found.append((what, _cells(SCANS, faster)))
    return found


def _model_rows(rows: list[Record]) -> list[tuple[str, list[str]]]:
    timed = {(r["model"], r["size"], r["pass"], r["way"]): r for r in rows}

    def figure(name: str, size: int, pass_name: str, mode: str, field: str) -> str:
        row = timed.get((name, size, pass_name, mode))
        if row is None:
            return "-"
        return "failed" if row["error"] else f"{row[field]:.2f}"

    found = []
    for pass_name in ("training", "inference"):
        for size in SIZES:

            def ratios(name: str, size: int = size, pass_name: str = pass_name) -> str | None:
                values = [figure(name, size, pass_name, mode, "seconds_ratio") for mode in MODES]
                return None if set(values) == {"-"} else " / ".join(values)

            what = f"{pass_name} at {size} px, time relative to `deit_tiny`: op by op / "
            found.append((what + "CUDA graph / compiled", _cells(COLUMNS, ratios)))
    for size in SIZES:

        def memory(name: str, size: int = size) -> str | None:
            value = figure(name, size, "training", "eager", "bytes_ratio")
            return None if value == "-" else value

        what = f"training at {size} px, peak memory relative to `deit_tiny`"
        found.append((what, _cells(COLUMNS, memory)))
    return found


def _recall_row(record: Record | None) -> tuple[str, list[str]]:
    runs = {run["recurrence"]: run for run in record["runs"]} if record else {}
    epochs = min((run["epochs"] for run in runs.values()), default=None)
    if not epochs:
        return "recall of 64 pairs in 512 tokens, %", [NOT_RUN] * len(COLUMNS)
    length = next(iter(runs.values()))["length"]
    # Each stopped where its time was up: what all have reached can be compared.
    what = f"recall at {length} tokens after {epochs} epochs of {record['settings']['epochs']}, %"
    return what, _cells(
        RECURRENCES,
        lambda name: f"{100 * runs[name]['by_epoch'][epochs - 1]:.1f}" if name in runs else None,
    )


def _fractals_row(record: Record | None) -> tuple[str, list[str]]:
    runs = {run["model"]: run for run in record["runs"]} if record else {}
    if not runs:
        return "fractals at 224 px, top-1 in %", [NOT_RUN] * len(COLUMNS)
    steps = next(iter(runs.values()))["steps"]
    what = f"fractals at 224 px, top-1 in % after {steps:,} steps"
    if "DeiT tiny" in runs:
        what += f" (DeiT: {runs['DeiT tiny']['top1']:.1f})"
    return what, _cells(
        CLASSIFIERS, lambda name: f"{runs[name]['top1']:.1f}" if name in runs else None
    )
