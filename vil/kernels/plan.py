"""Plans: a backend's one-time preparation for calls with arguments of the same shapes, strides and dtype.

A plan contains everything about a call that does not depend on tensor values. It holds no tensor of a call, so several
threads can use it at the same time. Letters as in ``args.py``; K taps.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vil.kernels.args import ScanArgs

_T = TypeVar("_T")
MOST_KEPT = 256
"""Plans of a kind, and layouts of tokens, kept in a process. Those of an image size take some 10 kB and 20 bytes per
token; evicted ones are made again when needed."""
_caches: list[Callable[[], None]] = []


class ScanKey(NamedTuple):
    """Everything that the plan of a scan depends on."""

    recurrence: str
    reverse: bool
    kappa_scale: float
    """Factor of |k|^2 in the step size."""
    shape: tuple[int, int, int, int]
    """Shape of x, (N, B, L, D)."""
    states: int
    """State size M."""
    rank: int | None
    """Rank R of the step sizes; None if they have full rank."""
    strides: tuple[tuple[int, ...] | None, ...]
    """Strides of x, dt, q, k and z."""
    started: bool
    """Whether an initial state is given."""
    dtype: torch.dtype
    device: torch.device
    dz: tuple[int, ...] | None = None
    """Strides of the tensor that receives the gradient for z; None to allocate it."""


class ConvKey(NamedTuple):
    """Everything that the plan of a convolution depends on."""

    shape: tuple[int, int, int]
    """Shape of x, (B, L, D)."""
    strides: tuple[int, int, int]
    taps: int
    """Number of taps K."""
    positions: int | None
    """Positions in the order; None without an order."""
    aligned: bool
    """Whether x begins at a multiple of two elements."""
    dtype: torch.dtype
    device: torch.device
    dx: tuple[int, ...] | None = None
    """Strides of the tensor that receives the gradient for x; None to allocate it."""


def scan_key(args: ScanArgs, recurrence: str, reverse: bool, kappa_scale: float) -> ScanKey:
    """Return the key of the plan for the arguments."""
    x, dt, _, q, k, _, _, z, state, dt_weight = args
    strides = (x.stride(), dt.stride(), q.stride(), k.stride(), None if z is None else z.stride())
    rank = None if dt_weight is None else dt_weight.shape[2]
    return ScanKey(
        recurrence, reverse, float(kappa_scale), tuple(x.shape), k.shape[3], rank, strides,
        state is not None, x.dtype, x.device,
    )  # fmt: skip


def conv_key(x: Tensor, weight: Tensor, order: Tensor | None) -> ConvKey:
    """Return the key of the plan for the arguments."""
    positions = None if order is None else len(order)
    aligned = x.data_ptr() % (2 * x.element_size()) == 0
    return ConvKey(
        tuple(x.shape), x.stride(), weight.shape[2], positions, aligned, x.dtype, x.device
    )  # fmt: skip


def plans(make: Callable[..., _T]) -> Callable[..., _T]:
    """Cache a function that makes a plan for a key."""
    cached = functools.lru_cache(MOST_KEPT)(make)
    _caches.append(cached.cache_clear)
    return cached


def kept_plans() -> dict[Any, Any]:
    """Return an empty dictionary of plans, which ``forget_plans`` clears."""
    made: dict[Any, Any] = {}
    _caches.append(made.clear)
    return made


def forget_plans() -> None:
    """Clear all cached plans, for use after a change in their inputs."""
    for clear in _caches:
        clear()
