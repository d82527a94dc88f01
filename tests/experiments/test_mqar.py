"""Recall of keys and values: the data, the recurrences against loops, a model, tables and figures."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments import mqar, mqar_results, plan, recurrences
from experiments.mixer import ALL, Mixer
from experiments.records import Record

# ------------------------------------------------------------------------------------------- data


def test_every_key_is_asked_for_once_after_all_pairs() -> None:
    length, pairs, vocabulary = 40, 10, 32
    data = mqar.sample(torch.Generator().manual_seed(0), 200, length, pairs, vocabulary)
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


def test_gaps_follow_the_power_law_in_the_order_of_the_pairs() -> None:
    pairs = 2
    data = mqar.sample(torch.Generator().manual_seed(0), 50_000, 16, pairs, 16)
    p = torch.arange(1, 7, dtype=torch.float64) ** (0.01 - 1)
    p /= p.sum()
    first, second = ((data.queries - 2 * pairs) // 2).unbind(1)
    drawn = torch.bincount(first, minlength=6) / len(data)
    torch.testing.assert_close(drawn.double(), p, atol=0.01, rtol=0)
    # The second is drawn from what the first leaves.
    after = (p[:, None] * p / (1 - p[:, None])).fill_diagonal_(0).sum(0)
    drawn = torch.bincount(second, minlength=6) / len(data)
    torch.testing.assert_close(drawn.double(), after, atol=0.01, rtol=0)


def test_data_depend_on_the_seed_alone() -> None:
    one, same, other = (mqar.sample_many(seed, 1200, 16, 4, 16) for seed in (1, 1, 2))
    assert len(one) == 1200
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize(("pairs", "vocabulary", "named"), [(5, 64, "pairs"), (4, 8, "vocabulary")])
def test_pairs_that_do_not_fit_are_refused(pairs: int, vocabulary: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        mqar.sample(torch.Generator(), 1, 16, pairs, vocabulary)


# ------------------------------------------------------------------------------------ recurrences

L, N, E = 40, 3, 4  # more tokens than a chunk


def drawn(*shape: int) -> Tensor:
    return torch.randn(2, L, *shape, dtype=torch.float64, requires_grad=True)


def loop(x: Tensor, q: Tensor, k: Tensor, forget: Tensor, step: Tensor, delta: bool) -> Tensor:
    """S <- forget S + step (x - delta k.S) k, and q.S is read; forget is (B, L, E, N)."""
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


@pytest.mark.parametrize("name", ALL)
def test_mixers_are_causal(name: str) -> None:
    mixer = Mixer(8, name, d_state=N)
    x = torch.randn(2, L, 8)
    y = mixer(x)
    changed = mixer(torch.cat([x[:, :20], torch.randn(2, L - 20, 8)], dim=1))
    torch.testing.assert_close(y[:, :20], changed[:, :20])
    assert not torch.allclose(y[:, 20:], changed[:, 20:])


def test_mixers_of_equal_state_have_nearly_as_many_parameters() -> None:
    counts = {
        name: mqar.parameters(Mixer(64, name)) for name in ALL if name not in ("softmax", "none")
    }
    assert max(counts.values()) < 1.12 * min(counts.values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"recurrence": "lstm"}, "recurrence"), ({"recurrence": "gla", "d_state": 0}, "d_state")],
)
def test_mixer_names_a_bad_argument(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Mixer(8, **arguments)


# -------------------------------------------------------------------------------- runs and results


@pytest.mark.parametrize("name", ["longhorn", "mamba", "softmax", "none"])
def test_small_run_trains_and_tests(name: str) -> None:
    small = {
        "dim": 8,
        "far_pairs": 2,
        "length": 16,
        "pairs": (2, 4),
        "batch_size": 4,
        "test_count": 4,
    }
    figures = mqar.run_small(name, 1e-3, 0, steps=2, factors=(1, 2), **small)
    assert figures == mqar.run_small(name, 1e-3, 0, steps=2, factors=(1, 2), **small)
    assert list(figures) == [
        "parameters",
        "accuracy",
        "pairs 2",
        "pairs 4",
        "length 16",
        "length 32",
    ]
    assert figures["accuracy"] == (figures["pairs 2"] + figures["pairs 4"]) / 2


def test_a_model_without_filler_learns_to_recall() -> None:
    """Softmax attention, one pair: the answer is the only value seen."""
    small = {"dim": 16, "length": 8, "pairs": (1,), "vocabulary": 8, "factors": ()}
    figures = mqar.run_small("softmax", 1e-2, 0, steps=150, warmup=10, **small)
    assert figures["accuracy"] > 0.9


def test_published_run_stops_when_it_recalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqar, "PUBLISHED", {16: (2, 4)})
    small = {"vocabulary": 16, "train_count": 8, "test_count": 4, "epochs": 3}
    run = {"recurrence": "longhorn", "length": 16, "dim": 8, "lr": 1e-3, "seed": 0}
    assert mqar.run_published(**run, **small)["epochs"] == 3
    assert mqar.run_published(**run, **small, enough=-1.0)["epochs"] == 0


def test_published_run_ends_with_the_epoch_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mqar, "PUBLISHED", {16: (2, 4)})
    small = {"vocabulary": 16, "train_count": 8, "test_count": 4, "epochs": 3}
    run = {"recurrence": "longhorn", "length": 16, "dim": 8, "lr": 1e-3, "seed": 0}
    whole = mqar.run_published(**run, **small)
    cut = mqar.run_published(**run, **small, deadline=0.0)
    assert (cut["epochs"], cut["stopped"]) == (1, True)
    assert cut["by_epoch"] == whole["by_epoch"][:1]
    assert "stopped" not in whole


def small_rows() -> list[dict]:
    shared = {"lr": 2.2e-3, "parameters": 1234, "accuracy": 0.5}
    return [
        {"recurrence": name, "seed": seed, "pairs 4": score + seed / 1000}
        | {"length 64": 0.1, "length 128": score}  # the first is the trained one's: not shown
        | shared
        for name, score in (("mamba", 0.25), ("longhorn", 0.75))
        for seed in range(3)
    ]


def test_table_gives_mean_spread_and_what_differs() -> None:
    rows = mqar_results.table(small_rows()).splitlines()
    assert rows[0] == "| recurrence | parameters | rate | pairs 4 | length 128 |"
    assert rows[2] == "| longhorn | 1,234 | 0.0022 | 75.1 ± 0.1 | 75.0 ± 0.0 |"
    assert rows[3] == "| mamba | 1,234 | 0.0022 | 25.1 ± 0.1 * | 25.0 ± 0.0 * |"


def published_rows() -> list[dict]:
    return [
        {"recurrence": "longhorn", "length": 64, "dim": dim, "seed": 1, "lr": lr, "accuracy": a}
        for dim, lr, a in ((64, 1e-3, 0.5), (64, 1e-2, 0.9), (128, 1e-3, 0.9), (128, 1e-2, 0.9))
    ]


def test_published_table_takes_the_best_learning_rate() -> None:
    best = mqar_results.best_of_rates(published_rows())
    assert [row["lr"] for row in best] == [1e-2, 1e-3]  # the lower one of equals
    assert mqar_results.published_table(best).splitlines()[-1] == "| 64 | longhorn | 90.0 | 90.0 |"


@pytest.mark.parametrize("rows", [small_rows(), published_rows()])
def test_figures_are_drawn(rows: list[dict], tmp_path: Path) -> None:
    mqar_results.draw(rows, tmp_path / "mqar.png")
    assert (tmp_path / "mqar.png").read_bytes().startswith(b"\x89PNG")


def test_the_rate_with_the_better_mean_is_reported() -> None:
    lucky = [row | {"accuracy": 0.3 + 0.6 * (row["seed"] == 0)} for row in small_rows()]
    steady = [row | {"lr": 1e-2, "accuracy": 0.6, "pairs 4": 0.6} for row in small_rows()]
    best = mqar_results.best_mean(lucky + steady)
    assert {row["lr"] for row in best} == {1e-2}
    assert len(best) == 6
    head, _, line, _ = mqar_results.table(lucky + steady).splitlines()
    assert head.endswith("| length 128 | other rate |")
    assert line.startswith("| longhorn | 1,234 | 0.01 | 60.0 ± 0.0 |")
    assert line.endswith("| 50.0 ± 34.6 |")


@pytest.mark.parametrize("setting", ["short", "long", "longer", "published"])
def test_command_writes_record_and_table(
    setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def run_all(record: Record, function: object, runs: list[dict], jobs: int, **_: object) -> None:
        figures = {"parameters": 1, "accuracy": 0.5, "pairs 2": 0.5, "length 32": 0.5}
        for run in record.missing(runs):
            record.add(run | figures)

    monkeypatch.setattr(mqar, "run_all", run_all)
    path = tmp_path / "mqar.json"
    arguments = ["--recurrences", "longhorn", "mamba", "--output", str(path)]
    monkeypatch.setattr("sys.argv", ["mqar.py", "--setting", setting, *arguments])
    mqar.main()
    assert "| longhorn |" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["runs"]) > 2


def test_longer_has_a_rate_for_each_recurrence_and_as_many_runs_of_each_when_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    runs = mqar.small_runs("longer", ["longhorn", "mamba"], [0, 1])
    assert [(run["recurrence"], run["seed"]) for run in runs] == [
        *(("longhorn", 0), ("mamba", 0)),
        *(("longhorn", 1), ("mamba", 1)),
    ]
    assert {run["lr"] for run in runs if run["recurrence"] == "mamba"} == {1.6e-2}
    assert set(mqar.LONGER_RATES) == set(mqar.LONG_RECURRENCES)
    tuned = json.loads((mqar.RESULTS / "plan_long.json").read_text())["runs"]
    assert plan.TASKS["long"].chosen(tuned) == mqar.LONGER_RATES
    monkeypatch.setattr("sys.argv", ["mqar.py", "--setting", "longer", "--recurrences", "none"])
    with pytest.raises(SystemExit):
        mqar.main()
    assert "--recurrences of longer must be of longhorn, longhorn_exact" in capsys.readouterr().err
