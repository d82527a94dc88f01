"""Every program sets how OpenMP's threads wait before it loads torch, unless the user did."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "benchmarks", "downstream", "examples", "experiments")
PROGRAMS = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
# Imports a program, and ends when it begins to load torch.
WATCH = """
import os, runpy, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
runpy.{run}({name!r}, run_name="watched")
print("no torch")
"""


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_the_policy_is_set_before_torch_is_loaded(program: Path) -> None:
    module = ".".join(program.with_suffix("").parts)
    is_script = len(program.parts) == 1 or program.parts[0] == "examples"
    run, name = ("run_path", str(ROOT / program)) if is_script else ("run_module", module)
    code = WATCH.format(run=run, name=name)
    own = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    own["PYTHONPATH"] = str(ROOT / program.parent if is_script else ROOT)
    for setting, expected in ({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"):
        done = subprocess.run(
            [sys.executable, "-c", code], env=own | setting, capture_output=True, text=True
        )
        assert done.stdout in (f"{expected}\n", "no torch\n"), done.stderr


def test_the_programs_are_found() -> None:
    names = {str(program) for program in PROGRAMS}
    assert names >= {"train_imagenet.py", "eval.py", "predict.py", "release.py", "make_shards.py"}
    assert names >= {"examples/detect.py", "downstream/coco.py", "benchmarks/models.py"}
