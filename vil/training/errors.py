"""Errors that one line explains, their exit codes, and the frame of every program.

- 0: every epoch ran, or the evaluation was written
- 2: wrong argument or setting, or too little memory for it
- 3: data missing, unreadable or not what the settings say, or not the same for all processes
- 4: the loss is not finite
- 5: a checkpoint or an output file cannot be read or written
- 6: a loader process, or another process of the run, is gone: the same command continues
- 130, 143, 129, 138, 140, 152: stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU,
  after writing a checkpoint: the same command continues

torchrun itself always ends with 1, and starts the processes again whatever the code, up to --max-restarts times.
"""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import torch

from vil.messages import first_line, printable

log = logging.getLogger("vil.training")
SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
"""What terminals, launchers and schedulers send ahead of SIGKILL, to every process of a job: the training process
answers, its loaders do not. SIGQUIT is left to end a process at once, which is what it is for."""


class UserError(Exception):
    """An error that one line can explain; programs print it without a traceback."""

    exit_code = 2

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        """Say what is wrong.

        Args:
            message: One line.
            everywhere: Whether all processes of the run raise it, so that one of each node says it.
        """
        super().__init__(message)
        self.everywhere = everywhere


class ConfigError(UserError):
    """A wrong argument or setting."""


class DataError(UserError):
    """Data that is missing, unreadable or not what the settings say."""

    exit_code = 3


class NonFiniteLossError(UserError):
    """A loss or a weight that is NaN or infinite."""

    exit_code = 4


class OutputError(UserError):
    """A checkpoint or an output file that cannot be read or written."""

    exit_code = 5


class DamagedError(OutputError):
    """A checkpoint that was read, and is not what was written."""


class LostProcessError(UserError):
    """A loader process, or another process of the run, that ended in the middle of it."""

    exit_code = 6


class StoppedError(UserError):
    """A signal asked the run to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}", everywhere=True)
        self.exit_code = 128 + number


def run_script(body: Callable[[], None]) -> int:
    """Run a program's body: show what it logs, turn its errors into one line on stderr, return the exit code.

    Only the main process of a run shows what it logs. Neither a closed terminal nor a full disk below the output
    ends a run.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter())
    logging.raiseExceptions = False
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    log.addHandler(handler)
    try:
        try:
            body()
        finally:
            end_loaders()
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except (UserError, RuntimeError, MemoryError, OSError) as error:
        explained = _explained(error)
        if explained is None:
            raise
        rank = os.environ.get("RANK", "0")
        if not explained.everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
            _say(f"{'' if rank == '0' else f'process {rank}: '}error: {message_of(explained)}")
        return explained.exit_code
    finally:
        log.removeHandler(handler)
        _give_up_output()
    return 0


def is_dead_loader(error: Exception) -> bool:
    """Tell the death of a loader process, which PyTorch raises wherever the training process then is."""
    return "DataLoader" in str(error) and "Caught " not in str(error)  # as an error in one says


def message_of(error: Exception) -> str:
    """Return what an error says in one line; that of a loader process says all of its traceback."""
    line = (str(error).strip().splitlines() or [""])[-1]
    line = line.removeprefix(f"{type(error).__module__}.").removeprefix(f"{type(error).__name__}: ")
    return printable(line)


class _Formatter(logging.Formatter):
    """A line as it is, but for the names of warnings."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return f"warning: {line}" if record.levelno >= logging.WARNING else line


def _explained(error: Exception) -> UserError | None:
    """Return an error that one line explains, or None if it takes a traceback."""
    if isinstance(error, UserError):
        return error
    told = str(error)
    # The CPU's want of memory has no type of its own.
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in told:
        return ConfigError(
            f"too little memory ({first_line(error)}); raise run.grad_accum_steps, which keeps the batch, or lower "
            f"data.validation_batch_size or data.num_workers"
        )
    if isinstance(error, OSError) and error.errno is not None:  # what no function had an answer to
        return OutputError(
            f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"
        )
    if is_dead_loader(error):
        return LostProcessError(
            f"a loader process is gone ({first_line(error)}); if memory is short, lower data.num_workers; if "
            f"/dev/shm is, give the container more, by docker run --shm-size 8g, say"
        )
    return None


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201  the one line that a program ends with


def end_loaders() -> None:
    """Kill loader processes that are left: they ignore SIGTERM, and one whose disk hangs would be waited for."""
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if not children:
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's raises when they die
    for child in children:
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, handler)


def _give_up_output() -> None:
    """Drop what was printed and cannot be written, which Python would make its exit code of."""
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
