"""Run a command in a process group of its own, within a time, its output shown and kept."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
GRACE_S = 5.0  # between a polite signal and the last one
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    """Exit status, negative for a signal, as of ``subprocess``."""
    timed_out: bool
    seconds: float


def run(
    command: Sequence[str],
    limit_s: float,
    log: Path,
    environment: dict[str, str],
    folder: Path,
    show: Callable[[str], object] = lambda text: None,
) -> Outcome:
    """Run a command; past its time, end it and every process of its group.

    Python then writes where it hung (SIGABRT, by its fault handler) before the group gets SIGTERM and
    SIGKILL. The group is ended, too, if this process is interrupted, and its first process if this one
    is killed.

    Args:
        command: Program and arguments.
        limit_s: Seconds it may take.
        log: Receives its output; appended to.
        environment: Its environment variables.
        folder: Where it runs.
        show: Called several times a second with what is new of the output, which may be nothing.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            cwd=folder,
            start_new_session=True,
            preexec_fn=_prepare,
        )
        seen = log.stat().st_size
        timed_out = False
        try:
            while process.poll() is None:
                seen = _follow(log, seen, show)
                if time.monotonic() - start > limit_s:
                    timed_out = True
                    break
                time.sleep(min(POLL_S, limit_s))
        finally:
            _end(process, timed_out)
            _follow(log, seen, show)
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return Outcome(code, timed_out, time.monotonic() - start)


def _prepare() -> None:
    """Die with the parent, and leave no memory image behind; runs in the new process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(process: subprocess.Popen, hung: bool) -> None:
    """End what is left of the group; what a signal cannot end is left behind after a while."""
    if hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
        _wait(process, 1.0)
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        _wait(process, GRACE_S)
    _signal_group(process, signal.SIGKILL)
    _wait(process, GRACE_S)


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _wait(process: subprocess.Popen, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _follow(log: Path, seen: int, show: Callable[[str], object]) -> int:
    """Show what the log has beyond the bytes already seen; return how many there are now."""
    with log.open("rb") as file:
        file.seek(seen)
        new = file.read()
    show(new.decode(errors="replace"))
    return seen + len(new)


def tail(log: Path, characters: int = 3000) -> str:
    """Return the end of a log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4 * characters))
        return file.read().decode(errors="replace")[-characters:]
