"""What the trainer does with files, each made to fail: run in a process that has the library preloaded."""

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tools.faults.disk_faults import HALF, DiskFault, arm, read_calls


def _append(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b"more")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path) -> None:
    with path.open("ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# What the trainer does with files, by the kind of call that is to fail.
OPERATIONS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("open", lambda folder: (folder / "a").open("rb")),
    ("open", lambda folder: os.open(folder, os.O_RDONLY)),
    ("read", lambda folder: (folder / "a").read_bytes()),
    ("read", lambda folder: os.pread(os.open(folder / "a", os.O_RDONLY), 4, 0)),
    ("write", lambda folder: (folder / "b").write_bytes(b"text")),
    ("write", lambda folder: _append(folder / "a")),
    ("close", lambda folder: _append(folder / "a")),
    ("sync", lambda folder: _sync(folder / "a")),
    ("sync", _sync),
    ("truncate", lambda folder: os.truncate(folder / "a", 1)),
    ("truncate", lambda folder: (folder / "a").open("r+b").truncate(1)),
    ("rename", lambda folder: os.replace(folder / "a", folder / "b")),
    ("link", lambda folder: os.link(folder / "a", folder / "b")),
    ("unlink", lambda folder: (folder / "a").unlink()),
    ("mkdir", lambda folder: (folder / "new").mkdir()),
    ("stat", lambda folder: (folder / "a").stat()),
    ("stat", lambda folder: os.fstat(os.open(folder / "a", os.O_RDONLY))),
    ("stat", lambda folder: os.statvfs(folder)),
    ("list", lambda folder: list(os.scandir(folder))),
    ("list", lambda folder: os.listdir(folder)),
    ("lock", lambda folder: _lock(folder / "a")),
)


def try_operations(root: Path) -> None:
    """Let each operation fail, in a process that has the library preloaded; tell those that did not."""
    for number, (kind, operate) in enumerate(OPERATIONS):
        for which in (kind, "all"):
            folder, log = root / f"{which}{number}", root / f"{which}{number}.log"
            folder.mkdir()
            (folder / "a").write_bytes(b"text")
            arm([folder], DiskFault(0, which, errno.EIO, lasts=True), log)
            try:
                operate(folder)
                print(f"{which} {number}: nothing failed")
            except OSError as error:
                if error.errno != errno.EIO:
                    print(f"{which} {number}: {error}")
            calls = read_calls(log)
            if not any(call.failed and which in (call.kind, "all") for call in calls):
                print(f"{which} {number}: {calls}")


def try_some_calls(root: Path) -> None:
    """Let one call of several fail, or do half of its work, and print what each came to."""
    folder = root / "some"
    folder.mkdir()
    arm([root / "other", folder], DiskFault(1, "write", HALF, lasts=False), root / "some.log")
    file = os.open(folder / "a", os.O_RDWR | os.O_CREAT)
    print([os.write(file, b"1234"), os.write(file, b"34")])
    arm([folder], DiskFault(0, "read", errno.EIO, lasts=False, first=1), root / "some.log")
    print([_read_or_fail(file, place) for place in range(3)])


def _read_or_fail(file: int, place: int) -> bytes | str:
    try:
        return os.pread(file, 1, place)
    except OSError as error:
        return errno.errorcode[error.errno]


if __name__ == "__main__":
    try_operations(Path(sys.argv[1]))
    try_some_calls(Path(sys.argv[1]))
