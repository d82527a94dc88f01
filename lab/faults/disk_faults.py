"""Compile disk_faults.c and control the preloaded library, which lets chosen file calls fail."""

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
HALF = -1  # instead of an errno: only half of the bytes are read or written
KINDS = (
    *("open", "read", "write", "sync", "close", "truncate", "rename"),
    *("link", "unlink", "mkdir", "stat", "list", "lock", "all"),
)
_FOREVER = (1 << 62) - 1


@dataclass(frozen=True)
class DiskFault:
    """File calls to fail."""

    disk: int
    """Index of the folder whose files are affected."""
    kind: str
    """One of KINDS."""
    error: int
    """errno, or HALF."""
    lasts: bool
    """Whether every later call fails too, or only the first."""
    first: int = 0
    """Index of the first call to fail, from 0, among the calls on this disk and of this kind."""

    def __str__(self) -> str:
        error = "half" if self.error == HALF else errno.errorcode[self.error]
        return f"{self.disk} {self.kind} {error} {'always' if self.lasts else 'once'} {self.first}"


class Call(NamedTuple):
    """A counted call on a file of a disk."""

    disk: int
    kind: str
    function: str
    """Function of the C library."""
    failed: bool
    path: str


def compile_library(folder: Path) -> Path:
    """Compile disk_faults.c into a folder and return the path of the library.

    Raises:
        subprocess.CalledProcessError: If the compiler fails.
    """
    library = folder / "disk_faults.so"
    command = [COMPILER, "-shared", "-fPIC", "-O2", "-w", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return library


def arm(disks: Iterable[Path], fault: DiskFault | None, log: Path) -> None:
    """Count the file calls of this process and its later forks, and let the chosen ones fail.

    Args:
        disks: Folders to watch.
        fault: Calls to fail; None lets none fail.
        log: File that gets a line for each call.

    Raises:
        RuntimeError: If the library is not preloaded, or cannot store the folders.
    """
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    told = fcntl.fcntl(opened, fcntl.F_DUPFD, 500)  # a high number, which the run does not reuse
    os.close(opened)
    fault = fault or DiskFault(-1, "all", 0, False)
    library = ctypes.CDLL(None)
    if not hasattr(library, "disk_faults_arm"):
        raise RuntimeError(f"{SOURCE.name} must be compiled and preloaded (LD_PRELOAD)")
    numbers = [fault.first, _FOREVER if fault.lasts else fault.first]
    folders = "\n".join(map(str, disks)).encode()
    kind = KINDS.index(fault.kind)
    if library.disk_faults_arm(folders, fault.disk, kind, *map(ctypes.c_long, numbers), fault.error, told):
        raise RuntimeError(f"cannot count the calls about {folders}")


def read_calls(log: Path) -> list[Call]:
    """Return the counted calls, in order."""
    calls = []
    for line in log.read_text(errors="replace").splitlines():
        disk, kind, function, failed, path = line.split("\t", 4)
        calls.append(Call(int(disk), kind, function, failed == "1", path))
    return calls
