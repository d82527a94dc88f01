"""Plans: what a backend prepares once for calls with arguments of the same shapes, strides and dtype.

A plan has everything of a call that no value in a tensor changes. It holds no tensor of a call, and serves calls of
several threads at the same time. Letters as in ``args.py``, K taps.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vil.kernels.args import ScanArgs

_T = TypeVar("_T")
# Of a process and a kind. One takes about 3 kB, and one that is gone is made anew.
_MOST_PLANS = 4096
_caches: list[Callable[[], None]] = []


class ScanKey(NamedTuple):
    """What the plan of a scan is made for."""

    recurrence: str
    reverse: bool
    kappa_scale: float
    shape: tuple[int, int, int, int]
    """Of x, (N, B, L, D)."""
    states: int
    rank: int | None
    """Of the step sizes, None if they are in full."""
    strides: tuple[tuple[int, ...] | None, ...]
    """Of x, dt, q, k and z."""
    started: bool
    """Whether there is an initial state."""
    dtype: torch.dtype
    device: torch.device
    dz: tuple[int, ...] | None = None
    """Strides of the tensor that the gradient for z is written to, None for one of its own."""


class ConvKey(NamedTuple):
    """What the plan of a convolution is made for."""

    shape: tuple[int, int, int]
    """Of x, (B, L, D)."""
    strides: tuple[int, int, int]
    taps: int
    positions: int | None
    """Of an order, None without one."""
    aligned: bool
    """Whether x begins at a multiple of two elements."""
    dtype: torch.dtype
    device: torch.device
    dx: tuple[int, ...] | None = None
    """Strides of the tensor that the gradient for x is written to, None for one of its own."""


def scan_key(args: ScanArgs, recurrence: str, reverse: bool, kappa_scale: float) -> ScanKey:
    """Return what a plan for such arguments is made for."""
    x, dt, _, q, k, _, _, z, state, dt_weight = args
    strides = (x.stride(), dt.stride(), q.stride(), k.stride(), None if z is None else z.stride())
    rank = None if dt_weight is None else dt_weight.shape[2]
    return ScanKey(
        recurrence, reverse, float(kappa_scale), tuple(x.shape), k.shape[3], rank, strides,
        state is not None, x.dtype, x.device,
    )  # fmt: skip


def conv_key(x: Tensor, weight: Tensor, order: Tensor | None) -> ConvKey:
    """Return what a plan for such arguments is made for."""
    positions = None if order is None else len(order)
    aligned = x.data_ptr() % (2 * x.element_size()) == 0
    return ConvKey(
        tuple(x.shape), x.stride(), weight.shape[2], positions, aligned, x.dtype, x.device
    )  # fmt: skip


def plans(make: Callable[..., _T]) -> Callable[..., _T]:
    """Let a function that makes a plan for a key do so once for each key."""
    cached = functools.lru_cache(_MOST_PLANS)(make)
    _caches.append(cached.cache_clear)
    return cached


def forget_plans() -> None:
    """Make every plan anew, as after a change of what they are made from."""
    for clear in _caches:
        clear()
