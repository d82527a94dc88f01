"""Where images come from: digits, a folder per class, or webdataset shards, checked when opened.

Each source has num_images, classes (None where the data holds bare indices), max_workers and
dataset(transform, seed).
"""

import logging
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from timm.data import ImageDataset, IterableImageDataset, create_dataset
from torch.utils.data import Dataset

from vil.training.config import DataConfig, ModelConfig
from vil.training.errors import ConfigError, DataError

Transform = Callable[[Image.Image], torch.Tensor]

_MODES = {1: "L", 3: "RGB"}
_SHARD_IMAGES = (".jpg", ".png", ".webp")  # what timm's shard reader takes for an image
_DIGITS_HELD_OUT = 360


class Source(Protocol):
    """One split of a data set, checked."""

    num_images: int
    classes: tuple[str, ...] | None
    max_workers: int | None

    def dataset(self, transform: Transform, seed: int) -> Dataset:
        """Return the images of an epoch, transformed; the seed orders those read in sequence."""


def open_source(data: DataConfig, model: ModelConfig, training: bool) -> Source:
    """Open one split of the configured data and check it against the model.

    Args:
        data: Names the data.
        model: Gives the number of classes and channels.
        training: Training split, or validation.

    Raises:
        ConfigError: data.path is missing or has no meaning.
        DataError: the data is missing, damaged, or has another number of classes.
    """
    if data.dataset == "digits":
        if data.path is not None:
            raise ConfigError(f"data.path has no use for data.dataset digits, got {data.path}")
        source: Source = DigitSource(training, model.in_chans)
    else:
        if data.path is None:
            raise ConfigError(
                f"data.dataset {data.dataset} needs --data.path, the root folder of the data"
            )
        if not Path(data.path).is_dir():
            raise DataError(f"data.path {data.path} is not a folder")
        kind = FolderSource if data.dataset == "folder" else ShardSource
        source = kind(data, training, model.in_chans)
    split = "training" if training else "validation"
    if source.num_images == 0:
        raise DataError(f"the {split} data in {data.path} holds no images")
    if source.classes is not None and len(source.classes) != model.num_classes:
        found = len(source.classes)
        raise DataError(
            f"the {split} data has {found} classes, "
            f"model.num_classes is {model.num_classes}; pass --model.num-classes {found}"
        )
    return source


class DigitSource:
    """The 1,797 handwritten digits that scikit-learn ships, a fixed 360 of them held out."""

    max_workers = None

    def __init__(self, training: bool, in_chans: int) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        parts = train_test_split(
            digits.images,
            digits.target,
            test_size=_DIGITS_HELD_OUT,
            stratify=digits.target,
            random_state=0,
        )
        pixels, labels = (parts[0], parts[2]) if training else (parts[1], parts[3])
        self.images = [_enlarge(image).convert(_MODES[in_chans]) for image in pixels]
        self.labels = [int(label) for label in labels]
        self.num_images = len(self.labels)
        self.classes = tuple(str(name) for name in digits.target_names)

    def dataset(self, transform: Transform, seed: int) -> Dataset:
        """Return the digits, transformed; the same in every epoch."""
        return _ListDataset(self.images, self.labels, transform)


class FolderSource:
    """A folder per class below data.path/<split>, numbered in timm's order of their names."""

    max_workers = None

    def __init__(self, data: DataConfig, training: bool, in_chans: int) -> None:
        self.folder = _find_split(data, training)
        self.mode = _MODES[in_chans]
        try:
            images = create_dataset("", root=str(self.folder), search_split=False)
        except RuntimeError as error:
            raise DataError(f"there are no images in the sub-folders of {self.folder}") from error
        self.reader = images.reader
        self.training = training
        self.num_images = len(images)
        self.classes = tuple(self.reader.class_to_idx)
        folders = [path for path in self.folder.iterdir() if path.is_dir()]
        empty = sorted(path.name for path in folders if path.name not in self.reader.class_to_idx)
        if empty:
            raise DataError(
                f"class folder {self.folder / empty[0]} has no images "
                f"({len(empty)} such, of {len(folders)})"
            )

    def dataset(self, transform: Transform, seed: int) -> Dataset:
        """Return the images, transformed; the same in every epoch."""
        # In training timm logs an unreadable image and takes its neighbour; a score must not.
        kind = ImageDataset if self.training else _StrictImageDataset
        return kind(
            str(self.folder), reader=self.reader, input_img_mode=self.mode, transform=transform
        )


