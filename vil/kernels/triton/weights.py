"""Weights of the small projections as products need them: one kernel for their order and casts.

PyTorch takes four: three copies into one tensor, and a cast.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vil.kernels.plan import plans
from vil.kernels.triton.launch import Kernel

_BLOCK = 512


@triton.jit
def small_weights_kernel(
    x_proj_ptr, dt_weight_ptr, small_ptr, dt_ptr, rank, states, columns, channels, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a row of ``small``, (2, columns, channels), or a part of dt_weight in the same dtype."""
    program, blocks = tl.program_id(0), tl.cdiv(channels, BLOCK)
    place = program % blocks * BLOCK + tl.arange(0, BLOCK)
    row, direction = program // blocks % columns, program // blocks // columns
    if direction < 2:
        keys = row < 2 * states
        source = tl.where(keys, row + rank, row - 2 * states) + direction * (rank + 2 * states)
        mask = (place < channels) & (row < 2 * states + rank)
        weight = tl.load(x_proj_ptr + source * channels + place, mask=mask, other=0.0)
        to = small_ptr + (direction * columns + row) * channels + place
        tl.store(to, weight.to(small_ptr.dtype.element_ty), mask=place < channels)
    else:
        place = (program - 2 * columns * blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = place < 2 * channels * rank
        weight = tl.load(dt_weight_ptr + place, mask=mask)
        tl.store(dt_ptr + place, weight.to(dt_ptr.dtype.element_ty), mask=mask)


class _Key(NamedTuple):
    """Sizes R, M, P and E."""

    rank: int
    states: int
    columns: int
    channels: int


@plans
def _kernel(key: _Key) -> Kernel:
    rows = 2 * key.columns * triton.cdiv(key.channels, _BLOCK)
    programs = rows + triton.cdiv(2 * key.channels * key.rank, _BLOCK)
    return Kernel(small_weights_kernel, programs, 4, **key._asdict(), BLOCK=_BLOCK)


def small_weights(x_proj_weight: Tensor, dt_weight: Tensor, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the result of ``reference.small_weights``."""
    _, channels, rank = dt_weight.shape
    states = (x_proj_weight.shape[1] - rank) // 2
    small = torch.empty((2, columns, channels), dtype=dtype, device=dt_weight.device)
    dt = torch.empty(dt_weight.shape, dtype=dtype, device=dt_weight.device)
    _kernel(_Key(rank, states, columns, channels))(
        small, x_proj_ptr=x_proj_weight.contiguous(), dt_weight_ptr=dt_weight.contiguous(), small_ptr=small, dt_ptr=dt
    )
    return small, dt
