"""CPU memory for tensors that an operator needs only while it runs, kept for the next call.

These tensors are as large as those that a training step keeps, and would lie between them. The
malloc of glibc fills the gaps that they leave badly: a block of tensors for 1024 px took twice the
memory of its live tensors. Keeping the memory also avoids page faults in every call.
"""

import math
import threading

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

_MAX_BYTES = 256 << 20  # bytes kept per thread; calls that need more allocate the rest and free it
_MAX_VIEWS = 1024
_ALIGNMENT = 64

_View = tuple[int, tuple[int, ...], torch.dtype]  # start, shape, dtype


class _Memory(threading.local):
    taken: int | None = None
    """Bytes requested since ``arena`` was entered; None outside of it."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.capacity = 0
        self.views: dict[_View, tuple[Tensor, int]] = {}
        """Tensors returned before, each with the start of the next: faster than new ones."""


_memory = _Memory()


class _Arena:
    def __enter__(self) -> None:
        _memory.taken = 0

    def __exit__(self, *_: object) -> None:
        needed, _memory.taken = _memory.taken, None
        if _memory.capacity < needed <= _MAX_BYTES:
            _memory.views.clear()  # views keep the old buffer alive
            _memory.buffer = None
            with torch.inference_mode(False):  # else other code could not write to it
                _memory.buffer = torch.empty(needed, dtype=torch.uint8, device="cpu")
            _memory.capacity = needed


arena = _Arena()
"""Context in which ``empty`` and ``bmm`` use this thread's memory; the next block reuses it."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor; within ``arena`` it must not outlive the block."""
    start = _memory.taken
    # Under a dispatch mode, tensors belong to the mode; fake tensors have no memory.
    if start is None or _get_current_dispatch_mode() is not None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    known = _memory.views.get((start, shape, dtype))
    if known is not None:
        _memory.taken = known[1]
        return known[0]
    end = start + math.prod(shape) * dtype.itemsize
    _memory.taken = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
    if start == end or end > _memory.capacity:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if len(_memory.views) == _MAX_VIEWS:
        _memory.views.clear()
    with torch.inference_mode(False), torch.no_grad():
        tensor = _memory.buffer[start:end].view(dtype).view(shape)
    _memory.views[start, shape, dtype] = tensor, _memory.taken
    return tensor


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``torch.bmm``, within ``arena`` in memory from ``empty``."""
    if _memory.taken is None:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out=empty((*a.shape[:2], b.shape[2]), a.dtype))
