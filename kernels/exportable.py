"""The bidirectional scan for exporters that do not know custom operators, such as ONNX.

The same recurrence as everywhere (``reference.advance``) driven by the higher-order op ``scan``,
which an exporter keeps as one loop node instead of L copies of the step. Both directions share one
loop: the second is flipped and stacked on the batch. For inference: torch 2.11 differentiates that op
wrongly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan

from vil.kernels import reference


def bidirectional_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor,
    recurrence: str,
    key_norm: float = 1.0,
) -> Tensor:
    """Return the same as ``reference.bidirectional_scan``; arguments as there, inference only."""
    directions, B, L, channels = x.shape
    step = reference.step_size(dt, k, bias[:, None, None], recurrence, key_norm)

    def time_first(tensor: Tensor) -> Tensor:  # (2, B, L, C) -> (L, 2, B, C), each in scan order
        return torch.stack((tensor[0], tensor[1].flip(1))).permute(2, 0, 1, 3)

    rates = None if A is None else A[:, None]  # (2, 1, D, M)

    def one_token(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x_t, step_t, q_t, k_t = token
        state, y_t = reference.advance(state, x_t, step_t, rates, q_t, k_t, recurrence)
        return state, y_t.clone()  # the op refuses outputs that alias each other

    state = x.new_zeros(directions, B, channels, k.shape[-1])
    tokens = tuple(time_first(tensor) for tensor in (x, step, q, k))
    _, y = scan(one_token, state, tokens)
    y = y.permute(1, 2, 0, 3)  # (2, B, L, D)
    forward = y[0] + D[0] * x[0]
    backward = y[1].flip(1) + D[1] * x[1]
    return F.silu(z) * (forward + backward) / 2
