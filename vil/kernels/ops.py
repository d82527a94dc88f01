"""The public operations.

Each is a torch.library operator (``registration.py``) with rules for automatic mixed
precision and for counting FLOPs. Each raises NotImplementedError if the backend does not support
the arguments: Triton takes up to 64 states, 128 for longhorn_exact. It raises RuntimeError if a
backend that you chose by name cannot be used.
Letters: B batch, L tokens, D channels of the scan, M state size (``d_state``).
"""

import contextlib
from typing import Literal

import torch
from torch import Tensor

from vil.kernels import autocast, flops, func_transforms, registration  # noqa: F401  (register)
from vil.kernels.backends import BACKENDS, use_backend
from vil.kernels.checks import check_not_onnx, check_tensors, in_forward_mode, is_eager
from vil.kernels.mixer import without_autocast
from vil.kernels.reference import RECURRENCES

__all__ = [
    "BACKENDS",
    "RECURRENCES",
    "bidirectional_scan",
    "longhorn_scan",
    "mamba_scan",
    "use_backend",
]

# ------------------------------------------------------------------------------ public functions


def longhorn_scan(
    x: Tensor,
    beta: Tensor,
    q: Tensor,
    k: Tensor,
    D: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    recurrence: Literal["longhorn", "longhorn_exact"] = "longhorn",
    reverse: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan a sequence with the Longhorn recurrence (Longhorn paper, ICLR 2025).

    With ``eps = b / (1 + b |k|^2)`` and ``b = sigmoid(beta + bias)``, per channel i and state j::

        longhorn (Eq. 7)         S_ij <- (1 - eps_i k_j^2) S_ij + eps_i k_j x_i
        longhorn_exact (Eq. 6)   S_i  <- S_i + eps_i (x_i - k.S_i) k
        both                     y_i  =  q.S_i + D_i x_i

    Args:
        x: Values, (B, L, D), float64, float32, bfloat16 or float16, any strides.
        beta: Step size before bias and sigmoid, (B, L, D), dtype of x.
        q: Queries, (B, L, M), dtype of x.
        k: Keys, (B, L, M), dtype of x.
        D: Skip weights, (D,), dtype of x or float32; no skip if None.
        bias: Added to beta, (D,), dtype of x or float32.
        recurrence: "longhorn" (the paper's models) or "longhorn_exact" (the closed-form solution of
            Eq. 5).
        reverse: Scan from the last token to the first.
        initial_state: (B, D, M), float64 if x is, else float32; zeros if None.
        return_final_state: Return the state after the last token scanned as well.

    Returns:
        y (B, L, D) in the dtype of x, or (y, final state (B, D, M)). The state is kept in float64
        if x is float64, else in float32.

    Raises:
        TypeError: If an argument is no tensor.
        ValueError: If a shape, dtype or device disagrees, or ``recurrence`` is unknown.
    """
    if recurrence not in ("longhorn", "longhorn_exact"):
        raise ValueError(f'recurrence must be "longhorn" or "longhorn_exact", got {recurrence!r}')
    check_tensors({"x": x, "beta": beta, "q": q, "k": k}, {"D": D, "bias": bias, "initial_state": initial_state})
    tensors = (x, beta, None, q, k, D, bias, initial_state)
    y, state = _scan_one_direction(tensors, recurrence, reverse)
    return (y, state) if return_final_state else y


def mamba_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    q: Tensor,
    k: Tensor,
    D: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    reverse: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan a sequence with Mamba's selective recurrence (Mamba paper, Algorithm 2).

    With ``d = softplus(dt + bias)``, per channel i and state j::

        S_ij <- exp(d_i A_ij) S_ij + d_i k_j x_i
        y_i  =  q.S_i + D_i x_i

    Args:
        x: Values (Mamba's u), (B, L, D), float64, float32, bfloat16 or float16, any strides.
        dt: Step size (Mamba's delta) before bias and softplus, (B, L, D), dtype of x.
        A: Decay rates, (D, M), all negative, dtype of x or float32.
        q: Queries (Mamba's C), (B, L, M), dtype of x.
        k: Keys (Mamba's B), (B, L, M), dtype of x.
        D: Skip weights, (D,), dtype of x or float32; no skip if None.
        bias: Added to dt, (D,), dtype of x or float32.
        reverse: Scan from the last token to the first.
        initial_state: (B, D, M), float64 if x is, else float32; zeros if None.
        return_final_state: Return the state after the last token scanned as well.

    Returns:
        y (B, L, D) in the dtype of x, or (y, final state (B, D, M)). The state is kept in float64
        if x is float64, else in float32.

    Raises:
        TypeError: If an argument is no tensor.
        ValueError: If a shape, dtype or device disagrees.
    """
    check_tensors({"x": x, "dt": dt, "A": A, "q": q, "k": k}, {"D": D, "bias": bias, "initial_state": initial_state})
    tensors = (x, dt, A, q, k, D, bias, initial_state)
    y, state = _scan_one_direction(tensors, "mamba", reverse)
    return (y, state) if return_final_state else y


def bidirectional_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor,
    recurrence: Literal["longhorn", "longhorn_exact", "mamba"],
) -> Tensor:
    """Scan in both directions, average and gate: ``silu(z) * (y_0 + reversed scan y_1) / 2``.

    The mixer of Vision Mamba ("bimamba v2" with divided output), for any recurrence. Index 0 of
    the leading axis is scanned from the first token to the last, index 1 from the last to the
    first. Both are given, and summed, in token order.

    Args:
        x: Values, (2, B, L, D), float64, float32, bfloat16 or float16, any strides.
        dt: Step size before bias and sigmoid (Longhorn's beta) or softplus (Mamba's delta),
            (2, B, L, D), dtype of x.
        A: Decay rates, (2, D, M), dtype of x or float32: required for "mamba", None otherwise.
        q: Queries, (2, B, L, M), dtype of x.
        k: Keys, (2, B, L, M), dtype of x.
        D: Skip weights, (2, D), dtype of x or float32.
        bias: Added to dt, (2, D), dtype of x or float32.
        z: Gate before its SiLU, shared by the directions, (B, L, D), dtype of x.
        recurrence: "longhorn" (paper, Eq. 7), "longhorn_exact" (Eq. 6) or "mamba".

    Returns:
        (B, L, D) in the dtype of x, accumulated in float32 (float64 if x is).

    Raises:
        TypeError: If an argument is no tensor.
        ValueError: If a shape, dtype or device disagrees, or ``recurrence`` is unknown.
    """
    check_tensors({"x": x, "dt": dt, "q": q, "k": k, "D": D, "bias": bias, "z": z}, {"A": A})
    return _scan((x, dt, A, q, k, D, bias, z, None), recurrence, False)[0]


