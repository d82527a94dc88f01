"""Reading what torch.save wrote without executing anything in it, and checking that it is whole."""

import argparse
import errno
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vil.messages import one_line


def load_archive(path: Path, foreign: bool = False) -> Any:
    """Read tensors and plain values, and compare the file with its checksums.

    Args:
        path: Path of the file.
        foreign: Also read files without checksums, and the argparse options that timm's trainer stores.

    Returns:
        Content of the file, with tensors on the CPU.

    Raises:
        OSError, MemoryError: The disk or the memory fails; the content may be intact.
        ValueError: The file is damaged, or contains more than tensors and plain values.
    """
    with _reading(path) as file, torch.serialization.safe_globals([argparse.Namespace] * foreign):
        if not foreign or file.peek(2)[:2] == b"PK":  # also if it is cut off
            _check_members(file)
            file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def check_plain(tensors: Mapping[str, Tensor], origin: object) -> None:
    """Raise ValueError unless all tensors are dense and have all of their numbers.

    A file of a few bytes can describe a tensor of any size whose elements share one number in memory.
    """
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"{origin}: {name} is not a dense tensor")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(
                f"{origin}: {name} has fewer values than its shape needs, {(*value.shape,)}"
            )


def check_finite(tensors: Mapping[str, Tensor], origin: object) -> None:
    """Raise ValueError if a plain tensor contains NaN or infinity.

    A tensor without dimensions may be infinite: some models clip to such limits.
    """
    # One-byte floats lack isfinite, so widen them. Fetch all answers from a GPU at once.
    floats = {
        name: value.float() if value.element_size() == 1 else value
        for name, value in tensors.items()
        if value.is_floating_point() or value.is_complex()
    }
    if not floats:
        return
    wrong = [v.isfinite().logical_not().any() if v.ndim else v.isnan() for v in floats.values()]
    names = [name for name, bad in zip(floats, torch.stack(wrong).tolist(), strict=True) if bad]
    if names:
        more = f", nor are {len(names) - 1} other tensors" if len(names) > 1 else ""
        raise ValueError(f"{origin}: {names[0]} is not finite{more}")


class _FaultError(Exception):
    """A fault of a file; the file's name goes before the message."""


class _Reader(io.FileIO):
    """A file that records a disk error, even if the reading library hides it."""

    failure: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        """Read, as the base does."""
        return self._remembering(super().readinto, buffer)

    def readall(self) -> bytes:
        """Read, as the base does."""
        return self._remembering(super().readall)

    def _remembering(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and separate errors of the disk and the memory from errors in the content.

    Raises:
        OSError, MemoryError: If the disk or the memory fails.
        ValueError: If the content is wrong.
    """
    raw = _Reader(path)
    try:
        with io.BufferedReader(raw) as file:
            yield file
    except _FaultError as error:
        raise ValueError(f"{path} {error}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not a torch.save file, or contains more than tensors and plain values; "
            f"files that could execute code are not read"
        ) from error
    except Exception as error:  # zipfile and torch.load raise many things for a damaged file
        if raw.failure is not None:
            raise raw.failure from error
        # An offset in the file that points before its beginning raises EINVAL: the file is damaged.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(f"not enough memory for {path}") from error
        raise ValueError(f"{path} is truncated or not a checkpoint: {one_line(error)}") from error


def _check_members(file: BinaryIO) -> None:
    """Compare a zip archive with its checksums and with what torch.save writes.

    Raises:
        _FaultError: If it differs.
        Exception: Any error of zipfile, if the file is no archive.
    """
    size = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise _FaultError("is compressed, so torch.save did not write it")
        if sum(member.file_size for member in members) > size:
            raise _FaultError("is damaged: its parts are larger than the whole")
        if len({member.filename for member in members}) < len(members):
            raise _FaultError("is damaged: two of its parts have one name")
        damaged = archive.testzip()
    if damaged is not None:
        raise _FaultError(f"is damaged: wrong checksum in {damaged}")
