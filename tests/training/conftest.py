"""Fixtures: a few images in folders and shards, a tiny model, and the scripts run in-process."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

import eval as eval_script
import train_imagenet
from tests.training.run_files import completed
from vil.training.program import run_script
from vil.training.recipes import to_yaml
from vil.training.release import ReleaseConfig, release
from vil.training.settings import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

CLASSES = ("ash", "birch", "cedar", "dogwood")
SPLITS = {"train": 8, "val": 3}  # images of a class


def make_image(seed: int) -> Image.Image:
    """Draw an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def image_folder(tmp_path) -> Path:
    """Four classes in folders, 32 images to train on and 12 held out."""
    for split, count in SPLITS.items():
        for label, name in enumerate(CLASSES):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                make_image(1000 * label + number).save(folder / f"{number}.jpg")
    return tmp_path / "images"


@pytest.fixture
def image_shards(tmp_path, image_folder) -> Path:
    """Return the same images in three shards per split."""
    root = tmp_path / "shards"
    root.mkdir()
    for split in SPLITS:
        paths = sorted((image_folder / split).glob("*/*.jpg"))
        for shard in range(3):
            with webdataset.TarWriter(str(root / f"{split}-{shard}.tar")) as writer:
                for path in paths[shard::3]:
                    label = CLASSES.index(path.parent.name)
                    key = f"{path.parent.name}{path.stem}"
                    writer.write({"__key__": key, "jpg": path.read_bytes(), "cls": str(label)})
    return root


@pytest.fixture
def config(image_folder) -> TrainConfig:
    """Return a run of three epochs of a tiny ViL, with everything random switched on."""
    config = TrainConfig(
        model=ModelConfig(
            name="vil_tiny",
            num_classes=4,
            img_size=16,
            patch_size=8,
            embed_dim=16,
            depth=2,
            drop_path_rate=0.2,
        ),
        data=DataConfig(path=str(image_folder), batch_size=8, num_workers=0),
        optim=OptimConfig(lr_base=1e-3, lr_base_size=8, model_ema_decay=0.9),
        schedule=ScheduleConfig(epochs=3, warmup_epochs=1, warmup_lr=1e-4),
        run=RunConfig(log_interval=3, device="cpu", save_minutes=1e6),
    )
    return completed(config)


@pytest.fixture
def shard_config(config, image_shards) -> TrainConfig:
    """Return the same configuration on shards."""
    return config.changed(
        "data",
        dataset="wds",
        path=str(image_shards),
        train_split="train-{0..2}.tar",
        val_split="val-{0..2}.tar",
    )


@pytest.fixture
def rendered() -> None:
    """Render the curves of the test's runs."""


@pytest.fixture
def pack() -> Callable[[Path, Path, int], Path]:
    """Return a function that packs an image folder into shards of some images, and returns their folder."""

    def packed(images: Path, shards: Path, maxcount: int) -> Path:
        shards.mkdir()
        splits = {}
        for split, place in (("train", "train"), ("validation", "val")):
            paths = sorted((images / place).glob("*/*"))
            classes = sorted({path.parent.name for path in paths})
            pattern = str(shards / f"{split}-%06d.tar")
            with webdataset.ShardWriter(pattern, maxcount=maxcount, verbose=0, mtime=0) as writer:
                for number, path in enumerate(paths):
                    label = classes.index(path.parent.name)
                    sample = {"__key__": f"{number:06d}", "cls": label}
                    writer.write(sample | {path.suffix[1:]: path.read_bytes()})
            names = sorted(path.name for path in shards.glob(f"{split}-*.tar"))
            lengths = [min(len(paths) - first, maxcount) for first in range(0, len(paths), maxcount)]
            splits[split] = {
                "name": split, "filenames": names, "shard_lengths": lengths,
                "num_samples": len(paths), "classes": classes,
            }  # fmt: skip
        (shards / "_info.json").write_text(json.dumps({"splits": splits}))
        return shards

    return packed


@pytest.fixture
def program(monkeypatch) -> Callable[..., int]:
    """Return a function that runs the main function of a script, and gives its exit code."""

    def run(main: Callable[[], None], *words: object) -> int:
        monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, words)])
        return run_script(main)

    return run


@pytest.fixture
def train(request, tmp_path, monkeypatch, program) -> Callable[..., int]:
    """Return a function that runs train_imagenet.py on a configuration and gives its exit code.

    Curves are always drawn. They are rendered to pixels only if a test requests ``rendered``, because
    rendering takes a third of a run.
    """
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **options: file.write(b"PNG"))

    def run(config: TrainConfig, *arguments: str) -> int:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(to_yaml(config))
        return program(train_imagenet.main, "--config", recipe, *arguments)

    return run


@pytest.fixture
def checkpoint(config, train, tmp_path) -> Path:
    """Return the last checkpoint of a run of one epoch, whose preprocessing is not the default."""
    options = {"crop_pct": 0.8, "crop_mode": "squash", "interpolation": "bilinear"}
    options |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    short = config.changed("schedule", epochs=1, warmup_epochs=0).changed("data", **options)
    assert train(short, "--run.output", str(tmp_path / "run")) == 0
    return tmp_path / "run" / "last.pt"


@pytest.fixture
def released(checkpoint, tmp_path) -> Path:
    """Return the folder of a release of the checkpoint."""
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "small")))
    return tmp_path / "small"


@pytest.fixture
def evaluate(program) -> Callable[..., int]:
    """Return a function that runs eval.py and gives its exit code."""
    return partial(program, eval_script.main)
