"""Compare recurrences at recalling pairs of keys and values (MQAR, arXiv 2312.04927).

    python -m experiments.mqar [--setting short] [--jobs 2] [--recurrences ...] [--output ...]
    python -m experiments.mqar --setting long [--jobs 2]
    python -m experiments.mqar --setting longer [--jobs 2] [--seconds 3600]
    python -m experiments.mqar --setting published [--lengths 512] [--dims 64] [--output ...]

A sequence lists K pairs and then asks for the value of each key once, at gaps drawn from a power law.
All models are the same but for the recurrence (``mixer.py``). All but ``published`` are for CPUs:
they train one layer on fresh sequences of several K, at two learning rates, of which the one with the
better mean over the seeds is reported, and test each K apart, and at up to 16 times the length trained
at. In ``short`` the question is how many pairs are recalled at once; in ``long``, with twice the tokens,
who begins to recall within the steps; ``longer``, at 128, trains those that began to the end, at one rate
each. ``published`` is the grid of Fig. 4 of the Longhorn paper. Runs
are recorded one by one; the same command continues. After ``--seconds`` none is begun; runs of ``published``
that are still going then end with their epoch, and are recorded as stopped; "by_epoch" tells how far each was.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from benchmarks.budget import UNFINISHED, Budget, add_seconds
from experiments.mixer import ALL, Mixer
from experiments.mqar_results import best_of_rates, published_table, table
from experiments.records import Record, Row, product, run_all
from experiments.recurrences import RECURRENCES

RESULTS = Path(__file__).parent / "results"
RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)  # the paper's
SMALL_RATES = RATES[2:]  # the lower ones are too low for a thousand steps
GAP_POWER = 0.01
WEIGHT_DECAY = 0.1
DATA_SEED, TEST_SEED = 123, 2**31
TEST_TOKENS = 16384  # in a batch: bounds the memory of attention to all earlier tokens

# ------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Sequences:
    """Sequences with what to recall in them."""

    tokens: Tensor
    """(B, T)."""
    queries: Tensor
    """Positions at which a value is asked for, in the order of the pairs, (B, K)."""
    answers: Tensor
    """These values, (B, K)."""

    def __getitem__(self, which: slice) -> "Sequences":
        return Sequences(self.tokens[which], self.queries[which], self.answers[which])

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> "Sequences":
        """Copy to a device."""
        return Sequences(*(t.to(device) for t in (self.tokens, self.queries, self.answers)))


def sample(
    generator: torch.Generator, count: int, length: int, pairs: int, vocabulary: int
) -> Sequences:
    """Draw sequences: k1 v1 k2 v2 ... and then the keys among zeros.

    Query i is at token 2 K + 2 g_i. The gaps g are drawn without replacement, in the order of the
    pairs, with probability proportional to (g + 1)^(a - 1), a = 0.01.

    Args:
        generator: Of the CPU, so that the sequences do not depend on the device.
        count: Number of sequences B.
        length: Tokens T of each.
        pairs: Pairs K of each.
        vocabulary: Number of tokens; keys are of the lower half without 0, values of the upper.

    Raises:
        ValueError: the pairs do not fit the length or the vocabulary.
    """
    places, half = (length - 2 * pairs) // 2, vocabulary // 2
    if not 0 < pairs <= places:
        raise ValueError(f"pairs must be in [1, length / 4] for length {length}, got {pairs}")
    if pairs > half - 1:
        raise ValueError(f"vocabulary must be at least {2 * pairs + 2} for {pairs} pairs")
    keys = 1 + torch.rand(count, half - 1, generator=generator).topk(pairs).indices
    answers = half + torch.rand(count, vocabulary - half, generator=generator).topk(pairs).indices
    # The highest of log p plus Gumbel noise are a draw without replacement, in the order of drawing.
    log_p = (GAP_POWER - 1) * torch.arange(1, places + 1, dtype=torch.float64).log()
    noise = torch.empty(count, places, dtype=torch.float64).exponential_(generator=generator)
    gaps = (log_p - noise.log()).topk(pairs).indices
    queries = 2 * pairs + 2 * gaps
    tokens = torch.zeros(count, length, dtype=torch.int64)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = answers
    return Sequences(tokens.scatter_(1, queries, keys), queries, answers)


def sample_many(seed: int, count: int, length: int, pairs: int, vocabulary: int) -> Sequences:
    """Draw as ``sample``, in parts that bound the memory."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [len(part) for part in torch.arange(count).split(1000)]
    parts = [sample(generator, size, length, pairs, vocabulary) for size in sizes]
    fields = ("tokens", "queries", "answers")
    return Sequences(*(torch.cat([getattr(part, field) for part in parts]) for field in fields))


