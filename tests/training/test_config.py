"""Recipes against the published hyper-parameters, and the errors of a wrong one."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

import vil  # noqa: F401  registers the models
from vil.training.config import OptimConfig, RunConfig, TrainConfig
from vil.training.data import train_transform, val_transform
from vil.training.errors import ConfigError
from vil.training.recipes import (
    changed_keys,
    config_from_dict,
    flat_dict,
    load_config,
    read_recipe,
    to_yaml,
)
from vil.training.setup import build_model, build_optimizer, build_training, resolve_device

CONFIGS = Path(__file__).parents[2] / "configs"
IMAGENET_RECIPES = ("vil_tiny", "vil_small", "vim_tiny", "vim_small")

SHARED = {
    "model.num_classes": 1000,
    "model.img_size": 224,
    "data.dataset": "folder",
    "data.aug_repeats": 3,
    "data.mean": (0.485, 0.456, 0.406),
    "data.std": (0.229, 0.224, 0.225),
    "data.interpolation": "bicubic",
    "data.crop_pct": 0.875,
    "augment.degrees": 0.0,
    "augment.translate": 0.0,
    "augment.zoom": (1.0, 1.0),
    "augment.scale": (0.08, 1.0),
    "augment.ratio": (3 / 4, 4 / 3),
    "augment.hflip": 0.5,
    "augment.aa": "rand-m9-mstd0.5-inc1",
    "augment.reprob": 0.25,
    "augment.remode": "pixel",
    "augment.recount": 1,
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "augment.mixup_prob": 1.0,
    "augment.mixup_switch_prob": 0.5,
    "augment.mixup_mode": "batch",
    "augment.smoothing": 0.1,
    "optim.opt": "adamw",
    "optim.lr": 1e-3,
    "optim.opt_betas": (0.9, 0.999),
    "optim.opt_eps": 1e-8,
    "optim.clip_grad": None,
    "optim.model_ema_decay": 0.99996,
    "schedule.sched": "cosine",
    "schedule.epochs": 300,
    "schedule.warmup_epochs": 5,
    "schedule.warmup_lr": 1e-6,
    "schedule.min_lr": 1e-5,
    "run.seed": 0,
    "run.amp": False,
}
BY_SIZE = {
    "tiny": {
        "data.batch_size": 1024,
        "optim.weight_decay": 0.1,
        "model.drop_path_rate": 0.0,
    },
    "small": {
        "data.batch_size": 512,
        "optim.weight_decay": 0.05,
        "model.drop_path_rate": 0.05,
    },
}


@pytest.mark.parametrize("name", IMAGENET_RECIPES)
def test_recipe_has_published_values(name: str) -> None:
    resolved = flat_dict(read_recipe(CONFIGS / f"{name}.yaml"))
    expected = SHARED | BY_SIZE[name.split("_")[1]] | {"model.name": name}
    assert {key: resolved[key] for key in expected} == expected


@pytest.mark.parametrize("name", IMAGENET_RECIPES)
def test_recipe_reaches_what_trains(name: str) -> None:
    config = read_recipe(CONFIGS / f"{name}.yaml")
    sizes = dataclasses.replace(config.model, depth=3, embed_dim=32)
    training = build_training(dataclasses.replace(config, model=sizes))
    small = name.endswith("small")
    group = training.optimizer.param_groups[-1]
    assert isinstance(training.optimizer, torch.optim.AdamW)
    assert (group["initial_lr"], group["weight_decay"]) == (1e-3, 0.05 if small else 0.1)
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    assert (training.ema.decay, training.ema.use_warmup) == (0.99996, False)
    mixup = training.mixup
    assert (mixup.mixup_alpha, mixup.cutmix_alpha, mixup.mix_prob) == (0.8, 1.0, 1.0)
    assert (mixup.switch_prob, mixup.mode, mixup.label_smoothing) == (0.5, "batch", 0.1)
    assert training.criterion.label_smoothing == 0.0  # mixup has smoothed already
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in training.model.blocks]
    assert rates == pytest.approx([0.0, 0.025, 0.05] if small else [0.0] * 3)


def test_transforms_are_the_published_ones() -> None:
    config = read_recipe(CONFIGS / "vil_tiny.yaml")
    crop, flip, policy, _, normalize, erasing = train_transform(config).transforms
    assert (crop.size, crop.scale, crop.ratio) == ((224, 224), (0.08, 1.0), (3 / 4, 4 / 3))
    assert "bicubic" in repr(crop)
    assert flip.p == 0.5
    assert (policy.num_layers, len(policy.ops), policy.choice_weights) == (2, 15, None)
    assert {(op.magnitude, op.magnitude_std, op.prob) for op in policy.ops} == {(9, 0.5, 0.5)}
    assert "PosterizeIncreasing" in {op.name for op in policy.ops}
    assert normalize.mean.tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert normalize.std.tolist() == pytest.approx([0.229, 0.224, 0.225])
    assert (erasing.probability, erasing.per_pixel, erasing.max_count) == (0.25, True, 1)
    resize, centre, *_ = val_transform(config).transforms
    assert (resize.size, resize.interpolation.value, centre.size) == (256, "bicubic", (224, 224))


def test_labels_are_smoothed_without_mixing() -> None:
    training = build_training(read_recipe(CONFIGS / "digits.yaml"))
    assert training.mixup is None
    assert training.criterion.label_smoothing == 0.1


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_states_every_value_once_and_in_range(path: Path) -> None:
    sections = yaml.safe_load(path.read_text())
    config = read_recipe(path)
    for section, fields in sections.items():
        for key, value in fields.items():
            stated = tuple(value) if isinstance(value, list) else value
            resolved = getattr(getattr(config, section), key)
            assert resolved == (float(stated) if isinstance(resolved, float) else stated)


def published_rate(epoch: int) -> float:
    """Return the rate that DeiT's loop trained an epoch with: it steps after the epoch."""
    step = max(epoch - 1, 0)
    if step < 5:
        return 1e-6 + step * (1e-3 - 1e-6) / 5
    cosine = torch.tensor(torch.pi * step / 300, dtype=torch.float64).cos().item()
    return 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + cosine)


