"""Webdataset shards on local disks, read at random: any image by its number, nothing unpacked.

The index of a shard, <shard>.idx.json beside it, tells where in the tar each image lies, and its label, so that a
million images are found in seconds. make_shards.py writes it with a checksum of every image; for shards of other
origin it is made from the headers of the tar. It holds for the very file that it was made of; another one of the same
name, a copy too, is scanned again.
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

from vil.messages import printable
from vil.training.errors import ConfigError, DataError, OutputError
from vil.training.files import write_text
from vil.training.images import IMAGE_EXTENSIONS, Source, fingerprint
from vil.training.settings import DataConfig

INFO_NAME = "_info.json"
_USUAL_IMAGES = ("jpg", "jpeg", "png", "webp")  # go before other images of a sample, in this order
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset's own records
_INTEGER = re.compile(r"[+-]?[0-9]+")
_HEAD = b'{"crc32":"'
_MOST_OPEN_FILES = 64  # of the 1024 that a process is usually granted
_INDEX_THREADS = 16  # they mostly wait for the disk
_NO_CHECKSUM = -1
_MOST_CLASSES = 1 << 20  # where nothing says how many there are


class Sample(NamedTuple):
    """The files of one key."""

    key: str
    offset: int | None
    """First byte of the image in the tar; None where there is a label without an image."""
    size: int
    """Bytes of the image."""
    label: int | str | None
    """What the .cls member holds: an integer, or a text that is none; None without such a member."""
    crc32: int | None
    """Checksum of the image; None where nobody has read it."""


class Index(TypedDict):
    """A shard as it was when it was indexed: size and times of the tar, and its samples."""

    size: int
    mtime_ns: NotRequired[int | None]
    ctime_ns: NotRequired[int | None]
    samples: list[tuple[str, int | None, int, int | str | None, int | None]]


class Split(TypedDict):
    """What _info.json, timm's description of a folder of shards, says about a split."""

    filenames: list[str]
    shard_lengths: NotRequired[list[int]]
    classes: NotRequired[list[str]]
    made_from: NotRequired[dict[str, Any]]


_INDEX = TypeAdapter(Index)
_INFO = TypeAdapter(TypedDict("Info", {"splits": dict[str, Split]}))


class ShardSource(Source):
    """The images of one split, found by the indexes of its shards.

    It holds arrays only, no object per image, because loader processes are forked from it. Each process opens the
    shards for itself. Not for several threads at once.
    """

    def __init__(self, data: DataConfig, training: bool, num_classes: int | None) -> None:
        """Find all images and check that every shard is whole.

        Args:
            data: Names the folder and the shards.
            training: Training split, or validation.
            num_classes: Labels must lie below; None takes the number of the classes' names, or else any label.

        Raises:
            ConfigError: the split is no pattern of shards.
            DataError: a shard is missing, damaged, of another length than _info.json says, or has a
                label that is no class.
        """
        root, splits = Path(data.path), read_info(Path(data.path))
        names, classes = _find_shards(root, data, training, splits)
        self.classes = None if classes is None else tuple(classes)
        stated = {
            name: length
            for split in splits.values()
            for name, length in zip(
                split["filenames"], split.get("shard_lengths", ()), strict=False
            )
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
        told = json.dumps([Path(name).name for name in names]).encode()
        self.listing = fingerprint(told, self._starts, self._places[:, :3])
        self._names, self._files = names, _Files([root / name for name in names])
        self._shuffle_shards = data.shuffle_shards

    def read(self, index: int) -> bytes:
        """Return an image's file."""
        offset, size, _, checksum = self._places[index].tolist()
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
        with self._files.paths[self._shard(index)].open("rb") as file:
            return zlib.crc32(_read_all(file.fileno(), size, offset))

    def name(self, index: int) -> str:
        """Return an image's shard and key."""
        start, end = self._key_starts[index : index + 2]
        return f"{self._names[self._shard(index)]}: {self._keys[start:end].decode()}"

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Shuffle the shards, and the images of every few consecutive ones together."""
        windows = []
        for window in torch.randperm(len(self._names), generator=generator).split(
            self._shuffle_shards
        ):
            images = torch.cat([torch.arange(*self._starts[s : s + 2]) for s in window.tolist()])
            windows.append(images[torch.randperm(len(images), generator=generator)])
        return torch.cat(windows)

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1


def load_index(shard: Path) -> list[Sample]:
    """Return the samples of a shard, from its index or, where that is of another file, from its headers.

    In the latter case the index is written for the next time, if the folder can be written to.

    Raises:
        DataError: the shard is missing, truncated, no tar, being written, or not the one whose checksums
            the index has.
    """
    stamp, index, path = stamp_of(shard), read_index(shard), index_path(shard)
    samples = [] if index is None else [Sample(*row) for row in index["samples"]]
    if index is not None and stamp == {key: index.get(key) for key in stamp}:
        return samples
    if index is not None and stamp["size"] < index["size"]:
        raise DataError(
            f"shard {shard} is truncated: {stamp['size']} of {index['size']} bytes (if it is a new one, delete {path})"
        )
    scanned = scan(shard)
    if stamp_of(shard) != stamp:
        raise DataError(f"shard {shard} changes while it is read: it is being written")
    if any(sample.crc32 is not None for sample in samples):
        if [sample._replace(crc32=None) for sample in samples] != scanned:
            raise DataError(
                f"index {path} does not belong to its shard, which has other samples; delete it"
            )
        scanned = samples
    with suppress(OutputError, OSError):  # only time is lost
        write_index(shard, scanned, stamp)
    return scanned


def index_path(shard: Path) -> Path:
    """Return where a shard's index lies."""
    return shard.with_name(f"{shard.name}.idx.json")


def stamp_of(shard: Path) -> dict[str, int]:
    """Return what another file of the same name would have otherwise: its size and times."""
    try:
        found = shard.stat()
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror}") from error
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}


