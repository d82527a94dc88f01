"""Random access to the images of webdataset shards on local disks, without unpacking them.

Each shard has an index, <shard>.idx.json, with the offset and label of every image. With it, a million images
are found in seconds. It is built from the tar headers when the shard is first opened. An index is valid only for the
file it was built from: another file of the same name, even a copy, is scanned again.
"""

import glob
import json
import os
import re
import tarfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict
from webdataset.shardlists import expand_urls
from webdataset.tariterators import base_plus_ext

from vil.messages import nfc, printable
from vil.training.errors import ConfigError, DataError, OutputError
from vil.training.files import write_text
from vil.training.images import Source, fingerprint
from vil.training.listing import IMAGE_EXTENSIONS
from vil.training.settings import DataConfig

_INFO_NAME = "_info.json"
_USUAL_IMAGES = ("jpg", "jpeg", "png", "webp")  # preferred image of a sample, in order
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset's own records
_INTEGER = re.compile(r"[+-]?[0-9]+")
MAX_OPEN_FILES = 64  # below the usual limit of 1024 per process
_INDEX_THREADS = 16  # more than cores, since they mostly wait for the disk
MAX_CLASSES = 1 << 20  # limit if the number of classes is unknown


class Sample(NamedTuple):
    """A webdataset sample: the files that share a key."""

    key: str
    offset: int | None
    """Offset of the image in the tar in bytes; None if the sample has a label but no image."""
    size: int
    """Size of the image in bytes."""
    label: int | str | None
    """Content of the .cls member: an integer, or a string if it is not an integer. None without such a member."""


class Index(TypedDict):
    """Index of a shard: size and times of the tar at indexing, and its samples."""

    size: int
    mtime_ns: int
    ctime_ns: int
    digest: str
    """Of the samples."""
    samples: list[tuple[str, int | None, int, int | str | None]]


class Split(TypedDict):
    """Description of a split in _info.json, timm's description of a folder of shards."""

    filenames: list[str]
    shard_lengths: NotRequired[list[int]]
    classes: NotRequired[list[str]]


_INDEX = TypeAdapter(Index)
_INFO = TypeAdapter(TypedDict("Info", {"splits": dict[str, Split]}))


class ShardSource(Source):
    """Images of one split, located by the indexes of its shards.

    Stores only arrays, no Python objects per image, because data-loading workers are forked from it. Each
    process opens the shards for itself. Not thread-safe.
    """

    def __init__(self, data: DataConfig, training: bool, num_classes: int | None) -> None:
        """Locate all images and check that every shard is complete.

        Args:
            data: Data options, which name the folder and the shards.
            training: Whether to open the training split; else validation.
            num_classes: Upper bound of labels, exclusive. None uses the number of class names, or allows
                any label if there are none.

        Raises:
            ConfigError: If the split is not a valid shard pattern.
            DataError: If a shard is missing or damaged, its length differs from _info.json, or a label
                is out of range.
        """
        root, splits = Path(data.path), _read_info(Path(data.path))
        names, classes = _find_shards(root, data, training, splits)
        self.classes = None if classes is None else nfc(classes)
        stated = {
            name: length
            for split in splits.values()
            for name, length in zip(split["filenames"], split.get("shard_lengths", ()), strict=False)
        }
        count = num_classes or (None if classes is None else len(classes))
        with ThreadPoolExecutor(_INDEX_THREADS) as pool:
            shards = list(pool.map(lambda n: _open_shard(root, n, stated.get(n), count), names))
        self.excluded = [line for shard in shards for line in shard.excluded]
        self._places = np.concatenate([shard.places for shard in shards])
        self._starts = np.cumsum([0, *(len(shard.places) for shard in shards)])
        keys = [key for shard in shards for key in shard.keys]
        self._keys, self._key_starts = b"".join(keys), np.cumsum([0, *map(len, keys)])
        self.labels = self._places[:, 2].copy()
        content = json.dumps([Path(name).name for name in names]).encode()
        self.listing = fingerprint(content, self._starts, self._places)
        self._names, self._files = names, _Files([root / name for name in names])
        self._shuffle_shards = data.shuffle_shards

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file; raise OSError if the shard is truncated."""
        offset, size, _ = self._places[index].tolist()
        content = self._files.read(self._shard(index), offset, size)
        if len(content) < size:
            raise OSError(f"the shard ends after {len(content)} of the image's {size} bytes")
        return content

    def checksum(self, index: int) -> int:
        """Return the CRC32 of an image."""
        offset, size, _ = self._places[index].tolist()
        with self._files.paths[self._shard(index)].open("rb") as file:
            return zlib.crc32(_read_all(file.fileno(), size, offset))

    def name(self, index: int) -> str:
        """Return the shard and key of an image."""
        start, end = self._key_starts[index : index + 2]
        return f"{self._names[self._shard(index)]}: {self._keys[start:end].decode()}"

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Shuffle the shards, then the images of every ``data.shuffle_shards`` consecutive shards together."""
        windows = []
        for window in torch.randperm(len(self._names), generator=generator).split(self._shuffle_shards):
            images = torch.cat([torch.arange(*self._starts[s : s + 2]) for s in window.tolist()])
            windows.append(images[torch.randperm(len(images), generator=generator)])
        return torch.cat(windows)

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1


