"""Associative recall: the data, the recurrences against loops, and small runs."""

import pytest
import torch
from torch import Tensor

from experiments import recall, recall_task, recurrences
from experiments.mixer import Mixer

# ------------------------------------------------------------------------------------------- data


def test_every_key_is_asked_for_once_after_all_pairs() -> None:
    length, pairs, vocabulary = 40, 10, 32
    data = recall_task.sample(torch.Generator().manual_seed(0), 200, length, pairs, vocabulary)
    keys, values = data.tokens[:, 0 : 2 * pairs : 2], data.tokens[:, 1 : 2 * pairs : 2]
    assert keys.min() == 1
    assert keys.max() == vocabulary // 2 - 1
    assert values.min() == vocabulary // 2
    assert values.max() == vocabulary - 1
    for drawn in (keys, values, data.queries):
        assert all(len(set(row.tolist())) == pairs for row in drawn)
    assert torch.equal(data.tokens.gather(1, data.queries), keys)
    assert torch.equal(data.answers, values)
    assert data.queries.min() == 2 * pairs
    assert data.queries.max() == length - 2
    assert not (data.queries % 2).any()
    filler = torch.ones(200, length).scatter(1, data.queries, 0)[:, 2 * pairs :]
    assert not (data.tokens[:, 2 * pairs :] * filler).any()


def test_data_depend_on_the_seed_alone() -> None:
    one, same, other = (recall_task.sample_many(seed, 1200, 16, 4, 16) for seed in (1, 1, 2))
    assert len(one) == 1200
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, other.tokens)


# ------------------------------------------------------------------------------------ recurrences

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
    pairs = (
        torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True)
        for y in (parallel, sequential)
    )
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def test_linear_attention_is_a_sum() -> None:
    x, q, k = inputs = drawn(E), drawn(N), drawn(N)
    one = torch.ones(2, L, 1, 1)
    check(recurrences.linear_attention(*inputs), loop(*inputs, one, one[..., 0], False), inputs)


def test_retention_forgets_at_the_rate_of_the_head() -> None:
    x, q, k = inputs = drawn(E), drawn(N), drawn(N)
    decays = torch.tensor([0.5, 0.9], dtype=torch.float64)
    forget = decays.repeat_interleave(E // 2).expand(2, L, E).unsqueeze(-1)
    step = torch.ones(2, L, 1)
    check(recurrences.retention(*inputs, decays), loop(*inputs, forget, step, False), inputs)


def test_gated_linear_attention_forgets_by_state_channel() -> None:
    x, q, k, logit = inputs = drawn(E), drawn(N), drawn(N), drawn(N)
    log_decay = torch.nn.functional.logsigmoid(logit)
    forget = log_decay.exp().unsqueeze(2).expand(2, L, E, N)
    parallel = recurrences.gated_linear_attention(x, q, k, log_decay)
    check(parallel, loop(x, q, k, forget, torch.ones(2, L, 1), False), inputs)


def test_gated_linear_attention_survives_the_strongest_decay() -> None:
    model = Mixer(4, "gla", d_state=N)
    torch.nn.init.constant_(model.recurrence.decay_proj.bias, -1e4)
    x = torch.randn(2, L, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.isfinite().all()


def test_delta_rule_writes_what_is_not_known_yet() -> None:
    x, q, k, logit = inputs = drawn(E), drawn(N), drawn(N), drawn(1)
    step, key = torch.sigmoid(logit), torch.nn.functional.normalize(k, dim=-1)
    parallel = recurrences.delta_rule(x, q, key, step)
    check(parallel, loop(x, q, key, torch.ones(2, L, 1, 1), step, True), inputs)


@pytest.mark.parametrize("name", ["longhorn_scalar", "longhorn_exact_scalar"])
def test_one_beta_serves_all_channels(name: str) -> None:
    module = recurrences.RECURRENCES[name](recurrences.Sizes(2, E, N, 1)).double()
    x = drawn(E)
    beta, k, q = module.x_proj(x).split([1, N, N], dim=-1)
    step = beta.sigmoid() / (1 + beta.sigmoid() * k.square().sum(-1, keepdim=True))
    exact = name == "longhorn_exact_scalar"
    forget = (1 - (0 if exact else step * k.square())) * torch.ones_like(k)
    expected = loop(x, q, k, forget.unsqueeze(2), step, exact)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", recurrences.RECURRENCES)
def test_mixers_are_causal(name: str) -> None:
    mixer = Mixer(8, name, d_state=N)
    x = torch.randn(2, L, 8)
    y = mixer(x)
    changed = mixer(torch.cat([x[:, :20], torch.randn(2, L - 20, 8)], dim=1))
    torch.testing.assert_close(y[:, :20], changed[:, :20])
    assert not torch.allclose(y[:, 20:], changed[:, 20:])


# -------------------------------------------------------------------------------- runs and results


def test_a_small_run_trains_and_tests() -> None:
    small = {
        "dim": 8,
        "far_pairs": 2,
        "length": 16,
        "pairs": (2, 4),
        "batch_size": 4,
        "test_count": 4,
    }
    figures = recall.run_small("longhorn", 1e-3, 0, steps=2, factors=(1, 2), **small)
    assert figures == recall.run_small("longhorn", 1e-3, 0, steps=2, factors=(1, 2), **small)
    assert figures["accuracy"] == (figures["pairs 2"] + figures["pairs 4"]) / 2
    assert {"length 16", "length 32"} <= figures.keys()
