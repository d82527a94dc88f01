"""The frame of every program: its output, its last line, its exit code, and the end of its workers."""

import io
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Listener
from types import FrameType

from vil.messages import printable
from vil.training.errors import ConfigError, StoppedError, UserError, explained, log


def run_script(body: Callable[[], None]) -> int:
    """Run the body of a program, print its errors as one line on stderr, and return the exit code.

    Log messages go to stdout, from rank 0 only. A closed terminal does not stop the run, and neither does a
    full disk behind redirected output. Characters that stdout and stderr cannot encode are escaped. SIGTERM ends the
    program, also as the first process of a container, where the system ignores it unless a program does not.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else logging would drop the whole line
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter())
    logging.raiseExceptions = False
    former = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _end}
    former = {number: signal.signal(number, handler) for number, handler in former.items()}
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
        known = explained(error)
        if known is None:
            raise
        rank = os.environ.get("RANK", "0")
        if not known.everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
            which = "" if rank == "0" else f"process {rank}: "
            what = "" if isinstance(known, StoppedError) else "error: "
            _say(f"{which}{what}{message_of(known)}")
        return known.exit_code
    finally:
        log.removeHandler(handler)
        for number, handler in former.items():
            signal.signal(number, handler)
        _give_up_output()
    return 0


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


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201  the final line of a program


def _end(number: int, frame: FrameType | None) -> None:
    _say(f"stopped by {signal.Signals(number).name}")
    raise SystemExit(128 + number)


def check_workers(num_workers: int) -> None:
    """Raise ConfigError if data-loading workers could not send images, which would make the program wait for long."""
    try:
        if num_workers:
            Listener().close()
    except OSError as error:
        raise ConfigError(
            f"data-loading workers need sockets in the folder for temporary files, where none can be made ({error}); "
            f"set TMPDIR to a writable folder whose path is shorter than 75 characters, or use no workers"
        ) from error


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