def read_index(shard: Path) -> Index | None:
    """Read the index beside a shard, without a look at the shard; None if there is no index."""
    path = index_path(shard)
    try:
        text = path.read_bytes()
        if text.startswith(_HEAD) and text[: len(_HEAD) + 8] != _HEAD + _checksum(text):
            raise DataError(f"index {path} is damaged; delete it")
        return _INDEX.validate_json(text, strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"index {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise DataError(f"index {path} is not the index of a shard; delete it") from error


def write_index(shard: Path, samples: list[Sample], stamp: dict[str, int]) -> None:
    """Write the index beside a shard, whose stamp was taken before it was read."""
    path = index_path(shard)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # of a killed process
        left.unlink()  # if it is of one at work, that one goes without an index this time
    content = {"crc32": "0" * 8, **stamp, "samples": samples}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"
    start = (_HEAD + _checksum(text.encode())).decode()
    write_text(path, start + text[len(start) :])


def scan(shard: Path) -> list[Sample]:
    """Index a shard from the headers of the tar and its labels; images are not read.

    Returns:
        Its samples in order: those of an image, a label or both, grouped as webdataset does it.

    Raises:
        DataError: the file is missing, no tar, truncated or damaged, has a key twice, or holds no images.
    """
    samples: list[Sample] = []
    try:
        with shard.open("rb") as file:
            for key, group in groupby(_members(file, shard), key=lambda member: member[0]):
                sample = _sample(key, {extension: member for _, extension, member in group}, file)
                if (sample.offset, sample.label) != (None, None):
                    samples.append(sample)
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror or error}") from error
    if all(sample.offset is None for sample in samples):
        raise DataError(
            f"shard {shard} holds no images (.jpg, .png or another kind that Pillow opens)"
        )
    [(key, count)] = Counter(sample.key for sample in samples).most_common(1)
    if count > 1:
        raise DataError(f"shard {shard} holds sample {key!r} {count} times")
    return samples


def read_info(root: Path) -> dict[str, Split]:
    """Read the splits that _info.json of a folder of shards describes; none if there is no such file."""
    path = root / INFO_NAME
    try:
        splits = _INFO.validate_json(path.read_bytes(), strict=True)["splits"]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        told = error.errors()[0]
        place = ".".join(map(str, told["loc"]))
        raise DataError(
            f"{path} does not describe shards as timm does: {place}: {told['msg']}"
        ) from error
    for name, split in splits.items():
        if len(split.get("shard_lengths", split["filenames"])) != len(split["filenames"]):
            raise DataError(f"{path} must have as many shard_lengths as filenames of split {name}")
    return splits


