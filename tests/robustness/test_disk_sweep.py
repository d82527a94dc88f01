"""A disk may fail at any call; tests/robustness/disk_sweep.py lets it fail at every one."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.robustness.disk_faults import (
    COMPILER,
    HALF,
    KINDS,
    Call,
    DiskFault,
    arm,
    compile_library,
    read_calls,
)
from tests.robustness.disk_sweep import table
from tests.robustness.disk_sweep_runs import SCENARIOS, Point, Verdict, site_of, thin

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the library is compiled with cc")


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
    folder = root / "half"
    folder.mkdir()
    arm([folder], DiskFault(0, "write", HALF, lasts=False), root / "half.log")
    file = os.open(folder / "a", os.O_WRONLY | os.O_CREAT)
    print([os.write(file, b"1234"), os.write(file, b"34")])
    arm([folder], DiskFault(0, "read", errno.EIO, lasts=False, first=1), root / "once.log")
    (folder / "a").read_bytes()[:0]


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose calls can fail."""
    library = compile_library(tmp_path_factory.mktemp("library"))
    return os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}


def test_each_call_can_fail(preloaded: dict[str, str], tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.robustness.test_disk_sweep import try_operations
try_operations(Path({str(tmp_path)!r}))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=preloaded, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[2, 2]\n"
    assert "Input/output error" in done.stderr  # the second read, of which the first was left alone


def test_a_thinned_sweep_has_each_kind_of_call() -> None:
    paths = [f"/1/data/train/ash/{number}.jpg" for number in range(5)]
    paths += ["/1/run/.last.pt.7.tmp", "/1/data/train/birch/8.jpg", "/1/run/.last.pt.7.tmp"]
    sites = [site_of(Call(0, "read", "read", False, path)) for path in paths]
    assert len(set(sites)) == 2
    assert thin(sites, 1000) == [3, 7]
    assert thin(sites, 4) == [2, 7]
    assert thin(sites, 1) == list(range(8))


def test_a_fault_is_written_as_it_is_read() -> None:
    for fault in (DiskFault(0, "read", HALF, True, 3), DiskFault(1, "lock", errno.ENOLCK, False)):
        assert DiskFault.parse(*str(fault).split()) == fault


def test_the_table_counts_ends() -> None:
    fault = DiskFault(1, "write", errno.ENOSPC, lasts=True)
    call = Call(1, "write", "write", True, "/run/last.pt")
    points = [
        Point(SCENARIOS[0], fault, call, Verdict(end), "") for end in ("stopped", "stopped", "lost")
    ]
    rows = table(points, {(1, "write"): 7}).splitlines()
    assert rows[2] == "| run | write | 7 | 3 | 0 | 0 | 2 | 1 |"
    assert rows[3] == "| | | | 3 | 0 | 0 | 2 | 1 |"
    assert set(KINDS) >= {"write", "all"}


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    """Some calls of a run that reads its checkpoints and writes new ones."""
    command = [sys.executable, "-m", "tests.robustness.disk_sweep", "--every", "1000"]
    command += ["--most", "40", "--only", "going on"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
