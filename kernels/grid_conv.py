"""The mixer's convolution at another grid than its taps were learnt on, around a backend's.

Two things are left to do besides an order of the tokens (``reference.causal_conv1d_bidirectional``).
Where the distance of the taps is no integer, each is shared out between two: the backend gets ``weight @
taps``. And the class token, which stands where no patch does, meets means of patches: it has no position in
the order, and is convolved here, K U products of a token each for B tokens of B L.

Letters: B batch, L tokens, D channels, K taps, T taps once resampled, P positions of the order, U tokens
that the class token reads, the first of them itself, all different.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.kernels.grid import Layout


class Conv(Protocol):
    """A backend's convolution, ``reference.causal_conv1d_bidirectional``, and its gradients."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None) -> Tensor:
        """Convolve both ways, then SiLU."""

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        order: Tensor | None,
        dx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients for x, weight and bias; dx is given if the backend ``writes_halves``."""


def forward(
    conv: Conv,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: Layout | None,
) -> Tensor:
    """Convolve both ways, then SiLU.

    Args:
        conv: Of tokens in an order; the result is differentiable if its is.
        x: (B, L, D).
        weight: Taps as they were learnt, (2, D, K).
        bias: (2, D).
        layout: Of the tokens; None if they stand behind one another.

    Returns:
        (2, B, L, D) in the dtype of x.
    """
    if layout is None or not layout.order.numel():
        return conv.forward(x, weight, bias, None)
    out = conv.forward(x, _resampled(weight, layout.taps), bias, layout.order)
    reads, shares = layout.class_reads, layout.class_shares
    if not reads.numel():
        return out
    _, v = _class_token(x, weight, bias, reads, shares)
    out[:, :, reads[0]] = F.silu(v).to(out.dtype)
    return out


def backward(
    conv: Conv,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: Layout | None,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``forward`` for x, weight and bias, the same in every run.

    Args:
        conv: As in ``forward``, this and all others but for ``grad`` and ``dx``.
        grad: Gradient of the output, (2, B, L, D).
        x: As in ``forward``.
        weight: As in ``forward``.
        bias: As in ``forward``.
        layout: As in ``forward``.
        dx: Where the gradient for x goes; a tensor of its own if None.
    """
    if layout is None or not layout.order.numel():
        return conv.backward(grad, x, weight, bias, None, dx)
    dx, dweight, dbias = conv.backward(
        grad, x, _resampled(weight, layout.taps), bias, layout.order, dx
    )
    dweight = (dweight @ layout.taps.to(dweight.dtype).mT).to(weight.dtype)
    reads, shares = layout.class_reads, layout.class_shares
    if not reads.numel():
        return dx, dweight, dbias
    read, v = _class_token(x, weight, bias, reads, shares)
    s = torch.sigmoid(v)
    dv = grad[:, :, reads[0]].to(v.dtype) * s * (1 + v * (1 - s))  # (2, B, D)
    dread = dv[:, :, None] * weight.to(v.dtype).mT[:, None]  # (2, B, K, D)
    dtokens = shares.to(v.dtype).flatten(1, 2).mT @ dread.transpose(0, 1).flatten(1, 2)
    dx[:, reads[:1]] = 0
    dx[:, reads] = (dx[:, reads].to(v.dtype) + dtokens).to(dx.dtype)
    dweight = dweight + (dv[:, :, None] * read).sum(1).mT.to(dweight.dtype)
    return dx, dweight, dbias + dv.sum(1).to(dbias.dtype)


def _resampled(weight: Tensor, taps: Tensor) -> Tensor:
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.to(dtype) @ taps.to(dtype)


def _class_token(
    x: Tensor, weight: Tensor, bias: Tensor, reads: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the class token's taps read, (2, B, K, D), and its values before SiLU, (2, B, D)."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    tokens = x[:, reads].to(dtype)  # (B, U, D)
    read = (shares.to(dtype).flatten(1, 2) @ tokens).unflatten(1, (2, -1)).transpose(0, 1)
    v = (read * weight.to(dtype).mT[:, None]).sum(2) + bias.to(dtype)[:, None]
    return read, v
