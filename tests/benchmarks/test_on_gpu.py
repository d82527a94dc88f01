"""The command for a GPU, run as a toy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.on_gpu_parts import PARTS


@pytest.mark.nightly
def test_every_part_runs_as_a_toy(tmp_path: Path) -> None:
    """From an empty folder to the tables, as on a machine with a GPU."""
    output = str(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.on_gpu",
            "--toy",
            "--output",
            output,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    content = json.loads((tmp_path / "on_gpu.json").read_text())
    assert {entry["status"] for entry in content["parts"].values()} == {"passed"}
    assert content["environment"]["toy"] is True
    assert all((tmp_path / part.record).exists() for part in PARTS if part.record)
    assert "TOY: nothing below was measured on a GPU" in done.stdout
