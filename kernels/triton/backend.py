"""The operations of ``reference.py`` by Triton kernels: which kernel file serves what.

Same functions, same arguments, same meaning, in float32. Asking for what no kernel serves is an
error.
"""

import torch
import triton
from torch import Tensor

from vil.kernels.reference import full_steps
from vil.kernels.triton import conv, exact_chunks, longhorn_exact, sequential, sequential_tokens
from vil.kernels.triton.tuning import CHUNK

# Largest d_state of a recurrence: beyond, programs outgrow registers or shared memory.
_MOST_STATES = {"longhorn_exact": 128, "longhorn": 64, "mamba": 64}


def _check_dtype(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise NotImplementedError(
            'the backend "triton" computes in float32, x is torch.float64; use "reference"'
        )


def _check_states(k: Tensor, recurrence: str) -> None:
    if recurrence not in _MOST_STATES:
        raise NotImplementedError(
            f'the backend "triton" does not serve the recurrence {recurrence}; use "reference"'
        )
    most = _MOST_STATES[recurrence]
    if k.shape[-1] > most:
        raise NotImplementedError(
            f'the backend "triton" serves up to {most} states of {recurrence}, k has {k.shape[-1]}; '
            'use "reference"'
        )


def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    *rest: Tensor | bool | float | None,
    recurrence: str,
    dt_weight: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    _check_dtype(x)
    _check_states(rest[1], recurrence)
    if recurrence == "longhorn_exact":
        return longhorn_exact.forward(x, dt, *rest, dt_weight=dt_weight)
    return sequential.forward(x, full_steps(dt, dt_weight), A, *rest)


def _backward(
    dout: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    *rest: Tensor | bool | float | None,
    recurrence: str,
) -> tuple[Tensor | None, ...]:
    if recurrence == "longhorn_exact":
        dx, ddt, *others = longhorn_exact.backward(dout, dfinal, x, dt, *rest)
        return dx, ddt, None, *others
    return sequential.backward(dout, dfinal, x, dt, A, *rest)


def _as_one_direction(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the arguments with a leading axis of one direction, and zeros for absent weights."""
    zero = x.new_zeros(x.shape[-1], dtype=torch.float32)
    D, bias = zero if D is None else D, zero if bias is None else bias
    return tuple(None if t is None else t.unsqueeze(0) for t in (x, dt, A, q, k, D, bias))


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    initial_state: Tensor | None,
    recurrence: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Scan one direction; arguments and results as of ``reference.scan``."""
    inputs = _as_one_direction(x, dt, A, q, k, D, bias)
    y, _, _, final = _forward(*inputs, None, initial_state, reverse, False, recurrence=recurrence)
    return y, final


def scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    initial_state: Tensor | None,
    recurrence: str,
    reverse: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``scan`` for x, dt, A, q, k, D, bias and initial_state."""
    inputs = _as_one_direction(x, dt, A, q, k, D, bias)
    *grads, _, dinitial = _backward(
        grad_y, grad_final_state, *inputs, None, initial_state, None, None, reverse,
        recurrence=recurrence,
    )  # fmt: skip
    dx, ddt, dA, dq, dk, dD, dbias = (None if g is None else g.squeeze(0) for g in grads)
    return (
        dx, ddt, dA, dq, dk, None if D is None else dD, None if bias is None else dbias, dinitial
    )  # fmt: skip


def saved(
    x: Tensor, k: Tensor, recurrence: str
) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of y_sum and states, which ``bidirectional_scan_saving`` saves."""
    _, B, L, channels = x.shape
    chunks, states = triton.cdiv(L, CHUNK), k.shape[-1]
    if recurrence == "longhorn_exact":
        shape = (2, B, chunks, channels, exact_chunks.padded_states(states))
        sum_dtype = longhorn_exact.sum_dtype(x.dtype)
    else:
        sum_dtype = torch.float32
        shape = (2, B, chunks, sequential_tokens.padded_states(states) // 4, channels, 4)
    return ((B, L, channels), sum_dtype), (shape, torch.float32)


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
    dt_weight: Tensor | None = None,
) -> Tensor:
    """Scan both ways, average and gate; arguments as of ``reference.bidirectional_scan``."""
    out, *_ = _forward(
        x, dt, A, q, k, D, bias, z, None, False, False, key_norm, recurrence=recurrence,
        dt_weight=dt_weight,
    )  # fmt: skip
    return out


def bidirectional_scan_saving(
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
    dt_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what ``bidirectional_scan`` does, and return y_sum and states for the backward pass too."""
    out, y_sum, states, _ = _forward(
        x, dt, A, q, k, D, bias, z, None, False, True, key_norm, recurrence=recurrence,
        dt_weight=dt_weight,
    )  # fmt: skip
    return out, y_sum, states


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
    saved: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    key_norm: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``bidirectional_scan`` for x, dt, A, q, k, D, bias and z.

    ``saved`` is y_sum and states of ``bidirectional_scan_saving``; without them it scans again.
    """
    *grads, _ = _backward(
        grad, None, x, dt, A, q, k, D, bias, z, None, *saved, False, key_norm, recurrence=recurrence
    )
    return tuple(grads)


def causal_conv1d_bidirectional(
    x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None
) -> Tensor:
    """Convolve both ways, then SiLU; as ``reference.causal_conv1d_bidirectional``."""
    _check_dtype(x)
    return conv.forward(x, weight, bias, order)


def causal_conv1d_bidirectional_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of ``causal_conv1d_bidirectional`` for x, weight and bias."""
    return conv.backward(grad, x, weight, bias, order)
