"""steps.csv: a row for every step of a run, whatever killed it in between.

Rows are appended. What was appended after the checkpoint that a run continues from is cut off, as is a
last line that is torn, and comes again.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vil.training.errors import OutputError
from vil.training.files import sync, write_atomically

STEPS = "steps.csv"


class StepRow(NamedTuple):
    """A step, skipped ones included."""

    step: int
    """Number of the step, from 1."""
    epoch: int
    """Number of its epoch, from 1."""
    loss: float
    """Mean over its images."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    """Learning rate."""
    images_per_s: float
    """Over all processes; the same for all steps between two readings of the loss."""
    data_wait: float
    """Percent of the time; likewise."""

    @property
    def is_finite(self) -> bool:
        """Whether the step changed the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def line(self) -> str:
        """The row as CSV; nine digits are all that a float32 has."""
        numbers = (f"{value:.9g}" for value in self[2:5])
        return f"{self.step},{self.epoch},{','.join(numbers)},{self[5]:.1f},{self[6]:.1f}\n"


_HEADER = f"{','.join(StepRow._fields)}\n".encode()


class StepLog:
    """The file, in the process that writes it."""

    def __init__(self, path: Path, done: int) -> None:
        """Prepare it; nothing is read or written yet.

        Args:
            path: The CSV file.
            done: Steps that the run's checkpoint has done.
        """
        self.path = path
        self.done = done
        self.size: int | None = None
        """Bytes of whole rows; None until it was opened."""
        self.unwritten: list[StepRow] = []
        self.fails = False
        self.is_torn = False
        """Whether more may be in the file than whole rows, because writing failed."""

    def open(self) -> None:
        """Cut off what comes after the checkpoint, or begin the file.

        Raises:
            OutputError: the file cannot be read or written or is no log of steps; or it can, and rows
                from before the checkpoint are missing.
        """
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise OutputError(f"cannot read {self.path}: {error.strerror}") from error
        if content and not content.startswith(_HEADER):
            raise OutputError(f"{self.path} must begin with {_HEADER.decode().strip()}")
        kept, last = _rows_until(content, self.done)
        if kept != content:
            write_atomically(self.path, lambda file: file.write(kept))
        self.size = len(kept)
        if last < self.done:
            raise OutputError(f"{self.path} has no rows of steps {last + 1} to {self.done}")

    def rows_after(self, step: int) -> list[StepRow]:
        """Read the rows of later steps; none from a file that could not be opened."""
        lines = [] if self.size is None else self.path.read_text().splitlines()[1:]
        rows = (line.split(",") for line in lines)
        return [StepRow(int(n), int(e), *map(float, rest)) for n, e, *rest in rows if int(n) > step]

    def append(self, rows: Sequence[StepRow]) -> None:
        """Add rows, and those that could not be added before.

        Raises:
            OutputError: they cannot be written, and those before could.
        """
        self.unwritten += rows
        failed, self.fails = self.fails, True
        try:
            if self.size is None:
                self.open()
            self._write("".join(row.line for row in self.unwritten).encode())
        except OutputError:
            if not failed:
                raise
            return
        self.unwritten.clear()
        self.fails = False

    def sync(self) -> None:
        """Make the rows survive a power loss; those that could not be added before get another chance.

        Raises:
            OutputError: the disk refuses.
        """
        if self.fails:
            self.append(())
        if self.size is None or self.fails:
            return
        try:
            sync(self.path)
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error

    def _write(self, lines: bytes) -> None:
        try:
            with self.path.open("r+b", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                if self.is_torn and end > self.size:
                    file.truncate(self.size)
                    end = file.seek(self.size)
                if end != self.size:
                    raise OutputError(f"{self.path} was changed by another program")
                self.is_torn = True  # until it is closed: some disks tell only then what they lost
                try:
                    rest = memoryview(lines)
                    while rest:  # a disk may take a part at a time
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(self.size)
                    raise
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
        self.is_torn = False
        self.size += len(lines)


def _rows_until(content: bytes, done: int) -> tuple[bytes, int]:
    """Return the header and the rows of the first steps, and the last step among them.

    Args:
        content: Of the file.
        done: The last step to keep.
    """
    kept, last = [_HEADER], 0
    for line in content[len(_HEADER) :].splitlines(keepends=True):
        step = _step_of(line)
        if not last < step <= done:
            break
        kept.append(line)
        last = step
    return b"".join(kept), last


def _step_of(line: bytes) -> int:
    """Return the step of a row, 0 if it is not a whole one."""
    values = line.split(b",")
    try:
        numbers = [float(value) for value in values]
        step = int(values[0])
    except ValueError:
        return 0
    return step if len(numbers) == len(StepRow._fields) and line.endswith(b"\n") else 0
