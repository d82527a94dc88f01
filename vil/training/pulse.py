"""A line at least every 30 seconds, so that only a program that hangs is silent."""

import time

from vil.training.errors import log

_SECONDS = 30.0


class Pulse:
    """Print lines, and remember when the last one was printed."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether no line was printed for 30 seconds."""
        return time.monotonic() - self.last >= _SECONDS

    def restart(self) -> None:
        """Remember that something was printed now."""
        self.last = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line."""
        log.info(line)
        self.restart()

    def beat(self, line: str) -> None:
        """Print a line if it is due."""
        if self.is_due:
            self.say(line)
