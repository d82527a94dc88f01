"""Atomic file writes, CSV tables, and folders locked to one writer."""

import csv
import errno
import fcntl
import io
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from vil.training.errors import OutputError, is_dead_loader, log

LOCK_NAME = ".vision-longhorn.lock"
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
# Errors of disks without locks (such as Lustre without -o flock), and of disks that cannot sync a folder.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically: a crash at any moment leaves either the old or the new file intact.

    Raises OutputError if ``write``, which gets an open binary file, fails; the old file is intact.
    """
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:
        if is_dead_loader(error):
            raise
        free = ""
        with suppress(OSError):  # the disk or folder may be gone
            free = f" ({shutil.disk_usage(path.parent).free >> 20} MiB free)"
        reason = str(error) or "not enough memory"
        if "unexpected pos" in reason:  # torch.save's message for an incomplete write
            reason = "the disk took only a part of it"
        raise OutputError(f"cannot write {path}{free}: {reason}") from error
    finally:
        with suppress(OSError):  # the disk may be read-only
            temporary.unlink()


def check_target(path: Path, option: str) -> None:
    """Raise OutputError if no file can be written at a path; to be called before the work that it is for."""
    if path.is_dir() or not os.access(f"{path.parent}/", os.W_OK):
        raise OutputError(f"{option} must be a file in a folder that exists and can be written, got {path}")


def write_text(path: Path, text: str) -> None:
    """Write a text file like ``write_atomically``; undecodable bytes of file names are escaped."""
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Return a table as CSV with columns in the order of the last row; rows may lack columns."""
    table = io.StringIO()
    columns = dict.fromkeys(key for row in reversed(rows) for key in row)
    writer = csv.DictWriter(table, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def link_atomically(source: Path, path: Path) -> None:
    """Hard-link an immutable file to a second name, or else copy it; raise OutputError if neither works."""
    temporary = _temporary(path)
    try:
        os.link(source, temporary)
    except OSError:
        write_atomically(path, lambda file: file.write(source.read_bytes()))
        return
    try:
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # os.replace does nothing if both names are the same file
            temporary.unlink()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; create it if missing and remove temporary files of killed processes.

    Raises OutputError if the folder is not writable or another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("ab", buffering=0)
    except OSError as error:
        raise OutputError(f"output folder {folder} cannot be written: {error.strerror}") from error
    try:
        _lock(file, folder)
        with suppress(OSError):  # leftover files do no harm
            for path in folder.iterdir():
                if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    path.unlink()
        yield
    finally:
        with suppress(OSError):  # the lock file is empty
            file.close()


def _lock(file: BinaryIO, folder: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise OutputError(f"output folder {folder} is in use by another process") from error
        if error.errno not in _NO_LOCKS:
            raise OutputError(f"output folder {folder} cannot be locked: {error.strerror}") from error
        log.warning(
            f"the disk of {folder} does not support locks ({error.strerror}): a second process "
            f"that writes there will not be noticed"
        )


def is_there(path: Path) -> bool:
    """Return whether a path exists, including a dangling link; raise OutputError if the disk fails."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from error
    return True


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, so that they survive a power loss.

    Raises OSError. The error of disks that cannot sync folders is ignored, as databases do.
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
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
