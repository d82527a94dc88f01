"""The operations of ``reference.py`` by Triton kernels: which kernel file serves what.

Same functions, same arguments, same meaning, in float32. Asking for what no kernel serves is an
error.
"""

import torch
import triton
from torch import Tensor

from vil.kernels.args import ScanArgs
from vil.kernels.plan import ScanKey, plans, scan_key
from vil.kernels.triton import conv, exact_chunks, longhorn_exact, sequential_tokens
from vil.kernels.triton.longhorn_exact import ExactPlan
from vil.kernels.triton.scan_plan import ScanPlan, padded_tokens, prepared
from vil.kernels.triton.sequential import SequentialPlan
from vil.kernels.triton.tuning import CHUNK

# Largest d_state of a recurrence: beyond, programs outgrow registers or shared memory.
_MOST_STATES = {"longhorn_exact": 128, "longhorn": 64, "mamba": 64}
_FAMILIES: dict[str, type[ScanPlan]] = {
    "longhorn_exact": ExactPlan,
    "longhorn": SequentialPlan,
    "mamba": SequentialPlan,
}


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        raise NotImplementedError(
            'the backend "triton" computes in float32, x is torch.float64; use "reference"'
        )


def _check_states(states: int, recurrence: str) -> None:
    most = _MOST_STATES[recurrence]
    if states > most:
        raise NotImplementedError(
            f'the backend "triton" serves up to {most} states of {recurrence}, k has {states}; '
            'use "reference"'
        )


def _plan(
    args: ScanArgs, recurrence: str, reverse: bool, key_norm: float
) -> tuple[ScanPlan, ScanArgs]:
    """Return the plan for arguments, and these as its kernels take them."""
    if recurrence not in _FAMILIES:
        raise NotImplementedError(
            f'the backend "triton" does not serve the recurrence {recurrence}; use "reference"'
        )
    args = prepared(args, _FAMILIES[recurrence].least_tokens)
    return _plan_of(scan_key(args, recurrence, reverse, key_norm)), args


@plans
def _plan_of(key: ScanKey) -> ScanPlan:
    _check_dtype(key.dtype)
    _check_states(key.states, key.recurrence)
    return _FAMILIES[key.recurrence](key)


def _first(tensor: Tensor | None, tokens: int) -> Tensor | None:
    """Return the first tokens of (..., L, D)."""
    return tensor if tensor is None else tensor[..., :tokens, :]


def scan(
    args: ScanArgs,
    recurrence: str,
    reverse: bool = False,
    key_norm: float = 1.0,
    save: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Scan; arguments and results as of ``reference.scan``."""
    length = args.x.shape[2]
    plan, args = _plan(args, recurrence, reverse, key_norm)
    out, final, y_sum, states = plan.forward(args, save)
    if length < plan.L:
        out = out[:, :length].contiguous()
        y_sum = None if y_sum is None else y_sum[:, :length].contiguous()
    return out, final, y_sum, states


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
    given, length = args, args.x.shape[2]
    plan, args = _plan(args, recurrence, reverse, key_norm)
    missing = plan.L - length
    if missing:
        grad = padded_tokens(grad, missing)
        if saved is not None and saved[0] is not None:
            saved = (padded_tokens(saved[0], missing), saved[1])
    grads = plan.backward(args, grad, grad_final, saved)
    if missing:
        rows = {name: _first(getattr(grads, name), length) for name in ("x", "dt", "q", "k", "z")}
        grads = grads._replace(**rows)
    return ScanArgs(*(None if t is None else g for t, g in zip(given, grads, strict=True)))


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
    _check_dtype(x.dtype)
    return conv.forward(x, weight, bias, order)


def causal_conv1d_bidirectional_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of ``causal_conv1d_bidirectional`` for x, weight and bias."""
    return conv.backward(grad, x, weight, bias, order)