def find_split(splits: dict[str, Split], name: str) -> Split | None:
    """Return a split by its name; validation also goes by its usual short one."""
    return splits.get("val" if name == "validation" and name not in splits else name)


class _Images(NamedTuple):
    """The usable images of one shard."""

    places: np.ndarray
    """Offset, size, label and checksum of each, int64, (images, 4)."""
    keys: list[bytes]
    excluded: list[str]


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


def _checksum(text: bytes) -> bytes:
    """Return eight digits for all of an index that comes after them."""
    return b"%08x" % zlib.crc32(text[len(_HEAD) + 8 :])


def _read_all(descriptor: int, size: int, offset: int) -> bytes:
    """Read a part of a file; less of it where the file ends, and not where a disk gives a piece."""
    pieces, missing = [], size
    while missing and (piece := os.pread(descriptor, missing, offset + size - missing)):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _members(file: BinaryIO, shard: Path) -> list[tuple[str, str, tarfile.TarInfo]]:
    """Return the key, the extension and the header of each file of a sample, having checked that the tar is whole."""
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
        raise DataError(f"shard {shard} is no tar, or not one {place}: {error}") from error
    rest = file.read(1 << 20)  # writers pad to some KiB
    if len(rest) < tarfile.BLOCKSIZE or any(rest) or file.read(1):
        raise DataError(
            f"shard {shard} is truncated or damaged {place}, where a tar's end mark must be"
        )
    return members


def _sample(key: str, found: dict[str, tarfile.TarInfo], file: BinaryIO) -> Sample:
    """Describe the files of one key, by their extensions."""
    label: int | str | None = None
    if "cls" in found:
        start, size = found["cls"].offset_data, min(found["cls"].size, 64)
        text = os.pread(file.fileno(), size, start).decode("utf-8", "replace").strip()
        label = int(text) if _INTEGER.fullmatch(text) else text
    images = sorted(found.keys() & IMAGE_EXTENSIONS)
    if not images:
        return Sample(key, None, 0, label, None)
    image = found[next((kind for kind in _USUAL_IMAGES if kind in images), images[0])]
    return Sample(key, image.offset_data, image.size, label, None)


def _find_shards(
    root: Path, data: DataConfig, training: bool, splits: dict[str, Split]
) -> tuple[list[str], list[str] | None]:
    """Return the names of a split's shards and of its classes, if they have names."""
    split = data.train_split if training else data.val_split
    setting = f"data.{'train' if training else 'val'}_split {split}"
    found = find_split(splits, split)
    if found is not None:
        names = found["filenames"]
    elif "|" in split or ("{" not in split and not split.endswith(".tar")):
        raise DataError(
            f"{setting} is neither a pattern such as train-{{000..511}}.tar nor one of the "
            f"splits of {root / INFO_NAME}: {', '.join(splits) or 'none'}"
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
            f"{setting}: shard {root / missing[0]} is missing ({len(missing)} of {len(names)} are)"
        )
    if len(set(names)) != len(names) or not names:
        raise DataError(f"{setting} in {root} names no shards, or one of them twice")
    return names, None if found is None else found.get("classes")


def _open_shard(root: Path, name: str, stated: int | None, num_classes: int | None) -> _Images:
    """Load a shard's index and check it; it must hold as many images as stated, their labels below num_classes."""
    samples = load_index(root / name)
    count = sum(sample.offset is not None for sample in samples)
    if stated not in (None, count):
        raise DataError(f"shard {root / name} holds {count} images, {INFO_NAME} says {stated}")
    places, keys, excluded = [], [], []
    for key, offset, size, label, checksum in samples:
        key = printable(key)
        if offset is None or not isinstance(label, int):
            fault = "no label" if label is None else f"label {label!r} is no integer"
            excluded.append(f"{name}: {key}: {'no image' if offset is None else fault}")
        elif not 0 <= label < (num_classes or _MOST_CLASSES):
            limit = f"model.num_classes is {num_classes or _MOST_CLASSES}"
            raise DataError(f"shard {root / name} sample {key} has label {label}, {limit}")
        else:
            places.append((offset, size, label, _NO_CHECKSUM if checksum is None else checksum))
            keys.append(key.encode())
    return _Images(np.array(places, dtype=np.int64).reshape(-1, 4), keys, excluded)
