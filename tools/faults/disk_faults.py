"""The library of disk_faults.c: compiled, preloaded, and told which calls are to fail."""

import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("disk_faults.c")
COMPILER = shutil.which("cc")
HALF = -1  # in the place of an errno: only half of the bytes are read or written
KINDS = (
    *("open", "read", "write", "sync", "close", "truncate", "rename"),
    *("link", "unlink", "mkdir", "stat", "list", "lock", "all"),
)
_FOREVER = (1 << 62) - 1


@dataclass(frozen=True)
class DiskFault:
    """Calls that fail."""

    disk: int
    """Number of the folder that they are about."""
    kind: str
    """One of KINDS."""
    error: int
    """errno, or HALF."""
    lasts: bool
    """From then on, or once."""
    first: int = 0
    """Which of these calls is the first."""

    @classmethod
    def parse(cls, disk: str, kind: str, error: str, how: str, first: str) -> "DiskFault":
        """Return the fault that words describe, as __str__ writes them."""
        number = HALF if error == "half" else getattr(errno, error)
        return cls(int(disk), kind, number, {"once": False, "always": True}[how], int(first))

    def __str__(self) -> str:
        error = "half" if self.error == HALF else errno.errorcode[self.error]
        return f"{self.disk} {self.kind} {error} {'always' if self.lasts else 'once'} {self.first}"


class Call(NamedTuple):
    """A call about a file on a disk."""

    disk: int
    kind: str
    function: str
    """Of the C library."""
    failed: bool
    path: str


def compile_library(folder: Path) -> Path:
    """Compile the library.

    Raises:
        subprocess.CalledProcessError: the compiler refused.
    """
    library = folder / "disk_faults.so"
    command = [COMPILER, "-shared", "-fPIC", "-O2", "-w", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return library


def arm(disks: Iterable[Path], fault: DiskFault | None, log: Path) -> None:
    """Begin to count the calls of this process and of those that it will fork, and to let some fail.

    Args:
        disks: The folders.
        fault: Which calls fail; None lets none.
        log: Receives a line about each call.

    Raises:
        RuntimeError: the library was not preloaded, or cannot remember the folders.
    """
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    told = fcntl.fcntl(opened, fcntl.F_DUPFD, 500)  # out of the way of numbers that a run reuses
    os.close(opened)
    fault = fault or DiskFault(-1, "all", 0, False)
    library = ctypes.CDLL(None)
    if not hasattr(library, "disk_faults_arm"):
        raise RuntimeError(f"{SOURCE.name} must be compiled and preloaded (LD_PRELOAD)")
    numbers = [fault.first, _FOREVER if fault.lasts else fault.first]
    folders = "\n".join(map(str, disks)).encode()
    kind = KINDS.index(fault.kind)
    if library.disk_faults_arm(
        folders, fault.disk, kind, *map(ctypes.c_long, numbers), fault.error, told
    ):
        raise RuntimeError(f"cannot count the calls about {folders}")


def read_calls(log: Path) -> list[Call]:
    """Return the calls that were counted, in order."""
    calls = []
    for line in log.read_text(errors="replace").splitlines():
        disk, kind, function, failed, path = line.split("\t", 4)
        calls.append(Call(int(disk), kind, function, failed == "1", path))
    return calls
