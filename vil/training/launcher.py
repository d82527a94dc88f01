"""What torchrun does with a process that fails, where that is not what a user needs.

It starts all of them again whatever their exit codes say, and so repeats an error that no restart cures
as often as there are processes and restarts.
"""

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from hashlib import blake2b
from pathlib import Path

_PATIENCE = 10.0  # seconds
_MODULES = {"torch.distributed.run", "torch.distributed.launch"}


def world_size() -> int:
    """Return the number of processes that the launcher says there are; what is no number is found later."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdigit() and "RANK" in os.environ else 1


def is_launched() -> bool:
    """Tell whether torchrun started this process, so that it may be started again."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first(message: str) -> bool:
    """Tell whether no process of this node has said something yet where this one would, on its stderr.

    That is asked anew in each attempt of torchrun. Without torchrun each process is the first.
    """
    if not is_launched():
        return True
    place = os.fstat(2)  # torchrun can give each process a file, or none
    # Where that cannot be known, saying it too often is better than never.
    return _claim(f"{place.st_dev} {place.st_ino} {message}") is not False


def end_restarts() -> None:
    """Make torchrun end, if it would start this process again; it then ends the others, too."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    agent = os.getppid()
    if attempt >= restarts or not _is_torchrun(agent):
        return
    if os.path.samestat(os.fstat(2), os.stat(os.devnull)):
        # torchrun --local-ranks-filter: nobody saw why. A process that says so must have the time to.
        time.sleep(_PATIENCE)
    # A second signal would interrupt torchrun while it ends the other processes.
    if _claim("the end"):
        os.kill(agent, signal.SIGTERM)


@contextmanager
def said_once() -> Iterator[None]:
    """Run a parser, which explains on stderr why it exits, so that under torchrun that is said once.

    A wrong argument is wrong at the next attempt, too, so torchrun is ended.
    """
    if not is_launched():
        yield
        return
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            yield
    except SystemExit as error:
        if error.code and is_first(told.getvalue()):
            sys.stderr.write(told.getvalue())
            sys.stderr.flush()
            end_restarts()
        raise


def _claim(name: str) -> bool | None:
    """Take something that one process of a node may have in an attempt of torchrun.

    Returns:
        Whether it was still there; None where torchrun has no folder for the attempt.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <attempt>/<local rank>/error.json
    if not error_file:
        return None
    digest = blake2b(name.encode(), digest_size=8).hexdigest()
    try:
        (Path(error_file).parents[1] / f".claimed-{digest}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return None
    return True


def _is_torchrun(pid: int) -> bool:
    """Tell whether a process is the torchrun that started this one, and not what adopted this one."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        is_python = Path(words[0]).name.startswith("python")
        names = any(Path(word).name == "torchrun" or word in _MODULES for word in words)
        was_launched = any(line.startswith("TORCHELASTIC_RUN_ID=") for line in variables)
        return is_python and names and not was_launched
    return False
