"""Print the tables of a record from a GPU: whole models, hours of ImageNet, scans and kernels.

    python -m benchmarks.gpu [RECORD]

The default record, ``results/h100.json``, is the first run on a GPU. Its programs are not part of the repository. All
numbers are bfloat16 autocast on one GPU. Times of models are of whole steps in CUDA graphs, except where the table says
eager or compile. Times of scans and kernels are those that the GPU works on one block.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results" / "h100.json"
IMAGENET, EPOCHS = 1_281_167, 300
Rows = Sequence[dict[str, Any]]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by(rows: Rows, row: str, column: Sequence[str]) -> tuple[list, list, dict]:
    """Return the values of ``row``, those of ``column``, and the rows by both, in the record's order."""
    cells = {(r[row], tuple(r[name] for name in column)): r for r in rows}
    return list(dict.fromkeys(k for k, _ in cells)), list(dict.fromkeys(k for _, k in cells)), cells


def models(rows: Rows) -> str:
    """Return times of steps, and memory, as ratios to the first model; that model's in ms and MiB."""
    graphs = [r for r in rows if r["way"] == "graphs"]
    names, columns, cells = _by(graphs, "model", ("pass", "size", "batch"))
    body = []
    for unit, digits in (("ms", 1), ("mib", 0)):
        for name in names:
            what = "time" if unit == "ms" else "memory"
            line = [f"{what}, {name}"]
            for column in columns:
                row, base = cells.get((name, column)), cells[names[0], column][unit]
                if row is None:
                    line.append("")
                elif name == names[0]:
                    line.append(f"{base:,.{digits}f} {'ms' if unit == 'ms' else 'MiB'}")
                else:
                    line.append(f"{row[unit] / base:.2f}")
            body.append(line)
    heads = ["", *(f"{p}, {size} px, batch {batch}" for p, size, batch in columns)]
    return table(heads, body)


def hours(rows: Rows) -> str:
    """Return the hours of 300 epochs of ImageNet, computed from the times of a step at 224 px."""
    chosen = [r for r in rows if r["pass"] == "training" and r["size"] == 224]
    names, ways, cells = _by(chosen, "model", ("way",))
    body = []
    for name in names:
        line = [name]
        for way in ways:
            row = cells.get((name, way))
            if row is None:
                line.append("")
                continue
            one = IMAGENET * EPOCHS / row["batch"] * row["ms"] / 3.6e6
            line.append(f"{row['ms']:.0f} ms: {one:.0f} h, {one / 8:.1f} h")
        body.append(line)
    return table(["step, hours on 1 and on 8 GPUs", *(way for (way,) in ways)], body)


def scans(rows: Rows) -> str:
    """Return microseconds of both directions with the gate: inference, and forward and backward."""
    rows = [r | {"shape": tuple(r["shape"])} for r in rows]
    names, shapes, cells = _by(rows, "name", ("shape",))
    body = []
    for name in names:
        line = [name]
        for shape in shapes:
            row = cells[name, shape]
            line.append(f"{row['inference_us']:,.0f}, {row['training_us']:,.0f}")
        body.append(line)
    return table(["(B, L, D)", *(str(shape) for (shape,) in shapes)], body)


def kernels(rows: Rows) -> str:
    """Return microseconds of every kernel of a block at 224 px, batch 128.

    In brackets: issue slots used, and time in which a warp waits for global loads, both in percent (Nsight Compute).
    """
    names, columns, cells = _by(rows, "kernel", ("model", "pass"))
    body = []
    for name in names:
        line = [name]
        for column in columns:
            row = cells.get((name, column), {})
            line.append(f"{row['us']:.0f}" if row else "")
            if "issue_slots" in row:
                line[-1] += f" ({row['issue_slots']}, {row['waits_for_loads']})"
        body.append(line)
    return table(["", *(", ".join(column) for column in columns)], body)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables of a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="?", type=Path, default=RECORD)
    record = json.loads(parser.parse_args(arguments).record.read_text())
    print(", ".join(f"{name} {value}" for name, value in record["environment"].items()))
    for function, part in (
        (models, "models"),
        (hours, "models"),
        (scans, "scans"),
        (kernels, "kernels"),
    ):
        print(f"\n{function.__doc__.splitlines()[0]}\n\n{function(record[part])}")


if __name__ == "__main__":
    main()
