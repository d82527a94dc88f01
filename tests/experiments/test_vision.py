"""The vision experiments: variants that change one thing, choice of learning rates, figures, tables."""

import dataclasses
import json

import pytest
import timm
import torch

from experiments import variants, vision, vision_results
from experiments.comparisons import Comparison, beyond_noise, holm, p_value, table
from experiments.records import Row, product, spread
from vil.training.config import OptimConfig
from vil.training.run.setup import build_model, build_optimizer

SMALL = {"depth": 2, "img_size": 16, "patch_size": 4, "in_chans": 1, "num_classes": 10}
TINY = dataclasses.replace(vision.EXPERIMENTS["digits"], steps=2, images_per_class=(4,))


def create(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, embed_dim=32, **SMALL)


@pytest.mark.parametrize("form", variants.FORMS)
def test_the_variant_that_changes_nothing_is_the_model(form: str) -> None:
    images = torch.randn(2, 1, 16, 16)
    name = {"diagonal": "vil_tiny", "exact": "vil_tiny_exact"}[form]
    assert torch.equal(create(f"both_middle_{form}")(images), create(name)(images))


def test_scalar_beta_is_one_step_size_for_all_channels() -> None:
    mixer = create("scalar_diagonal").blocks[0].mixer
    assert mixer.dt_weight.shape[1] == mixer.dt_bias.shape[1] == 64
    assert torch.equal(mixer.dt_weight, mixer.dt_weight[:, :1].expand_as(mixer.dt_weight))
    assert mixer.parametrizations.dt_weight.original.shape[1] == 1


@pytest.mark.parametrize(
    ("name", "block", "reached"),
    [
        ("forward_last_diagonal", 0, slice(8, None)),
        ("forward_last_diagonal", 1, slice(8, None)),
        ("alternating_middle_diagonal", 0, slice(8, None)),
        ("alternating_middle_diagonal", 1, slice(None, 9)),
    ],
)
def test_one_direction_hands_nothing_back(name: str, block: int, reached: slice) -> None:
    mixer = create(name).blocks[block].mixer
    tokens = torch.randn(1, 17, 32)
    changed = tokens.clone()
    changed[:, 8] += 1
    differs = (mixer(tokens) != mixer(changed)).any(-1)[0]
    expected = torch.zeros(17, dtype=torch.bool)
    expected[reached] = True
    assert torch.equal(differs, expected)


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_class_token_stands_where_it_is_said_to(position: str) -> None:
    model = create(f"both_{position}_diagonal")
    model.cls_token.data.fill_(100)
    tokens, *_ = model._embed(torch.zeros(1, 1, 16, 16))
    place = {"first": 0, "middle": 8, "last": 16}[position]
    assert tokens[0].mean(-1).argmax() == place
    assert model._class_token_first(tokens)[0].mean(-1).argmax() == 0


def test_reparametrized_vectors_are_not_decayed_either() -> None:
    for name in ("forward_last_diagonal", "scalar_exact"):
        model = create(name)
        optimizer = build_optimizer(model, OptimConfig(), 1e-3)
        groups = [group for group in optimizer.param_groups if group["weight_decay"]]
        decaying = {id(p) for group in groups for p in group["params"]}
        decayed = [name for name, p in model.named_parameters() if id(p) in decaying]
        assert decayed
        assert not any("bias" in name or ".D." in name for name in decayed)


def test_every_ablation_is_registered_and_recorded() -> None:
    names = list(vision.EXPERIMENTS["ablations"].models)
    assert len(set(names)) == len(names) == 13
    assert all(timm.is_model(name) for name in names)
    record = json.loads((vision.RESULTS / "vision_ablations.json").read_text())
    assert {row["model"] for row in record["runs"]} == set(names)


def test_a_run_trains_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vision.EXPERIMENTS, "tiny", TINY)
    rows = [vision.run("tiny", "ViL", 4, 1e-3, seed) for seed in (0, 0, 1)]
    assert rows[0]["steps"] == 2
    assert rows[0]["parameters"] == 304_330
    assert rows[0]["loss"] == rows[1]["loss"] != rows[2]["loss"]


def test_models_are_about_equally_large() -> None:
    sizes = []
    for model in vision.MODELS:
        config = vision.configure(TINY, model, 4, 1e-3, 0)
        sizes.append(sum(p.numel() for p in build_model(config.model).parameters()))
    assert max(sizes) < 1.1 * min(sizes)


