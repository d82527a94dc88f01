"""Files that are either whole or absent, tables in them, and the lock of a run's folder."""

import csv
import fcntl
import io
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from vil.training.errors import OutputError

LOCK_NAME = ".lock"
_TEMPORARY = ".tmp"


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
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(path.parent).free >> 20 if path.parent.is_dir() else 0
        reason = str(error)
        if "unexpected pos" in reason:  # so torch.save reports a full disk
            reason = "the disk took only a part of it"
        raise OutputError(f"cannot write {path} ({free} MiB free): {reason}") from error
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


def lock_folder(folder: Path) -> BinaryIO:
    """Reserve a folder for this process; the lock ends with the process or when the file is closed.

    Args:
        folder: An existing folder.

    Returns:
        The open lock file.

    Raises:
        OutputError: another process holds the lock, or the folder's disk has no locks.
    """
    try:
        file = (folder / LOCK_NAME).open("a+b")
    except OSError as error:
        raise OutputError(f"output folder {folder} cannot be written: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        owner = file.read().decode(errors="replace") or "another process"
        file.close()
        raise OutputError(f"output folder {folder} is in use by {owner}") from error
    except OSError as error:
        file.close()
        raise OutputError(f"output folder {folder} cannot be locked: {error.strerror}") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    return file


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes were writing."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        path.unlink()


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")


def _copy(source: Path, file: BinaryIO) -> None:
    with source.open("rb") as content:
        shutil.copyfileobj(content, file)