# ------------------------------------------------------------------------------------------ model


class LanguageModel(nn.Module):
    """Embedding, mixers with residuals, and the embedding again as the head."""

    def __init__(
        self,
        recurrence: str,
        vocabulary: int,
        dim: int,
        depth: int,
        d_state: int,
        positions: int | None = None,
    ) -> None:
        """Create a model.

        Args:
            recurrence: A key of ``mixer.ALL``.
            vocabulary: Number of tokens.
            dim: Channels C.
            depth: Number of layers.
            d_state: State size N.
            positions: Learn an embedding of that many positions; none if None.
        """
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = None if positions is None else nn.Embedding(positions, dim)
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(depth))
        self.mixers = nn.ModuleList(
            Mixer(dim, recurrence, d_state, depth=depth) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        for module in (self.embedding, self.positions):
            if module is not None:
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, queries: Tensor) -> Tensor:
        """Return logits (B, K, V) of the tokens (B, T) that answer those at ``queries`` (B, K)."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        asked = x.gather(1, queries.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.norm(asked) @ self.embedding.weight.mT


def loss_of(model: LanguageModel, batch: Sequences) -> Tensor:
    """Return the cross-entropy of the answers, over the whole vocabulary."""
    logits = model(batch.tokens, batch.queries)
    return F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())


@torch.no_grad()
def accuracy(model: LanguageModel, sequences: Sequences, batch_size: int) -> float:
    """Return the share of right answers; all sequences have as many, so it is their mean's."""
    right = 0
    for start in range(0, len(sequences), batch_size):
        batch = sequences[start : start + batch_size]
        guesses = model(batch.tokens, batch.queries).argmax(-1)
        right += int((guesses == batch.answers).sum())
    return right / sequences.answers.numel()


def parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def step(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: Sequences) -> Tensor:
    """Take one step of training and return the loss."""
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


# ------------------------------------------------------------------------- the setting for a CPU


@dataclass(frozen=True)
class Small:
    """What the runs on a CPU share.

    The numbers of pairs are half the state size, as many and twice as many. One layer, since two
    need far more examples to find the task; few pairs among many, since they are found first.
    """

    dim: int = 64
    depth: int = 1
    d_state: int = 4
    vocabulary: int = 64
    length: int = 32
    pairs: tuple[int, ...] = (2, 4, 8)
    """Of a sequence; batches of each take turns."""
    batch_size: int = 64
    steps: int = 1200
    warmup: int = 50
    factors: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Lengths of a further test, in trained ones ..."""
    far_pairs: int = 4
    """... and the pairs of its sequences."""
    test_count: int = 500


SMALL = {
    "short": Small(),
    "long": Small(length=64, d_state=8, pairs=(4, 8, 16), steps=800, far_pairs=8),
    "longer": Small(
        length=128, d_state=8, pairs=(4, 8, 16), steps=3000, far_pairs=8, factors=(1, 2, 4)
    ),
}
# Chosen for 64 tokens by the tuning of PLAN.md: a run of ``longer`` takes minutes, and has one rate.
LONGER_RATES = {
    "longhorn": 2.83e-3,
    "longhorn_exact": 4e-3,
    "mamba": 1.6e-2,
    "linear_attention": 4e-3,
    "deltanet": 1e-3,
}
# Enough to tell what matters, in minutes.
LONG_RECURRENCES = ("longhorn", "longhorn_exact", "mamba", "linear_attention", "deltanet")


def run_small(recurrence: str, lr: float, seed: int, **settings: Any) -> Row:
    """Train on fresh sequences, the numbers of pairs in turn, and test.

    Args:
        recurrence: A key of ``mixer.ALL``.
        lr: Highest learning rate.
        seed: Of the initial values and of the sequences.
        settings: Fields of ``Small``.

    Returns:
        Figures "accuracy" (mean over the numbers of pairs, at the trained length), "pairs K" for
        each number of pairs, and "length T" for each length, with ``far_pairs`` pairs.
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


