"""Fine-tuning: the recipe alone, learning rates by layer and batch, and batch sizes by the data."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import train_imagenet
from tests.training.run_files import rows
from vil.block import Block
from vil.training.distributed import World
from vil.training.images import FolderSource
from vil.training.recipes import read_recipe
from vil.training.release import ReleaseConfig, release
from vil.training.settings import ModelConfig, suitable_batch
from vil.training.setup import build
from vil.training.subject import load_subject

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def photos(tmp_path) -> Path:
    """Three classes, 12 images to train on and 3 held out."""
    for name in ("cat", "dog", "emu"):
        for split, count in (("train", 4), ("val", 1)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.effect_noise((24, 20), 64).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


def test_recipe_needs_images_and_weights_and_nothing_else(
    config, train, program, photos, tmp_path, monkeypatch, capsys
) -> None:
    short = ("--schedule.epochs", "1", "--schedule.warmup-epochs", "0")
    short += ("--data.mean", "0.1", "0.2", "0.3")
    assert train(config, *short, "--run.output", str(tmp_path / "before")) == 0
    monkeypatch.chdir(tmp_path)
    command = ["--config", CONFIGS / "finetune.yaml", "--data.path", "photos"]
    command += ["--model.pretrained", "before/last.pt", "--schedule.epochs", 2]
    assert program(train_imagenet.main, *command) == 0
    assert "new head.weight (3, 16), head.bias (3,)" in capsys.readouterr().out
    found = yaml.safe_load((tmp_path / "output" / "finetune" / "config.yaml").read_text())
    model, data = found["model"], found["data"]
    assert (model["name"], model["num_classes"], model["img_size"]) == ("vil_tiny", 3, 16)
    assert (model["embed_dim"], model["depth"], model["patch_size"]) == (16, 2, 8)
    assert (data["mean"], data["batch_size"]) == ([0.1, 0.2, 0.3], 8)
    assert found["schedule"]["warmup_epochs"] == 0
    rates = [float(row["lr"]) for row in rows(tmp_path / "output" / "finetune", "steps.csv")]
    recipe = read_recipe(CONFIGS / "finetune.yaml")
    peak, least = recipe.optim.lr_base * (8 / 64) ** 0.5, recipe.schedule.min_lr
    ways = [step / len(rates) for step in range(len(rates))]
    cosine = [least + (peak - least) * math.cos(math.pi / 2 * way) ** 2 for way in ways]
    assert rates == pytest.approx(cosine, rel=1e-3)


def test_flat_folder_from_scratch_to_an_evaluation(
    photos, program, evaluate, tmp_path, monkeypatch, capsys, caplog
) -> None:
    """Training splits a flat folder of photos, and eval.py uses the same held-out part."""
    monkeypatch.chdir(tmp_path)
    command = ["--config", CONFIGS / "scratch.yaml", "--data.path", "photos/train"]
    command += ["--data.num-workers", 0, "--run.device", "cpu", "--schedule.epochs", 1]
    command += ["--model.img-size", 16, "--model.embed-dim", 16, "--model.depth", 1]
    assert program(train_imagenet.main, *command) == 3
    told = "images at photos/train/train/<class>/<image>, or at photos/train/<class>/<image> with"
    assert f"{told} --data.val-fraction 0.1" in capsys.readouterr().err
    assert program(train_imagenet.main, *command, "--data.val-fraction", 0.15) == 0
    told = caplog.text + capsys.readouterr().out  # another test's logger may write to either
    assert "folder in photos/train: 9 images to train on, 3 held out, 3 classes" in told
    (row,) = rows(tmp_path / "output" / "scratch")
    weights = "output/scratch/last.pt"
    assert evaluate(weights) == 0
    result = json.loads((tmp_path / "output" / "scratch" / "last-eval.json").read_text())
    assert (result["num_images"], result["split"]) == (3, "0.15 of the images")
    assert result["loss"] == pytest.approx(float(row["val_loss"]), rel=1e-6)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    shutil.copytree("photos/train", "moved")
    for path, *options, number in (
        (f"{tmp_path}/photos/val/../train", 3),
        ("link/train", 3),
        ("moved", "--data.val-fraction", "0.15", 3),
        ("moved", "--data.val-fraction", "0", 12),
        ("photos/train", "--data.dataset", "folder", 3),
        ("photos/train", "--data.val-split", ".", 12),  # a split that is named is scored
        ("moved", 12),
    ):
        capsys.readouterr()
        caplog.clear()
        assert evaluate(weights, "--json", "result.json", "--data.path", path, *options) == 0
        told = caplog.text + capsys.readouterr().out
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["num_images"] == number
        assert f"{result['path']}, {'all images' if number == 12 else '0.15 of the images'}" in told
        unasked = number == 12 and not options
        assert ("all 12 images of moved are scored. The run held out 0.15" in told) == unasked
        assert ("--data.val-fraction 0.15 scores the held-out ones" in told) == unasked
    exceptions = torch.load(weights, weights_only=True)["run"]["val_exceptions"]
    # A release knows the share that was held out, and a larger share has images that were trained on.
    release(ReleaseConfig(checkpoint=weights, folder="small"))
    for source, *options, number in (
        ("small", 12),
        ("small", "--data.val-fraction", "0.15", 3),
        (weights, "--data.val-fraction", "0.5", 7),
    ):
        capsys.readouterr()
        caplog.clear()
        command = (source, "--json", "result.json", "--data.path", "photos/train", *options)
        assert evaluate(*command) == 0
        told = caplog.text + capsys.readouterr().out
        assert json.loads((tmp_path / "result.json").read_text())["num_images"] == number
        warned = "The run held out 0.15 of its images; if these are the same, it was trained on" in told
        assert warned == (number != 3)
    # The names of the user's files are in the checkpoint alone.
    assert exceptions
    for path in ("output/scratch/config.yaml", "small/README.md", "small/config.json"):
        assert not [name for name in exceptions if name in Path(path).read_text()]
    # Images that are added change the side of none, so that no image is scored that was trained on.
    trained = load_subject(weights).settings.data
    before = FolderSource(trained, True, exceptions).paths.tolist()
    for name in ("cat", "dog", "emu"):
        for number in range(100, 120):
            shutil.copy(f"photos/train/{name}/0.jpg", f"photos/train/{name}/{number}.jpg")
    for options in ([], ["--data.path", "photos/train", "--data.val-fraction", "0.15"]):
        assert evaluate(weights, "--json", "added.json", *options) == 0
        result = json.loads((tmp_path / "added.json").read_text())
        assert 3 < result["num_images"] < 40
        source = FolderSource(trained, False, exceptions)
        assert result["num_images"] == source.num_images
        assert not {*source.paths.tolist()} & {*before}
    assert evaluate(weights, "--data.path", "photos") == 0
    result = json.loads((tmp_path / "output" / "scratch" / "last-photos-eval.json").read_text())
    assert (result["num_images"], result["split"]) == (3, "validation")  # photos/val, whole


def test_layer_decay_gives_lower_blocks_lower_rates(config) -> None:
    training = build(config.changed("optim", layer_decay=0.5), World(), 1)
    training.set_step(1)
    names = {id(value): name for name, value in training.model.named_parameters()}
    rate = {names[id(value)]: group["lr"] for group in training.optimizer.param_groups for value in group["params"]}
    warmup_lr = config.schedule.warmup_lr
    expected = {"pos_embed": 0.125, "blocks.0.": 0.25, "blocks.1.": 0.5, "norm": 0.5, "head": 1.0}
    for start, share in expected.items():
        found = {value for name, value in rate.items() if name.startswith(start)}
        assert found == {share * warmup_lr}
    assert training.lr == warmup_lr  # logs show the rate of the head


@pytest.mark.parametrize(
    ("images", "batch", "steps"),
    [(1, 1, 1), (12, 8, 1), (80, 8, 10), (512, 32, 16), (5_000, 64, 78), (50_000, 64, 781)],
)
def test_batch_suits_the_number_of_images(images, batch, steps) -> None:
    assert suitable_batch(images) == batch
    assert images // batch == steps


def test_fine_tuning_at_another_size_trains_at_it(config, train, tmp_path) -> None:
    """A model resizes images near its trained size; while it trains on such images, it must not."""
    short = config.changed("model", patch_size=4).changed("schedule", epochs=1, warmup_epochs=0)
    assert train(short, "--run.output", str(tmp_path / "run")) == 0
    start = ModelConfig(pretrained=str(tmp_path / "run" / "last.pt"), img_size=20)
    tuned, tokens = dataclasses.replace(short, model=start), set()

    def watch(module: nn.Module, _: tuple, out: torch.Tensor) -> None:
        tokens.update({out.shape[1]} if isinstance(module, Block) else ())

    hook = nn.modules.module.register_module_forward_hook(watch)
    try:
        assert train(tuned, "--run.output", str(tmp_path / "tuned")) == 0
    finally:
        hook.remove()
    assert tokens == {5 * 5 + 1}
