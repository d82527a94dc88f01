"""The index of a webdataset shard: where in the tar each image lies, and its label.

It is kept beside the shard, as <shard>.idx.json, so that a million images are found in seconds. The
tool that makes shards writes it with a checksum of every image; for shards of other origin it is
made from the headers of the tar.
"""

import contextlib
import json
import os
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from webdataset.tariterators import base_plus_ext

from vil.training.data.image_files import IMAGE_EXTENSIONS
from vil.training.errors import DataError, OutputError
from vil.training.files import write_text

_USUAL_IMAGES = ("jpg", "jpeg", "png", "webp")  # go before other images of a sample, in this order
_LABEL_EXTENSION = "cls"
_MOST_LABEL_BYTES = 64
_MOST_PADDING = 1 << 20  # zeros after the last member; writers pad to some KiB
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset's own records
_INTEGER = re.compile(r"[+-]?[0-9]+")


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


class ShardIndex(NamedTuple):
    """A shard as it was when it was indexed."""

    size: int
    """Bytes of the tar."""
    samples: list[Sample]


def index_path(shard: Path) -> Path:
    """Return where a shard's index lies."""
    return shard.with_name(f"{shard.name}.idx.json")


def load_index(shard: Path) -> list[Sample]:
    """Return the samples of a shard, from its index or, where it has none, from its headers.

    In the latter case the index is written for the next time, if the folder can be written to.

    Args:
        shard: An uncompressed tar.

    Raises:
        DataError: the shard is missing, truncated, no tar, or not the one that was indexed.
    """
    index = read_index(shard)
    if index is None:
        samples = scan_shard(shard)
        with contextlib.suppress(OutputError, OSError):  # only time is lost
            write_index(shard, samples)
        return samples
    try:
        size = shard.stat().st_size
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror}") from error
    if size < index.size:
        raise DataError(f"shard {shard} is truncated: {size} of {index.size} bytes")
    if size > index.size:
        raise DataError(
            f"index {index_path(shard)} does not belong to its shard, which has {size} bytes and not "
            f"{index.size}; delete the index"
        )
    return index.samples


def read_index(shard: Path) -> ShardIndex | None:
    """Read the index beside a shard, without a look at the shard; None if there is no index.

    Raises:
        DataError: the index cannot be read or is damaged.
    """
    path = index_path(shard)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"index {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"index {path} is not JSON ({error}); delete it") from error
    if not _is_index(content):
        raise DataError(f"index {path} is not the index of a shard; delete it")
    return ShardIndex(content["size"], [Sample(*row) for row in content["samples"]])


def write_index(shard: Path, samples: list[Sample]) -> None:
    """Write the index beside a shard.

    Raises:
        OutputError: it could not be written.
    """
    index = ShardIndex(shard.stat().st_size, samples)
    write_text(index_path(shard), json.dumps(index._asdict(), separators=(",", ":")) + "\n")


def scan_shard(shard: Path) -> list[Sample]:
    """Index a shard from the headers of the tar and its labels; images are not read.

    Args:
        shard: An uncompressed tar.

    Returns:
        Its samples in order: those of an image, a label or both, grouped as webdataset does it.

    Raises:
        DataError: the file is missing, no tar, truncated or damaged, or holds no images.
    """
    try:
        with shard.open("rb") as file:
            named = [
                (key, extension.lower(), member)
                for member in _members(file, shard)
                for key, extension in [base_plus_ext(member.name)]
                if key is not None and not member.isdir() and not _SKIPPED.match(member.name)
            ]
            groups = groupby(named, key=lambda item: item[0])
            samples = [_sample(key, list(group), file, shard) for key, group in groups]
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror or error}") from error
    samples = [s for s in samples if s.offset is not None or s.label is not None]
    if all(sample.offset is None for sample in samples):
        first = f", its first file is {named[0][2].name!r}" if named else ""
        raise DataError(
            f"shard {shard} holds no images (.jpg, .png or another kind that Pillow opens){first}"
        )
    return samples


def _members(file: BinaryIO, shard: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar and check that all of it is there."""
    size = os.fstat(file.fileno()).st_size
    place = "at its start"
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()
                if member.offset_data + member.size > size:
                    raise DataError(f"shard {shard} is truncated: it ends within {member.name!r}")
                place = f"after {member.name!r}"
                yield member
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise DataError(f"shard {shard} is no tar, or not one {place}: {error}") from error
    file.seek(end)
    rest = file.read(_MOST_PADDING + 1)
    if len(rest) < tarfile.BLOCKSIZE:
        raise DataError(f"shard {shard} is truncated: it ends {place}, without a tar's end mark")
    if len(rest) > _MOST_PADDING and not any(rest):
        raise DataError(f"shard {shard} is written in part only: {place} are zeros")
    if any(rest):
        raise DataError(f"shard {shard} is damaged, or two in one: {place} is more than the end")


def _sample(
    key: str, files: list[tuple[str, str, tarfile.TarInfo]], file: BinaryIO, shard: Path
) -> Sample:
    """Describe the files of one key."""
    found: dict[str, tarfile.TarInfo] = {}
    for _, extension, member in files:
        if extension in found:
            raise DataError(f"shard {shard} holds two files {member.name!r} in a row")
        if extension in IMAGE_EXTENSIONS or extension == _LABEL_EXTENSION:
            if not member.isreg() or member.issparse():
                raise DataError(f"shard {shard} holds {member.name!r} as a link or a sparse file")
            found[extension] = member
    labelled = found.pop(_LABEL_EXTENSION, None)
    label = None if labelled is None else _read_label(file, labelled)
    if not found:
        return Sample(key, None, 0, label, None)
    usual = next((extension for extension in _USUAL_IMAGES if extension in found), None)
    image = found[usual or min(found)]
    return Sample(key, image.offset_data, image.size, label, None)


def _read_label(file: BinaryIO, member: tarfile.TarInfo) -> int | str:
    size = min(member.size, _MOST_LABEL_BYTES)
    text = os.pread(file.fileno(), size, member.offset_data).decode("utf-8", "replace").strip()
    return int(text) if _INTEGER.fullmatch(text) else text


def _is_index(content: Any) -> bool:
    """Check the types of an index, and that its images lie within the tar."""
    if not isinstance(content, dict) or content.keys() != set(ShardIndex._fields):
        return False
    size, rows = content["size"], content["samples"]
    return (
        type(size) is int
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == len(Sample._fields) for row in rows)
        and all(_is_sample(Sample(*row), size) for row in rows)
    )


def _is_sample(sample: Sample, tar_size: int) -> bool:
    key, offset, size, label, crc32 = sample
    return (
        type(key) is str
        and type(size) is int
        and (offset is None or (type(offset) is int and 0 <= offset <= offset + size <= tar_size))
        and (label is None or type(label) in (int, str))
        and (crc32 is None or (type(crc32) is int and 0 <= crc32 < 1 << 32))
    )
