"""Data and recipes of the small train_imagenet.py runs on failing disks."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools.faults.runs import CLASSES, write_shard
from vil.training.files import write_text
from vil.training.recipes import to_yaml
from vil.training.settings import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

DISKS = ("data", "run")
IMAGES = {"train": 4, "val": 1}  # per class


@dataclass(frozen=True)
class Scenario:
    """A run to inject faults into."""

    name: str
    dataset: str = "folder"
    workers: int = 0
    resumes: bool = False
    """Whether it resumes from checkpoints in the middle of the second epoch."""
    coarse: int = 1
    """How many similar calls to try one of."""


SCENARIOS = (
    Scenario("images in folders"),
    Scenario("shards without indexes", dataset="wds"),
    Scenario("going on", resumes=True),
    Scenario("a loader process", workers=1, coarse=10),
)


def make_data(folder: Path, dataset: str) -> None:
    """Write tiny images, in folders or in shards as other programs write them, without indexes."""
    images = folder if dataset == "folder" else folder.with_name("images")
    for split, images_of_class in IMAGES.items():
        for label, name in enumerate(CLASSES):
            (images / split / name).mkdir(parents=True)
            for number in range(images_of_class):
                noise = np.random.default_rng(1000 * label + number).integers(0, 136, (20, 24, 3))
                pixels = (40 * label + noise).astype("uint8")
                Image.fromarray(pixels).save(images / split / name / f"{number}.jpg")
    if dataset == "folder":
        return
    for split in IMAGES:
        paths = sorted((images / split).glob("*/*.jpg"))
        for shard in range(2):
            write_shard(folder / f"{split}-{shard}.tar", paths[shard::2])
    shutil.rmtree(images)


def write_recipe(place: Path, scenario: Scenario) -> Path:
    """Write the recipe: 2 epochs of 2 steps, with a checkpoint before and after each step."""
    splits = {"train_split": "train-{0..1}.tar", "val_split": "val-{0..1}.tar"}
    config = TrainConfig(
        model=ModelConfig(
            name="vil_tiny", num_classes=4, img_size=16, patch_size=8, embed_dim=8, depth=1
        ),
        data=DataConfig(
            dataset=scenario.dataset,
            path=str(place / "data"),
            batch_size=8,
            aug_repeats=1,
            num_workers=scenario.workers,
            **(splits if scenario.dataset == "wds" else {}),
        ),
        optim=OptimConfig(lr_base=1e-3, lr_base_size=8),
        schedule=ScheduleConfig(epochs=2, warmup_epochs=1, warmup_lr=1e-4),
        run=RunConfig(device="cpu", num_threads=1, log_interval=1, save_minutes=0.0),
    )
    path = place / "recipe.yaml"
    write_text(path, to_yaml(config))
    return path
