"""Associative recall (MQAR, arXiv 2312.04927): sequences with pairs of keys and values, and a small language model."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.experiments.recurrences import Mixer

GAP_POWER = 0.01

# ------------------------------------------------------------------------------------------- data


class Sequences(NamedTuple):
    """Sequences with their queries and answers."""

    tokens: Tensor
    """Tokens, (B, T)."""
    queries: Tensor
    """Positions at which a value is asked for, in the order of the pairs, (B, K)."""
    answers: Tensor
    """Values that are asked for, (B, K)."""

    def split(self, size: int) -> "list[Sequences]":
        """Split into batches of at most ``size`` sequences."""
        parts = (tensor.split(size) for tensor in self)
        return [Sequences(*tensors) for tensors in zip(*parts, strict=True)]

    def to(self, device: torch.device) -> "Sequences":
        """Copy to a device."""
        return Sequences(*(tensor.to(device) for tensor in self))


def sample(generator: torch.Generator, count: int, length: int, pairs: int, vocabulary: int) -> Sequences:
    """Draw sequences: k1 v1 k2 v2 ... and then the keys among zeros.

    Query i is at token 2 K + 2 g_i. The gaps g are drawn without replacement, in the order of the
    pairs, with probability proportional to (g + 1)^(a - 1), a = 0.01.

    Args:
        generator: CPU generator, so that the sequences do not depend on the device.
        count: Number of sequences B.
        length: Tokens T of each sequence.
        pairs: Pairs K of each sequence.
        vocabulary: Number of tokens; keys are in the lower half without 0, values in the upper half.

    Raises:
        ValueError: If the pairs do not fit the length or the vocabulary.
    """
    places, half = (length - 2 * pairs) // 2, vocabulary // 2
    if not 0 < pairs <= places:
        raise ValueError(f"pairs must be in [1, length / 4] for length {length}, got {pairs}")
    if pairs > half - 1:
        raise ValueError(f"vocabulary must be at least {2 * pairs + 2}, got {vocabulary}")
    keys = 1 + torch.rand(count, half - 1, generator=generator).topk(pairs).indices
    answers = half + torch.rand(count, vocabulary - half, generator=generator).topk(pairs).indices
    # Gumbel top-k: the largest log p + noise are a draw without replacement, in the order of drawing.
    log_p = (GAP_POWER - 1) * torch.arange(1, places + 1, dtype=torch.float64).log()
    noise = torch.empty(count, places, dtype=torch.float64).exponential_(generator=generator)
    gaps = (log_p - noise.log()).topk(pairs).indices
    queries = 2 * pairs + 2 * gaps
    tokens = torch.zeros(count, length, dtype=torch.int64)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = answers
    return Sequences(tokens.scatter_(1, queries, keys), queries, answers)


def sample_many(seed: int, count: int, length: int, pairs: int, vocabulary: int) -> Sequences:
    """Draw sequences like ``sample``, in parts of 1,000 to bound the memory."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [len(part) for part in torch.arange(count).split(1000)]
    parts = [sample(generator, size, length, pairs, vocabulary) for size in sizes]
    return Sequences(*map(torch.cat, zip(*parts, strict=True)))


# ------------------------------------------------------------------------------------------ model


class LanguageModel(nn.Module):
    """Embedding, mixers with residuals, and a head that shares the embedding's weights."""

    def __init__(self, recurrence: str, vocabulary: int, dim: int, depth: int, d_state: int) -> None:
        """Create a model.

        Args:
            recurrence: A key of ``recurrences.RECURRENCES``.
            vocabulary: Number of tokens.
            dim: Channels C.
            depth: Number of layers.
            d_state: State size N.
        """
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(depth))
        self.mixers = nn.ModuleList(Mixer(dim, recurrence, d_state, depth) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, queries: Tensor) -> Tensor:
        """Return logits (B, K, V) at the positions ``queries`` (B, K) of the tokens (B, T)."""
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        asked = x.gather(1, queries.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.norm(asked) @ self.embedding.weight.mT


@torch.no_grad()
def accuracy(model: LanguageModel, sequences: Sequences, batch_size: int) -> float:
    """Return the share of right answers over all queries of all sequences."""
    right = sum(
        (model(batch.tokens, batch.queries).argmax(-1) == batch.answers).sum().item()
        for batch in sequences.split(batch_size)
    )
    return right / sequences.answers.numel()


def step(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: Sequences) -> None:
    """Take one step of training: cross-entropy of the answers, over the whole vocabulary."""
    logits = model(batch.tokens, batch.queries)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
