"""Reading the files of the data: regular ones only, and again where a disk is away for a moment."""

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from vil.messages import printable
from vil.training.errors import DataError

PAUSES = tuple(0.1 * 2**number for number in range(9))
"""Seconds before a read is tried again, 51 in all."""
_MOST_BYTES = 1 << 30
_PAUSES_IF_GONE = 3  # where only the file is missing, and its folder is there
# They tell what a file is, or whose; no time changes that.
_LASTING = {
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EISDIR, errno.ENXIO, errno.EINVAL, errno.EFBIG),
}


def is_folder(path: Path) -> bool:
    """Tell whether a path leads to a folder.

    Raises:
        DataError: nobody knows, for a disk does not answer, say.
    """
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Tell whether a path leads to a regular file.

    Raises:
        DataError: nobody knows.
    """
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    """Return what lies at a path, or leads from it; 0 for nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a NUL in the path
        return 0
    except OSError as error:
        raise DataError(f"{printable(str(path))} cannot be read: {error.strerror}") from error


def read_file(path: Path) -> bytes:
    """Read a regular file.

    Raises:
        OSError: it cannot be read, is too large, or is a folder, or a pipe or device, which might never
            end.
    """
    # Opening a pipe waits for its writer otherwise.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        check_size(found.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def check_size(size: int) -> None:
    """Refuse to read so many bytes at once.

    Raises:
        OSError: an image of so many would have more pixels than are decoded.
    """
    if size > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {_MOST_BYTES:,} are read")


def _is_gone(error: OSError) -> bool:
    """Tell a file that is missing, or a link to one, from a disk that is."""
    if error.errno != errno.ENOENT or error.filename is None:
        return False
    return os.path.isdir(os.path.dirname(os.path.realpath(error.filename)))


class PatientReader:
    """Reads images by their numbers; one that cannot be read is tried again for a minute.

    A minute that was in vain is not spent again: not on the same image, nor on any until one can be read.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """Take a function that opens what it reads each time that it failed before."""
        self._read = read
        self._lost: set[int] = set()
        self._is_hopeful = True

    def __call__(self, index: int) -> bytes:
        """Read an image's file.

        Raises:
            OSError: it could not be read.
        """
        pauses = PAUSES if self._is_hopeful and index not in self._lost else ()
        for number, pause in enumerate((*pauses, None)):
            try:
                content = self._read(index)
                break
            except OSError as error:
                if error.errno is None or error.errno in _LASTING:
                    raise
                is_gone = number == _PAUSES_IF_GONE and _is_gone(error)
                if pause is not None and not is_gone:
                    time.sleep(pause)
                    continue
                if pauses:
                    self._lost.add(index)
                    self._is_hopeful = is_gone
                raise
        self._lost.discard(index)
        self._is_hopeful = True
        return content
