"""What ends a run in good order, a signal or an error, and how all processes agree on it between two steps."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist

from vil.messages import one_line
from vil.training.distributed import World
from vil.training.errors import LostProcessError, StoppedError, UserError, message_of

# Those that terminals, launchers and schedulers send ahead of SIGKILL. SIGQUIT is left to end a process
# at once, which is what it is for.
_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)

_Item = TypeVar("_Item")


class Agreement:
    """Tells all processes between the same two steps to stop, or to write a checkpoint.

    What one process knows alone, a signal or an error, it asks about before a step; the answer is read
    after the step, in all processes, so that nobody waits for it. So an error that shall end a run in
    good order must be known a step ahead: `shield` is for that.
    """

    def __init__(self, world: World, save_minutes: float = math.inf) -> None:
        """Prepare to catch signals; a second SIGINT interrupts at once.

        Args:
            world: The processes.
            save_minutes: Minutes between two checkpoints, on the main process's clock.
        """
        self.world = world
        self.save_seconds = 60 * save_minutes
        self.saved = time.monotonic()
        self.received = 0
        self.error: Exception | None = None
        """What keeps this process from going on."""
        self.waits = False
        """Whether it does so for data, and does nothing else that an exception could spoil."""
        self.stops = False
        """Whether all processes have agreed to."""
        self.pending: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> "Agreement":
        """Catch signals; a SIGHUP that nohup lets be ignored stays so."""
        numbers = set(_SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        self.previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and self.pending is not None:
            self.pending[1].wait()
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def ask(self) -> None:
        """Ask whether to go on, once per step, in all processes, ahead of the step."""
        if self.world.size > 1:
            question = torch.tensor(self._own_view())
            self.pending = question, dist.all_reduce(question, dist.ReduceOp.MAX, async_op=True)

    def check(self, may_save: bool = True) -> bool:
        """Read the answer, if something was asked; in all processes.

        Args:
            may_save: Whether a checkpoint can be written now.

        Returns:
            Whether to write one.

        Raises:
            StoppedError: some process received a signal.
            UserError: that of a process that cannot go on; LostProcessError for what is no UserError.
            Exception: likewise, in that process.
        """
        received, due, failed = self._answer()
        if not (received or failed):
            if due and may_save:
                self.has_saved()
            return bool(due and may_save)
        self.stops = True
        # An error may be but the consequence of what a signal announced.
        raise StoppedError(received) if received else self._first_error()

    def shield(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield items until the next one cannot be had; what keeps it away is what is asked about next.

        A signal interrupts the waiting for one, which can last for ever if a disk hangs.
        """
        with self.noting():
            while True:
                self.waits = True
                item = next(items, None)
                self.waits = False
                if item is None:
                    return
                yield item

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep an error of what this process does alone for the next question."""
        try:
            yield
        except Exception as error:
            # Kept with all that it refers to: a loader's end would wait for processes that hang.
            self.waits, self.error = False, error

    def has_saved(self) -> None:
        """Start counting the time to the next checkpoint."""
        self.saved = time.monotonic()

    def _own_view(self) -> tuple[int, int, int]:
        """Return what this process has to say: a signal, whether to save, whether it failed."""
        due = self.world.is_main and time.monotonic() - self.saved >= self.save_seconds
        return self.received, int(due), int(self.error is not None)

    def _answer(self) -> tuple[int, ...]:
        """Return the maximum over all processes of what they said."""
        if self.world.size == 1:
            return self._own_view()
        if self.pending is None:
            return 0, 0, 0
        answer, work = self.pending
        work.wait()
        self.pending = None
        return tuple(answer.tolist())

    def _first_error(self) -> Exception:
        """Return this process's error, or the one of the first process that has any; in all processes."""
        error = self.error
        own = error if isinstance(error, UserError) else _foreign(error, self.world.rank)
        told = self.world.gather(None if own is None else (type(own), message_of(own)))
        kind, message = next(item for item in told if item is not None)
        return kind(message) if error is None else error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if self.waits:
            self.waits = False
            raise StoppedError(number)


@contextmanager
def opening(world: World) -> Iterator[None]:
    """Open data in the main process and then in the others; an error of one process ends all."""
    agreement = Agreement(world)
    if not world.is_main:
        world.gather(None)
    with agreement.noting():
        yield
    if world.is_main:
        world.gather(None)
    agreement.ask()
    agreement.check()


def _foreign(error: Exception | None, rank: int) -> LostProcessError | None:
    """Return what other processes are told of an error that is no UserError."""
    if error is None:
        return None
    return LostProcessError(f"process {rank} failed: {type(error).__name__}: {one_line(error)}")
