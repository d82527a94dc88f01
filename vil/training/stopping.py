"""Signals and due saves, which all processes agree on between two steps."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from vil.training.distributed import World
from vil.training.errors import SIGNALS


class Signals:
    """Catches signals while it is entered; a second SIGINT interrupts at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.received = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> "Signals":
        """Catch signals; a SIGHUP that nohup lets be ignored stays so."""
        numbers = set(SIGNALS)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and self._pending is not None:
            self._pending[1].wait()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agree(self, due: bool) -> tuple[int, bool]:
        """Ask all processes, once per step, and answer what was asked a step before, so that nobody waits.

        Args:
            due: Whether this process wants a checkpoint to be written.

        Returns:
            A signal that some process received, or 0, and whether to write a checkpoint; the same in all processes.
        """
        if self.world.size == 1:
            return self.received, due
        number, save = 0, False
        if self._pending is not None:
            answer, work = self._pending
            work.wait()
            number, save = answer[0].item(), bool(answer[1])
        question = torch.tensor([self.received, int(due and not save)])
        self._pending = question, dist.all_reduce(question, dist.ReduceOp.MAX, async_op=True)
        return number, save

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
