"""Signals that end a run in good order, and what all processes agree on at each step."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from vil.training.distributed import World
from vil.training.errors import StoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Agreement:
    """Tells all processes at the same step to stop, or to write a checkpoint.

    A signal sets a number that the next steps compare over all processes; the answer to one step's
    question is read at the next, so that nobody waits for it.
    """

    def __init__(self, world: World, save_minutes: float) -> None:
        """Prepare to catch SIGINT, SIGTERM and SIGUSR1; a second SIGINT interrupts at once.

        Args:
            world: The processes.
            save_minutes: Minutes between two checkpoints, on the main process's clock.
        """
        self.world = world
        self.save_seconds = 60 * save_minutes
        self.saved = time.monotonic()
        self.received = 0
        self.pending: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> "Agreement":
        self.previous = [signal.signal(number, self._receive) for number in _SIGNALS]
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.settle()
        for number, handler in zip(_SIGNALS, self.previous, strict=True):
            signal.signal(number, handler)

    def check(self, may_save: bool = True) -> bool:
        """Ask once per step, in all processes.

        Args:
            may_save: Whether a checkpoint can be written now.

        Returns:
            Whether to write one.

        Raises:
            StoppedError: some process received a signal.
        """
        due = may_save and time.monotonic() - self.saved >= self.save_seconds
        answer = self._agree(self.received, int(due and self.world.is_main))
        if answer is None:
            return False
        received, due = answer
        if received:
            raise StoppedError(received)
        if due and may_save:
            self.has_saved()
        return bool(due and may_save)

    def has_saved(self) -> None:
        """Start counting the time to the next checkpoint."""
        self.saved = time.monotonic()

    def settle(self) -> None:
        """Wait for the last question, in all processes, without asking another."""
        if self.pending is not None:
            self.pending[1].wait()
            self.pending = None

    def _agree(self, received: int, due: int) -> tuple[int, int] | None:
        """Return the maximum over all processes of what they asked at the previous step."""
        if self.world.size == 1:
            return received, due
        answer = None
        if self.pending is not None:
            self.pending[1].wait()
            answer = tuple(self.pending[0].tolist())
        question = torch.tensor([received, due])
        self.pending = question, dist.all_reduce(question, dist.ReduceOp.MAX, async_op=True)
        return answer

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
