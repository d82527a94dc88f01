"""One process of a machine compiles a kernel; the others wait, and find it in Triton's cache.

All processes of a training run reach a kernel at the same time, and each would compile it: as many
times the work, on cores that are then too few for any of them.
"""

import contextlib
import time
from pathlib import Path
from typing import IO, Any

from triton import knobs

try:
    import fcntl
except ImportError:  # not a POSIX system: every process compiles
    fcntl = None

LIMIT_S = 600.0  # after which a process compiles for itself, whatever the others do

_held: IO[bytes] | None = None
_installed = False


def install() -> None:
    """Have Triton take a lock around every compilation of a kernel of this package, from now on."""
    global _installed
    if _installed or fcntl is None:
        return
    _installed = True
    before, after = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook

    def begin(**compilation: Any) -> bool | None:
        fn = compilation["fn"]
        if fn.module.startswith(f"{__package__}."):
            _acquire(Path(knobs.cache.dir), fn.jit_function.__name__)
        skip = None if before is None else before(**compilation)
        if skip:
            _release()
        return skip

    def end(**compilation: Any) -> bool | None:
        _release()
        return None if after is None else after(**compilation)

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end


def _acquire(folder: Path, kernel: str) -> None:
    """Take the lock of a kernel, waiting for it; without one if the disk knows no locks."""
    global _held
    _release()  # of a compilation that failed
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{__package__}.{kernel}.lock").open("ab")
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                _held = file
                return
        file.close()


def _release() -> None:
    global _held
    if _held is not None:
        _held.close()  # which gives the lock back
        _held = None
