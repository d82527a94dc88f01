"""The vision experiments: variants that change one thing, choice of learning rates, figures, tables."""

import dataclasses

import pytest
import timm
import torch

from experiments import variants, vision
from vil.training.run.setup import build_model

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


@pytest.mark.ci
def test_a_run_trains_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vision.EXPERIMENTS, "tiny", TINY)
    rows = [vision.run("tiny", "ViL", 4, 1e-3, seed) for seed in (0, 0, 1)]
    assert rows[0]["steps"] == 2
    assert rows[0]["parameters"] == 304_330
    assert rows[0]["loss"] == rows[1]["loss"] != rows[2]["loss"]


@pytest.mark.ci
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
