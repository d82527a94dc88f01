"""Files that are either whole or absent, and the folder of a run."""

import os
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from vil.training.config import RunConfig
from vil.training.errors import OutputError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one, whole.

    Args:
        path: Destination; replaced if it exists.
        write: Writes the content to the binary file it is given.

    Raises:
        OutputError: the content could not be written; the old file is intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        free = shutil.disk_usage(path.parent).free >> 20 if path.parent.is_dir() else 0
        raise OutputError(f"cannot write {path} ({free} MiB free): {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def open_run_folder(run: RunConfig, recipe: str) -> Path:
    """Create the folder of a new run, or find that of a run to resume.

    Args:
        run: Names the folder, or leaves it to the recipe's name and the time.
        recipe: Name of the recipe.

    Raises:
        OutputError: a new run would write over files, or there is nothing to resume.
    """
    default = Path("output", f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}")
    folder = default if run.output is None else Path(run.output)
    if run.resume:
        if not (folder / "last.pt").is_file():
            raise OutputError(f"--run.resume: there is no {folder / 'last.pt'} to resume from")
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise OutputError(f"cannot create output folder {folder}: {error.strerror}") from error
    if occupied:
        raise OutputError(
            f"output folder {folder} is not empty; choose another --run.output, "
            f"or --run.resume to continue the run in it"
        )
    return folder


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
