"""The operations of ``reference.py`` by Triton kernels: which kernel file serves what.

Same functions, same arguments, same meaning, in float32. Asking for what no kernel serves is an
error.
"""

import torch
import triton
from torch import Tensor

from vil.kernels.args import ScanArgs
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


def _with_parameters(args: ScanArgs) -> ScanArgs:
    """Return the arguments with zeros for absent weights, which the kernels always read."""
    if args.D is not None and args.bias is not None:
        return args
    N, _, _, channels = args.x.shape
    zero = args.x.new_zeros(N, channels, dtype=torch.float32)
    return args._replace(
        D=zero if args.D is None else args.D, bias=zero if args.bias is None else args.bias
    )


def scan(
    args: ScanArgs,
    recurrence: str,
    reverse: bool = False,
    key_norm: float = 1.0,
    save: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Scan; arguments and results as of ``reference.scan``."""
    _check_dtype(args.x)
    _check_states(args.k, recurrence)
    x, dt, A, q, k, D, bias, z, state, dt_weight = _with_parameters(args)
    state = None if state is None else state[0]
    rest = (q, k, D, bias, z, state, reverse, save, key_norm)
    if recurrence == "longhorn_exact":
        found = longhorn_exact.forward(x, dt, *rest, dt_weight=dt_weight)
    else:
        found = sequential.forward(x, full_steps(dt, dt_weight), A, *rest)
    out, y_sum, states, final = found
    return out, None if final is None else final[None], y_sum, states


def scan_backward(
    args: ScanArgs,
    grad: Tensor,
    grad_final: Tensor | None,
    recurrence: str,
    reverse: bool = False,
    key_norm: float = 1.0,
    saved: tuple[Tensor | None, Tensor] | None = None,
) -> ScanArgs:
    """Return the gradients of ``scan``; arguments as of ``reference.scan_backward``."""
    x, dt, A, q, k, D, bias, z, state, _ = _with_parameters(args)
    state = None if state is None else state[0]
    grads = (grad, None if z is not None else grad_final[0])
    rest = (q, k, D, bias, z, state, *(saved or (None, None)), reverse, key_norm)
    if recurrence == "longhorn_exact":
        dx, ddt, dq, dk, dD, dbias, dz, dstate = longhorn_exact.backward(*grads, x, dt, *rest)
        dA = None
    else:
        dx, ddt, dA, dq, dk, dD, dbias, dz, dstate = sequential.backward(*grads, x, dt, A, *rest)
    return ScanArgs(
        dx,
        ddt,
        dA,
        dq,
        dk,
        None if args.D is None else dD,
        None if args.bias is None else dbias,
        dz,
        None if dstate is None else dstate[None],
    )


def saved(
    x: Tensor, k: Tensor, recurrence: str
) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the sum of both directions and the states that ``scan`` saves."""
    N, B, L, channels = x.shape
    chunks, states = triton.cdiv(L, CHUNK), k.shape[-1]
    if recurrence == "longhorn_exact":
        shape = (N, B, chunks, channels, exact_chunks.padded_states(states))
        sum_dtype = longhorn_exact.sum_dtype(x.dtype)
    else:
        sum_dtype = torch.float32
        shape = (N, B, chunks, sequential_tokens.padded_states(states) // 4, channels, 4)
    y_sum = ((0,), torch.float32) if N == 1 else ((B, L, channels), sum_dtype)
    return y_sum, (shape, torch.float32)


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
