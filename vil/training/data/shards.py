"""Webdataset shards on local disks, read at random: any image by its index, nothing unpacked."""

import json
import math
import os
import re
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from webdataset.shardlists import expand_urls

from vil.messages import printable
from vil.training.config import DataConfig
from vil.training.data.base import Source, fingerprint
from vil.training.data.reading import check_size, is_file
from vil.training.data.shard_index import index_path, load_index, remove_unfinished
from vil.training.data.shard_info import INFO_NAME, Split, find_split, read_info
from vil.training.data.shard_scan import Sample
from vil.training.errors import ConfigError, DataError

_MOST_OPEN_FILES = 64  # of the 1024 that a process is usually granted
_INDEX_THREADS = 16  # they mostly wait for the disk
_NO_CHECKSUM = -1
_MOST_SHARDS = 1_000_000
_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)")  # in a brace pattern
_MOST_CLASSES = 1 << 20  # where nothing says how many there are


class ShardSource(Source):
    """The images of one split, found by the indexes of its shards.

    It holds arrays only, no object per image, because loader processes are forked from it or get it
    pickled. Each process opens the shards for itself. Not for several threads at once.
    """

    def __init__(self, data: DataConfig, training: bool, num_classes: int | None) -> None:
        """Find all images and check that every shard is whole.

        Args:
            data: Names the folder and the shards.
            training: Training split, or validation.
            num_classes: Labels must lie below; None takes the number of the classes' names, if the
                shards have any, and else any label.

        Raises:
            ConfigError: the split is no pattern of shards.
            DataError: a shard is missing, damaged, of another length than _info.json says, or has a
                label that is no class.
        """
        root = Path(data.path)
        key = "data.train_split" if training else "data.val_split"
        splits = read_info(root)
        names, self.classes = _find_shards(root, key, getattr(data, key[5:]), splits)
        if num_classes is None and self.classes is not None:
            num_classes = len(self.classes)
        stated = {
            name: length
            for split in splits.values()
            for name, length in zip(split.filenames, split.lengths or (), strict=False)
        }

        def open_shard(name: str) -> _Images:
            return _open_shard(root, name, stated.get(name), num_classes)

        indexes = [index_path(root / name) for name in names]
        for folder in {path.parent for path in indexes}:
            remove_unfinished(folder, {path.name for path in indexes if path.parent == folder})
        with ThreadPoolExecutor(_INDEX_THREADS) as pool:
            shards = list(pool.map(open_shard, names))
        self.excluded = [line for shard in shards for line in shard.excluded]
        self._places = np.concatenate([shard.places for shard in shards])
        self._starts = np.cumsum([0, *(len(shard.places) for shard in shards)])
        keys = [key for shard in shards for key in shard.keys]
        self._keys = b"".join(keys)
        self._key_starts = np.cumsum([0, *map(len, keys)])
        self.labels = self._places[:, 2].copy()
        told = json.dumps([Path(name).name for name in names]).encode()
        self.listing = fingerprint(told, self._starts, self._places[:, :3])
        self._shuffle_shards = data.shuffle_shards
        self._names = names
        self._files = _Files([root / name for name in names])

    def read(self, index: int) -> bytes:
        """Return an image's file."""
        offset, size, _, checksum = self._places[index].tolist()
        check_size(size)
        content = self._files.read(self._shard(index), offset, size)
        if len(content) < size:
            raise OSError(f"the shard ends after {len(content)} of the image's {size} bytes")
        if checksum not in (_NO_CHECKSUM, zlib.crc32(content)):
            raise OSError("wrong checksum")
        return content

    def checksum(self, index: int) -> int:
        """Return what the index says, or read an image."""
        offset, size, _, checksum = self._places[index].tolist()
        if checksum != _NO_CHECKSUM:
            return checksum
        check_size(size)
        with self._files.paths[self._shard(index)].open("rb") as file:
            return zlib.crc32(_read_all(file.fileno(), size, offset))

    def name(self, index: int) -> str:
        """Return an image's shard and key."""
        start, end = self._key_starts[index : index + 2]
        return f"{self._names[self._shard(index)]}: {self._keys[start:end].decode()}"

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Shuffle the shards, and the images of every few consecutive ones together."""
        shards = torch.randperm(len(self._names), generator=generator)
        windows = []
        for window in shards.split(self._shuffle_shards):
            images = torch.cat([torch.arange(*self._starts[s : s + 2]) for s in window.tolist()])
            windows.append(images[torch.randperm(len(images), generator=generator)])
        return torch.cat(windows)

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1


class _Images(NamedTuple):
    """The usable images of one shard."""

    places: np.ndarray
    """Offset, size, label and checksum of each, int64, (images, 4)."""
    keys: list[bytes]
    excluded: list[str]


def _read_all(descriptor: int, size: int, offset: int) -> bytes:
    """Read a part of a file; less of it where the file ends, and not where a disk gives a piece."""
    pieces, missing = [], size
    while missing and (piece := os.pread(descriptor, missing, offset + size - missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


class _Files:
    """Files kept open for reading, those used last; a copy in another process opens its own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.descriptors: OrderedDict[int, int] = OrderedDict()

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Read a part of a file; less of it where the file ends."""
        descriptor = self.descriptors.pop(number, None)
        if descriptor is None:
            while len(self.descriptors) >= _MOST_OPEN_FILES:
                os.close(self.descriptors.popitem(last=False)[1])
            descriptor = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = _read_all(descriptor, size, offset)
        except OSError:
            os.close(descriptor)  # a stale handle of a network disk must not be used again
            raise
        self.descriptors[number] = descriptor
        return content

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "descriptors": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def _find_shards(
    root: Path, key: str, split: str, splits: dict[str, Split]
) -> tuple[list[str], tuple[str, ...] | None]:
    """Return the names of a split's shards and of its classes, if they have names.

    Args:
        root: Folder of the shards.
        key: The setting that names the split, for errors.
        split: A split of _info.json, or a pattern.
        splits: What _info.json says.
    """
    found = find_split(splits, split)
    if found is not None:
        names, classes = list(found.filenames), found.classes
    else:
        names, classes = _expand(root, key, split, splits), None
    missing = [name for name in names if not is_file(root / name)]
    if missing:
        raise DataError(
            f"{key} {split}: shard {root / missing[0]} is missing "
            f"({len(missing)} of {len(names)} are)"
        )
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count != 1:
        what = f"names shard {name} {count} times" if names else "names no shards"
        raise DataError(f"{key} {split} in {root} {what}")
    return names, classes


def _expand(root: Path, key: str, split: str, splits: dict[str, Split]) -> list[str]:
    """Expand a pattern of shards."""
    if "|" in split:
        raise ConfigError(f"{key} takes no |, the images of shards are counted; got {split}")
    if "{" not in split and not split.endswith(".tar"):
        raise DataError(
            f"{key} {split} is neither a pattern such as train-{{000..511}}.tar nor one of the "
            f"splits of {root / INFO_NAME}: {', '.join(splits) or 'none'}"
        )
    try:
        ranges = [abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(split)]
        if math.prod(ranges) > _MOST_SHARDS:
            raise ConfigError(
                f"{key} must name at most {_MOST_SHARDS:,} shards, got {split}, which names "
                f"{math.prod(ranges):,}"
            )
        return expand_urls(split)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{key} must be a brace pattern, got {split}: {error}") from error


def _open_shard(root: Path, name: str, stated: int | None, num_classes: int | None) -> _Images:
    """Load a shard's index and check it.

    Args:
        root: Folder of the shards.
        name: The shard's name in it.
        stated: Images that it holds by _info.json, None if that does not say.
        num_classes: Labels must lie below; None allows any.
    """
    samples = load_index(root / name)
    count = sum(sample.offset is not None for sample in samples)
    if stated not in (None, count):
        raise DataError(f"shard {root / name} holds {count} images, {INFO_NAME} says {stated}")
    places, keys, excluded = [], [], []
    for sample in samples:
        key, offset, size, label, checksum = sample
        key = printable(key)
        fault = _fault(sample)
        if fault is not None:
            excluded.append(f"{name}: {key}: {fault}")
        elif not 0 <= label < (num_classes or _MOST_CLASSES):
            limit = f"model.num_classes is {num_classes}"
            if num_classes is None:
                limit = f"which is not one of at most {_MOST_CLASSES:,} classes"
            raise DataError(f"shard {root / name} sample {key} has label {label}, {limit}")
        else:
            places.append((offset, size, label, _NO_CHECKSUM if checksum is None else checksum))
            keys.append(key.encode())
    return _Images(np.array(places, dtype=np.int64).reshape(-1, 4), keys, excluded)


def _fault(sample: Sample) -> str | None:
    """Say why a sample cannot be used."""
    if sample.offset is None:
        return "no image"
    if sample.label is None:
        return "no label"
    if isinstance(sample.label, str):
        return f"label {sample.label!r} is no integer"
    return None
