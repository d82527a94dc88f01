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
WAIT = "print(flush=True); input()"


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


def test_error_is_said_once_an_attempt_and_another_one_too(
    signals: list[tuple[int, int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for rank in range(3):
        become(monkeypatch, tmp_path, rank)
        assert fail(ConfigError("wrong")) == 2
    assert fail(DataError("missing")) == 3
    assert capsys.readouterr().err == "error: wrong\nprocess 2: error: missing\n"
    assert signals == [(os.getppid(), signal.SIGTERM)]  # a second one would disturb torchrun
    become(monkeypatch, tmp_path, 0, attempt=1)
    assert fail(ConfigError("wrong")) == 2
    assert capsys.readouterr().err == "error: wrong\n"


def test_error_that_torchrun_drops_is_said_by_another_process_first(
    signals: list[tuple[int, int]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    waited = []

    def meanwhile(seconds: float) -> None:
        waited.append(seconds)
        assert signals == []
        os.dup2(shown, 2)
        become(monkeypatch, tmp_path, 0)
        assert fail(ConfigError("wrong")) == 2

    monkeypatch.setattr(launcher.time, "sleep", meanwhile)
    become(monkeypatch, tmp_path, 1)
    shown = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        assert fail(ConfigError("wrong")) == 2
    os.close(shown)
    assert waited == [10.0]
    # Of the first, what Python's stderr had under pytest.
    assert capfd.readouterr().err == "process 1: error: wrong\nerror: wrong\n"
    assert len(signals) == 1


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


def test_last_attempt_and_a_process_of_nobody_signal_nothing(
    signals: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    become(monkeypatch, tmp_path, 0, attempt=2)
    fail(ConfigError("the last"))
    become(monkeypatch, tmp_path, 0)
    monkeypatch.setattr(launcher, "_is_torchrun", lambda pid: False)
    fail(ConfigError("adopted"))
    for name in ("RUN_ID", "MAX_RESTARTS", "RESTART_COUNT", "ERROR_FILE"):
        monkeypatch.delenv(f"TORCHELASTIC_{name}")
    monkeypatch.setattr(launcher, "_is_torchrun", lambda pid: True)
    fail(ConfigError("alone"))
    assert signals == []


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        ([sys.executable, "-c", WAIT, "torchrun"], {}, True),
        ([sys.executable, "-c", WAIT, "torch.distributed.run"], {}, True),
        ([sys.executable, "-c", WAIT, "torch"], {}, False),
        ([sys.executable, "-c", WAIT, "torchrun"], {"TORCHELASTIC_RUN_ID": "none"}, False),
        (["sh", "-c", "echo; read line", "torchrun"], {}, False),
    ],
    ids=["torchrun", "module", "another", "its-worker", "a-shell"],
)
def test_torchrun_is_told_from_other_processes(
    command: list[str], variables: dict[str, str], expected: bool
) -> None:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | variables
    )
    try:
        process.stdout.readline()  # the command line is there only some time after the process is
        assert launcher._is_torchrun(process.pid) == expected
    finally:
        process.communicate(b"\n")
    assert not launcher._is_torchrun(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message", "restarts"),
    [
        (["--config", "none.yaml"], "error: --config none.yaml: No such file", 0),
        (["--optim.lr-base", "fast"], "Error parsing --optim.lr-base: could not convert", 0),
        (["--run.output", "."], "holds mine and no run to continue", 1),
    ],
    ids=["config", "value", "curable"],
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
