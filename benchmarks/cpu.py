"""Time the tiny backbones against timm's deit_tiny on this machine's CPU.

    python -m benchmarks.cpu [--sizes 224 448 1024] [--dtypes float32 bfloat16] [--rounds 5] [--threads N]
        [--json FILE]

Every round runs each model in turn, so that a drift of the machine's speed hits all alike: one step
that is not counted, which finds another model's data in the caches, then two that are. A model's
time is the median over rounds, and its ratio the median of the round-by-round ratios to deit_tiny.
A training step is forward, cross-entropy, backward and AdamW. Bfloat16 is autocast's. The first round,
which compiles, is not counted.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F

from benchmarks.provenance import environment
from vil.training.files import write_text

MODELS = ("deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny")
BATCH = {224: 8, 448: 2, 1024: 1}
STEPS = 2  # counted steps per model and round


def inference(
    name: str, size: int, batch: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """Return a function that runs one forward pass, with autocast for another dtype than float32."""
    model = timm.create_model(name, img_size=size).eval()
    images = torch.randn(batch, 3, size, size)

    def step() -> None:
        with torch.inference_mode(), torch.autocast("cpu", dtype, dtype != torch.float32):
            model(images)

    return step


def training(
    name: str, size: int, batch: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """Return a function that runs one training step, with autocast for another dtype than float32."""
    model = timm.create_model(name, img_size=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))

    def step() -> None:
        with torch.autocast("cpu", dtype, dtype != torch.float32):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step in every counted round for each function."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            step()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            if i:
                seconds[name].append((time.perf_counter() - start) / STEPS)
    return seconds


def compare(
    models: Sequence[str],
    make: Callable[..., Callable[[], None]],
    size: int,
    batch: int,
    dtype: torch.dtype,
    rounds: int,
) -> list[dict[str, Any]]:
    """Return each model's median time per image and its ratio to the first's, round by round."""
    seconds = measure({name: make(name, size, batch, dtype) for name in models}, rounds)
    base = seconds[models[0]]
    return [
        {
            "size": size,
            "batch": batch,
            "dtype": str(dtype).removeprefix("torch."),
            "pass": make.__name__,
            "model": name,
            "ms_per_image": 1e3 * statistics.median(times) / batch,
            "ratio": statistics.median(t / b for t, b in zip(times, base, strict=True)),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    """Run, print a Markdown table, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    known = environment() | {"threads": args.threads}
    print(", ".join(f"{name} {value}" for name, value in known.items()))
    print("| size | batch | dtype | pass | model | ms per image | ratio to deit_tiny |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for size, dtype, make in itertools.product(args.sizes, args.dtypes, (inference, training)):
        for row in compare(MODELS, make, size, BATCH[size], getattr(torch, dtype), args.rounds):
            rows.append(row)
            *names, milliseconds, ratio = row.values()
            print(
                f"| {' | '.join(map(str, names))} | {milliseconds:.1f} | {ratio:.2f} |", flush=True
            )
    if args.json:
        write_text(args.json, json.dumps({"environment": known, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
