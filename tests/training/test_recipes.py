"""Recipes have the published hyper-parameters, and a wrong recipe is refused."""

import dataclasses
import math
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import vil  # noqa: F401  registers the models
from tests.training.run_files import completed
from vil.preprocess import to_planes
from vil.training.distributed import World
from vil.training.errors import ConfigError
from vil.training.evaluation import EvalConfig
from vil.training.prediction import PredictConfig
from vil.training.recipes import flat, from_dict, load_config, parse, read_recipe, to_yaml
from vil.training.settings import OptimConfig, TrainConfig
from vil.training.setup import TrainSetup, build, build_model, build_optimizer
from vil.training.transforms import train_transform

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")
# How the published recipes differ from that of ViL-Tiny
SMALL = {
    "model.drop_path_rate": 0.05,
    "data.batch_size": 512,
    "augment.mix_size": 64,
    "optim.lr_base": 1e-3,
    "optim.weight_decay": 0.05,
}
FINER = {
    "model.patch_stride": 8,
    "optim.lr_base": 5e-6,
    "optim.weight_decay": 1e-8,
    "schedule.epochs": 30,
    "schedule.warmup_lr": 1e-5,
}


def recipe(name: str) -> TrainConfig:
    return read_recipe(CONFIGS / f"{name}.yaml")


def built(config: TrainConfig, steps_per_epoch: int = 4) -> TrainSetup:
    """Build a small version of what a recipe trains on ImageNet."""
    classes = config.model.num_classes or 1000
    small = config.changed("model", num_classes=classes, depth=3, embed_dim=32)
    return build(completed(small), World(), steps_per_epoch)


@pytest.mark.parametrize(("size", "differences"), [("tiny", {}), ("small", SMALL)])
@pytest.mark.parametrize("kind", ["vil", "vim"])
def test_recipes_differ_where_the_published_ones_do(kind, size, differences) -> None:
    name, tiny = f"{kind}_{size}", flat(recipe("vil_tiny"))
    assert flat(recipe(name)) == tiny | differences | {"model.name": name}
    start = {"model.name": name, "model.pretrained": f"output/{name}/last.pt"}
    assert flat(recipe(f"{name}_finer")) == tiny | FINER | start


@pytest.mark.parametrize("name", ["vil_tiny", "vil_small"])
def test_recipe_reaches_what_trains(name) -> None:
    """The other tests of ViL-Tiny show its transforms and its learning rates."""
    config = recipe(name)
    training, small = built(config), name.endswith("small")
    group = training.optimizer.param_groups[-1]
    assert isinstance(training.optimizer, torch.optim.AdamW)
    assert (group["initial_lr"], group["weight_decay"]) == (1e-3, 0.05 if small else 0.1)
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    assert (training.ema.decay, training.ema.use_warmup) == (0.99996, False)
    mixup, erase = training.augment.mixup, training.augment.erase
    assert (mixup.mixup_alpha, mixup.cutmix_alpha, mixup.mix_prob) == (0.8, 1.0, 1.0)
    assert (mixup.switch_prob, mixup.mode, mixup.label_smoothing) == (0.5, "batch", 0.1)
    assert (erase.probability, erase.per_pixel, erase.max_count) == (0.25, True, 1)
    assert training.augment.mix_size == (64 if small else 128)
    assert training.training_pass.criterion.label_smoothing == 0.0  # mixup has smoothed already
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in training.model.blocks]
    assert rates == pytest.approx([0.0, 0.025, 0.05] if small else [0.0] * 3)
    assert (config.data.batch_size, config.data.aug_repeats) == (512 if small else 1024, 3)
    assert (config.optim.clip_grad, config.run.amp) == (None, False)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 8), (2, 4), (8, 1)])
def test_rate_does_not_depend_on_how_a_batch_is_divided(world_size, accumulation) -> None:
    config = recipe("vil_tiny").changed("run", grad_accum_steps=accumulation)
    assert config.peak_lr == 5e-4 * 8 * 128 / 512
    assert config.micro_batch(world_size) * world_size * accumulation == config.data.batch_size


