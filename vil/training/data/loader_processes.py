"""The processes that load images: how they start, end, and are replaced when they die."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import RawArray, active_children
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from vil.training.data.shared_memory import CURE, is_full
from vil.training.errors import ConfigError, DataError, message_of

_MOST_WORKER_DEATHS = 20
_START_SECONDS = 60.0  # for a process to be forked, which takes milliseconds, or spawned, seconds
_MOST_STARTS = 5
_PREFETCH = 2  # batches of a process
_MOST_WORKERS = 8  # where none are asked for
_PATIENCE = 1.0  # seconds between a loader process's looks for its parent
# That a terminal or a scheduler sends to every process of a job.
_SIGNALS = (
    *(signal.SIGINT, signal.SIGHUP, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGXCPU),
)

_Item = TypeVar("_Item")


def outliving_deaths(
    load: Callable[[int], Iterator[_Item]], first: int, stop: int
) -> Iterator[_Item]:
    """Yield what is loaded from one number to another, loading again what a dead process was to.

    A loader process can die for want of memory, say. What is loaded follows from its number, so that
    nothing of the run depends on it.

    Args:
        load: Yields items from a number on.
        first: Number of the first item.
        stop: Number after the last.

    Raises:
        DataError: too many processes died.
        ConfigError: memory is short, or shared memory.
    """
    deaths = 0
    while first < stop:
        try:
            for item in load(first):
                yield item
                first += 1
        except MemoryError as error:
            raise ConfigError(
                f"too little memory to load images; lower data.num_workers ({message_of(error)})"
            ) from error
        except Exception as error:
            if is_full(error):
                raise ConfigError(f"/dev/shm is full: {CURE}") from error
            if not _is_worker_death(error):
                raise
            deaths += 1
            if deaths > _MOST_WORKER_DEATHS:
                raise DataError(
                    f"{deaths} loader processes died, the last: {error}; "
                    f"if memory is short, lower data.num_workers; if /dev/shm is, {CURE}"
                ) from error


class _Arrivals:
    """Called in each loader process when it begins; tells the training process that it did."""

    def __init__(self, count: int) -> None:
        self.pids = RawArray("q", count)

    def __call__(self, worker: int) -> None:
        _leave_signals_to_parent()
        self.pids[worker] = os.getpid()

    def await_from(self, processes: set[BaseProcess]) -> list[BaseProcess]:
        """Wait for processes to begin, or to die, and return those that do neither."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            waiting = [process for process in processes if process.pid not in self.pids[:]]
            waiting = [process for process in waiting if process.is_alive()]
            if not waiting or time.monotonic() > deadline:
                return waiting
            time.sleep(0.001)


def worker_arguments(count: int | None) -> dict[str, Any]:
    """Return DataLoader's arguments for loader processes; None is one per core of this process's share.

    Forked on Linux, as PyTorch always did: Python 3.14's default would import it anew in each.
    """
    count = _number(count)
    if count == 0:
        return {"num_workers": 0}
    context = "fork" if sys.platform == "linux" else None
    return {
        "num_workers": count,
        "prefetch_factor": _PREFETCH,
        "multiprocessing_context": context,
        "worker_init_fn": _Arrivals(count),
    }


def batches_ahead(count: int | None) -> int:
    """Return how many batches loader processes, so many as asked for, have ready at most."""
    return _PREFETCH * _number(count)


def _number(count: int | None) -> int:
    """Return the number of loader processes where so many are asked for."""
    if count is None:
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        cores = len(usable(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        count = max(min(cores, _MOST_WORKERS), 1)
    return count


def start(loader: DataLoader) -> Iterator[Any]:
    """Start a loader's processes, anew if one does not begin.

    A process can hang while it is forked: Python 3.10 and 3.11 then wait for a lock that a thread of
    gloo's may have held at that moment, which no longer exists.

    PyTorch answers the death of one by raising from a signal handler, wherever the training process
    then is, in the middle of an optimiser step too. Without the handler the loader finds out itself.

    Raises:
        DataError: they do not begin time and again.
    """
    for _ in range(_MOST_STARTS):
        others = set(active_children())
        batches = iter(loader)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        started = set(active_children()) - others
        hanging = loader.worker_init_fn.await_from(started) if started else []
        if not hanging:
            return batches
        for process in hanging:
            process.kill()
        del batches  # ends the others
    raise DataError(
        f"loader processes did not begin within {_START_SECONDS:g} s, {_MOST_STARTS} times"
    )


def _leave_signals_to_parent() -> None:
    """Let only the training process end its loader processes.

    Schedulers signal every process of a job, and it could write no checkpoint once these have died.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """End this process at a SIGTERM from its parent and at no other, or when the parent is gone.

    PyTorch, too, looks for the parent, but not while an image is being read, which can take for ever.
    """
    while os.getppid() == parent:
        told = signal.sigtimedwait({signal.SIGTERM}, _PATIENCE)
        if told is not None and told.si_pid == parent:
            break
    os._exit(0)


def _is_worker_death(error: Exception) -> bool:
    """Tell the death of a loader process from an error in one, which names the process."""
    if "Caught " in str(error) and "in DataLoader worker process" in str(error):
        return False
    lost = isinstance(error, (EOFError, ConnectionError, FileNotFoundError))  # of its pipes
    return lost or "exited unexpectedly" in str(error) or "in pin memory thread" in str(error)
