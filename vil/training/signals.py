"""Agreement of all ranks on signals and due checkpoints between steps."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from vil.training.distributed import World
from vil.training.errors import SIGNALS


class Signals:
    """Context manager that catches signals; a second SIGINT interrupts at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.received = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> "Signals":
        """Install the signal handlers; keep SIGHUP ignored under nohup."""
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
        """Reduce signals and due checkpoints over all ranks; every rank must call this once per step.

        With several ranks, a call returns the result of the previous step, so that no rank waits.

        Args:
            due: Whether this process wants to write a checkpoint.

        Returns:
            Signal number received by any rank, or 0, and whether to write a checkpoint; equal on all ranks.
        """
        if self.world.size == 1:
            return self.received, due
        number, save = 0, False
        if self._pending is not None:
            answer, work = self._pending
            work.wait()
            number, save = answer[0].item(), bool(answer[1])
        question = torch.tensor([self.received, int(due and not save)], dtype=torch.int64)
        self._pending = question, dist.all_reduce(question, dist.ReduceOp.MAX, async_op=True)
        return number, save

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
