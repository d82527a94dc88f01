"""FLOP counts of the operators for torch.utils.flop_counter, two per multiply-add.

Per token, channel and state, the diagonal and the Mamba scan take 4 multiply-adds: decay times
state, the write and its product, the read by q. The exact scan takes 3: recall k.S, write, read.
Exponentials and divisions, one per state for Mamba and one per channel for Longhorn, are not
counted. A backward pass counts as two forward passes, as torch counts matrix products. It
recomputes scans, convolution and step sizes, which adds one forward pass of these.
"""

import math

import torch
from torch.utils.flop_counter import register_flop_formula

from vil.kernels import registration  # noqa: F401  (defines them)

_MACS_PER_STATE = {"longhorn": 4, "longhorn_exact": 3, "mamba": 4}

Shape = tuple[int, ...]


def _scan_macs(x: Shape, states: int, skip: bool, gate: bool, recurrence: str) -> int:
    scans = math.prod(x) * (_MACS_PER_STATE[recurrence] * states + skip)
    return scans + (math.prod(x[1:]) if gate else 0)


def _mixer_macs(
    xz: Shape, conv_weight: Shape, x_proj_weight: Shape, dt_weight: Shape, recurrence: str
) -> tuple[int, int]:
    """Return the multiply-adds that the backward pass recomputes, and the remaining ones."""
    B, L, _ = xz
    _, columns, inner = x_proj_weight
    rank = dt_weight[-1]
    tokens = 2 * B * L * inner
    scan = _scan_macs((2, B, L, inner), (columns - rank) // 2, True, True, recurrence)
    return tokens * (conv_weight[-1] + rank) + scan, tokens * columns


@register_flop_formula(torch.ops.vil.scan)
def _scan(x, dt, A, q, k, D, bias, z, initial_state, recurrence, *args, **kwargs) -> int:
    return 2 * _scan_macs(x, q[-1], D is not None, z is not None, recurrence)


@register_flop_formula(torch.ops.vil.scan_backward)
def _scan_backward(grad, grad_final, *args, **kwargs) -> int:
    *tensors, y_pre_gate, states, recurrence, reverse = args
    return 3 * _scan(*tensors, recurrence)


@register_flop_formula(torch.ops.vil.mixer)
def _mixer(xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, recurrence, *args, **kwargs) -> int:
    return 2 * sum(_mixer_macs(xz, conv_weight, x_proj_weight, dt_weight, recurrence))


@register_flop_formula(torch.ops.vil.mixer_backward)
def _mixer_backward(grad, xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, *args, **kwargs) -> int:
    recurrence = args[3]  # after the tensors that the forward pass saved
    again, once = _mixer_macs(xz, conv_weight, x_proj_weight, dt_weight, recurrence)
    return 6 * again + 4 * once
