"""One process per machine compiles a kernel; all other processes wait and find it in Triton's cache.

All processes of a training run reach a kernel at the same time, and each would compile it. That multiplies
the work, on too few cores.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from triton import knobs

try:
    import fcntl
except ImportError:  # not a POSIX system: every process compiles
    fcntl = None

LIMIT_S = 600.0  # after which a process stops waiting and compiles


@contextlib.contextmanager
def held(kernel: str) -> Iterator[None]:
    """Wait for the lock of a kernel and hold it; go without if the disk has no locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = Path(knobs.cache.dir)
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / f"{__package__}.{kernel}.lock").open("ab"))
            deadline = time.monotonic() + LIMIT_S
            while fcntl is not None and time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield
