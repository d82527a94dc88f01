"""The mixer as a composition of plain PyTorch operations.

For PyTorch where it transforms functions, which cannot take an operator.
"""

from collections.abc import Sequence

from torch import Tensor

from vil.kernels import grid_conv, reference
from vil.kernels.grid import layout_of, without_missing
from vil.kernels.operators import project, split
from vil.kernels.step_area import Steps


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
    grid: Sequence[int] | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Return the first output of ``vil::mixer`` (B, L, E), given its arguments.

    Args:
        xz: And all that follow: as of the operator.
        conv_weight: (2, E, K).
        conv_bias: (2, E).
        x_proj_weight: (2, R + 2 M, E).
        dt_weight: (2, E, R).
        dt_bias: (2, E).
        A: (2, E, M) for "mamba", else None.
        D: (2, E).
        recurrence: One of ``reference.RECURRENCES``.
        grid: The numbers of ``grid.Grid``, or None.
        valid: (B, H W), or None.
    """
    x, z = xz.chunk(2, dim=-1)
    # Not from the operators' cache: a tracer would leave its own tensors in it.
    layout = layout_of(grid, conv_weight.shape[2], xz.device)
    if valid is not None:
        layout = without_missing(layout, valid, grid[-1])
    x = grid_conv.forward(reference, x, conv_weight, conv_bias, layout)
    steps = Steps(x_proj_weight, dt_weight, A, recurrence, layout.area)
    low, q, k = split(project(x, steps.x_proj_weight), dt_weight, x)
    return reference.bidirectional_scan(
        x, low, steps.A, q, k, D, dt_bias, z, recurrence, steps.key_norm, dt_weight
    )