def test_learning_rate_of_every_epoch_is_the_published_one() -> None:
    config = read_recipe(CONFIGS / "vil_tiny.yaml")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, depth=1, embed_dim=32)
    )
    training = build_training(config)
    for epoch in range(300):
        training.scheduler.step(max(epoch - 1, 0))
        rate = training.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(published_rate(epoch), rel=1e-9)
    assert published_rate(1) == 1e-6
    assert published_rate(6) == pytest.approx(9.993e-4, rel=1e-4)
    assert published_rate(299) == pytest.approx(1.011e-5, rel=1e-3)


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])
def test_weight_decay_falls_on_the_published_parameters(name: str) -> None:
    config = read_recipe(CONFIGS / "vil_tiny.yaml").model
    model = build_model(dataclasses.replace(config, name=name, depth=1, embed_dim=32))
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decay = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    decayed = {key for key, value in model.named_parameters() if decay[id(value)] == 0.1}
    mixer = ["conv_weight", "x_proj_weight", "dt_weight", "in_proj.weight", "out_proj.weight"]
    # A_log is a matrix, so the published run decays it, whatever attribute it carries.
    mixer += ["A_log"] if name == "vim_tiny" else []
    expected = {f"blocks.0.mixer.{key}" for key in mixer}
    assert decayed == expected | {"patch_embed.proj.weight", "head.weight"}
    assert set(decay.values()) == {0.0, 0.1}


def test_command_line_wins_over_recipe() -> None:
    arguments = ["--config", str(CONFIGS / "vil_small.yaml"), "--optim.lr", "5e-4", "--run.amp"]
    config, name = load_config(arguments, CONFIGS / "digits.yaml")
    assert (config.optim.lr, config.run.amp, config.data.batch_size) == (5e-4, True, 512)
    assert name == "vil_small"


