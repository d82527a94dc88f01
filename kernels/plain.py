"""The operators as compositions of plain PyTorch operations, with the arguments of ``operators.py``.

For whoever cannot take an operator: exporters, and PyTorch where it transforms functions.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vil.kernels import grid_conv, reference
from vil.kernels.grid import layout_of, without_missing
from vil.kernels.step_area import Steps


def bidirectional_scan(*arguments: Tensor | str | bool | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``vil::bidirectional_scan``, which saves nothing here."""
    *inputs, recurrence, _ = arguments
    out = reference.bidirectional_scan(*inputs, recurrence)
    return out, *_nothing(out, 2)


def mixer(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj_weight: Tensor,
    dt_weight: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    recurrence: str,
    save: bool = False,
    grid: Sequence[int] | None = None,
    valid: Tensor | None = None,
    scan: Callable[..., Tensor] = reference.bidirectional_scan,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``vil::mixer``, which saves nothing here.

    Args:
        xz: And all that follow, but for the last: as of the operator.
        conv_weight: See above.
        conv_bias: See above.
        x_proj_weight: See above.
        dt_weight: See above.
        dt_bias: See above.
        A: See above.
        D: See above.
        recurrence: See above.
        save: Without effect.
        grid: See above.
        valid: See above.
        scan: What does the work of ``reference.bidirectional_scan``.
    """
    B, L, _ = xz.shape
    x, z = xz.chunk(2, dim=-1)
    layout = layout_of(grid, conv_weight.shape[2], xz.device)
    if valid is not None:
        layout = without_missing(layout, valid, grid[-1])
    x = grid_conv.forward(reference, x, conv_weight, conv_bias, layout)
    steps = Steps(x_proj_weight, dt_weight, A, recurrence, layout.area)
    rank = dt_weight.shape[-1]
    states = (x_proj_weight.shape[1] - rank) // 2
    projected = torch.bmm(x.flatten(1, 2), steps.x_proj_weight.to(x.dtype).transpose(1, 2))
    dt, k, q = projected.split([rank, states, states], dim=-1)
    dt = torch.bmm(dt, dt_weight.to(x.dtype).transpose(1, 2)).unflatten(1, (B, L))  # (2, B, L, E)
    k, q = k.unflatten(1, (B, L)), q.unflatten(1, (B, L))  # (2, B, L, M)
    out = scan(x, dt, steps.A, q, k, D, dt_bias, z, recurrence, steps.key_norm)
    return out, *_nothing(out, 3)


def _nothing(like: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) for _ in range(count))
