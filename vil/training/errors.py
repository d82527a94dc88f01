"""Errors with one-line messages, their exit codes, and ``run_script``, which wraps every program.

- 0: every epoch ran, or the evaluation was written
- 2: invalid argument or option, or too little memory for it
- 3: data is missing, unreadable, inconsistent with the options, or different between processes
- 4: the loss is not finite
- 5: a checkpoint or an output file cannot be read or written
- 6: a data-loading worker or another process of the run died; repeat the command to resume
- 130, 143, 129, 138, 140, 152: stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU
  after writing a checkpoint; repeat the command to resume

torchrun itself always exits with 1. It restarts the processes after any exit code, up to --max-restarts times.
"""

import io
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
"""Signals that terminals, launchers and schedulers send to every process of a job before SIGKILL. The training
process handles them; data-loading workers ignore them. SIGQUIT is not handled, so it ends a process at once."""


class UserError(Exception):
    """An error with a one-line message that programs print without a traceback."""

    exit_code = 2

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        """Initialise the error.

        Args:
            message: One-line message.
            everywhere: Whether all processes of the run raise the error; then one per node prints it.
        """
        super().__init__(message)
        self.everywhere = everywhere


class ConfigError(UserError):
    """An invalid argument or option."""


class DataError(UserError):
    """Data that is missing, unreadable or inconsistent with the options."""

    exit_code = 3


class NonFiniteLossError(UserError):
    """A loss or a weight that is NaN or infinite."""

    exit_code = 4


class OutputError(UserError):
    """A checkpoint or an output file that cannot be read or written."""

    exit_code = 5


class DamagedError(OutputError):
    """A checkpoint that can be read but whose content is damaged."""


class LostProcessError(UserError):
    """A data-loading worker or another process of the run died."""

    exit_code = 6


class StoppedError(UserError):
    """A signal asked the run to stop."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        told = f"stopped by {name}; the run is saved, and the same command resumes it"
        super().__init__(told, everywhere=True)
        self.exit_code = 128 + number


def run_script(body: Callable[[], None]) -> int:
    """Run the body of a program, print its errors as one line on stderr, and return the exit code.

    Log messages go to stdout, from rank 0 only. A closed terminal does not stop the run, and neither does a
    full disk behind redirected output. Characters that stdout and stderr cannot encode are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else logging would drop the whole line
            stream.reconfigure(errors="backslashreplace")
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
    except (UserError, RuntimeError, MemoryError, OSError, ValueError) as error:
        explained = _explained(error)
        if explained is None:
            raise
        rank = os.environ.get("RANK", "0")
        if not explained.everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
            which = "" if rank == "0" else f"process {rank}: "
            what = "" if isinstance(explained, StoppedError) else "error: "
            _say(f"{which}{what}{message_of(explained)}")
        return explained.exit_code
    finally:
        log.removeHandler(handler)
        _give_up_output()
    return 0


def is_dead_loader(error: Exception) -> bool:
    """Return whether an error reports a dead data-loading worker; PyTorch raises it at any point of training."""
    # "Caught" marks an exception that was raised inside a live worker.
    return "DataLoader" in str(error) and "Caught " not in str(error)


def message_of(error: Exception) -> str:
    """Return the error as one line: its last line, since errors from workers carry a whole traceback."""
    line = (str(error).strip().splitlines() or [""])[-1]
    line = line.removeprefix(f"{type(error).__module__}.").removeprefix(f"{type(error).__name__}: ")
    return printable(line)


class _Formatter(logging.Formatter):
    """Print messages unchanged, with the prefix "warning: " for warnings."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return f"warning: {line}" if record.levelno >= logging.WARNING else line


def _explained(error: Exception) -> UserError | None:
    """Return the error as a UserError, or None if it needs a traceback."""
    if isinstance(error, UserError):
        return error
    told = str(error)
    # Out of memory on the CPU has no exception type of its own.
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in told:
        return ConfigError(
            f"too little memory ({first_line(error)}); raise run.grad_accum_steps, which keeps the batch, or lower "
            f"data.validation_batch_size or data.num_workers"
        )
    if "more than 1 value per channel" in told:  # in PyTorch's BatchNorm
        return ConfigError(
            f"a BatchNorm of the model has one value per channel: {first_line(error)}; raise data.batch_size or "
            f"model.img_size, or lower run.grad_accum_steps"
        )
    if isinstance(error, OSError) and error.errno is not None:  # not handled by any caller
        return OutputError(
            f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"
        )
    if is_dead_loader(error):
        return LostProcessError(
            f"a data-loading worker failed ({first_line(error)}); if memory is short, lower "
            f"data.num_workers; if /dev/shm is full, enlarge it, as with docker run --shm-size 8g"
        )
    return None


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201  the final line of a program


def end_loaders() -> None:
    """Kill remaining data-loading workers: they ignore SIGTERM, and waiting for a hung disk could take forever."""
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if not children:
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's raises when workers die
    for child in children:
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, handler)


def _give_up_output() -> None:
    """Discard output that cannot be written; otherwise Python would change the exit code."""
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
