"""Time budgets: stop a benchmark so that it can be resumed."""

import argparse
import math
import time

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