def test_default_recipe_is_digits() -> None:
    config, name = load_config([], CONFIGS / "digits.yaml")
    assert (config.data.dataset, name) == ("digits", "digits")


def test_yaml_exponent_without_point_is_a_number(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optim:\n  lr: 1e-3\n  clip_grad: 2e0\n")
    optim = read_recipe(recipe).optim
    assert (optim.lr, optim.clip_grad) == (0.001, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  lrr: 1\n", r"recipe\.yaml: unrecognized key optim\.lrr; .* optim\.lr$"),
        ("optimiser:\n  lr: 1\n", r"recipe\.yaml: unrecognized key optimiser\.lr"),
        ("lr: 1\n", "lr must be a section, got 1"),
        ("- lr\n", "must map sections to keys"),
        ("optim: {lr: [\n", "is not YAML"),
        ("optim:\n  lr: fast\n", "has a wrong value"),
        ("data:\n  batch_size: 12.5\n", "has a wrong value"),
        ("data:\n  dataset: cifar\n", "has a wrong value"),
        ("data:\n  dataset: wds\n", "has a wrong value"),
        ("data:\n  batch_size: 7\n", "has a wrong value"),
        ("model:\n  in_chans: 1\n", "has a wrong value"),
        ("schedule:\n  epochs: 2\n", "has a wrong value"),
    ],
)
def test_wrong_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe)


def test_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(["--config", str(tmp_path / "none.yaml")], CONFIGS / "digits.yaml")


def test_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"argument --optim.lrr; perhaps you meant --optim.lr$"):
        load_config(["--optim.lrr", "1"], CONFIGS / "digits.yaml")


def test_wrong_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_config(["--optim.lr", "fast"], CONFIGS / "digits.yaml")
    assert exit_info.value.code == 2
    assert "--optim.lr" in capsys.readouterr().err


def test_resolved_config_survives_yaml_and_dict(tmp_path: Path) -> None:
    config = read_recipe(CONFIGS / "digits.yaml")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_recipe(tmp_path / "config.yaml") == config
    assert config_from_dict(dataclasses.asdict(config), "here") == config


def test_unknown_key_of_checkpoint_is_refused() -> None:
    values = dataclasses.asdict(TrainConfig())
    values["optim"]["lrr"] = 1
    with pytest.raises(ConfigError, match=r"here: section optim: .*lrr"):
        config_from_dict(values, "here")


def test_changed_keys_ignores_what_cannot_change_the_result() -> None:
    old = TrainConfig()
    moved = dataclasses.replace(
        old,
        run=dataclasses.replace(old.run, output="there", resume=True, log_interval=1),
    )
    assert changed_keys(old, moved) == []
    other = dataclasses.replace(old, optim=dataclasses.replace(old.optim, lr=0.5))
    assert changed_keys(old, other) == ["optim.lr (0.001 -> 0.5)"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "vil_gigantic", "cannot create model vil_gigantic"),
        ("img_size", 225, "img_size"),
        ("patch_size", -1, "cannot create model"),
    ],
)
def test_impossible_model_is_refused(field: str, value: object, message: str) -> None:
    config = dataclasses.replace(TrainConfig().model, **{field: value})
    with pytest.raises(ConfigError, match=message):
        build_model(config)


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot create optimizer sgdd"):
        build_optimizer(torch.nn.Linear(2, 2), OptimConfig(opt="sgdd"))


def test_number_of_threads_is_set_and_checked() -> None:
    before = torch.get_num_threads()
    try:
        resolve_device(RunConfig(device="cpu", num_threads=2))
        assert torch.get_num_threads() == 2
        resolve_device(RunConfig(device="cpu"))  # None changes nothing
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match=r"run.num_threads must be at least 1, got 0"):
        RunConfig(num_threads=0)
