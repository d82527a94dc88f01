"""Errors a user can cause and cure, and the exit code each one ends a script with.

- 0: every epoch ran, or the evaluation was written
- 2: wrong argument or configuration
- 3: data missing, unreadable or not what the configuration says
- 4: the loss is not finite
- 5: a checkpoint or an output file cannot be read or written
- 6: another process of the run is gone; its own error says why
- 130, 138, 143: stopped by SIGINT (Ctrl-C), SIGUSR1 or SIGTERM, after writing a checkpoint: the same
  command continues

torchrun itself always ends with 1. It starts a process again whatever the code; after 2, 3 and 4, which
would only come again, it is ended.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable

from rich.console import Console

from vil.training.launcher import end_restarts, is_first


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


def run_script(script: Callable[[], None]) -> int:
    """Run a script's body and turn its user errors into one line on stderr, those of settings into more.

    Of the processes that torchrun started on a node, only the first to meet an error says it.

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
        message = str(error).strip()
        if not isinstance(error, SettingsError):
            # A loader worker's error arrives as its whole traceback; the last line is the message.
            message = message.splitlines()[-1].removeprefix(f"{type(error).__module__}.")
            message = message.removeprefix(f"{type(error).__name__}: ")
        if is_first(message):
            console.print(f"{prefix}error: {message}")
            if error.is_final:
                end_restarts()
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
