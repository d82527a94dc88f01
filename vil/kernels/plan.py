"""Caches of plans (``interface.py``): a plan is made once for a key, and dropped if unused."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
MAX_KEPT = 256
"""Plans of a kind, and layouts of tokens, kept in a process. Those of an image size take some 10 kB
and 20 bytes per token; evicted ones are made again when needed."""
_caches: list[Callable[[], None]] = []


def plans(make: Callable[..., _T]) -> Callable[..., _T]:
    """Cache a function that makes a plan for a key."""
    cached = functools.lru_cache(MAX_KEPT)(make)
    _caches.append(cached.cache_clear)
    return cached


def kept_plans() -> dict[Any, Any]:
    """Return an empty dictionary of plans, which ``forget_plans`` clears."""
    kept: dict[Any, Any] = {}
    _caches.append(kept.clear)
    return kept


def forget_plans() -> None:
    """Clear all cached plans, for use after a change in their inputs."""
    for clear in _caches:
        clear()
