"""The operations of ``reference.py`` by Triton kernels: which kernel file serves what.

Same functions, same arguments, same meaning, in float32. Asking for what no kernel serves is an
error.
"""

import torch
from torch import Tensor

from vil.kernels import conv, longhorn_diagonal, longhorn_exact, mamba

_LONGHORN = {"longhorn": longhorn_diagonal, "longhorn_exact": longhorn_exact}


def _check_dtype(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise NotImplementedError(
            'the backend "triton" computes in float32, x is torch.float64; use "reference"'
        )


def scan(*arguments: object) -> tuple[Tensor, Tensor]:
    """Refuse: there is no kernel for a single direction.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        'the backend "triton" serves bidirectional_scan and causal_conv1d_bidirectional; '
        'use "reference" for a scan in one direction'
    )


scan_backward = scan


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
) -> Tensor:
    """Scan both ways, average and gate; arguments as of ``reference.bidirectional_scan``."""
    _check_dtype(x)
    if recurrence == "mamba":
        out, *_ = mamba.bidirectional_forward(x, dt, A, q, k, D, bias, z, save=False)
    else:
        kernel = _LONGHORN[recurrence]
        out, *_ = kernel.bidirectional_forward(x, dt, q, k, D, bias, z, save=False)
    return out


def bidirectional_scan_backward(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor,
    recurrence: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``bidirectional_scan`` for x, dt, A, q, k, D, bias and z."""
    if recurrence == "mamba":
        return mamba.bidirectional_backward(grad, x, dt, A, q, k, D, bias, z, None, None)
    kernel = _LONGHORN[recurrence]
    dx, ddt, *rest = kernel.bidirectional_backward(grad, x, dt, q, k, D, bias, z, None, None)
    return dx, ddt, None, *rest


def causal_conv1d_bidirectional(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve both ways, then SiLU; as ``reference.causal_conv1d_bidirectional``."""
    _check_dtype(x)
    return conv.forward(x, weight, bias)


def causal_conv1d_bidirectional_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of ``causal_conv1d_bidirectional`` for x, weight and bias."""
    return conv.backward(grad, x, weight, bias)
