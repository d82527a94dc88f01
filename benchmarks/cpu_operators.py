"""Show where a CPU's time goes in the tiny backbones and deit_tiny, by operator.

    python -m benchmarks.cpu_operators [--models NAME ...] [--size 224] [--batch 8] [--threads 1]
        [--steps 3] [--output FILE.json]

PyTorch's profiler times each operator without the operators that it calls. The loops of the CPU backend are
named "loops::...". Times are percentages of the first model's total. The profiler makes steps longer:
benchmarks.models times them without it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import build
from benchmarks.provenance import environment, processor
from benchmarks.steps import PASSES, step_of
from vil.training.files import write_text

MODELS = ("deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny")
SHOWN = 0.01  # of a model's time; operators below it share one row
REST, ALL = "all others", "all"


def milliseconds(name: str, pass_name: str, size: int, batch: int, steps: int) -> dict[str, float]:
    """Return each operator's milliseconds per image, the longest first, then the rest.

    Args:
        name: Model, as timm knows it.
        pass_name: One of ``PASSES``.
        size: Height and width in pixels.
        batch: Number of images.
        steps: Number of profiled steps, after two that are not profiled.
    """
    cell = {"size": size, "batch": batch, "device": "cpu"}
    run = step_of(*build(name, cell), pass_name)
    for _ in range(2):
        run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            run()
    microseconds = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    times = {key: time / (1e3 * steps * batch) for key, time in microseconds.items()}
    total = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: -item[1])
    large = {key: time for key, time in ordered if time >= SHOWN * total}
    return large | {REST: total - sum(large.values())}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table for each pass, with operators as rows and models as columns."""
    parts = []
    for pass_name in dict.fromkeys(row["pass"] for row in rows):
        columns = {row["model"]: row["ms"] for row in rows if row["pass"] == pass_name}
        whole = sum(next(iter(columns.values())).values())
        lines = [f"| {pass_name} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for key in dict.fromkeys((*(k for c in columns.values() for k in c if k != REST), REST)):
            cells = [f"{100 * c[key] / whole:.0f} %" if key in c else "" for c in columns.values()]
            lines.append(f"| {key.removeprefix('aten::')} | {' | '.join(cells)} |")
        sums = [f"{100 * sum(c.values()) / whole:.0f} %" for c in columns.values()]
        lines.append(f"| {ALL} | {' | '.join(sums)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> int:
    """Profile, print the tables, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, help="the record, JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    protocol = {"size": args.size, "batch": args.batch, "threads": args.threads}
    rows = [
        {
            "pass": pass_name,
            "model": name,
            "ms": milliseconds(name, pass_name, args.size, args.batch, args.steps),
        }
        for pass_name in PASSES
        for name in args.models
    ]
    record = {"environment": environment() | protocol | {"processor": processor()}, "rows": rows}
    print(table(rows))
    if args.output:
        write_text(args.output, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
