"""The library that lets calls about files fail fails each that Python makes, and no other."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.faults.disk_faults import COMPILER, HALF, DiskFault, compile_library

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(COMPILER is None, reason="the library is compiled with cc")
def test_each_call_can_fail(tmp_path: Path) -> None:
    library = compile_library(tmp_path)
    command = [sys.executable, "-m", "tools.faults.disk_operations", str(tmp_path)]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[2, 2]", "[b'1', 'EIO', b'3']"], done


def test_a_fault_is_written_as_it_is_read() -> None:
    for fault in (DiskFault(0, "read", HALF, True, 3), DiskFault(1, "lock", errno.ENOLCK, False)):
        assert DiskFault.parse(*str(fault).split()) == fault
