"""Errors a user can cause and cure, and the exit code each one ends a script with.

- 0: every epoch ran, or the evaluation was written
- 2: wrong argument or configuration, or too little memory for it
- 3: data missing, unreadable or not what the configuration says
- 4: the loss is not finite
- 5: a checkpoint or an output file cannot be read or written
- 6: another process of the run is gone; its own error says why
- 130, 143, 129, 138, 140, 152: stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU,
  after writing a checkpoint: the same command continues

torchrun itself always ends with 1. It starts a process again whatever the code; after 2, 3 and 4, which
would only come again, it is ended.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from vil.messages import printable
from vil.training.console import give_up_output, new_console
from vil.training.launcher import end_restarts, is_first

_GRACE = 2.0  # seconds that loader processes have to end by themselves


class UserError(Exception):
    """An error that one line can explain; the scripts print it without a traceback."""

    exit_code = 2
    is_final = False
    """Whether another attempt would end the same way."""


class ConfigError(UserError):
    """A wrong argument or configuration."""

    is_final = True


class DataError(UserError):
    """Data that is missing, unreadable or not what the configuration says."""

    exit_code = 3
    is_final = True


class SettingsError(UserError):
    """Everything that is wrong with the settings, by themselves and for the data."""

    is_final = True

    def __init__(self, problems: list[UserError]) -> None:
        """Put them together.

        Args:
            problems: Each a ConfigError, or a DataError; the exit code is the smallest of theirs.
        """
        lines = [str(problem) for problem in problems]
        several = [f"{len(lines)} things are wrong:", *(f"  - {line}" for line in lines)]
        super().__init__(lines[0] if len(lines) == 1 else "\n".join(several))
        self.exit_code = min(problem.exit_code for problem in problems)


class NonFiniteLossError(UserError):
    """A loss that is NaN or infinite; another attempt has the same images and draws."""

    exit_code = 4
    is_final = True


class OutputError(UserError):
    """A checkpoint or an output file that cannot be read or written."""

    exit_code = 5


class DamagedError(OutputError):
    """A checkpoint that was read, and is not what was written."""


class LostProcessError(UserError):
    """Another process of the run ended in the middle of it."""

    exit_code = 6


class StoppedError(UserError):
    """A signal asked the run to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def message_of(error: Exception) -> str:
    """Return what an error says in one line; that of a loader process says all of its traceback."""
    line = (str(error).strip().splitlines() or [""])[-1]
    return line.removeprefix(f"{type(error).__module__}.").removeprefix(f"{type(error).__name__}: ")


def run_script(script: Callable[[], None]) -> int:
    """Run a script's body and turn its user errors into one line on stderr, those of settings into more.

    Of the processes that torchrun started on a node, only the first to meet an error says it.

    Args:
        script: The body; its own arguments already bound.

    Returns:
        The exit code.
    """
    console = new_console(stderr=True)
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"process {rank}: "
    impatience = threading.Timer(_GRACE, lambda: _kill(left))
    impatience.daemon = True
    try:
        try:
            script()
        finally:
            # A loader's end waits for one process after the other, 5 seconds each, and one that reads
            # from a disk that hangs does not end.
            left = multiprocessing.active_children()
            impatience.start()
    except UserError as error:
        message = str(error).strip() if isinstance(error, SettingsError) else message_of(error)
        if is_first(message):
            lines = map(printable, message.split("\n"))  # which may quote a file's name
            console.print(f"{prefix}error: " + "\n".join(lines))
            if error.is_final:
                end_restarts()
        return error.exit_code
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        impatience.cancel()
        # Python would end loader processes that an error left by SIGTERM, and wait for them for ever
        # if one hangs where it was forked.
        _kill(multiprocessing.active_children())
        give_up_output()
    return 0


def _kill(children: list[BaseProcess]) -> None:
    for process in children:
        process.kill()
