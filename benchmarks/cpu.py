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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

from benchmarks.provenance import environment
from vil.measuring import PASSES, Step, in_turns, step_of
from vil.training.files import write_text

MODELS = ("deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny")
BATCH = {224: 8, 448: 2, 1024: 1}


def step(
    name: str, size: int, batch: int, pass_name: str, dtype: torch.dtype = torch.float32
) -> Step:
    """Return a function that does one step of a new model, as ``vil.measuring.step_of`` does."""
    model = timm.create_model(name, img_size=size)
    return step_of(model, torch.randn(batch, 3, size, size), pass_name, dtype)


def compare(
    models: Sequence[str],
    pass_name: str,
    size: int,
    batch: int,
    dtype: torch.dtype,
    rounds: int,
) -> list[dict[str, Any]]:
    """Return each model's median time per image and its ratio to the first's, round by round."""
    steps = {name: step(name, size, batch, pass_name, dtype) for name in models}
    seconds = in_turns(steps, rounds)
    base = seconds[models[0]]
    return [
        {
            "size": size,
            "batch": batch,
            "dtype": str(dtype).removeprefix("torch."),
            "pass": pass_name,
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
    for size, dtype, pass_name in itertools.product(args.sizes, args.dtypes, PASSES):
        precision, batch = getattr(torch, dtype), BATCH[size]
        for row in compare(MODELS, pass_name, size, batch, precision, args.rounds):
            rows.append(row)
            *names, milliseconds, ratio = row.values()
            print(
                f"| {' | '.join(map(str, names))} | {milliseconds:.1f} | {ratio:.2f} |", flush=True
            )
    if args.json:
        write_text(args.json, json.dumps({"environment": known, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
