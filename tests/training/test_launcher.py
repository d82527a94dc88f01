"""torchrun's restarts: none after an error that would come again, and that error said once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vil.training import launcher
from vil.training.errors import (
    ConfigError,
    DataError,
    LostProcessError,
    NonFiniteLossError,
    OutputError,
    StoppedError,
    UserError,
    run_script,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """Pose as the first attempt of three of a torchrun, and collect the signals that it would get."""
    sent = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(launcher, "_is_torchrun", lambda pid: True)
    become(monkeypatch, tmp_path, 0)
    return sent


def become(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, attempt: int = 0) -> None:
    """Become another process of that torchrun."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    own = folder / f"attempt_{attempt}" / str(rank)
    own.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own / "error.json"))


def fail(error: UserError) -> int:
    """Run a script that fails, and return its exit code."""

    def script() -> None:
        raise error

    return run_script(script)


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (ConfigError("x"), True),
        (DataError("x"), True),
        (NonFiniteLossError("x"), True),
        (OutputError("x"), False),
        (LostProcessError("x"), False),
        (StoppedError(signal.SIGTERM), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_no_restart_cures_ends_torchrun(
    error: UserError, ends: bool, signals: list[tuple[int, int]]
) -> None:
    fail(error)
    assert len(signals) == int(ends)


@pytest.mark.parametrize(
    ("arguments", "message", "restarts"),
    [
        pytest.param(
            *(["--config", "none.yaml"], "error: --config none.yaml: No such file", 0),
            marks=pytest.mark.ci,
        ),
        pytest.param(
            *(["--run.output", "."], "holds mine and no run to continue", 1),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["config", "curable"],
)
def test_torchrun_says_an_error_once_and_restarts_only_what_that_may_cure(
    arguments: list[str], message: str, restarts: int, tmp_path: Path
) -> None:
    (tmp_path / "mine").touch()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "--max-restarts", "1", str(ROOT / "train_imagenet.py"), *arguments]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 1  # torchrun has no other
    assert process.stderr.count(message) == 1 + restarts
    assert ("Received 15 death signal" in process.stderr) == (restarts == 0)
