"""Every recurrence of this library, defined once in plain PyTorch.

This is the definition that all faster backends are tested against. It runs on any device, is
differentiable by autograd, and computes in float64 for float64 inputs and in float32 otherwise.
Letters: B batch, L tokens, D channels of the scan, M state size (``d_state``), K convolution width.

Per batch element, channel i, token t and state j, with queries q and keys k shared by all channels:

    longhorn        S_ij <- (1 - eps_i k_j^2) S_ij + eps_i k_j x_i      Longhorn paper, Eq. 7
    longhorn_exact  S_i  <- S_i + eps_i (x_i - k.S_i) k                 Longhorn paper, Eq. 6
                    eps = beta / (1 + beta |k|^2),  beta = sigmoid(dt + bias)
    mamba           S_ij <- exp(dt_i A_ij) S_ij + dt_i k_j x_i          Mamba paper, Algorithm 2
                    dt = softplus(raw dt + bias),  A < 0,  k is Mamba's B and q its C
    all             y_i  =  q.S_i + D_i x_i
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.kernels.interface import ConvKey, ScanArgs, ScanKey, ScanResult, compute_dtype

RECURRENCES = ("longhorn", "longhorn_exact", "mamba")


def step_size(dt: Tensor, k: Tensor, bias: Tensor | None, recurrence: str, kappa_scale: float = 1.0) -> Tensor:
    """Return eps (Longhorn paper, Theorem 3.1) or softplus(dt + bias) (Mamba).

    Args:
        dt: Raw step size, (..., D).
        k: Keys, (..., M).
        bias: Added to dt, (D,) or broadcastable to it.
        recurrence: One of ``RECURRENCES``.
        kappa_scale: Factor of |k|^2 in eps. Mamba's step size has no such term.

    Returns:
        (..., D); for Longhorn in [0, 1).
    """
    v = dt if bias is None else dt + bias
    if recurrence == "mamba":
        return F.softplus(v)
    # Not beta / (1 + beta kappa): the terms of its gradient cancel for long keys. Bounded so that
    # gradients are finite.
    exp_minus_v = torch.exp((-v).clamp(max=0.9 * math.log(torch.finfo(v.dtype).max)))
    return 1 / (1 + kappa_scale * k.square().sum(-1, keepdim=True) + exp_minus_v)


def advance(
    state: Tensor, x: Tensor, step: Tensor, A: Tensor | None, q: Tensor, k: Tensor, recurrence: str
) -> tuple[Tensor, Tensor]:
    """Update the state with one token and read it: the three recurrences at the top of this file.

    Args:
        state: (..., D, M).
        x: Values of the token, (..., D).
        step: eps (Longhorn) or dt after its softplus (Mamba), (..., D).
        A: (..., D, M), for ``mamba`` only.
        q: Query of the token, (..., M).
        k: Key of the token, (..., M).
        recurrence: One of ``RECURRENCES``.

    Returns:
        The new state, (..., D, M), and the values that the query reads from it, (..., D).
    """
    q, k, x, step = q.unsqueeze(-2), k.unsqueeze(-2), x.unsqueeze(-1), step.unsqueeze(-1)
    if recurrence == "longhorn":
        state = (1 - step * k.square()) * state + step * x * k
    elif recurrence == "longhorn_exact":
        state = state + step * (x - (k * state).sum(-1, keepdim=True)) * k
    else:
        state = torch.exp(step * A) * state + step * x * k
    return state, (q * state).sum(-1)


def scan(
    args: ScanArgs,
    recurrence: str,
    reverse: bool = False,
    kappa_scale: float = 1.0,
    save: bool = False,
) -> ScanResult:
    """Scan one direction, or scan both, average and gate: silu(z) (y0 + y1) / 2.

    The second form is Vision Mamba's bidirectional composition ("v2" with divided output), for any
    recurrence.

    Args:
        args: Tensors of the scan.
        recurrence: One of ``RECURRENCES``.
        reverse: Scan a single direction from the last token to the first.
        kappa_scale: Same as in ``step_size``.
        save: Also return tensors for the backward pass; this backend saves none.

    Returns:
        The output, (B, L, D), in the dtype of x. For one direction, the last state, (1, B, D, M),
        in ``compute_dtype``, else None. Two tensors for the backward pass, or None.
    """
    args = args._replace(dt=dt_proj(args.dt, args.dt_weight), dt_weight=None)
    raised = args.to(compute_dtype(args.x))
    if args.z is None:
        y, state = _scan_direction(raised, 0, recurrence, reverse, kappa_scale)
        return y.to(args.x.dtype), state[None], None, None
    y_pre_gate = 0
    for direction in (0, 1):
        y_pre_gate = y_pre_gate + _scan_direction(raised, direction, recurrence, direction == 1, kappa_scale)[0]
    return (F.silu(raised.z) * y_pre_gate / 2).to(args.x.dtype), None, None, None


def _scan_direction(
    args: ScanArgs, direction: int, recurrence: str, reverse: bool, kappa_scale: float
) -> tuple[Tensor, Tensor]:
    """Return y (B, L, D) and the last state (B, D, M) of one direction."""
    x, dt, A, q, k, D, bias, _, state, _ = args
    x, dt, q, k = (t[direction] for t in (x, dt, q, k))
    A, D, bias, state = (None if t is None else t[direction] for t in (A, D, bias, state))
    step = step_size(dt, k, bias, recurrence, kappa_scale)
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], k.shape[2])
    outputs = [x[:, 0]] * x.shape[1]  # every entry is replaced
    tokens = range(x.shape[1])
    for t in reversed(tokens) if reverse else tokens:
        state, outputs[t] = advance(state, x[:, t], step[:, t], A, q[:, t], k[:, t], recurrence)
    y = torch.stack(outputs, 1)
    return y if D is None else y + D * x, state


def scan_backward(
    args: ScanArgs,
    grad: Tensor,
    grad_final: Tensor | None,
    recurrence: str,
    reverse: bool = False,
    kappa_scale: float = 1.0,
    saved: tuple[Tensor | None, Tensor] | None = None,
) -> ScanArgs:
    """Return the gradients of ``scan``.

    Args:
        args: Same as in ``scan``. With ``dt_weight``, the gradient for dt is still (N, B, L, D), of
            full rank.
        grad: Gradient of the output, (B, L, D).
        grad_final: Gradient of the last state, (1, B, D, M), for one direction.
        recurrence: Same as in ``scan``.
        reverse: Same as in ``scan``.
        kappa_scale: Same as in ``scan``.
        saved: Tensors that ``scan`` saved; not used here. Other backends scan again without them.
    """
    args = args._replace(dt=dt_proj(args.dt, args.dt_weight), dt_weight=None)
    grads = (grad,) if args.z is not None else (grad, grad_final)

    def outputs(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return scan(ScanArgs(*tensors), recurrence, reverse, kappa_scale)[: len(grads)]

    return ScanArgs(*gradients(outputs, args, grads))


class ScanPlan(NamedTuple):
    """Scan for a ``ScanKey``; prepares nothing."""

    key: ScanKey
    writes_small = False

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the result of ``scan``."""
        key = self.key
        return scan(args, key.recurrence, key.reverse, key.kappa_scale, save)

    def backward(
        self,
        args: ScanArgs,
        grad: Tensor,
        grad_final: Tensor | None,
        saved: tuple[Tensor | None, Tensor] | None = None,
        dz: None = None,
        small: None = None,
    ) -> ScanArgs:
        """Return the result of ``scan_backward``."""
        key = self.key
        return scan_backward(args, grad, grad_final, key.recurrence, key.reverse, key.kappa_scale)


