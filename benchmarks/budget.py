"""Time budgets: stop a benchmark so that it can be resumed, and interrupt a compiler."""

import argparse
import contextlib
import math
import signal
import time
from collections.abc import Iterator

UNFINISHED = 75  # exit status: out of time, repeat the command to resume (EX_TEMPFAIL)


class Budget:
    """A number of seconds that starts to run now."""

    def __init__(self, seconds: float | None) -> None:
        """Start the clock; None means no limit."""
        self.seconds = math.inf if seconds is None else seconds
        self._start = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.seconds - (time.monotonic() - self._start))


def add_seconds(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--seconds`` to a benchmark that can be resumed."""
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin nothing new after that long, and end with status 75 if something is left",
    )


class TimeLimitError(Exception):
    """Something took too long."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str = "not compiled") -> Iterator[None]:
    """Raise TimeLimitError in the block after ``seconds``; works in the main thread only."""

    def stop(*_: object) -> None:
        raise TimeLimitError(f"{what} within {seconds:.3g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
