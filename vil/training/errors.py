"""Errors with one-line messages and exit codes, and which errors of libraries they stand for.

- 0: every epoch ran, or the evaluation was written
- 2: invalid argument or option, or too little memory for it
- 3: data is missing, unreadable, inconsistent with the options, or different between processes
- 4: the loss is not finite
- 5: a checkpoint or an output file cannot be read or written
- 6: a data-loading worker or another process of the run died; repeat the command to resume
- 130, 143, 129, 138, 140, 152: stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU;
  a training writes a checkpoint first, and the same command resumes it

torchrun itself always exits with 1. It restarts the processes after any exit code, up to --max-restarts times.
"""

import errno
import logging
import os
import signal

import torch

from vil.messages import first_line

log = logging.getLogger("vil.training")
LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
"""Numbers of OSErrors that say that the process, not the file, is at a limit."""
_THREADS = "of processes and threads (ulimit -u, or a container's pids limit)"
_LIMIT_OF = {  # in messages, also in those of libraries and workers, which lose the number
    # ENFILE first: its message begins with that of EMFILE.
    os.strerror(errno.ENFILE): "of open files of this machine (fs.file-max)",
    os.strerror(errno.EMFILE): "of open files of this process (ulimit -n)",
    os.strerror(errno.EAGAIN): _THREADS,
    "can't start new thread": _THREADS,
}
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
        """Initialise; if all processes of the run raise the error (``everywhere``), one per node prints it."""
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
        message = f"stopped by {name}; the run is saved, and the same command resumes it"
        super().__init__(message, everywhere=True)
        self.exit_code = 128 + number


def is_dead_loader(error: Exception) -> bool:
    """Return whether an error reports a dead data-loading worker; PyTorch raises it at any point of training."""
    # "Caught" marks an exception that was raised inside a live worker.
    return "DataLoader" in str(error) and "Caught " not in str(error)


def explained(error: Exception) -> UserError | None:
    """Return the error as a UserError, or None if it needs a traceback."""
    if isinstance(error, UserError):
        return error
    message = str(error)
    limit = next((limit for words, limit in _LIMIT_OF.items() if words in message), None)
    if limit is not None:
        return ConfigError(f"the limit {limit} is reached; raise it, or lower data.num_workers")
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")) or (
        "Failed to find C compiler" in message  # Triton
    ):
        return ConfigError(
            f"the model or its kernels cannot be compiled ({first_line(error)}); install a C++ compiler such as g++, "
            f"or leave out run.torchcompile"
        )
    # Out of memory on the CPU has no exception type of its own.
    no_memory = any(words in message for words in ("DefaultCPUAllocator", os.strerror(errno.ENOMEM)))
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or no_memory:
        return ConfigError(
            f"too little memory ({first_line(error)}); raise run.grad_accum_steps, which keeps the batch, or lower "
            f"data.validation_batch_size or data.num_workers"
        )
    if "more than 1 value per channel" in message:  # in PyTorch's BatchNorm
        return ConfigError(
            f"a BatchNorm of the model has one value per channel: {first_line(error)}; raise data.batch_size or "
            f"model.img_size, or lower run.grad_accum_steps"
        )
    if isinstance(error, OSError) and error.errno is not None:  # not handled by any caller
        return OutputError(f"{error.filename or 'a file'} cannot be read or written: {error.strerror}")
    if is_dead_loader(error):
        return LostProcessError(
            f"a data-loading worker failed ({first_line(error)}); if memory is short, lower "
            f"data.num_workers; if /dev/shm is full, enlarge it, as with docker run --shm-size 8g"
        )
    return None
