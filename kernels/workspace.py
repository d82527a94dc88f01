"""Memory on the CPU for tensors that an operator needs only while it runs, kept for the next call.

These tensors are as large as those that a training step keeps, and lie between them. glibc's malloc fills
the gaps badly that they leave: a block of tensors for 1024 px took twice what was alive in it. Memory
that is kept is also not faulted in anew, page by page, in every call.
"""

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

_MOST = 256 << 20  # bytes kept for each thread; calls that need more take theirs and give it back
_ALIGNMENT = 64


class _Memory(threading.local):
    buffer: Tensor | None = None
    taken: int | None = None
    """Bytes asked for since ``lent`` began; None outside of it."""


_memory = _Memory()


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Let ``empty`` and ``bmm`` hand out this thread's memory, which is the next call's after the block."""
    _memory.taken = 0
    try:
        yield
    finally:
        needed, _memory.taken = _memory.taken, None
        if _capacity() < needed <= _MOST:
            _memory.buffer = None
            with torch.inference_mode(False):  # or nothing else could write to it
                _memory.buffer = torch.empty(needed, dtype=torch.uint8, device="cpu")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU; within ``lent`` it must not outlive the block."""
    # Tensors that are made under a mode are the mode's: fake ones have no memory.
    if _memory.taken is None or _get_current_dispatch_mode() is not None:
        return torch.empty(shape, dtype=dtype)
    start, size = _memory.taken, math.prod(shape) * dtype.itemsize
    _memory.taken += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
    if start + size > _capacity():
        return torch.empty(shape, dtype=dtype)
    return _memory.buffer[start : start + size].view(dtype).view(shape)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``torch.bmm``; within ``lent`` in what ``empty`` returns."""
    if _memory.taken is None:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out=empty((*a.shape[:2], b.shape[2]), a.dtype))


def _capacity() -> int:
    return 0 if _memory.buffer is None else _memory.buffer.nbytes