def _load_index(shard: Path) -> list[Sample]:
    """Return the samples of a shard from its index, or from the tar headers if the index is missing or outdated.

    A new index is then saved for the next time, if the folder is writable. Raises DataError if the shard is missing,
    truncated, not a tar, or being written.
    """
    stamp = _stamp_of(shard)
    index = _read_index(shard)
    if index is not None and stamp == {key: index[key] for key in stamp}:
        return [Sample(*row) for row in index["samples"]]
    samples = _scan(shard)
    if _stamp_of(shard) != stamp:
        raise DataError(f"shard {shard} changed while it was read; wait until it is complete")
    with suppress(OutputError, OSError):  # without an index, the next start only takes longer
        path = _index_path(shard)
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # of killed processes
            left.unlink()  # a live process that loses its file skips its index this time
        content = {**stamp, "digest": _digest(samples), "samples": samples}
        write_text(path, json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
    return samples


def _index_path(shard: Path) -> Path:
    """Return the path of the index of a shard."""
    return shard.with_name(f"{shard.name}.idx.json")


def _stamp_of(shard: Path) -> dict[str, int]:
    """Return size and times of a shard, which identify it; raise DataError if it cannot be read."""
    try:
        status = shard.stat()
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror}") from error
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def _read_index(shard: Path) -> Index | None:
    """Read the index of a shard, not the shard; return None if it is missing or damaged."""
    try:
        index = _INDEX.validate_json(_index_path(shard).read_bytes(), strict=True)
    except (FileNotFoundError, ValidationError):
        return None
    except OSError as error:
        raise DataError(f"index {_index_path(shard)} cannot be read: {error.strerror}") from error
    return index if index["digest"] == _digest(index["samples"]) else None


def _digest(samples: Sequence[tuple[Any, ...]]) -> str:
    return fingerprint(json.dumps(samples).encode())


def _scan(shard: Path) -> list[Sample]:
    """Index a shard from its tar headers and labels, without reading images.

    Returns:
        Samples in order, grouped as in webdataset, by what precedes the first dot of a name. Samples with neither
            image nor label are left out, unless an image has another dot in its name.

    Raises:
        DataError: If the file is missing, not a tar, truncated or damaged, has a duplicate key, or
            contains no images.
    """
    samples: list[Sample] = []
    try:
        with shard.open("rb") as file:
            members = _members(file, shard)
            for key, group in groupby(members, key=lambda member: member[0]):
                files = {extension: member for _, extension, member in group}
                sample = _sample(key, files, file)
                images = {extension.rpartition(".")[2] for extension in files} & IMAGE_EXTENSIONS
                if images or sample.label is not None:
                    samples.append(sample)
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror or error}") from error
    if all(sample.offset is None for sample in samples):
        raise DataError(
            f"shard {shard} holds no images (.jpg, .png or another kind that Pillow opens, without another dot in "
            f"the name)"
        )
    [(key, count)] = Counter(sample.key for sample in samples).most_common(1)
    if count > 1:
        kinds = [extension for own, extension, _ in members if own == key]
        if len(kinds) == len(set(kinds)):
            raise DataError(
                f"shard {shard} has other files between those of sample {key!r}; pack it with tar --sort=name"
            )
        raise DataError(f"shard {shard} holds sample {key!r} {count} times")
    return samples


def _read_info(root: Path) -> dict[str, Split]:
    """Read the splits from _info.json in a folder; return {} if it is missing, raise DataError if invalid."""
    path = root / _INFO_NAME
    try:
        splits = _INFO.validate_json(path.read_bytes(), strict=True)["splits"]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path} is not in timm's format for shards: {place}: {problem['msg']}") from error
    for name, split in splits.items():
        if len(split.get("shard_lengths", split["filenames"])) != len(split["filenames"]):
            raise DataError(f"{path} must have as many shard_lengths as filenames in split {name}")
    return splits


def _find_split(splits: dict[str, Split], name: str) -> Split | None:
    """Return a split by name, or None; for `validation`, fall back to `val`."""
    return splits.get("val" if name == "validation" and name not in splits else name)


class _Images(NamedTuple):
    """The usable images of one shard."""

    places: np.ndarray
    """Offset, size and label of each image, int64 (images, 3)."""
    keys: list[bytes]
    excluded: list[str]


