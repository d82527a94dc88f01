"""Associative recall: the data, the recurrences against loops, and small runs."""

import dataclasses

import pytest
import torch
from torch import Tensor

from lab.experiments import recall, recall_task, recurrences
from lab.experiments.recurrences import Mixer


def test_every_key_is_asked_for_once_after_all_pairs() -> None:
    length, pairs, vocabulary = 40, 10, 32
    data = recall_task.sample(torch.Generator().manual_seed(0), 200, length, pairs, vocabulary)
    keys, values = data.tokens[:, 0 : 2 * pairs : 2], data.tokens[:, 1 : 2 * pairs : 2]
    assert (keys.min(), keys.max()) == (1, vocabulary // 2 - 1)
    assert (values.min(), values.max()) == (vocabulary // 2, vocabulary - 1)
    for drawn in (keys, values, data.queries):
        assert all(len(set(row.tolist())) == pairs for row in drawn)
    assert torch.equal(data.tokens.gather(1, data.queries), keys)
    assert torch.equal(data.answers, values)
    assert (data.queries.min(), data.queries.max()) == (2 * pairs, length - 2)
    assert not (data.queries % 2).any()
    filler = torch.ones(200, length).scatter(1, data.queries, 0)[:, 2 * pairs :]
    assert not (data.tokens[:, 2 * pairs :] * filler).any()


def test_data_depend_on_the_seed_alone() -> None:
    one, same, other = (recall_task.sample_many(seed, 1200, 16, 4, 16) for seed in (1, 1, 2))
    assert len(one.tokens) == 1200
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, other.tokens)


L, N, E = 40, 3, 4  # more tokens than a chunk


def drawn(*shape: int) -> Tensor:
    return torch.randn(2, L, *shape, dtype=torch.float64, requires_grad=True)


def loop(x: Tensor, q: Tensor, k: Tensor, forget: Tensor, step: Tensor, delta: bool) -> Tensor:
    """Compute S <- forget S + step (x - delta k.S) k and return q.S; forget is (B, L, E, N)."""
    state, outputs = torch.zeros(2, E, N, dtype=torch.float64), []
    for t in range(L):
        known = (state * k[:, t, None]).sum(-1) if delta else 0
        written = (step[:, t] * (x[:, t] - known)).unsqueeze(-1) * k[:, t, None]
        state = forget[:, t] * state + written
        outputs.append((state * q[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


def check(parallel: Tensor, sequential: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Compare the outputs and their gradients."""
    torch.testing.assert_close(parallel, sequential)
    weights = torch.randn_like(parallel)
    pairs = (torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True) for y in (parallel, sequential))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def test_parallel_forms_are_their_loops() -> None:
    """Linear attention is a sum; the delta rule writes what is not known yet."""
    inputs, one = (drawn(E), drawn(N), drawn(N)), torch.ones(2, L, 1, 1)
    made = recurrences.linear_attention(*inputs)
    check(made, loop(*inputs, one, one[..., 0], False), inputs)
    x, q, k, logit = inputs = *inputs, drawn(1)
    step, key = torch.sigmoid(logit), torch.nn.functional.normalize(k, dim=-1)
    made = recurrences.delta_rule(x, q, key, step)
    check(made, loop(x, q, key, one, step, True), inputs)


@pytest.mark.parametrize("name", recurrences.RECURRENCES)
def test_mixers_are_causal(name: str) -> None:
    mixer = Mixer(8, name, d_state=N)
    x = torch.randn(2, L, 8)
    y = mixer(x)
    changed = mixer(torch.cat([x[:, :20], torch.randn(2, L - 20, 8)], dim=1))
    torch.testing.assert_close(y[:, :20], changed[:, :20])
    assert not torch.allclose(y[:, 20:], changed[:, 20:])


def test_a_small_run_trains_and_tests() -> None:
    small = {"length": 16, "pairs": (2, 4), "batch_size": 4, "train_count": 8, "d_state": 4}
    small |= {"epochs": 2, "far_pairs": 2, "factors": (1, 2), "test_count": 4}
    first, again = (recall.run("longhorn", 8, 1e-3, 0, **small) for _ in range(2))
    assert first | {"seconds": 0} == again | {"seconds": 0}
    assert first["epochs"] == len(first["by_epoch"]) == 2
    assert first["accuracy"] == (first["pairs 2"] + first["pairs 4"]) / 2
    assert {"length 16", "length 32"} <= first.keys()


def test_the_published_settings_fit_their_sequences() -> None:
    for name, setting in recall.SETTINGS.items():
        small = dataclasses.replace(setting, train_count=3, batch_size=2)
        batches = recall.training_batches(small, 0, torch.device("cpu"))
        sizes = [2] * len(small.pairs) + [1] * len(small.pairs)
        assert [len(batch.tokens) for batch in batches] == sizes, name
