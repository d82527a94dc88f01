"""The public operations: argument checks, torch.library registration, dispatch to a backend.

Each operation is a torch.library custom operator, so that FX, TorchScript, torch.export and
torch.compile all see one opaque node instead of a loop over tokens. The checks run inside the
operator and its fake implementation alike: whoever calls it, by whatever route, gets them.
Letters: B batch, L tokens, D channels of the scan, M state size (``d_state``), K convolution width.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vil.kernels.backends import BACKENDS, backend_for, use_backend
from vil.kernels.reference import RECURRENCES

__all__ = [
    "BACKENDS",
    "RECURRENCES",
    "bidirectional_scan",
    "causal_conv1d_bidirectional",
    "longhorn_scan",
    "mamba_scan",
    "use_backend",
]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------ public functions


def longhorn_scan(
    x: Tensor,
    beta: Tensor,
    q: Tensor,
    k: Tensor,
    D: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    form: Literal["diagonal", "exact"] = "diagonal",
    reverse: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan a sequence with the Longhorn recurrence (Longhorn paper, ICLR 2025).

    With eps = b / (1 + b |k|^2) and b = sigmoid(beta + bias), per channel i and state j:

        diagonal (Eq. 7)   S_ij <- (1 - eps_i k_j^2) S_ij + eps_i k_j x_i
        exact (Eq. 6)      S_i  <- S_i + eps_i (x_i - k.S_i) k
        both               y_i  =  q.S_i + D_i x_i

    Args:
        x: Values, (B, L, D), float64, float32, bfloat16 or float16, any strides.
        beta: Step size before bias and sigmoid, (B, L, D), dtype of x.
        q: Queries, (B, L, M), dtype of x.
        k: Keys, (B, L, M), dtype of x.
        D: Skip weights, (D,), dtype of x or float32; no skip if None.
        bias: Added to beta, (D,), dtype of x or float32.
        form: "diagonal" (the paper's models) or "exact" (the closed-form solution of Eq. 5).
        reverse: Scan from the last token to the first.
        initial_state: (B, D, M), float64 if x is, else float32; zeros if None.
        return_final_state: Return the state after the last token scanned as well.

    Returns:
        y (B, L, D) in the dtype of x, or (y, final state (B, D, M)). The state is kept in float64
        if x is float64, else in float32.

    Raises:
        ValueError: A shape, dtype or device disagrees, or ``form`` is unknown.
    """
    forms = {"diagonal": "longhorn", "exact": "longhorn_exact"}
    if form not in forms:
        raise ValueError(f'form must be "diagonal" or "exact", got {form!r}')
    y, state = torch.ops.vil.scan(x, beta, None, q, k, D, bias, initial_state, forms[form], reverse)
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

    S_ij <- exp(d_i A_ij) S_ij + d_i k_j x_i,  y_i = q.S_i + D_i x_i,  d = softplus(dt + bias)

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
        ValueError: A shape, dtype or device disagrees.
    """
    y, state = torch.ops.vil.scan(x, dt, A, q, k, D, bias, initial_state, "mamba", reverse)
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
    first; both are given, and summed, in the order of the tokens.

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
        (B, L, D) in the dtype of x; everything before is accumulated in float32 (float64 if x is).

    Raises:
        ValueError: A shape, dtype or device disagrees, or ``recurrence`` is unknown.
    """
    return torch.ops.vil.bidirectional_scan(x, dt, A, q, k, D, bias, z, recurrence)


