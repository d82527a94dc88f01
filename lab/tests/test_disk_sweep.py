"""A disk may fail at any call; lab/faults/disk_sweep.py makes it fail at any of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults.disk_faults import COMPILER

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.skipif(COMPILER is None, reason="a library is compiled with cc")
def test_nothing_is_lost() -> None:
    """Test some calls of a resumed run, which reads its checkpoints and writes new ones."""
    command = [sys.executable, "-m", "lab.faults.disk_sweep", "--every", "1000", "--most", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
