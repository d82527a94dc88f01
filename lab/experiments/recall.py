"""Compare recurrences at recalling pairs of keys and values (MQAR, arXiv 2312.04927).

    python -m lab.experiments.recall                                  # minutes on a CPU
    python -m lab.experiments.recall --setting published_512 --seeds 123 --dims 64 128 256 512    # for a GPU
    python -m lab.experiments.tables output/recall.json --by recurrence lr --show accuracy*100:1

A sequence lists K pairs and then asks for the value of each key once, at gaps drawn from a power law. All models
differ only in the recurrence (``recurrences.py``). ``short`` (32 tokens) and ``longer`` (128) train one layer on
fresh sequences of several K, and test each K separately, and longer sequences. ``published_LENGTH`` is the grid of
Fig. 4 of the Longhorn paper.

Runs are recorded one by one; repeat the command to resume. After ``--seconds`` no run starts.
"""

import argparse
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from lab.benchmarks.budget import UNFINISHED, Budget, add_seconds
from lab.experiments.recall_task import LanguageModel, Sequences, accuracy, sample_many, step
from lab.experiments.records import Record, Row, product, run_all
from lab.experiments.recurrences import RECURRENCES

RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)  # the paper's
WEIGHT_DECAY = 0.1
TEST_SEED = 2**31
TEST_TOKENS = 16384  # in a batch of the test, which bounds its memory


@dataclass(frozen=True)
class Setting:
    """Settings that runs share."""

    length: int
    """Tokens of a training sequence."""
    pairs: tuple[int, ...]
    """Numbers of pairs K in a sequence; batches alternate between them."""
    batch_size: int
    train_count: int
    """Training sequences for each number of pairs."""
    d_state: int
    epochs: int = 1
    depth: int = 1
    vocabulary: int = 64
    warmup: int = 50
    """Steps; afterwards the learning rate follows a cosine, by step or, with several epochs, by epoch."""
    factors: tuple[int, ...] = ()
    """Lengths of the test by length, in multiples of the trained length."""
    far_pairs: int = 8
    """Number of pairs in the test by length."""
    test_count: int = 500
    enough: float = 1.0
    """Accuracy above which a run stops after an epoch."""


def published(length: int, pairs: int, batch_size: int) -> Setting:
    """Return the published setting for sequences of a length."""
    counts = {"train_count": 100_000, "test_count": 3000, "epochs": 64, "warmup": 1}
    model = {"d_state": 16, "depth": 2, "vocabulary": 8192}
    return Setting(length, (pairs,), batch_size, **counts, **model, enough=0.99)


# On a CPU, the numbers of pairs are 0.5, 1 and 2 times the state size. Small numbers are included because they are
# learned first. There is one layer, since two need far more examples to find the task.
SETTINGS = {
    "short": Setting(32, (2, 4, 8), 64, 25_600, d_state=4, far_pairs=4, factors=(1, 2, 4, 8, 16)),
    "longer": Setting(128, (4, 8, 16), 64, 64_000, d_state=8, factors=(1, 2, 4)),
    "published_64": published(64, 4, 512),
    "published_128": published(128, 8, 512),
    "published_256": published(256, 16, 256),
    "published_512": published(512, 64, 128),
}


def run(recurrence: str, dim: int, lr: float, seed: int, **settings: Any) -> Row:
    """Train on the same sequences in the same order in every epoch, on a GPU if there is one, and test.

    Args:
        recurrence: A key of ``recurrences.RECURRENCES``.
        dim: Channels C.
        lr: Highest learning rate.
        seed: Seed of the initial weights and of the training sequences.
        settings: Fields of ``Setting``.

    Returns:
        "parameters", "epochs" and "seconds", and accuracies: "pairs K" for each K at the trained length,
        "accuracy" (their mean), "by_epoch", and "length T" for each tested length with ``far_pairs`` pairs.
    """
    setting = Setting(**settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    sizes = (setting.vocabulary, dim, setting.depth, setting.d_state)
    model = LanguageModel(recurrence, *sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY)
    batches = training_batches(setting, seed, device)
    steps = setting.epochs * len(batches)
    constant = len(batches) if setting.epochs > 1 else 1
    schedule = LambdaLR(
        optimizer,
        lambda i: min(1.0, (i + 1) / setting.warmup) * cosine(i // constant * constant / steps),
    )

    def measure(length: int, pairs: int) -> float:
        sequences = sample_many(TEST_SEED, setting.test_count, length, pairs, setting.vocabulary)
        return accuracy(model, sequences.to(device), max(1, TEST_TOKENS // length))

    start = time.perf_counter()
    scores: list[float] = []
    while len(scores) < setting.epochs and (not scores or scores[-1] <= setting.enough):
        for batch in batches:
            step(model, optimizer, batch)
            schedule.step()
        by_pairs = {f"pairs {k}": measure(setting.length, k) for k in setting.pairs}
        scores.append(statistics.fmean(by_pairs.values()))
    lengths = [factor * setting.length for factor in setting.factors]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "epochs": len(scores),
        "seconds": round(time.perf_counter() - start, 1),
        "by_epoch": [round(score, 4) for score in scores],
        "accuracy": scores[-1],
        **by_pairs,
        **{f"length {length}": measure(length, setting.far_pairs) for length in lengths},
    }


def training_batches(setting: Setting, seed: int, device: torch.device) -> list[Sequences]:
    """Return the batches of an epoch."""
    parts = [
        sample_many(seed, setting.train_count, setting.length, k, setting.vocabulary).to(device) for k in setting.pairs
    ]
    splits = zip(*(part.split(setting.batch_size) for part in parts), strict=True)
    return [batch for batches in splits for batch in batches]


def cosine(share: float) -> float:
    """Return the share of the highest learning rate after a share of the training."""
    return 0.5 * (1 + math.cos(math.pi * share))


def main() -> int:
    """Make the runs that the record lacks and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--setting", choices=SETTINGS, default="short")
    add("--recurrences", nargs="+", choices=RECURRENCES, metavar="NAME", default=[*RECURRENCES])
    add("--dims", nargs="+", type=int, default=[64], help="channels")
    add("--rates", nargs="+", type=float, default=RATES, help="learning rates; default: the paper's")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--output", type=Path, default=Path("output/recall.json"), help="the record")
    add_seconds(parser)
    args = parser.parse_args()
    budget, settings = Budget(args.seconds), asdict(SETTINGS[args.setting])
    axes = {"recurrence": args.recurrences, "dim": args.dims, "lr": args.rates, "seed": args.seeds}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    record = Record(args.output, {"setting": args.setting} | settings)
    left = run_all(record, partial(run, **settings), product(**axes), args.jobs, budget)
    return UNFINISHED if left else 0


if __name__ == "__main__":
    sys.exit(main())