class _Files:
    """Cache of the most recently used open files; a copy pickled to another process opens its own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.descriptors: OrderedDict[int, int] = OrderedDict()

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Read a part of a file; fewer bytes at the end of the file."""
        descriptor = self.descriptors.pop(number, None)
        if descriptor is None:
            while len(self.descriptors) >= MAX_OPEN_FILES:
                os.close(self.descriptors.popitem(last=False)[1])
            descriptor = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = _read_all(descriptor, size, offset)
        except OSError:
            os.close(descriptor)  # never reuse a stale handle of a network disk
            raise
        self.descriptors[number] = descriptor
        return content

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "descriptors": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def _read_all(descriptor: int, size: int, offset: int) -> bytes:
    """Read a part of a file, repeating short reads; fewer bytes only at the end of the file."""
    pieces, missing = [], size
    while missing and (piece := os.pread(descriptor, missing, offset + size - missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _members(file: BinaryIO, shard: Path) -> list[tuple[str, str, tarfile.TarInfo]]:
    """Return key, extension and header of all sample files; raise DataError if the tar is not complete."""
    size, place, members = os.fstat(file.fileno()).st_size, "at its start", []
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()
                if member.size < 0 or member.offset_data + member.size > size:
                    raise DataError(f"shard {shard} is truncated: it ends within {member.name!r}")
                place = f"after {member.name!r}"
                key, extension = base_plus_ext(member.name)
                if key is not None and member.isfile() and not _SKIPPED.match(member.name):
                    members.append((key, extension.lower(), member))
            file.seek(tar.offset)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"shard {shard} is not a valid tar file {place}: {error}") from error
    rest = file.read(1 << 20)  # tar writers pad to some KiB
    if len(rest) < tarfile.BLOCKSIZE or any(rest) or file.read(1):
        raise DataError(f"shard {shard} is truncated or damaged {place}, where a tar file must end")
    return members


def _sample(key: str, files: dict[str, tarfile.TarInfo], file: BinaryIO) -> Sample:
    """Build a sample from the files of one key, given by extension."""
    label: int | str | None = None
    if "cls" in files:
        start, size = files["cls"].offset_data, min(files["cls"].size, 64)
        text = os.pread(file.fileno(), size, start).decode("utf-8", "replace").strip()
        label = int(text) if _INTEGER.fullmatch(text) else text
    images = sorted(files.keys() & IMAGE_EXTENSIONS)
    if not images:
        return Sample(key, None, 0, label)
    image = files[next((kind for kind in _USUAL_IMAGES if kind in images), images[0])]
    return Sample(key, image.offset_data, image.size, label)


def _find_shards(
    root: Path, data: DataConfig, training: bool, splits: dict[str, Split]
) -> tuple[list[str], list[str] | None]:
    """Return the shard names of a split, and its class names or None."""
    split = data.train_split if training else data.val_split
    setting = f"data.{'train' if training else 'val'}_split {split}"
    described = _find_split(splits, split)
    if described is not None:
        names = described["filenames"]
    elif "|" in split or ("{" not in split and not split.endswith(".tar")):
        raise DataError(
            f"{setting} is neither a pattern such as train-{{000..511}}.tar nor one of the "
            f"splits of {root / _INFO_NAME}: {', '.join(splits) or 'none'}"
        )
    else:
        try:
            names = expand_urls(split)
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"{setting} must be a brace pattern: {error}") from error
    try:
        missing = [name for name in names if not (root / name).is_file()]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    if missing:
        raise DataError(
            f"{setting}: {len(missing)} of {len(names)} shards are missing, for example {root / missing[0]}"
        )
    if len(set(names)) != len(names) or not names:
        raise DataError(f"{setting} in {root} must name at least one shard, and none twice")
    return names, None if described is None else described.get("classes")


def _open_shard(root: Path, name: str, stated: int | None, num_classes: int | None) -> _Images:
    """Load and check the index of a shard: ``stated`` images, with labels below ``num_classes``."""
    samples = _load_index(root / name)
    count = sum(sample.offset is not None for sample in samples)
    if stated not in (None, count):
        raise DataError(f"shard {root / name} has {count} images, but {_INFO_NAME} says {stated}")
    places, keys, excluded = [], [], []
    for key, offset, size, label in samples:
        key = printable(key)
        if offset is None or not isinstance(label, int):
            fault = "no label" if label is None else f"label {label!r} is not an integer"
            if offset is None:
                fault = "no image, or its name has another dot than that of its kind"
            excluded.append(f"{name}: {key}: {fault}")
        elif not 0 <= label < (num_classes or MAX_CLASSES):
            limit = f"must be 0 to {(num_classes or MAX_CLASSES) - 1} (number of classes - 1)"
            raise DataError(f"shard {root / name}: label of sample {key} {limit}, got {label}")
        else:
            places.append((offset, size, label))
            keys.append(key.encode())
    return _Images(np.array(places, dtype=np.int64).reshape(-1, 3), keys, excluded)
