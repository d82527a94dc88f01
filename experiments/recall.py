"""Compare recurrences at recalling pairs of keys and values (MQAR, arXiv 2312.04927).

    python -m experiments.recall                                  # accuracy after training, in minutes on a CPU
    python -m experiments.recall --measure steps --seeds 0 1 2    # steps until a run begins to recall
    python -m experiments.recall --setting published --lengths 512 --dims 64          # for a GPU
    python -m experiments.tables output/recall.json --by recurrence lr --show accuracy*100:1

A sequence lists K pairs and then asks for the value of each key once, at gaps drawn from a power law. All models
differ only in the recurrence (``mixer.py``). ``short`` (32 tokens), ``long`` (64) and ``longer`` (128) train one
layer on fresh sequences of several K. They test each K separately, and longer sequences. ``published`` is the
grid of Fig. 4 of the Longhorn paper. ``--measure steps`` trains until a run leaves the plateau (``plateau.py``).

Runs are recorded one by one; repeat the command to resume. After ``--seconds`` no run starts. A ``published`` run
then stops after its current epoch and is recorded as stopped; "by_epoch" has the accuracies so far.
"""

import argparse
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from benchmarks.budget import UNFINISHED, Budget, add_seconds
from experiments import plateau
from experiments.recall_task import (
    WEIGHT_DECAY,
    LanguageModel,
    accuracy,
    parameters,
    sample,
    sample_many,
    step,
)
from experiments.records import Record, Row, product, run_all
from experiments.recurrences import RECURRENCES

OUTPUT = Path("output/recall.json")
RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)  # the paper's
DATA_SEED, TEST_SEED = 123, 2**31
TEST_TOKENS = 16384  # in a batch, which bounds the memory of softmax attention

# ------------------------------------------------------------------------- the setting for a CPU


