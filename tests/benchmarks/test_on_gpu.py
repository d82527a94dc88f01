"""The benchmark command for a GPU, run in toy mode."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.on_gpu import PARTS


@pytest.mark.nightly
def test_every_part_runs_as_a_toy(tmp_path: Path) -> None:
    """Run from an empty folder to the report; if a call lacks time for a part, the next one resumes."""
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--toy", "--output", str(tmp_path)]
    short = subprocess.run([*command, "--call", "0.1"], capture_output=True, text=True, check=False)
    assert short.returncode == 75, short.stdout[-5000:] + short.stderr
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    parts = json.loads((tmp_path / "on_gpu.json").read_text())["parts"]
    assert [*parts] == [part.name for part in PARTS]
    assert {entry["status"] for entry in parts.values()} == {"passed"}
    assert "TOY, nothing was measured" in done.stdout
