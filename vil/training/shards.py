"""Webdataset shards on local disks, read at random: any image by its number, nothing unpacked.

The index of a shard, <shard>.idx.json beside it, tells where in the tar each image lies, and its label, so that a
million images are found in seconds. make_shards.py writes it with a checksum of every image; for shards of other
origin it is made from the headers of the tar. It holds for the very file that it was made of; another one of the same
name, a copy too, is scanned again.
"""

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


class Split(TypedDict, total=False):
    """What _info.json, timm's description of a folder of shards, says about a split."""

    filenames: list[str]
    shard_lengths: list[int]
    classes: list[str]
    made_from: dict[str, Any]


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
        setting = "data.train_split" if training else "data.val_split"
        splits = read_info(root)
        names, classes = _find_shards(root, setting, getattr(data, setting[5:]), splits)
        self.classes = None if classes is None else tuple(classes)
        if num_classes is None and self.classes is not None:
            num_classes = len(self.classes)
        stated = {
            name: length
            for split in splits.values()
            for name, length in zip(
                split["filenames"], split.get("shard_lengths", ()), strict=False
            )
        }

        def open_shard(name: str) -> _Images:
            return _open_shard(root, name, stated.get(name), num_classes)

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


def load_index(shard: Path) -> list[Sample]:
    """Return the samples of a shard, from its index or, where that is of another file, from its headers.

    In the latter case the index is written for the next time, if the folder can be written to.

    Args:
        shard: An uncompressed tar.

    Raises:
        DataError: the shard is missing, truncated, no tar, being written, or not the one whose checksums
            the index has.
    """
    stamp, index, path = stamp_of(shard), read_index(shard), index_path(shard)
    samples = [] if index is None else [Sample(*row) for row in index["samples"]]
    if index is not None and stamp == {key: index.get(key) for key in stamp}:
        return samples
    has_checksums = any(sample.crc32 is not None for sample in samples)
    if index is not None and stamp["size"] < index["size"]:
        raise DataError(
            f"shard {shard} is truncated: {stamp['size']} of {index['size']} bytes (if it is a new one, delete {path})"
        )
    scanned = scan(shard)
    if stamp_of(shard) != stamp:
        raise DataError(f"shard {shard} changes while it is read: it is being written")
    if has_checksums and [sample._replace(crc32=None) for sample in samples] != scanned:
        raise DataError(
            f"index {path} does not belong to its shard, whose keys, labels or places of images are others; delete "
            f"the index"
        )
    samples = samples if has_checksums else scanned
    with suppress(OutputError, OSError):  # only time is lost
        write_index(shard, samples, stamp)
    return samples


def index_path(shard: Path) -> Path:
    """Return where a shard's index lies."""
    return shard.with_name(f"{shard.name}.idx.json")


def stamp_of(shard: Path) -> dict[str, int]:
    """Return what another file of the same name would have otherwise: its size and times.

    Raises:
        DataError: it is missing.
    """
    try:
        found = shard.stat()
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror}") from error
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}


def read_index(shard: Path) -> Index | None:
    """Read the index beside a shard, without a look at the shard; None if there is no index.

    Raises:
        DataError: the index cannot be read or is damaged.
    """
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
    """Write the index beside a shard.

    Args:
        shard: The tar.
        samples: What it holds.
        stamp: Of the tar, before it was read.

    Raises:
        OutputError: it could not be written.
    """
    content = {"crc32": "0" * 8, **stamp, "samples": samples}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"
    start = (_HEAD + _checksum(text.encode())).decode()
    write_text(index_path(shard), start + text[len(start) :])


def scan(shard: Path) -> list[Sample]:
    """Index a shard from the headers of the tar and its labels; images are not read.

    Args:
        shard: An uncompressed tar.

    Returns:
        Its samples in order: those of an image, a label or both, grouped as webdataset does it.

    Raises:
        DataError: the file is missing, no tar, truncated or damaged, has a key twice, or holds no
            images.
    """
    samples: list[Sample] = []
    try:
        with shard.open("rb") as file:
            for key, members in groupby(_members(file, shard), key=lambda member: member[0]):
                found = {extension: member for _, extension, member in members}
                sample = _sample(key, found, file)
                if sample.offset is not None or sample.label is not None:
                    samples.append(sample)
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror or error}") from error
    [(key, count)] = Counter(sample.key for sample in samples).most_common(1) or [("", 0)]
    if count > 1:
        raise DataError(f"shard {shard} holds sample {key!r} {count} times")
    if all(sample.offset is None for sample in samples):
        raise DataError(
            f"shard {shard} holds no images (.jpg, .png or another kind that Pillow opens)"
        )
    return samples


def read_info(root: Path) -> dict[str, Split]:
    """Read the splits that _info.json of a folder of shards describes; none if there is no such file.

    Raises:
        DataError: the file cannot be read or is not of timm's form.
    """
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
        lengths = split.get("shard_lengths")
        if "filenames" not in split or len(lengths or split["filenames"]) != len(
            split["filenames"]
        ):
            raise DataError(
                f"{path} must have filenames of split {name}, and as many shard_lengths or none"
            )
    return splits


def find_split(splits: dict[str, Split], name: str) -> Split | None:
    """Return a split by its name; validation also goes by its usual short one."""
    return splits.get("val" if name == "validation" and name not in splits else name)


_INDEX = TypeAdapter(Index)
_INFO = TypeAdapter(TypedDict("Info", {"splits": dict[str, Split]}))


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
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"shard {shard} is no tar, or not one {place}: {error}") from error
    file.seek(end)
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
        size = min(found["cls"].size, 64)
        text = (
            os.pread(file.fileno(), size, found["cls"].offset_data)
            .decode("utf-8", "replace")
            .strip()
        )
        label = int(text) if _INTEGER.fullmatch(text) else text
    images = sorted(found.keys() & IMAGE_EXTENSIONS)
    if not images:
        return Sample(key, None, 0, label, None)
    image = found[
        next((extension for extension in _USUAL_IMAGES if extension in images), images[0])
    ]
    return Sample(key, image.offset_data, image.size, label, None)


def _find_shards(
    root: Path, setting: str, split: str, splits: dict[str, Split]
) -> tuple[list[str], list[str] | None]:
    """Return the names of a split's shards and of its classes, if they have names.

    Args:
        root: Folder of the shards.
        setting: The one that names the split, for errors.
        split: A split of _info.json, or a pattern.
        splits: What _info.json says.
    """
    found = find_split(splits, split)
    if found is None:
        if "|" in split or ("{" not in split and not split.endswith(".tar")):
            raise DataError(
                f"{setting} {split} is neither a pattern such as train-{{000..511}}.tar nor one of the "
                f"splits of {root / INFO_NAME}: {', '.join(splits) or 'none'}"
            )
        try:
            names = expand_urls(split)
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"{setting} must be a brace pattern, got {split}: {error}") from error
    else:
        names = found["filenames"]
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise DataError(
            f"{setting} {split}: shard {root / missing[0]} is missing "
            f"({len(missing)} of {len(names)} are)"
        )
    if len(set(names)) != len(names) or not names:
        raise DataError(f"{setting} {split} in {root} names no shards, or one of them twice")
    return names, None if found is None else found.get("classes")


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