def test_transforms_are_the_published_ones() -> None:
    config = completed(recipe("vil_tiny"))
    resize, flip, policy, to_tensor = train_transform(config.augment, config.images).transforms
    crop = resize.step
    assert (crop.size, crop.scale, crop.ratio) == ((224, 224), (0.08, 1.0), (3 / 4, 4 / 3))
    assert "bicubic" in repr(crop)
    assert flip.p == 0.5
    assert (policy.num_layers, len(policy.ops), policy.choice_weights) == (2, 15, None)
    assert {(op.magnitude, op.magnitude_std, op.prob) for op in policy.ops} == {(9, 0.5, 0.5)}
    assert "PosterizeIncreasing" in {op.name for op in policy.ops}
    image = Image.new("RGB", (224, 224), (10, 20, 30))
    assert to_tensor(image).dtype == torch.uint8
    normalized = config.images.normalizer(CPU)(to_tensor(image)[None])[0, :, 0, 0]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert torch.equal(normalized, (torch.tensor([10, 20, 30]) / 255 - mean) / std)
    big = Image.effect_noise((448, 300), 64).convert("RGB")
    resized = big.resize((382, 256), Image.Resampling.BICUBIC).crop((79, 16, 303, 240))
    assert torch.equal(config.images.transform()(big), to_planes(resized))


def published_rate(epoch: int) -> float:
    """Return the learning rate of an epoch in DeiT's loop, which steps after each epoch."""
    step = max(epoch - 1, 0)
    if step < 5:
        return 1e-6 + step * (1e-3 - 1e-6) / 5
    cosine = torch.tensor(torch.pi * step / 300, dtype=torch.float64).cos().item()
    return 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + cosine)


def test_learning_rate_of_every_epoch_is_the_published_one() -> None:
    training = built(recipe("vil_tiny"), steps_per_epoch=7)
    for epoch in range(300):
        training.set_step(7 * epoch + epoch % 7)
        assert training.lr == pytest.approx(published_rate(epoch), rel=1e-9)
    assert published_rate(1) == 1e-6
    assert published_rate(6) == pytest.approx(9.993e-4, rel=1e-4)
    assert published_rate(299) == pytest.approx(1.011e-5, rel=1e-3)


@pytest.mark.parametrize("sched", ["cosine", "constant"])
@pytest.mark.parametrize("warmup_epochs", [0, 2, 6])
def test_rate_by_step_rises_from_zero_and_the_cosine_ends(sched: str, warmup_epochs: int) -> None:
    config = recipe("vil_tiny")
    by_step = {"by": "step", "sched": sched, "epochs": 6, "warmup_epochs": warmup_epochs}
    training = built(config.changed("schedule", **by_step), steps_per_epoch=5)
    peak, least, warmup, total = 1e-3, 1e-5, 5 * warmup_epochs, 30
    assert training.lr == pytest.approx(peak / (warmup + 1))
    for step in [*range(total), 7, 0]:  # as if resumed
        training.set_step(step)
        expected = peak
        if step < warmup:
            expected *= (step + 1) / (warmup + 1)
        elif sched == "cosine":
            share = (step - warmup) / (total - warmup)
            expected = least + (peak - least) * math.cos(math.pi / 2 * share) ** 2
        assert training.lr == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])
def test_weight_decay_falls_on_the_published_parameters(name) -> None:
    config = completed(recipe("vil_tiny")).model
    sizes = {"num_classes": 1000, "depth": 1, "embed_dim": 32}
    model, _ = build_model(dataclasses.replace(config, name=name, **sizes))
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1), lr=1e-3)
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    decayed = {key for key, value in model.named_parameters() if decay[id(value)] == 0.1}
    mixer = ["conv_weight", "x_proj_weight", "dt_weight", "in_proj.weight", "proj.weight"]
    # A_log is a matrix, so the published run decays it regardless of any attribute.
    mixer += ["A_log"] if name == "vim_tiny" else []
    expected = {f"blocks.0.mixer.{key}" for key in mixer}
    assert decayed == expected | {"patch_embed.proj.weight", "head.weight"}
    assert set(decay.values()) == {0.0, 0.1}
    assert model.no_weight_decay() <= {name for name, _ in model.named_parameters()}


def test_command_line_wins_over_recipe() -> None:
    options = ["--data.path", "images", "--optim.lr-base", "5e-4", "--run.amp"]
    arguments = ["--config", str(CONFIGS / "vil_small.yaml"), *options]
    config = load_config(arguments, CONFIGS / "digits.yaml")
    assert (config.optim.lr_base, config.run.amp, config.data.batch_size) == (5e-4, True, 512)
    assert config.run.output == "output/vil_small"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  lr_bas: 1\n", r"recipe\.yaml: optim\.lr_bas is not an option"),
        ("- lr\n", "it must be an object, got 'lr'"),
        ("optim: {lr: [\n", "is not YAML"),
        ("optim:\n  lr_base: 1.0\n  lr_base: 2.0\n", "lr_base occurs 2 times.*line 2, column 3"),
        ("optim:\n  lr_base: 1.0\ndata: {}\noptim:\n  eps: 1e-9\n", "optim occurs 2 times"),
        ("optim:\n  lr_base: fast\n", r"optim\.lr_base must be a valid number, got 'fast'"),
        ("data:\n  batch_size: 12.5\n", r"batch_size must be a valid integer, got 12\.5"),
        (
            "augment:\n  ratio: [3:4, 4:3]\n",
            r"augment\.ratio\[0\] must be a valid number, got '3:4'",
        ),
        ("data:\n  batch_size: 1:30\n", r"batch_size must be a valid integer, got '1:30'"),
        ("data:\n  dataset: cifar\n", "must be 'digits', 'folder' or 'wds', got 'cifar'"),
    ],
)
def test_wrong_recipe_is_refused(tmp_path, text, message) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(path)


