"""Every program sets how OpenMP's threads wait before it loads torch, unless the user did; Ctrl-C then ends it."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRONG = {
    "train_imagenet.py": (2, "--config", "none.yaml"),
    "eval.py": (2, "none.pt"),
    "predict.py": (3, "none.pt", "none.jpg"),
    "release.py": (2, "none.pt", "none"),
}
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("", "downstream", "examples", "lab/benchmarks", "lab/experiments")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
# Imports each program in a process of its own, which ends when the program begins to load torch.
WATCH = """
import os, runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy", program, os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C while torch is loaded
            os._exit(0)

for program in sys.argv[1:]:
    if os.fork() == 0:
        sys.meta_path.insert(0, Watch())
        folder, _, name = program.removesuffix(".py").rpartition("/")
        is_script = folder in ("", "examples")
        sys.path.insert(0, folder if folder == "examples" else ".")
        run = runpy.run_path if is_script else runpy.run_module
        run(program if is_script else f"{folder}.{name}".replace("/", "."), run_name="watched")
        os._exit(0)
    print("end", program, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.parametrize("set_by_user", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_the_policy_is_set_before_torch_is_loaded(set_by_user: dict[str, str]) -> None:
    own = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", WATCH, *PROGRAMS]
    done = subprocess.run(command, cwd=ROOT, env=own | set_by_user, capture_output=True, text=True)
    assert "Error" not in done.stderr
    told = [line.split(" ") for line in done.stdout.splitlines()]
    found, ended = ({name: value for kind, name, value in told if kind == which} for which in ("policy", "end"))
    assert {*found.values()} == {set_by_user.get("OMP_WAIT_POLICY", "passive")}, found
    interrupted = {name for name in found if not name.startswith("examples/")}
    assert {ended[name] for name in interrupted} == {str(-signal.SIGINT)}, ended
    scripts = {"train_imagenet.py", "eval.py", "predict.py", "release.py"}
    assert {*found} >= scripts | {"examples/detect.py", "downstream/coco.py"}


@pytest.mark.parametrize("program", WRONG)
def test_a_script_ends_with_the_code_of_its_error(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, *words = WRONG[program]
    monkeypatch.setattr(sys, "argv", [program, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    assert ended.value.code == code