class ShardSource:
    """Webdataset shards below data.path, read in sequence; labels are class indices."""

    classes = None

    def __init__(self, data: DataConfig, training: bool, in_chans: int) -> None:
        self.arguments = {
            "name": "wds/",
            "root": data.path,
            "split": data.train_split if training else data.val_split,
            "is_training": training,
            "batch_size": data.batch_size,
            "input_img_mode": _MODES[in_chans],
        }
        try:
            info = self._open(num_samples=1, seed=0).reader.split_info
        except (RuntimeError, KeyError, ValueError) as error:
            raise DataError(
                f"{data.path} has no shards {self.arguments['split']}: {error}"
            ) from error
        shards = [Path(data.path, name) for name in info.filenames]
        missing = [shard for shard in shards if not shard.is_file()]
        if missing:
            raise DataError(
                f"shard {missing[0]} does not exist ({len(missing)} of {len(shards)} missing)"
            )
        # A worker reads whole shards, so one without a shard would cut the epoch short.
        self.max_workers = len(shards)
        # Validation trusts nothing but the shards: each image in them is scored once.
        stated = info.num_samples if training else 0
        self.num_images = stated or sum(_count_images(shard) for shard in shards)

    def dataset(self, transform: Transform, seed: int) -> Dataset:
        """Return the images of one epoch, transformed, and shuffled anew if for training."""
        dataset = self._open(num_samples=self.num_images, seed=seed)
        dataset.transform = transform
        return dataset

    def _open(self, num_samples: int, seed: int) -> IterableImageDataset:
        """Open the shards without timm's warning that nothing states their length."""
        logger = logging.getLogger("timm.data.readers.reader_wds")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            return create_dataset(**self.arguments, num_samples=num_samples, seed=seed)
        finally:
            logger.setLevel(level)


class _ListDataset(Dataset):
    """Images and labels in memory."""

    def __init__(self, images: list[Image.Image], labels: list[int], transform: Transform) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]

    def __len__(self) -> int:
        return len(self.images)


class _StrictImageDataset(ImageDataset):
    """timm's folder data set, in which an unreadable image is an error."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        try:
            file, target = self.reader[index]
            with file:
                image = Image.open(file).convert(self.input_img_mode)
        except (OSError, SyntaxError, ValueError) as error:
            name = self.filename(index, absolute=True)
            raise DataError(f"image {name} cannot be read: {error}") from error
        return self.transform(image), target


def _find_split(data: DataConfig, training: bool) -> Path:
    """Return the folder of a split; validation also goes by its usual short name."""
    split = data.train_split if training else data.val_split
    names = [split, "val"] if split == "validation" else [split]
    for name in names:
        folder = Path(data.path, name)
        if folder.is_dir():
            return folder
    raise DataError(f"data.path {data.path} has no folder {' or '.join(names)}")


def _count_images(shard: Path) -> int:
    """Count the images of a shard from its headers."""
    try:
        with tarfile.open(shard) as archive:
            return sum(member.name.endswith(_SHARD_IMAGES) for member in archive)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"shard {shard} is truncated or not a tar: {error}") from error


def _enlarge(pixels: np.ndarray) -> Image.Image:
    """Turn 8 x 8 values in 0 ... 16 into a grey image of 32 x 32, so that shifts are smooth."""
    image = Image.fromarray((pixels * (255 / 16)).round().astype("uint8"))
    return image.resize((32, 32), Image.Resampling.BICUBIC)
