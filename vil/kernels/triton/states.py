"""How the kernels lay out states, and what a scan saves for its backward pass.

This file does not import triton: a program that is compiled where triton is missing needs the
shapes, too. Letters as in ``kernels.interface``.
"""

import torch
from torch import Tensor

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
    larger error. For float16 they are float32, because float16 lacks the range. In place of the
    states of 16 tokens, the exact form may save as many numbers C, and then the states after splits.
    """
    N, B, L, D = shape
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    of_sum = kept if recurrence == "longhorn_exact" else torch.float32
    chunks, state = -(-L // tuning.CHUNK), state_shape(D, states, recurrence)
    saved = (N, B, chunks, *state)
    if recurrence == "longhorn_exact" and kept == torch.bfloat16 and state[1] == 16:
        splits = -(-chunks // tuning.SHORTEST_BACK_SPLIT)
        saved = (N, B, 16 * (chunks + 2 * splits), D)  # or the states of all chunks, which are fewer
    return (((B, L, D) if N == 2 else (0,), of_sum), (saved, kept))


def kept_states(saved: Tensor, shape: tuple[int, ...], splits: int) -> tuple[Tensor, Tensor]:
    """Return C (N, B, L, D), and the states after splits (N, B, S, D, 16), float32, in what a scan saves."""
    N, B, L, D = shape
    c, states = saved.flatten().split((N * B * L * D, saved.numel() - N * B * L * D))
    return c.view(shape), states[: 32 * N * B * splits * D].view(torch.float32).view(N, B, splits, D, 16)
