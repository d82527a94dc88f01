"""Errors a user can cause and cure, and the exit code each one ends a script with.

- 0: every epoch ran, or the evaluation was written
- 2: wrong argument or configuration
- 3: data missing, unreadable or not what the configuration says
- 4: the loss is not finite
- 5: a checkpoint or an output file cannot be read or written
- 6: another process of the run is gone; its own error says why
- 130, 138, 143: stopped by SIGINT (Ctrl-C), SIGUSR1 or SIGTERM, after writing a checkpoint: the same
  command continues
"""

import multiprocessing
import os
import signal
from collections.abc import Callable

from rich.console import Console


class UserError(Exception):
    """An error that one line can explain; the scripts print it without a traceback."""

    exit_code = 2


class ConfigError(UserError):
    """A wrong argument or configuration."""


class DataError(UserError):
    """Data that is missing, unreadable or not what the configuration says."""

    exit_code = 3


class NonFiniteLossError(UserError):
    """A loss that is NaN or infinite."""

    exit_code = 4


class OutputError(UserError):
    """A checkpoint or an output file that cannot be read or written."""

    exit_code = 5


class LostProcessError(UserError):
    """Another process of the run ended in the middle of it."""

    exit_code = 6


class StoppedError(UserError):
    """A signal asked the run to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def run_script(script: Callable[[], None]) -> int:
    """Run a script's body and turn its user errors into one line on stderr.

    Args:
        script: The body; its own arguments already bound.

    Returns:
        The exit code.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"process {rank}: "
    try:
        script()
    except UserError as error:
        # A loader worker's error arrives as its whole traceback; the last line is the message.
        message = str(error).strip().splitlines()[-1].removeprefix(f"{type(error).__module__}.")
        console.print(f"{prefix}error: {message.removeprefix(f'{type(error).__name__}: ')}")
        return error.exit_code
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        # Python would end loader processes that an error left by SIGTERM, and wait for them for ever
        # if one hangs where it was forked.
        for process in multiprocessing.active_children():
            process.kill()
    return 0