def _scan_one_direction(tensors: tuple[Tensor | None, ...], recurrence: str, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return y and the last state, given x, dt, A, q, k, D, bias and initial_state."""
    *tensors, state = (None if t is None else t.unsqueeze(0) for t in tensors)
    y, final, *_ = _scan((*tensors, None, state), recurrence, reverse)
    return y, final.squeeze(0)


def _scan(tensors: tuple[Tensor | None, ...], recurrence: str, reverse: bool) -> tuple[Tensor, ...]:
    """Return the outputs of ``vil::scan``, whose cost counts where a sequence is one token long.

    Calls without gradients that no compiler or transform sees bypass the operator. In forward mode,
    tensors may be dual, which the operator's plain form takes.
    """
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    inputs = (*tensors, recurrence, reverse, save)
    if in_forward_mode():
        return func_transforms.scan(*inputs)
    if torch.jit.is_tracing():  # as for ONNX with dynamo=False, which asks no fake implementation
        check_not_onnx("scan")
    if save or not is_eager(tensors[0], tensors):
        return torch.ops.vil.scan(*inputs)
    record = contextlib.nullcontext()
    if torch.autograd.profiler._is_profiler_enabled:
        record = torch.profiler.record_function("vil::scan")
    inputs = autocast.cast("scan", inputs)
    with record, without_autocast(tensors[0]):
        return registration.scan(*inputs)
