"""The mixer's convolution along an order of the tokens, with the class token's own reads.

Tokens may be convolved in another order than that of their sequence
(``reference.causal_conv1d_bidirectional``). The class token then has no position in it. It reads U
tokens, itself first, each with a weight per channel, and is convolved here: U products for B of the
B L tokens.

Letters: B batch, L tokens, D channels, K taps, P positions in the order, U tokens that the class
token reads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.kernels.interface import ConvPlan, compute_dtype


class Order(NamedTuple):
    """Order of the tokens in the convolution, for tokens of a grid other than the trained one."""

    order: Tensor | None = None
    """Token at each position, int32 (P,); None for sequence order."""
    cls_index: Tensor | None = None
    """Tokens that the class token reads, int64 (U,); None or empty if it is like the others."""
    tokens_per_ref: Sequence[int] = (1, 1)
    """Numerator and denominator of the number of tokens per trained token; see ``kappa_scale``."""


SEQUENCE = Order()
"""Sequence order, at the trained grid."""


def kappa_scale(recurrence: str, tokens_per_ref: Sequence[int]) -> float:
    """Return the factor of |k|^2 in a step size, for keys scaled as in ``sizes.py``."""
    if recurrence == "mamba":
        return 1.0
    area = max(tokens_per_ref[0] / tokens_per_ref[1], 1.0)
    return area ** (0.5 if recurrence == "longhorn_exact" else 1.0)


def conv_forward(
    conv: ConvPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    order: Order,
    cls_weight: Tensor | None,
) -> Tensor:
    """Convolve in both directions, then apply SiLU.

    Args:
        conv: Convolution of a backend. The result is differentiable if the backend's is.
        x: Input, (B, L, D).
        weight: Taps, (2, D, K).
        bias: Bias, (2, D).
        order: Order of the tokens.
        cls_weight: Weights of the class token's reads, (2, U, D).

    Returns:
        (2, B, L, D) in the dtype of x.
    """
    out = conv.forward(x, weight, bias, order.order)
    if cls_weight is None or not order.cls_index.numel():
        return out
    _, _, v = _class_token(x, bias, order.cls_index, cls_weight)
    out[:, :, _middle(x)] = F.silu(v).to(out.dtype)
    return out


def conv_backward(
    conv: ConvPlan,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    order: Order,
    cls_weight: Tensor | None,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of ``conv_forward`` for x, weight, bias and cls_weight.

    They are bit-identical in every run. ``grad`` is the gradient of the output, (2, B, L, D). The
    gradient for x is written to ``dx``, (B, L, D), if given.
    """
    dx, dweight, dbias = conv.backward(grad, x, weight, bias, order.order, dx)
    if cls_weight is None or not order.cls_index.numel():
        return dx, dweight, dbias, None if cls_weight is None else torch.zeros_like(cls_weight)
    tokens, shares, v = _class_token(x, bias, order.cls_index, cls_weight)
    s = torch.sigmoid(v)
    dv = grad[:, :, _middle(x)].to(v.dtype) * s * (1 + v * (1 - s))  # (2, B, D)
    dtokens = (dv[:, :, None] * shares[:, None]).sum(0)
    dshares = (dv[:, :, None] * tokens).sum(1)
    dx[:, _middle(x)] = 0
    dx[:, order.cls_index] = (dx[:, order.cls_index].to(v.dtype) + dtokens).to(dx.dtype)
    return dx, dweight, dbias + dv.sum(1).to(dbias.dtype), dshares.to(cls_weight.dtype)


def _middle(x: Tensor) -> int:
    """Return the place of the class token; to read it from ``cls_index`` would wait for the GPU."""
    return (x.shape[1] - 1) // 2


def _class_token(x: Tensor, bias: Tensor, cls_index: Tensor, cls_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens, (B, U, D), weights, (2, U, D), and sums before SiLU, (2, B, D)."""
    dtype = compute_dtype(x)
    tokens, shares = x[:, cls_index].to(dtype), cls_weight.to(dtype)
    v = (shares[:, None] * tokens).sum(2) + bias.to(dtype)[:, None]
    return tokens, shares, v
