"""Files that are either whole or absent, tables in them, and a folder with one writer."""

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
# What disks say that have no locks, as Lustre without -o flock, or cannot sync a folder.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


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
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        prove(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:
        if is_dead_loader(error):
            raise
        free = ""
        with suppress(OSError):  # of a disk or a folder that is gone
            free = f" ({shutil.disk_usage(path.parent).free >> 20} MiB free)"
        reason = str(error) or "not enough memory"
        if "unexpected pos" in reason:  # so torch.save reports what was not written
            reason = "the disk took only a part of it"
        raise OutputError(f"cannot write {path}{free}: {reason}") from error
    finally:
        with suppress(OSError):  # of a disk that can only be read
            temporary.unlink()


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
    """Give a file that is never changed in place a second name, or a copy where links do not exist."""
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
        with suppress(OSError):  # renaming one name of a file to another of its names does nothing
            temporary.unlink()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder if it is missing, reserve it for this process, and remove what killed ones were writing there.

    Raises:
        OutputError: the folder cannot be written, or another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("ab", buffering=0)
    except OSError as error:
        raise OutputError(f"output folder {folder} cannot be written: {error.strerror}") from error
    try:
        _lock(file, folder)
        with suppress(OSError):  # they are in nobody's way
            for path in folder.iterdir():
                if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    path.unlink()
        yield
    finally:
        with suppress(OSError):  # nothing was written into it
            file.close()


def _lock(file: BinaryIO, folder: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise OutputError(f"output folder {folder} is in use by another process") from error
        if error.errno not in _NO_LOCKS:
            raise OutputError(
                f"output folder {folder} cannot be locked: {error.strerror}"
            ) from error
        log.warning(
            f"the disk of {folder} has no locks ({error.strerror}): a second process that wrote there would not be "
            f"noticed"
        )


def is_there(path: Path) -> bool:
    """Tell whether a folder has an entry of a name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from error
    return True


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
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
