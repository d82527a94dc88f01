"""A disk may fail at any call; tests/robustness/disk_sweep.py lets it fail at every one."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.disk_faults import COMPILER, Call, DiskFault
from tests.robustness.disk_scenarios import SCENARIOS
from tests.robustness.disk_sweep import table
from tests.robustness.disk_sweep_runs import Point, Verdict, site_of, thin

ROOT = Path(__file__).resolve().parents[2]


def test_a_thinned_sweep_has_each_kind_of_call() -> None:
    paths = [f"/1/data/train/ash/{number}.jpg" for number in range(5)]
    paths += ["/1/run/.last.pt.7.tmp", "/1/data/train/birch/8.jpg", "/1/run/.last.pt.7.tmp"]
    sites = [site_of(Call(0, "read", "read", False, path)) for path in paths]
    assert len(set(sites)) == 2
    assert thin(sites, 1000) == [3, 7]
    assert thin(sites, 4) == [2, 7]
    assert thin(sites, 1) == list(range(8))


def test_the_table_counts_ends() -> None:
    fault = DiskFault(1, "write", errno.ENOSPC, lasts=True)
    call = Call(1, "write", "write", True, "/run/last.pt")
    points = [
        Point(SCENARIOS[0], fault, call, Verdict(end), "") for end in ("stopped", "stopped", "lost")
    ]
    rows = table(points, {(1, "write"): 7}).splitlines()
    assert rows[2] == "| run | write | 7 | 3 | 0 | 0 | 2 | 1 |"
    assert rows[3] == "| | | | 3 | 0 | 0 | 2 | 1 |"


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="a library is compiled with cc")
def test_nothing_is_lost() -> None:
    """Some calls of a run that reads its checkpoints and writes new ones."""
    command = [sys.executable, "-m", "tests.robustness.disk_sweep", "--every", "1000"]
    command += ["--most", "20", "--only", "going on"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