def causal_conv1d_bidirectional(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve every channel causally (index 0) and anti-causally (index 1), then SiLU.

    Args:
        x: (B, L, D), float64, float32, bfloat16 or float16, any strides.
        weight: (2, D, K), dtype of x or float32. Tap K - 1 meets the token itself and tap 0 the
            one K - 1 tokens before (index 0) or after (index 1) it.
        bias: (2, D), dtype of x or float32.

    Returns:
        (2, B, L, D) in the dtype of x.

    Raises:
        ValueError: A shape, dtype or device disagrees.
    """
    return torch.ops.vil.causal_conv1d_bidirectional(x, weight, bias)


# ---------------------------------------------------------------------------------------- checks


def _check_activation(x: Tensor, name: str, letters: str) -> None:
    if x.ndim != len(letters.split()):
        raise ValueError(f"{name} must have shape ({letters}), got {tuple(x.shape)}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name} must have one of the dtypes {_DTYPES}, got {x.dtype}")


def _check(
    tensor: Tensor, name: str, letters: str, shape: tuple[int, ...], dtypes: tuple, like: Tensor
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape ({letters}) = {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise ValueError(f"{name} must be {allowed} where x is {like.dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of x, {like.device}, got {tensor.device}")


def _parameter_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    return (x.dtype,) if x.dtype == torch.float64 else (x.dtype, torch.float32)


def _check_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    recurrence: str,
    directions: bool,
) -> None:
    if recurrence not in RECURRENCES:
        raise ValueError(f"recurrence must be one of {RECURRENCES}, got {recurrence!r}")
    lead, shape = ("2, ", (2,)) if directions else ("", ())
    _check_activation(x, "x", f"{lead}B, L, D")
    if x.shape[-2] < 1 or (directions and x.shape[0] != 2):
        raise ValueError(f"x must have shape ({lead}B, L, D) with L >= 1, got {tuple(x.shape)}")
    _check_activation(k, "k", f"{lead}B, L, M")
    channels, states, same, parameter = x.shape[-1], k.shape[-1], (x.dtype,), _parameter_dtypes(x)
    step = "dt" if recurrence == "mamba" else "beta"
    _check(dt, step, f"{lead}B, L, D", tuple(x.shape), same, x)
    _check(k, "k", f"{lead}B, L, M", (*x.shape[:-1], states), same, x)
    _check(q, "q", f"{lead}B, L, M", (*x.shape[:-1], states), same, x)
    if (A is not None) != (recurrence == "mamba"):
        raise ValueError(
            f'A must be given for recurrence "mamba" and None otherwise, got '
            f'{"None" if A is None else "a tensor"} for "{recurrence}"'
        )
    if A is not None:
        _check(A, "A", f"{lead}D, M", (*shape, channels, states), parameter, x)
    for name, tensor in (("D", D), ("bias", bias)):
        if tensor is not None:
            _check(tensor, name, f"{lead}D", (*shape, channels), parameter, x)


def _check_single(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    initial_state: Tensor | None,
    recurrence: str,
) -> None:
    _check_scan(x, dt, A, q, k, D, bias, recurrence, directions=False)
    if initial_state is not None:
        shape = (x.shape[0], x.shape[2], k.shape[2])
        _check(initial_state, "initial_state", "B, D, M", shape, (_state_dtype(x),), x)


def _check_bidirectional(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor,
    bias: Tensor,
    z: Tensor,
    recurrence: str,
) -> None:
    _check_scan(x, dt, A, q, k, D, bias, recurrence, directions=True)
    _check(z, "z", "B, L, D", tuple(x.shape[1:]), (x.dtype,), x)


def _check_conv(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    _check_activation(x, "x", "B, L, D")
    if x.shape[1] < 1:
        raise ValueError(f"x must have shape (B, L, D) with L >= 1, got {tuple(x.shape)}")
    if weight.ndim != 3 or weight.shape[-1] < 1:
        raise ValueError(f"weight must have shape (2, D, K), got {tuple(weight.shape)}")
    dtypes = _parameter_dtypes(x)
    _check(weight, "weight", "2, D, K", (2, x.shape[2], weight.shape[2]), dtypes, x)
    _check(bias, "bias", "2, D", (2, x.shape[2]), dtypes, x)


# ------------------------------------------------------------------------------------- operators


def _state_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _empty_gradients(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(inputs[0].new_empty(0) if t is None else _empty(t) for t in inputs)


def _to_operator(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Replace None, which an operator cannot return, by an empty tensor."""
    return tuple(like.new_empty(0) if g is None else g.contiguous() for g in grads)


def _from_operator(
    grads: tuple[Tensor, ...], inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else g for g, t in zip(grads, inputs, strict=True))


@torch.library.custom_op("vil::scan", mutates_args=())
def _scan(
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
    _check_single(x, dt, A, q, k, D, bias, initial_state, recurrence)
    y, state = backend_for(x.device).scan(
        x, dt, A, q, k, D, bias, initial_state, recurrence, reverse
    )
    return y.contiguous(), state.contiguous()


@_scan.register_fake
def _(x: Tensor, dt: Tensor, A: Tensor | None, q: Tensor, k: Tensor, *rest) -> tuple:
    _check_single(x, dt, A, q, k, *rest[:-1])
    state = x.new_empty((x.shape[0], x.shape[2], k.shape[2]), dtype=_state_dtype(x))
    return _empty(x), state


@torch.library.custom_op("vil::scan_backward", mutates_args=())
def _scan_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (x, dt, A, q, k, D, bias, initial_state)
    grads = backend_for(x.device).scan_backward(
        grad_y, grad_final_state, *inputs, recurrence, reverse
    )
    return _to_operator(grads, x)


@_scan_backward.register_fake
def _(grad_y: Tensor, grad_final_state: Tensor, *inputs) -> tuple[Tensor, ...]:
    return _empty_gradients(inputs[:-2])


def _scan_setup(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.recurrence, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _scan_autograd(ctx, grad_y: Tensor, grad_final_state: Tensor) -> tuple:
    inputs = ctx.saved_tensors
    grads = torch.ops.vil.scan_backward(
        grad_y, grad_final_state, *inputs, ctx.recurrence, ctx.reverse
    )
    return (*_from_operator(grads, inputs), None, None)


_scan.register_autograd(_scan_autograd, setup_context=_scan_setup)


@torch.library.custom_op("vil::bidirectional_scan", mutates_args=())
def _bidirectional_scan(
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
    _check_bidirectional(x, dt, A, q, k, D, bias, z, recurrence)
    out = backend_for(x.device).bidirectional_scan(x, dt, A, q, k, D, bias, z, recurrence)
    return out.contiguous()


@_bidirectional_scan.register_fake
def _(*inputs) -> Tensor:
    _check_bidirectional(*inputs)
    return _empty(inputs[-2])  # like z


@torch.library.custom_op("vil::bidirectional_scan_backward", mutates_args=())
def _bidirectional_scan_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (x, dt, A, q, k, D, bias, z)
    grads = backend_for(x.device).bidirectional_scan_backward(grad, *inputs, recurrence)
    return _to_operator(grads, x)


@_bidirectional_scan_backward.register_fake
def _(grad: Tensor, *inputs) -> tuple[Tensor, ...]:
    return _empty_gradients(inputs[:-1])


def _bidirectional_setup(ctx, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.recurrence = inputs
    ctx.save_for_backward(*tensors)


def _bidirectional_autograd(ctx, grad: Tensor) -> tuple:
    inputs = ctx.saved_tensors
    grads = torch.ops.vil.bidirectional_scan_backward(grad, *inputs, ctx.recurrence)
    return (*_from_operator(grads, inputs), None)


_bidirectional_scan.register_autograd(_bidirectional_autograd, setup_context=_bidirectional_setup)


@torch.library.custom_op("vil::causal_conv1d_bidirectional", mutates_args=())
def _conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    _check_conv(x, weight, bias)
    return backend_for(x.device).causal_conv1d_bidirectional(x, weight, bias).contiguous()


@_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    _check_conv(x, weight, bias)
    return x.new_empty((2, *x.shape))


@torch.library.custom_op("vil::causal_conv1d_bidirectional_backward", mutates_args=())
def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    backend = backend_for(x.device)
    return _to_operator(backend.causal_conv1d_bidirectional_backward(grad, x, weight, bias), x)


@_conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x), _empty(weight), _empty(bias)


def _conv_setup(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _conv_autograd(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.ops.vil.causal_conv1d_bidirectional_backward(grad, *ctx.saved_tensors))


_conv.register_autograd(_conv_autograd, setup_context=_conv_setup)


# ------------------------------------------------------------------------------------ FLOP counts

# Multiply-adds per token, channel and state. Diagonal and Mamba: decay times state, write, and the
# read by q, after forming the write; exact: recall k.S, write, read. Exponentials and divisions
# (one per state for Mamba, one per channel for Longhorn) are not multiply-adds and not counted.
_MACS_PER_STATE = {"longhorn": 4, "longhorn_exact": 3, "mamba": 4}


@register_flop_formula(torch.ops.vil.scan)
def _scan_flops(
    x_shape: tuple[int, ...],
    dt_shape: tuple[int, ...],
    A_shape: tuple[int, ...] | None,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    D_shape: tuple[int, ...] | None,
    bias_shape: tuple[int, ...] | None,
    initial_state_shape: tuple[int, ...] | None,
    recurrence: str,
    reverse: bool,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    B, L, D = x_shape
    skip = int(D_shape is not None)
    return 2 * B * L * D * (_MACS_PER_STATE[recurrence] * q_shape[-1] + skip)


@register_flop_formula(torch.ops.vil.bidirectional_scan)
def _bidirectional_flops(
    x_shape: tuple[int, ...],
    dt_shape: tuple[int, ...],
    A_shape: tuple[int, ...] | None,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    D_shape: tuple[int, ...],
    bias_shape: tuple[int, ...],
    z_shape: tuple[int, ...],
    recurrence: str,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    _, B, L, D = x_shape
    per_channel = 2 * (_MACS_PER_STATE[recurrence] * q_shape[-1] + 1) + 1  # skip twice, gate
    return 2 * B * L * D * per_channel


@register_flop_formula(torch.ops.vil.causal_conv1d_bidirectional)
def _conv_flops(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...], *args, out_shape=None, **kwargs
) -> int:
    B, L, D = x_shape
    return 2 * 2 * B * L * D * weight_shape[-1]
