"""python -m vil.run: a script finds the models and keeps its arguments, folder and exit status."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import beside, timm
print(sys.argv[1:], timm.create_model(sys.argv[1], depth=1).num_classes, __name__, beside.VALUE)
sys.exit(3)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vil.run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_script_knows_the_models(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text("VALUE = 7")
    done = run(tmp_path, "scripts/train.py", "vil_tiny", "--epochs", "2")
    assert done.stdout == "['vil_tiny', '--epochs', '2'] 1000 __main__ 7\n", done.stderr
    assert done.returncode == 3
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "python -m vil.run SCRIPT ARGS" in done.stdout
    for arguments, got in (((), "nothing"), (("nope.py",), "nope.py")):
        done = run(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(f"SCRIPT must be a file, got {got}\n")
