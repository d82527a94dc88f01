"""The index of a webdataset shard: where in the tar each image lies, and its label.

It is kept beside the shard, as <shard>.idx.json, so that a million images are found in seconds. The
tool that makes shards writes it with a checksum of every image; for shards of other origin it is
made from the headers of the tar. It holds for the very file that it was made of; another one of the same
name, a copy too, is scanned again.
"""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from vil.training.data.reading import read_file
from vil.training.data.shard_scan import Sample, scan_shard
from vil.training.errors import DataError, OutputError
from vil.training.files import write_text

_HEAD = b'{"crc32":"'
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<process>[1-9][0-9]*)\.tmp")  # of files.py


class Stamp(NamedTuple):
    """What another file of the same name would have otherwise."""

    size: int
    """Bytes of the tar."""
    mtime_ns: int | None
    ctime_ns: int | None
    """When it was changed; None in indexes that do not say it."""


class ShardIndex(NamedTuple):
    """A shard as it was when it was indexed."""

    stamp: Stamp
    samples: list[Sample]

    @property
    def has_checksums(self) -> bool:
        """Whether the shard's maker wrote it, who read the images."""
        return any(sample.crc32 is not None for sample in self.samples)

    @property
    def scanned(self) -> list[Sample]:
        """The samples as scanning the shard gives them."""
        return [sample._replace(crc32=None) for sample in self.samples]


def index_path(shard: Path) -> Path:
    """Return where a shard's index lies."""
    return shard.with_name(f"{shard.name}.idx.json")


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
    if index is not None:
        size = index.stamp.size
        if index.stamp == stamp:
            return index.samples
        if stamp.size < size:
            raise DataError(
                f"shard {shard} is truncated: {stamp.size} of {size} bytes (if it is a new one, "
                f"delete {path})"
            )
        if stamp.size > size and index.has_checksums:
            raise DataError(
                f"index {path} does not belong to its shard, which has {stamp.size} bytes and not "
                f"{size}; delete the index"
            )
    samples = scan_shard(shard)
    if stamp_of(shard) != stamp:
        raise DataError(f"shard {shard} changes while it is read: it is being written")
    if index is not None and index.has_checksums:
        if index.scanned != samples:
            raise DataError(
                f"index {path} does not belong to its shard, whose keys, labels or places of images "
                f"are others; delete the index"
            )
        samples = index.samples
    with contextlib.suppress(OutputError, OSError):  # only time is lost
        write_index(shard, samples, stamp)
    return samples


def stamp_of(shard: Path) -> Stamp:
    """Tell a file from others of its name.

    Raises:
        DataError: it is missing.
    """
    try:
        found = shard.stat()
    except OSError as error:
        raise DataError(f"shard {shard} cannot be read: {error.strerror}") from error
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_index(shard: Path) -> ShardIndex | None:
    """Read the index beside a shard, without a look at the shard; None if there is no index.

    Raises:
        DataError: the index cannot be read or is damaged.
    """
    path = index_path(shard)
    try:
        text = read_file(path)
        if text.startswith(_HEAD) and text[: len(_HEAD) + 8] != _HEAD + _checksum(text):
            raise DataError(f"index {path} is damaged; delete it")
        content = json.loads(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"index {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"index {path} is not JSON ({error}); delete it") from error
    if not _is_index(content):
        raise DataError(f"index {path} is not the index of a shard; delete it")
    stamp = Stamp(content["size"], content.get("mtime_ns"), content.get("ctime_ns"))
    return ShardIndex(stamp, [Sample(*row) for row in content["samples"]])


def write_index(shard: Path, samples: list[Sample], stamp: Stamp) -> None:
    """Write the index beside a shard.

    Args:
        shard: The tar.
        samples: What it holds.
        stamp: Of the tar, before it was read.

    Raises:
        OutputError: it could not be written.
    """
    content = {"crc32": "0" * 8, **stamp._asdict(), "samples": samples}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"
    start = (_HEAD + _checksum(text.encode())).decode()
    write_text(index_path(shard), start + text[len(start) :])


def _checksum(text: bytes) -> bytes:
    """Return eight digits for all of an index that comes after them."""
    return b"%08x" % zlib.crc32(text[len(_HEAD) + 8 :])


def remove_unfinished(folder: Path, names: Collection[str]) -> None:
    """Remove what processes that were killed have left of files that they were writing.

    Args:
        folder: Where the files lie; if it cannot be written to, nothing is removed.
        names: Of the files. What is named otherwise is somebody else's.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            named = _TEMPORARY.fullmatch(entry.name)
            if (
                named is not None
                and named["name"] in names
                and entry.is_file(follow_symlinks=False)
                and not _is_alive(int(named["process"]))
            ):
                os.unlink(entry.path)


def _is_alive(process: int) -> bool:
    """Tell whether this machine has a process; one of another machine can lose an index by that."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # somebody else's, and no number of a process
        pass
    return True


def _is_index(content: Any) -> bool:
    """Check the types of an index, and that its images lie within the tar."""
    if not isinstance(content, dict):
        return False
    # Those of before they had checksums say no times either.
    if content.keys() not in ({"size", "samples"}, {"crc32", *Stamp._fields, "samples"}):
        return False
    size, rows = content["size"], content["samples"]
    return (
        type(size) is int
        and all(type(content.get(key)) in (int, type(None)) for key in Stamp._fields)
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