def test_steps_are_equal_whatever_the_training_set() -> None:
    settings = vision.EXPERIMENTS["digits"]
    for size in settings.images_per_class:
        config = vision.configure(settings, "ViL", size, 1e-3, 0)
        assert config.schedule.epochs * (10 * size // 32) == settings.steps
        assert config.schedule.warmup_epochs == round(config.schedule.epochs / 15)


def test_learning_rate_is_the_one_of_the_lowest_loss() -> None:
    search = vision.EXPERIMENTS["digits"].search()
    rows = [run | {"loss": abs(run["lr"] - 1e-3)} for run in search]
    reported = vision.EXPERIMENTS["digits"].reported(rows)
    assert {run["lr"] for run in reported} == {1e-3}
    assert vision.CHOICE_SEED not in {run["seed"] for run in reported}
    assert vision.EXPERIMENTS["ablations"].search() == []


# ------------------------------------------------------------------------------------------ tables


def rows_of(tops: dict[str, list[float]]) -> list[Row]:
    rows = []
    for model, values in tops.items():
        for seed, top1 in enumerate(values):
            rows.append(
                {"model": model, "images_per_class": 8, "seed": seed, "top1": top1, "loss": 0.1}
                | {"train_loss": 0.5, "parameters": 1000, "ms_per_step": 2.0}
            )
    return rows


def test_tables_show_mean_and_deviation() -> None:
    rows = rows_of({"ViL": [90.0, 92.0], "DeiT": [80.0, 80.0]})
    table = vision_results.accuracy_table(rows)
    assert "| top1, 8 a class | loss, 8 a class | training loss, 8 a class |" in table
    assert "| ViL | 1,000 | 91.0 ± 1.4 | 0.100 ± 0.000 | 0.500 ± 0.000 | 1.00 |" in table
    assert [c.difference for c in vision_results.pairwise(rows)] == [11.0]


def test_ablation_is_compared_with_the_model_itself() -> None:
    rows = rows_of({"both_middle_exact": [90.0, 90.5], "scalar_exact": [80.0, 80.5]})
    comparison = vision_results.ablations(rows, "exact")["scalar_exact"]
    assert (comparison.first, comparison.difference) == ("scalar", -10.0)
    table = vision_results.ablation_table(rows, {"scalar_exact": True})
    assert "| 80.2 ± 0.4 * | 0.100 ± 0.000 | 0.500 ± 0.000 |" in table


def test_changes_are_compared_seed_by_seed() -> None:
    losses = {name: [0.5, 0.4] for name in vision.EXPERIMENTS["changes"].models}
    losses["silu_diagonal"] = [0.3, 0.41]
    rows = rows_of({name: [90.0, 91.0] for name in losses})
    for row in rows:
        row |= {"loss": losses[row["model"]][row["seed"]], "lr": 2e-3}
    table = vision_results.changes_table(rows)
    assert "| none | 0.002 | 90.5 ± 0.7 | 0.450 ± 0.071 | 0.500 ± 0.000 |  |  |" in table
    assert "| silu | 0.002 |" in table
    assert "| -0.095 ± 0.148 | 1 of 2 seeds |" in table


def test_pictures_are_drawn(tmp_path) -> None:
    rows = rows_of({"ViL": [90.0, 92.0], "DeiT": [80.0, 80.0]})
    vision_results.draw_accuracy(rows, tmp_path / "a.png")
    vision_results.draw_ablations(rows_of({"both_middle_exact": [90.0]}), tmp_path / "b.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in "ab")


# ------------------------------------------------------------------------------------- statistics


def test_noise_is_judged_for_all_comparisons_together() -> None:
    assert holm([0.01, 0.04, 0.02]) == [True, True, True]
    assert holm([0.01, 0.04, 0.03]) == [True, False, False]
    assert holm([0.02, 0.03]) == [True, True]
    assert holm([0.03, 0.06]) == [False, False]
    clear = Comparison("top1", "a", "b", [90.0, 90.1, 90.2], [80.0, 80.1, 80.2])
    noise = Comparison("top1", "a", "c", [90.0, 90.1, 90.2], [89.0, 90.0, 91.5])
    assert beyond_noise([clear, noise]) == [True, False]
    assert "1 of 2 differences do not exceed" in table([clear, noise], only_found=True)


def test_welch_of_equal_numbers() -> None:
    """By hand: difference 1, standard error sqrt(1/3 + 1/3), 4 degrees of freedom: t = 1.2247."""
    assert p_value([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == pytest.approx(0.2879, abs=1e-4)
    assert p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert p_value([1.0, 1.0], [2.0, 2.0]) == 0.0


def test_spread_is_the_sample_deviation() -> None:
    assert spread([1.0, 3.0]) == "2.0 ± 1.4"
    assert spread([1.0]) == "1.0"
    assert spread([]) == "not run"


def test_product_has_every_combination() -> None:
    assert product(a=(1, 2), b="x") == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
