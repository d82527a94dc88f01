"""How the kernels lay out states, and what a scan saves for its backward pass.

This file does not import triton: a program that is compiled where triton is missing needs the
shapes, too. Letters as in ``kernels.interface``.
"""

import torch

from vil.kernels.interface import SavedShapes
from vil.kernels.triton import tuning


def padded_states(states: int, recurrence: str) -> int:
    """Return the M of the kernels, for a state size.

    The exact form needs a power of two and at least 16 for matrix products, the others a multiple
    of 4 for 128-bit loads.
    """
    if recurrence == "longhorn_exact":
        return max(16, 1 << (states - 1).bit_length())
    return -(-states // 4) * 4


def state_shape(channels: int, states: int, recurrence: str) -> tuple[int, ...]:
    """Return the shape of the state of a sequence in the kernels, (D, M) or (M / 4, D, 4)."""
    M = padded_states(states, recurrence)
    return (channels, M) if recurrence == "longhorn_exact" else (M // 4, channels, 4)


def saved_shapes(shape: tuple[int, ...], states: int, recurrence: str, dtype: torch.dtype) -> SavedShapes:
    """Return what a scan saves: the sum of both directions, and the states before all chunks.

    States are bfloat16 for bfloat16, because rounding x, keys and queries to bfloat16 makes a
    larger error. For float16 they are float32, because float16 lacks the range.
    """
    N, B, L, D = shape
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    of_sum = kept if recurrence == "longhorn_exact" else torch.float32
    chunks = -(-L // tuning.CHUNK)
    return (
        ((B, L, D) if N == 2 else (0,), of_sum),
        ((N, B, chunks, *state_shape(D, states, recurrence)), kept),
    )