def dt_proj(dt_low: Tensor, dt_weight: Tensor | None) -> Tensor:
    """Return raw step sizes (N, B, L, D), rounded to the dtype of ``dt_low``.

    Args:
        dt_low: Step sizes of rank R, (N, B, L, R), or in full, (N, B, L, D).
        dt_weight: Projection, (N, D, R); None if ``dt_low`` is in full.
    """
    if dt_weight is None:
        return dt_low
    dt = torch.bmm(dt_low.flatten(1, 2), dt_weight.to(dt_low.dtype).mT)
    return dt.reshape(*dt_low.shape[:3], dt.shape[2])


def small_weights(x_proj_weight: Tensor, dt_weight: Tensor, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights that give the small projections and step sizes, in a dtype.

    Args:
        x_proj_weight: Rows for step sizes of rank R, keys and queries, (2, R + 2 M, E).
        dt_weight: Projection of the step sizes, (2, E, R).
        columns: Number of columns P of the small projections.
        dtype: Dtype of both results.

    Returns:
        The first with rows for keys, queries and step sizes, then zeros, (2, P, E), and the second.
    """
    R = dt_weight.shape[2]
    M = (x_proj_weight.shape[1] - R) // 2
    weight = x_proj_weight.new_empty((2, columns, x_proj_weight.shape[2]), dtype=dtype)
    weight[:, : 2 * M] = x_proj_weight[:, R:]
    weight[:, 2 * M : 2 * M + R] = x_proj_weight[:, :R]
    weight[:, 2 * M + R :] = 0
    return weight, dt_weight.to(dtype)


def causal_conv1d_bidirectional(x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None) -> Tensor:
    """Convolve every channel causally (index 0) and anti-causally (index 1), then apply SiLU.

    Index 1 is the causal convolution of the reversed sequence, reversed back: its tap K - 1 meets
    token t and tap 0 meets token t + K - 1 (Vision Mamba's ``conv1d`` and ``conv1d_b``).

    With an ``order``, the convolution runs over P positions, and a token gets the result at its
    position. A position holds a token t >= 0 or is empty (-1), which counts as zeros. A token has
    at most one position. Without one, its result and gradient are zeros here, and other backends do
    not write them. K - 1 empty positions separate sequences that must not read from each other.

    Args:
        x: Input, (B, L, D).
        weight: Taps of the two directions, (2, D, K).
        bias: Bias, (2, D).
        order: Token at each position, int32 (P,); None for sequence order.

    Returns:
        (2, B, L, D) in the dtype of x.
    """
    if order is not None:
        return _convolve_in_order(x, weight, bias, order)
    dtype = compute_dtype(x)
    x_c, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    length, taps = x.shape[1], weight.shape[-1]
    padded = F.pad(x_c, (0, 0, taps - 1, taps - 1))
    out = [bias[0].expand_as(x_c), bias[1].expand_as(x_c)]
    for tap in range(taps):
        ahead = 2 * (taps - 1) - tap
        out[0] = out[0] + weight[0, :, tap] * padded[:, tap : tap + length]
        out[1] = out[1] + weight[1, :, tap] * padded[:, ahead : ahead + length]
    return F.silu(torch.stack(out)).to(x.dtype)


def _convolve_in_order(x: Tensor, weight: Tensor, bias: Tensor, order: Tensor) -> Tensor:
    nobody = x.shape[1]  # row that empty positions read as zeros and write to
    order = order.to(torch.int64)
    token = torch.where(order < 0, nobody, order)
    read = F.pad(x, (0, 0, 0, 1))[:, token]
    y = causal_conv1d_bidirectional(read, weight, bias)
    y = torch.where((order >= 0)[:, None], y, 0)
    out = y.new_zeros(2, x.shape[0], nobody + 1, x.shape[2])
    return out.index_copy(2, token, y)[:, :, :-1]


# Keys of torch.func, which PyTorch excludes below a dispatch mode such as FlopCounterMode.
_TRANSFORMS = (
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode,
    torch._C.DispatchKey.FuncTorchGradWrapper,
)


def gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grad: Tensor | tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradient for each input (None for None), by autograd through ``function``."""
    present = [i for i, tensor in enumerate(inputs) if tensor is not None]

    def of_present(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        filled = list(inputs)
        for i, tensor in zip(present, tensors, strict=True):
            filled[i] = tensor
        return function(*filled)

    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _TRANSFORMS:
        excluded = excluded.remove(key)
    grads: list[Tensor | None] = [None] * len(inputs)
    # Use torch.func: torch.autograd.grad is disabled inside the implementation of a custom
    # operator.
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        _, pull_back = torch.func.vjp(of_present, *(inputs[i] for i in present))
        for i, g in zip(present, pull_back(grad), strict=True):
            grads[i] = g.clone()  # g may be the incoming gradient, which an operator must not return
    return tuple(grads)


def causal_conv1d_bidirectional_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``causal_conv1d_bidirectional`` for x, weight and bias."""
    return gradients(lambda *tensors: causal_conv1d_bidirectional(*tensors, order), (x, weight, bias), grad)


class ConvPlan(NamedTuple):
    """Convolution for a ``ConvKey``; prepares nothing."""

    key: ConvKey | None = None
    out_strides = ()
    """Strides of the result; empty, because this backend does not fix them."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None) -> Tensor:
        """Return the result of ``causal_conv1d_bidirectional``."""
        return causal_conv1d_bidirectional(x, weight, bias, order)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        order: Tensor | None = None,
        dx: None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return the result of ``causal_conv1d_bidirectional_backward``."""
        return causal_conv1d_bidirectional_backward(grad, x, weight, bias, order)


# ------------------------------------------------------------------------ as ``interface.Backend``

scan_plan, conv_plan = ScanPlan, ConvPlan
writes_halves, arena = False, contextlib.nullcontext()
