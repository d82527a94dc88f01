"""Files that are either whole or absent, tables in them, and the lock of a run's folder."""

import csv
import errno
import fcntl
import io
import logging
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from vil.training.errors import OutputError

LOCK_NAME = ".vision-longhorn.lock"
_LOCK_HEAD = b"Vision Longhorn writes into this folder. Last to do so: "
_TEMPORARY = ".tmp"
# What disks say that have no locks, as Lustre without -o flock, or cannot sync a folder.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

_logger = logging.getLogger("vil")


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    prove: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one, whole.

    Args:
        path: Destination; replaced if it exists.
        write: Writes the content to the binary file it is given.
        prove: Reads the new file before it takes the old one's place, and raises OutputError if it
            is not as it should be.

    Raises:
        OutputError: the content could not be written or proven; the old file is intact.
    """
    temporary = _temporary(path)
    said: list[OSError] = []
    try:
        with temporary.open("wb") as file:
            write(_Watched(file, said))
            file.flush()
            os.fsync(file.fileno())
        prove(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:
        free = ""
        with suppress(OSError):  # of a disk or a folder that is gone
            free = f" ({shutil.disk_usage(path.parent).free >> 20} MiB free)"
        reason = str(said[0] if said else error) or "not enough memory"
        if "unexpected pos" in reason:  # so torch.save reports what was not written
            reason = "the disk took only a part of it"
        raise OutputError(f"cannot write {path}{free}: {reason}") from error
    finally:
        with suppress(OSError):  # of a disk that can only be read
            temporary.unlink()


class _Watched:
    """A file that notes what its disk says: torch.save raises something else then, about positions."""

    def __init__(self, file: BinaryIO, said: list[OSError]) -> None:
        self._file = file
        self._said = said

    def write(self, content: bytes) -> int:
        """Write to the file."""
        try:
            return self._file.write(content)
        except OSError as error:
            self._said.append(error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; what is no text in the name of a file becomes an escape."""
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Return a table as CSV, its columns in the order of the last row; a row may lack some."""
    table = io.StringIO()
    columns = dict.fromkeys(key for row in reversed(rows) for key in row)
    writer = csv.DictWriter(table, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def link_atomically(source: Path, path: Path) -> None:
    """Give a file that is never changed in place a second name, or a copy where links do not exist.

    Args:
        source: The file.
        path: Its other name; replaced if it exists.

    Raises:
        OutputError: neither was possible; what was at the path is intact.
    """
    temporary = _temporary(path)
    try:
        os.link(source, temporary)
    except OSError:
        write_atomically(path, lambda file: _copy(source, file))
        return
    try:
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # renaming one name of a file to another of its names does nothing
            temporary.unlink()


def lock_folder(folder: Path, warn: Callable[[str], object] = _logger.warning) -> BinaryIO:
    """Reserve a folder for this process; the lock ends with the process or when the file is closed.

    Args:
        folder: An existing folder.
        warn: Told of a disk that has no locks.

    Returns:
        The open lock file.

    Raises:
        OutputError: another process holds the lock, or the file of its name is not a lock of ours.
    """
    path = folder / LOCK_NAME
    try:
        # Not through a link, and without waiting for the other end of a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = _LockFile(os.open(path, flags, 0o666), "r+b")
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _no_lock_of_ours(path) from error
        raise OutputError(f"output folder {folder} cannot be written: {error.strerror}") from error
    try:
        _take(file, path, warn)
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            raise OutputError(
                f"output folder {folder} cannot be locked: {error.strerror}"
            ) from error
        raise
    return file


class _LockFile(io.FileIO):
    """Closing it cannot fail: all that is in it says whose it was, and a run may end by another error."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _take(file: BinaryIO, path: Path, warn: Callable[[str], object]) -> None:
    """Lock an open file and write into it who has it.

    Raises:
        OutputError: another process has it, or it is somebody else's file.
    """
    content = file.read(1000) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    # A process that was killed, or a full disk, may have left a part of it.
    if content is None or not (content.startswith(_LOCK_HEAD) or _LOCK_HEAD.startswith(content)):
        raise _no_lock_of_ours(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.seek(0)
            owner = file.read(1000).removeprefix(_LOCK_HEAD).decode(errors="replace").strip()
            raise OutputError(
                f"output folder {path.parent} is in use by {owner or 'another process'}"
            ) from error
        if error.errno not in _NO_LOCKS:
            raise
        warn(
            f"the disk of {path.parent} has no locks ({error.strerror}): a second process that wrote "
            f"there, too, would not be noticed"
        )
    with suppress(OSError):  # of a full disk; what holds is the lock, this only says whose it is
        file.truncate(0)
        file.seek(0)
        file.write(_LOCK_HEAD + f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _no_lock_of_ours(path: Path) -> OutputError:
    return OutputError(
        f"{path} was not written by this program, which locks the folder by a file of that name; "
        f"choose another folder, or move it away"
    )


def remove_temporaries(folder: Path, names: Collection[str]) -> None:
    """Remove what killed processes were writing, if that can be: it is in nobody's way.

    Args:
        folder: Where this program writes.
        names: Of the files it writes there; what is named otherwise is somebody else's.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            if is_temporary(path, names):
                path.unlink()


def is_there(path: Path) -> bool:
    """Tell whether a folder has an entry of a name.

    Raises:
        OutputError: the disk does not say, which is no reason to take the entry for missing.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from error
    return True


def is_temporary(path: Path, names: Collection[str]) -> bool:
    """Tell whether a file is what this program may have been writing when it was killed.

    Args:
        path: The file.
        names: Of the files that it writes there.
    """
    named = re.fullmatch(rf"\.(.+)\.\d+{re.escape(_TEMPORARY)}", path.name)
    return named is not None and named[1] in names and path.is_file() and not path.is_symlink()


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power loss.

    A folder that the disk cannot sync is left to it, as databases do.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")


def _copy(source: Path, file: BinaryIO) -> None:
    with source.open("rb") as content:
        shutil.copyfileobj(content, file)