def test_numbers_are_those_of_yaml_1_2(tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("schedule: {epochs: 010}\noptim: {lr_base: 1e-3, clip_grad: 1}\nrun: {seed: 0x10}\n")
    config = read_recipe(path)
    assert (config.schedule.epochs, config.optim.lr_base, config.run.seed) == (10, 1e-3, 16)
    for text in ("1e5", "010", "1:30", "0o17", ".5", "12"):  # names that look like numbers
        named = config.changed("model", name=text)
        path.write_text(to_yaml(named))
        assert read_recipe(path) == named


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_finer"])
def test_a_rate_above_the_peak_is_refused(name) -> None:
    arguments = ["--config", str(CONFIGS / f"{name}.yaml"), "--data.path", "images"]
    arguments += ["--data.batch-size", "8"]
    arguments += ["--model.pretrained", "here"] if name == "vil_tiny_finer" else []
    recipe = read_recipe(CONFIGS / f"{name}.yaml")
    peak = recipe.optim.lr_base * 8 / recipe.optim.lr_base_size
    told = rf"min_lr {recipe.schedule.min_lr:g} is above the peak rate {peak:g} .* data.batch_size 8"
    with pytest.raises(ConfigError, match=told):
        load_config(arguments, CONFIGS / "digits.yaml")
    lower = ["--schedule.min-lr", "1e-9", "--schedule.warmup-lr", "1e-9"]
    load_config([*arguments, *lower], CONFIGS / "digits.yaml")
    with pytest.raises(ConfigError, match="warmup_lr 1 is above the peak"):
        load_config(
            [*arguments, *lower[:2], "--schedule.warmup-lr", "1", "--schedule.warmup-epochs", "3"],
            CONFIGS / "digits.yaml",
        )
    constant = ["--schedule.sched", "constant", "--schedule.warmup-epochs", "0"]
    load_config([*arguments, *constant], CONFIGS / "digits.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_survives_yaml_and_dict(path, tmp_path) -> None:
    config = read_recipe(path)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_recipe(tmp_path / "config.yaml") == config
    assert from_dict(dataclasses.asdict(config), "here") == config


PROGRAMS = {
    EvalConfig: ("{0}/best.pt", "--json={0}/a.json", "--data.path={0}/photos"),
    PredictConfig: ("local-dir:{0}/release", "{0}/1.jpg", "{0}/2.jpg", "--output={0}/a.csv"),
}


@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_paths_name_home_and_variables(kind, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def read(place: str) -> object:
        return parse(kind, [word.format(place) for word in PROGRAMS[kind]])

    expected = read(str(tmp_path))
    assert all(read(place) == expected for place in ("~", "$PLACE", "${PLACE}"))
    for unknown in ("$NOWHERE", "${NOWHERE}", "~nobody-here"):
        with pytest.raises(ConfigError, match=rf"\w+ names an unknown .*, {re.escape(unknown)}, got"):
            read(unknown)
    with pytest.raises(ConfigError, match=r"\w+ must be UTF-8, got .*udce9.*; rename the file"):
        read(os.fsdecode(b"caf\xe9"))
    (tmp_path / "$NOWHERE").mkdir()
    if kind is PredictConfig:
        assert parse(kind, ["$NOWHERE", "1.jpg"]).model == "$NOWHERE"


def test_recipes_name_home_and_variables(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text("run: {output: ~/run}\ndata: {path: $HOME/photos}\nmodel: {name: vil_tiny}")
    config = load_config(["--config=~/mine.yaml"], CONFIGS / "digits.yaml")
    assert (config.run.output, config.data.path) == (f"{tmp_path}/run", f"{tmp_path}/photos")
    path.write_text("run: {output: $NOWHERE/run}")
    with pytest.raises(ConfigError, match=r"mine.yaml: run.output names an unknown user or variab"):
        load_config(["--config=~/mine.yaml"], CONFIGS / "digits.yaml")
