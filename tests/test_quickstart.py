"""The README's first command and the evaluation it proposes, as a new user runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
def test_default_training_reaches_99_percent_and_eval_agrees(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    printed = run("train_imagenet.py", "--run.output", str(folder))
    reached = re.search(r"reached top-1 ([\d.]+)% \(best, epoch \d+\) and ([\d.]+)% \(last", printed)
    best, last = float(reached.group(1)), float(reached.group(2))
    assert best >= 99
    assert last >= 98.6  # what k nearest neighbours reach; the last epoch is not selected
    for name in ("best.pt", "last.pt", "config.yaml", "log.csv", "steps.csv", "curve.png"):
        assert (folder / name).stat().st_size > 0
    for checkpoint, expected in (("best", best), ("last", last)):
        assert f"top-1    {expected:.2f}%" in run("eval.py", str(folder / f"{checkpoint}.pt"))
        result = json.loads((folder / f"{checkpoint}-eval.json").read_text())
        assert round(result["top1"], 2) == expected
        assert result["num_images"] == 360