@dataclass(frozen=True)
class Small:
    """Settings that the runs on a CPU share.

    The numbers of pairs are 0.5, 1 and 2 times the state size. Small numbers are included because
    they are learned first. There is one layer, since two need far more examples to find the task.
    """

    dim: int = 64
    depth: int = 1
    d_state: int = 4
    vocabulary: int = 64
    length: int = 32
    pairs: tuple[int, ...] = (2, 4, 8)
    """Numbers of pairs K in a sequence; batches alternate between them."""
    batch_size: int = 64
    steps: int = 1200
    warmup: int = 50
    factors: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Lengths of the test by length, in multiples of the trained length."""
    far_pairs: int = 4
    """Number of pairs in the test by length."""
    test_count: int = 500


SMALL = {
    "short": Small(),
    "long": Small(length=64, d_state=8, pairs=(4, 8, 16), steps=800, far_pairs=8),
    "longer": Small(
        length=128, d_state=8, pairs=(4, 8, 16), steps=3000, far_pairs=8, factors=(1, 2, 4)
    ),
}


def run_small(recurrence: str, lr: float, seed: int, **settings: Any) -> Row:
    """Train on fresh sequences, alternating between the numbers of pairs, and test.

    Args:
        recurrence: A key of ``recurrences.RECURRENCES``.
        lr: Highest learning rate.
        seed: Seed of the initial weights and of the sequences.
        settings: Fields of ``Small``.

    Returns:
        "parameters" and accuracies: "pairs K" for each K at the trained length, "accuracy" (their
        mean), and "length T" for each tested length with ``far_pairs`` pairs.
    """
    small = Small(**settings)
    torch.manual_seed(seed)
    model = LanguageModel(recurrence, small.vocabulary, small.dim, small.depth, small.d_state)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY)
    schedule = LambdaLR(optimizer, lambda i: warmup_cosine(i, small.warmup, small.steps))
    generator = torch.Generator().manual_seed(seed)
    for i in range(small.steps):
        pairs = small.pairs[i % len(small.pairs)]
        batch = sample(generator, small.batch_size, small.length, pairs, small.vocabulary)
        step(model, optimizer, batch)
        schedule.step()
    return {"parameters": parameters(model)} | figures_of(model, small)


def warmup_cosine(i: int, warmup: int, steps: int) -> float:
    """Return the share of the highest learning rate at step ``i``."""
    return min(1.0, (i + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * i / steps))


def figures_of(model: LanguageModel, small: Small) -> Row:
    """Return the accuracy by number of pairs, and by length for ``far_pairs``."""
    model.eval()

    def measure(length: int, pairs: int) -> float:
        sequences = sample_many(TEST_SEED, small.test_count, length, pairs, small.vocabulary)
        return accuracy(model, sequences, max(1, TEST_TOKENS // length))

    by_pairs = {f"pairs {k}": measure(small.length, k) for k in small.pairs}
    figures = {"accuracy": statistics.fmean(by_pairs.values())} | by_pairs
    for factor in small.factors:
        length = factor * small.length
        figures[f"length {length}"] = measure(length, small.far_pairs)
    return figures


# ----------------------------------------------------------------------------- published setting

# Length in tokens -> (pairs, batch size).
PUBLISHED = {64: (4, 512), 128: (8, 512), 256: (16, 256), 512: (64, 128)}


@dataclass(frozen=True)
class Published:
    """Settings that the published runs share."""

    depth: int = 2
    d_state: int = 16
    vocabulary: int = 8192
    epochs: int = 64
    train_count: int = 100_000
    test_count: int = 3000
    enough: float = 0.99
    """Accuracy at which a run stops."""


def run_published(
    recurrence: str,
    length: int,
    dim: int,
    lr: float,
    seed: int,
    deadline: float = math.inf,
    **settings: Any,
) -> Row:
    """Train on the same sequences in the same order in every epoch, on a GPU if there is one.

    Args:
        recurrence: A key of ``recurrences.RECURRENCES``.
        length: A key of ``PUBLISHED``.
        dim: Channels C.
        lr: Learning rate of the first epoch.
        seed: Seed of the initial weights. All runs of a length train and test on the same data.
        deadline: Value of ``time.time``; the run stops after the epoch in which it passes.
        settings: Fields of ``Published``.

    Returns:
        Figures "accuracy" (of the last epoch), "by_epoch", "epochs", "parameters" and "seconds", and
        "stopped" if the deadline ended the run.
    """
    setting = Published(**settings)
    pairs, batch_size = PUBLISHED[length]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (length, pairs, setting.vocabulary)
    train = sample_many(DATA_SEED, setting.train_count, *shape).to(device)
    valid = sample_many(TEST_SEED, setting.test_count, *shape).to(device)
    torch.manual_seed(seed)
    # Only attention needs embeddings to distinguish positions.
    positions = length if recurrence == "softmax" else None
    sizes = (setting.vocabulary, dim, setting.depth, setting.d_state, positions)
    model = LanguageModel(recurrence, *sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY)
    schedule = CosineAnnealingLR(optimizer, setting.epochs)
    start = time.perf_counter()
    scores = [0.0]
    while len(scores) <= setting.epochs and scores[-1] <= setting.enough:
        for first in range(0, len(train), batch_size):
            step(model, optimizer, train[first : first + batch_size])
        schedule.step()
        scores.append(accuracy(model, valid, batch_size))
        if time.time() > deadline:
            break
    epochs, score = len(scores) - 1, scores[-1]
    seconds = round(time.perf_counter() - start, 1)
    row = {"parameters": parameters(model), "accuracy": score, "epochs": epochs, "seconds": seconds}
    row["by_epoch"] = [round(score, 4) for score in scores[1:]]
    ended = epochs == setting.epochs or score > setting.enough
    return row if ended else row | {"stopped": True}


# ------------------------------------------------------------------------------------------ main


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--setting", choices=(*SMALL, "published"), default="short")
    add("--measure", choices=("accuracy", "steps"), default="accuracy")
    add("--recurrences", nargs="+", choices=RECURRENCES, metavar="NAME", default=[*RECURRENCES])
    add("--rates", nargs="+", type=float, help="learning rates; default: the paper's")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--lengths", nargs="+", type=int, choices=PUBLISHED, default=[*PUBLISHED])
    add("--dims", nargs="+", type=int, default=[64, 128, 256, 512], help="of published")
    add("--output", type=Path, default=OUTPUT, help="the record")
    for field in fields(Published):
        if field.name.endswith("count") or field.name in ("epochs", "vocabulary"):
            option = f"--{field.name.replace('_', '-')}"
            add(option, type=int, default=field.default, help="of published")
    add_seconds(parser)
    args = parser.parse_args()
    if args.measure == "steps" and args.setting not in plateau.SETTINGS:
        allowed = ", ".join(plateau.SETTINGS)
        parser.error(f"--measure steps needs one of --setting {allowed}, got {args.setting}")
    return args


def main() -> int:
    """Make the runs that the record lacks and return the exit status."""
    args = parse()
    budget = Budget(args.seconds)
    axes = {"recurrence": args.recurrences, "lr": args.rates or RATES, "seed": args.seeds}
    if args.setting == "published":
        given = {
            field.name: getattr(args, field.name, field.default) for field in fields(Published)
        }
        settings, deadline = given, time.time() + budget.left
        function = partial(run_published, **settings, deadline=deadline)
        axes = {"length": args.lengths, "dim": args.dims} | axes
    elif args.measure == "steps":
        settings = asdict(plateau.SETTINGS[args.setting])
        function = partial(plateau.run, args.setting)
    else:
        settings = asdict(SMALL[args.setting])
        function = partial(run_small, **settings)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    heading = {"setting": args.setting, "measure": args.measure}
    record = Record(args.output, heading | settings)
    left = run_all(record, function, product(**axes), args.jobs, budget=budget)
    return UNFINISHED if left else 0


if __name__ == "__main__":
    sys.exit(main())