def small_runs(setting: str, recurrences: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """Return the runs of a setting: each seed at every rate, in ``longer`` at the recurrence's own."""
    if setting != "longer":
        return product(recurrence=recurrences, lr=SMALL_RATES, seed=seeds)
    runs = product(seed=seeds, recurrence=recurrences)  # what is stopped has as many of each
    return [run | {"lr": LONGER_RATES[run["recurrence"]]} for run in runs]


# ----------------------------------------------------------------------------- published setting

# Tokens: pairs and examples of a batch.
PUBLISHED = {64: (4, 512), 128: (8, 512), 256: (16, 256), 512: (64, 128)}


@dataclass(frozen=True)
class Published:
    """What the runs of the published setting share."""

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
        recurrence: A key of ``mixer.ALL``.
        length: A key of ``PUBLISHED``.
        dim: Channels C.
        lr: Learning rate of the first epoch.
        seed: Of the initial values. All runs of a length are trained and tested on the same data.
        deadline: By ``time.time``: the run stops after the epoch in which this passes.
        settings: Fields of ``Published``.

    Returns:
        Figures "accuracy" (the last epoch's), "by_epoch", "epochs", "parameters" and "seconds", and
        "stopped" if the deadline ended it.
    """
    setting = Published(**settings)
    pairs, batch_size = PUBLISHED[length]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (length, pairs, setting.vocabulary)
    train = sample_many(DATA_SEED, setting.train_count, *shape).to(device)
    valid = sample_many(TEST_SEED, setting.test_count, *shape).to(device)
    torch.manual_seed(seed)
    # Attention alone has no other way to tell one position from another.
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
    parser.add_argument("--setting", choices=(*SMALL, "published"), default="short")
    parser.add_argument(
        "--recurrences",
        nargs="+",
        choices=ALL,
        metavar="NAME",
        help="default: all; of long and longer, five",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="reported ones")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--lengths", nargs="+", type=int, choices=PUBLISHED, default=[*PUBLISHED])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument(
        "--output", type=Path, help="the record; default: results/mqar_<setting>.json"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="of published")
    for field in fields(Published):
        if field.name.endswith("count") or field.name in ("epochs", "vocabulary"):
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, type=int, default=field.default, help="of published")
    add_seconds(parser)
    args = parser.parse_args()
    if args.setting == "longer" and not set(args.recurrences or []) <= set(LONGER_RATES):
        allowed = ", ".join(LONGER_RATES)
        parser.error(f"--recurrences of longer must be of {allowed}, got {args.recurrences}")
    return args


def main() -> int:
    """Run what is missing, print a table and return the exit status; results.py draws figures."""
    args = parse()
    budget = Budget(args.seconds)
    published = args.setting == "published"
    few = args.setting in ("long", "longer")
    names = args.recurrences or (LONG_RECURRENCES if few else list(RECURRENCES))
    given = {field.name: getattr(args, field.name, field.default) for field in fields(Published)}
    settings = given if published else asdict(SMALL[args.setting])
    output = args.output or RESULTS / f"mqar_{args.setting}.json"
    in_pieces = args.setting == "longer"
    record = Record(output, {"setting": args.setting} | settings, in_pieces=in_pieces)
    if published:
        seeds = args.seeds or [123]
        axes = {"recurrence": names, "length": args.lengths, "dim": args.dims}
        runs = product(**axes, lr=args.rates, seed=seeds)
        until = partial(run_published, **settings, deadline=time.time() + budget.left)
        left = run_all(record, until, runs, args.jobs, budget=budget)
        print(published_table(best_of_rates(record.rows)))
        return UNFINISHED if left else 0
    seeds = args.seeds or list(range(5 if args.setting == "longer" else 3))
    runs = small_runs(args.setting, names, seeds)
    left = run_all(record, partial(run_small, **settings), runs, args.jobs, budget=budget)
    print(table(record.rows))
    return UNFINISHED if left else 0


if __name__ == "__main__":
    sys.exit(main())
