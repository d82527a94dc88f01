"""What lies where in a webdataset shard, from the headers of the tar."""

import os
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

from webdataset.tariterators import base_plus_ext

from vil.training.data.image_files import IMAGE_EXTENSIONS
from vil.training.errors import DataError

_USUAL_IMAGES = ("jpg", "jpeg", "png", "webp")  # go before other images of a sample, in this order
_LABEL_EXTENSION = "cls"
_MOST_LABEL_BYTES = 64
_MOST_HEADER_BYTES = 1 << 20  # of one member, long names and the like among them
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


class _File(NamedTuple):
    """A member of a tar and what its name says."""

    key: str
    extension: str
    member: tarfile.TarInfo


def scan_shard(shard: Path) -> list[Sample]:
    """Index a shard from the headers of the tar and its labels; images are not read.

    Args:
        shard: An uncompressed tar.

    Returns:
        Its samples in order: those of an image, a label or both, grouped as webdataset does it.

    Raises:
        DataError: the file is missing, no tar, truncated or damaged, has a key twice, or holds no
            images.
    """
    first, samples, places = "", [], {}
    try:
        with shard.open("rb") as file:
            for key, group in groupby(_files(file, shard), key=lambda item: item.key):
                files = list(group)
                first = first or f", its first file is {files[0].member.name!r}"
                sample, place = _sample(key, files, file, shard), files[0].member.offset
                if sample.offset is None and sample.label is None:
                    continue
                if places.setdefault(key, place) != place:
                    raise DataError(
                        f"shard {shard} holds sample {key!r} twice, from byte {places[key]} and from "
                        f"byte {place}"
                    )
                samples.append(sample)
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror or error}") from error
    if all(sample.offset is None for sample in samples):
        raise DataError(
            f"shard {shard} holds no images (.jpg, .png or another kind that Pillow opens){first}"
        )
    return samples


class _Headers:
    """A tar of which only headers are read, so that one that claims any size is read no further."""

    def __init__(self, file: BinaryIO) -> None:
        self.tell, self.seek, self._read = file.tell, file.seek, file.read
        self.left = _MOST_HEADER_BYTES

    def read(self, size: int) -> bytes:
        """Read what tarfile asks for: blocks, long names and records of attributes."""
        if not 0 <= size <= self.left:
            raise tarfile.ReadError(f"a header of {size} bytes")
        self.left -= size
        return self._read(size)


def _files(file: BinaryIO, shard: Path) -> Iterator[_File]:
    """Yield the members that belong to samples."""
    for member in _members(file, shard):
        key, extension = base_plus_ext(member.name)
        if key is not None and not member.isdir() and not _SKIPPED.match(member.name):
            yield _File(key, extension.lower(), member)


def _members(file: BinaryIO, shard: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar and check that all of it is there."""
    size = os.fstat(file.fileno()).st_size
    place, end = "at its start", 0
    headers = _Headers(file)
    try:
        with tarfile.open(fileobj=headers, mode="r:", encoding="utf-8") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()
                headers.left = _MOST_HEADER_BYTES
                if member.size < 0 or tar.offset <= end:  # it would be read again, for ever
                    raise tarfile.ReadError(f"{member.name!r} ends before it begins")
                if member.offset_data + member.size > size:
                    raise DataError(f"shard {shard} is truncated: it ends within {member.name!r}")
                place, end = f"after {member.name!r}", tar.offset
                yield member
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"shard {shard} is no tar, or not one {place}: {error}") from error
    file.seek(end)
    rest = file.read(_MOST_PADDING + 1)
    if len(rest) < tarfile.BLOCKSIZE:
        raise DataError(f"shard {shard} is truncated: it ends {place}, without a tar's end mark")
    if len(rest) > _MOST_PADDING and not any(rest):
        raise DataError(f"shard {shard} is written in part only: {place} are zeros")
    if any(rest):
        raise DataError(f"shard {shard} is damaged, or two in one: {place} is more than the end")


def _sample(key: str, files: list[_File], file: BinaryIO, shard: Path) -> Sample:
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
    """Return an integer, or the beginning of what is none."""
    size = min(member.size, _MOST_LABEL_BYTES)
    text = os.pread(file.fileno(), size, member.offset_data).decode("utf-8", "replace").strip()
    if member.size > size:
        return f"{text}..."
    return int(text) if _INTEGER.fullmatch(text) else text
