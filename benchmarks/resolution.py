"""Time and memory of models of timm at several image sizes, beside deit_tiny.

    python -m benchmarks.resolution [--sizes 224 512 1024 2048] [--models NAME ...] [--rounds 3]
        [--device cpu] [--threads 1] [--batches 1] [--output FILE.json]

Every cell is a process of its own: it builds the model, runs a step on a small image, which compiles,
and then one at full size, of which the memory is taken, and a second, of which the time is. Rounds go
over all models in turn; figures are medians over rounds, and a ratio is that of the ratios round by
round, to deit_tiny with PyTorch's fused attention. On a CPU in float32, on a GPU under bfloat16 autocast.

    time     CPU-seconds of this process on a CPU, which other programs change less than those of a
             clock; seconds by the clock on a GPU
    memory   the most that was resident (allocated on a GPU) during the step, beyond what was before it,
             the model without gradients

A training step is forward, cross-entropy and backward; gradients are part of its memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.provenance import environment, processor
from vil.measuring import watch_memory
from vil.training.files import write_text

BASE = "deit_tiny_patch16_224"
MODELS = (BASE, "vil_tiny", "vil_tiny_exact", "vim_tiny", "convnext_tiny")
SIZES = (224, 512, 1024, 2048)
PASSES = ("inference", "training")
SMALL = 64  # px, of the step that compiles
ROOT = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------------------- within a process


def measure(name: str, size: int, pass_name: str, batch: int, device: str) -> dict[str, float]:
    """Return the seconds and bytes of a step.

    Args:
        name: Model, as timm knows it.
        size: Height and width in pixels.
        pass_name: One of ``PASSES``.
        batch: Images.
        device: "cpu" or "cuda".
    """
    small, full = (_step(name, pixels, pass_name, batch, device) for pixels in (SMALL, size))
    small()
    del small
    most = watch_memory(device)
    full()
    memory = most()
    start = _clock(device)
    full()
    return {"seconds": _clock(device) - start, "bytes": memory}


def _step(name: str, size: int, pass_name: str, batch: int, device: str) -> Callable[[], None]:
    import timm
    import torch
    import torch.nn.functional as F

    import vil  # noqa: F401  (registers the models)

    options = {"img_size": size} if timm.models.get_pretrained_cfg(name).fixed_input_size else {}
    model = timm.create_model(name, **options).to(device).train(pass_name == "training")
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.zeros(batch, dtype=torch.long, device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            if pass_name == "inference":
                with torch.inference_mode():
                    model(images)
                return
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        model.zero_grad()

    return step


def _clock(device: str) -> float:
    import torch

    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------ all of them


def in_process(arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """Run ``measure`` in a process of its own; returns its figures, or the "error" it ended with."""
    command = [sys.executable, "-m", "benchmarks.resolution", "--cell", *arguments]
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | counts, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(rounds: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Summarise rounds, each of figures by model.

    Args:
        rounds: Of one size and pass.
    """
    rows = []
    for name in rounds[0]:
        errors = [r[name]["error"] for r in rounds if "error" in r[name]]
        row: dict[str, Any] = {"model": name, "error": errors[0] if errors else None}
        for figure in ("seconds", "bytes"):
            values = [] if errors else [r[name][figure] for r in rounds]
            base = [r.get(BASE, {}).get(figure) for r in rounds]
            ratios = [v / b for v, b in zip(values, base, strict=False) if b]
            row[figure] = statistics.median(values) if values else None
            row[f"{figure}_ratio"] = statistics.median(ratios) if ratios else None
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    lines = [
        "| px | batch | pass | model | seconds | x deit_tiny | MiB | x deit_tiny |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [row["error"], "", "", ""]
        if row["error"] is None:
            mib = row["bytes"] / 2**20
            figures = [f"{row['seconds']:.3g}", _ratio(row["seconds_ratio"])]
            figures += [f"{mib:.0f}", _ratio(row["bytes_ratio"])]
        what = (row["size"], row["batch"], row["pass"], row["model"])
        lines.append(f"| {' | '.join(map(str, (*what, *figures)))} |")
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> int:
    """Measure all cells, print the table, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path, help="the record, JSON")
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        name, size, pass_name, batch, device = args.cell
        print(json.dumps(measure(name, int(size), pass_name, int(batch), device)))
        return 0
    protocol = {"device_kind": args.device, "threads": args.threads}
    protocol |= {"rounds": args.rounds, "processor": processor()}
    rows: list[dict[str, Any]] = []
    for size, batch, pass_name in product(args.sizes, args.batches, args.passes):
        rest = [str(size), pass_name, str(batch), args.device]
        rounds = [
            {name: in_process([name, *rest], args.threads) for name in args.models}
            for _ in range(args.rounds)
        ]
        cell = {"size": size, "batch": batch, "pass": pass_name}
        rows += [{**cell, **row} for row in rows_of(rounds)]
        print(table(rows[-len(args.models) :]), file=sys.stderr, flush=True)
        if args.output:
            record = {"environment": environment() | protocol, "rows": rows}
            write_text(args.output, json.dumps(record, indent=1) + "\n")
    print(table(rows))
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
