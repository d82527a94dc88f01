"""The command lines of eval.py, release.py and make_shards.py; config.py has that of train_imagenet.py.

Nothing here imports torch, so that --help and a wrong argument do not wait for it.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig:
    """The validation data; what is None stays as the checkpoint has it."""

    dataset: Literal["digits", "folder", "wds", "fractals"] | None = None
    """scikit-learn's digits, a folder per class, webdataset shards, or fractals."""
    path: str | None = None
    """Root folder of the data."""
    val_split: str | None = None
    """Sub-folder, or shards."""
    validation_batch_size: int | None = None
    """Images per step."""
    max_pixels: int | None = None
    """Most pixels of an image, in its file and before the crop."""
    num_workers: int | None = None
    """Loader processes."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluate a vision model."""

    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Weights: a checkpoint of train_imagenet.py, a folder of release.py, a .safetensors file, a file with
    a state dict (the official Vision Mamba's), local-dir:FOLDER, hf-hub:NAME, or a timm model's name."""
    model: str | None = None
    """timm model that the weights belong to, where SOURCE does not say it."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    img_size: int | None = None
    """Height and width in pixels; None stays as trained."""
    crop_pct: float | None = None
    """Resize to img_size / crop_pct and keep the centre; None stays as trained."""
    ema: bool = False
    """Evaluate the averaged weights instead of the last ones."""
    amp: bool | None = None
    """Autocast to bfloat16; None does as in training."""
    per_class: bool = False
    """Tell the top-1 of each class, too."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes CUDA where there is one."""
    json: str | None = None
    """Where to write the result; None writes <checkpoint>-eval.json, or nothing for a name."""


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig:
    """Write the weights of a checkpoint as safetensors, for timm to load by local-dir:FOLDER."""

    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint that train_imagenet.py wrote."""
    folder: Annotated[Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """Folder to write, which must not exist."""
    ema: bool = False
    """Release the averaged weights instead of the last ones."""
    license: str = "other"
    """Licence of the weights, by its name on the Hugging Face hub."""


@dataclass(frozen=True, kw_only=True)
class MakeOptions:
    """Pack a folder of images into webdataset shards. The same command again finishes a run that was
    stopped. `make_shards.py verify SHARD_FOLDER` verifies shards."""

    images: Annotated[Positional[str], tyro.conf.arg(metavar="IMAGE_FOLDER")]
    """Folder with a folder per split with a folder per class."""
    shards: Annotated[Positional[str], tyro.conf.arg(metavar="SHARD_FOLDER")]
    """Where to write; made if it is missing."""
    splits: tuple[str, ...] = ("train", "validation")
    """Folders to pack; `validation` also finds `val`."""
    shard_images: int = 1000
    """Images of a shard."""
    seed: int = 0
    """Of the random order into which images are put, so that each shard holds a mix of classes.
    validation, val and test keep their order."""
    num_workers: int | None = None
    """Threads that copy; None takes one per core."""

    def __post_init__(self) -> None:
        if not self.splits or not all(re.fullmatch(r"[\w-]+", split) for split in self.splits):
            raise ValueError(f"splits must be names of folders, got {self.splits}")
        if len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits must differ, got {self.splits}")
        if self.shard_images < 1:
            raise ValueError(f"shard_images must be at least 1, got {self.shard_images}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        _check_num_workers(self.num_workers)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Read every image of a folder of shards and compare it with what was written."""

    shards: Annotated[Positional[str], tyro.conf.arg(metavar="SHARD_FOLDER")]
    """What make_shards.py wrote."""
    num_workers: int | None = None
    """Threads that read; None takes one per core."""

    def __post_init__(self) -> None:
        _check_num_workers(self.num_workers)


def _check_num_workers(num_workers: int | None) -> None:
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
