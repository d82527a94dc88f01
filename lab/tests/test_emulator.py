"""Kernels compiled for GPUs, with their PTX executed on the CPU; see lab/emulator/README.md."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

RUN = Path(__file__).parents[1] / "emulator" / "run.py"

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="the emulator is compiled with g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="triton compiles on Linux"),
]


def emulate(*options: str) -> str:
    """Run the emulator in a process without Triton's interpreter and return its output."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["CUDA_VISIBLE_DEVICES"] = ""  # a GPU would not be used anyway
    result = subprocess.run([sys.executable, str(RUN), *options], capture_output=True, text=True, env=env, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    return result.stdout


def counts(output: str) -> tuple[int, int, int]:
    """Return the numbers of cases ok, failed and not run from the last line of an output."""
    last = output.splitlines()[-1]
    return tuple(map(int, re.match(r"ptx: (\d+) cases ok, (\d+) failed, (\d+) not run", last).groups()))


@pytest.mark.ci
def test_compiled_kernels_are_right_and_without_races_or_bad_accesses() -> None:
    output = emulate("--quick")
    ok, failed, not_run = counts(output)
    assert (failed, not_run) == (0, 0), output
    assert ok >= 12, output
    # The emulator must report the faults that its self-test plants in kernels.
    assert output.count("is reported") >= 15, output
    for arch in (80, 90, 120):
        assert re.search(rf"^ok   sm_{arch} exact-", output, re.MULTILINE), output
