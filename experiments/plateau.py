"""Train associative recall until a run leaves the plateau; the result is the number of steps.

At first, runs name any of the K values of a sequence, which is right once in K times. They stay on this plateau
for some hundred steps or for good (``recall_task.py``). A run *has left* at the first step at which the mean
share of right answers in the last ``WINDOW`` batches is at least ``TIMES`` the mean of 1/K over the settings'
numbers of pairs. Sequences are fresh and answered before the step that learns from them, so this is accuracy on
unseen sequences. The learning rate rises for ``WARMUP`` steps and then stays constant. So a run's course does
not depend on the step limit at which it is given up (it is *censored*).
"""

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from experiments.recall_task import WEIGHT_DECAY, LanguageModel, sample
from experiments.records import Row

WINDOW = 60  # steps, 20 for each number of pairs; the share then varies by about 0.02
TIMES = 2.0
WARMUP = 50  # steps


@dataclass(frozen=True)
class Setting:
    """Settings that runs share."""

    length: int
    """Tokens of a sequence."""
    pairs: tuple[int, ...]
    """Numbers of pairs K in a sequence; batches alternate between them."""
    d_state: int
    limit: int
    """Steps after which a run that is still on the plateau is given up."""
    dim: int = 64
    depth: int = 1
    vocabulary: int = 64
    batch_size: int = 64

    @property
    def left_at(self) -> float:
        """Share of right answers at which a run has left the plateau."""
        return TIMES * statistics.fmean(1 / k for k in self.pairs)


SETTINGS = {
    "short": Setting(length=32, pairs=(2, 4, 8), d_state=4, limit=1500),
    "long": Setting(length=64, pairs=(4, 8, 16), d_state=8, limit=1500),
}


def run(setting: str, recurrence: str, lr: float, seed: int) -> Row:
    """Train a model until it leaves the plateau or reaches the step limit.

    Args:
        setting: A key of ``SETTINGS``.
        recurrence: A key of ``RECURRENCES``.
        lr: Learning rate after the warm-up.
        seed: Seed of the initial weights and of the sequences, which all recurrences share.

    Returns:
        "left" (whether it left), "steps" (steps until it left, or else the limit), "accuracy" and
        "train_loss" (means of the last window), and "cpu_seconds". A loss that is not finite ends the
        run: it counts as staying on the plateau, with "train_loss" None.
    """
    start = time.process_time()
    settings = SETTINGS[setting]
    torch.manual_seed(seed)
    model = LanguageModel(
        recurrence, settings.vocabulary, settings.dim, settings.depth, settings.d_state
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(seed)
    shares, losses = deque(maxlen=WINDOW), deque(maxlen=WINDOW)
    left, finite, step = False, True, 0
    while finite and not left and step < settings.limit:
        pairs = settings.pairs[step % len(settings.pairs)]
        shape = (settings.batch_size, settings.length, pairs, settings.vocabulary)
        batch = sample(generator, *shape)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / WARMUP)
        logits = model(batch.tokens, batch.queries)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        shares.append((logits.argmax(-1) == batch.answers).float().mean().item())
        losses.append(loss.item())
        finite = math.isfinite(losses[-1])
        left = len(shares) == WINDOW and statistics.fmean(shares) >= settings.left_at
    return {
        "left": left,
        "steps": step if left else settings.limit,
        "accuracy": round(statistics.fmean(shares), 4),
        "train_loss": round(statistics.fmean(losses), 4) if finite else None,
        "cpu_seconds": round(time.process_time() - start, 1),
    }
