"""Time the tiny backbones against timm's deit_tiny on this machine's CPU.

    python -m benchmarks.cpu [--sizes 224 448 1024] [--rounds 5] [--threads N] [--json FILE]

Every round runs each model in turn, so that a drift of the machine's speed hits all alike: one step
that is not counted, which finds another model's data in the caches, then two that are. A model's
time is the median over rounds, and its ratio the median of the round-by-round ratios to deit_tiny.
A training step is forward, cross-entropy, backward and AdamW in float32. The first round, which
compiles, is not counted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

import vil
from benchmarks.provenance import processor, revision

MODELS = ("deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny")
BATCH = {224: 8, 448: 2, 1024: 1}
STEPS = 2  # counted steps per model and round


def inference(name: str, size: int, batch: int) -> Callable[[], None]:
    """Return a function that runs one forward pass."""
    model = timm.create_model(name, img_size=size).eval()
    images = torch.randn(batch, 3, size, size)

    def step() -> None:
        with torch.inference_mode():
            model(images)

    return step


def training(name: str, size: int, batch: int) -> Callable[[], None]:
    """Return a function that runs one training step."""
    model = timm.create_model(name, img_size=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
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


def main() -> None:
    """Run, print a Markdown table, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    environment = {
        "processor": processor(),
        "threads": args.threads,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "vil": vil.__version__,
        "commit": revision(),
    }
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print("| size | batch | pass | model | ms per image | ratio to deit_tiny |")
    print("|---|---|---|---|---|---|")
    rows = []
    for size in args.sizes:
        for make in (inference, training):
            batch = BATCH[size]
            seconds = measure({name: make(name, size, batch) for name in MODELS}, args.rounds)
            base = seconds[MODELS[0]]
            for name, times in seconds.items():
                row = {
                    "size": size,
                    "batch": batch,
                    "pass": make.__name__,
                    "model": name,
                    "ms_per_image": 1e3 * statistics.median(times) / batch,
                    "ratio": statistics.median(t / b for t, b in zip(times, base, strict=True)),
                }
                rows.append(row)
                print(
                    f"| {size} | {batch} | {make.__name__} | {name} | {row['ms_per_image']:.1f} "
                    f"| {row['ratio']:.2f} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
