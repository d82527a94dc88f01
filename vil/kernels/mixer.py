"""The token mixer between its outer projections, for the operator, eager calls and torch.func.

The mixer is a convolution, projections to step sizes, keys and queries, a scan and a gate. It saves
the input, the small projections and the states of the scan for the backward pass. The convolution
and the step sizes, each as large as the input, are recomputed, as in Mamba's fused block.
Parameters that depend on the size of an image are given as that size needs them (``vil/sizes.py``),
so nothing here knows of grids but an order of the tokens. The small projections of a token are its
key, its query, and its step size of low rank. Zeros pad them to a multiple of 8 columns, because
matrix products on a GPU are several times slower with unaligned columns.

Letters as in ``args.py``; E channels of the scan, K taps, P columns of the small projections.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.kernels import reference
from vil.kernels.backends import backend_for
from vil.kernels.checks import check_mixer, is_eager
from vil.kernels.interface import Backend, ConvKey, ScanArgs, ScanKey
from vil.kernels.order import SEQUENCE, Order, conv_backward, conv_forward, kappa_scale
from vil.kernels.plan import MAX_KEPT, kept_plans

Saved = tuple[Tensor, Tensor | None, Tensor | None]
"""Small projections, (2, B L, P), and, if the backend saves them, sum of directions and states."""


class MixerParams(NamedTuple):
    """Parameters of the mixer, in the order of the operator's arguments."""

    conv_weight: Tensor
    """(2, E, K)."""
    conv_bias: Tensor
    """(2, E)."""
    x_proj_weight: Tensor
    """(2, R + 2 M, E)."""
    dt_weight: Tensor
    """(2, E, R)."""
    dt_bias: Tensor
    """(2, E)."""
    A: Tensor | None
    """(2, E, M)."""
    D: Tensor
    """(2, E)."""
    cls_weight: Tensor | None = None
    """Weights of the tokens that the class token reads, (2, U, E), if the order lacks it."""


def arguments(inputs: Sequence[Any]) -> tuple[MixerParams, str, bool, Order]:
    """Return the arguments of ``vil::mixer`` after the first."""
    *tensors, recurrence, save = inputs[:9]
    cls_weight, *order = inputs[9:] or (None,)
    return MixerParams(*tensors, cls_weight), recurrence, save, Order(*order)


def small_columns(rows: int) -> int:
    """Return the number of columns P of the small projections, for the rows of their weight."""
    return math.ceil(rows / 8) * 8


class MixerPlan:
    """Mixer prepared for arguments of the same shapes, strides, dtypes and length of the order.

    Args:
        backend: Backend of the convolution and the scan.
        xz: Input, (B, L, 2 E); the plan keeps no tensor.
        params: Parameters of the mixer.
        recurrence: One of ``RECURRENCES``.
        order: Order of the tokens.
        aligned: Whether the input begins at a multiple of two elements.

    Raises:
        ValueError, NotImplementedError: If an argument is invalid, or the backend does not support
            it.
    """

    def __init__(
        self,
        backend: Backend,
        xz: Tensor,
        params: MixerParams,
        recurrence: str,
        order: Order,
        aligned: bool,
    ) -> None:
        check_mixer(xz, *params, recurrence, order.order, order.cls_index)
        B, L, width = xz.shape
        _, E, taps = params.conv_weight.shape
        R = params.dt_weight.shape[2]
        M = (params.x_proj_weight.shape[1] - R) // 2
        self.recurrence, self.sizes = recurrence, (B, L, R, M)
        self.columns = small_columns(R + 2 * M)
        positions = None if order.order is None else len(order.order)
        self.kappa_scale = kappa_scale(recurrence, order.tokens_per_ref)
        self.writes_halves = backend.writes_halves
        one = (L * width, width, 1) if self.writes_halves else None
        dtype, device, half = xz.dtype, xz.device, xz.stride()
        self.conv = backend.conv_plan(ConvKey((B, L, E), half, taps, positions, aligned, dtype, device, dx=one))
        x_dbl = (B * L * self.columns, L * self.columns, self.columns, 1)
        strides = (self.conv.out_strides, x_dbl, x_dbl, x_dbl, half)
        self.scan = backend.scan_plan(
            ScanKey(
                recurrence, False, self.kappa_scale, (2, B, L, E), M, R, strides, False, dtype,
                device, one, self.columns,
            )
        )  # fmt: skip
        self.arena, self.small_weights = backend.arena, backend.small_weights


_NOTHING = contextlib.nullcontext()
_plans: dict[tuple, MixerPlan] = kept_plans()


def mixer_plan(
    xz: Tensor,
    params: MixerParams,
    recurrence: str,
    order: Order = SEQUENCE,
    backend: Backend | None = None,
) -> MixerPlan:
    """Return the plan for the arguments; same arguments and errors as ``MixerPlan``.

    Without ``backend``, device and dtype choose it.
    """
    aligned = True
    if backend is None:
        backend = backend_for(xz.device, xz.dtype)
        aligned = xz.data_ptr() % (2 * xz.element_size()) == 0
    key = (
        *(backend, recurrence, xz.shape, xz.stride(), aligned, xz.dtype, xz.device),
        *[None if p is None else (p.shape, p.dtype, p.device) for p in params],
    )
    positions = None if order.order is None else len(order.order)
    key += (positions, *order.tokens_per_ref)
    plan = _plans.get(key)
    if plan is None:
        plan = MixerPlan(backend, xz, params, recurrence, order, aligned)
        if len(_plans) >= MAX_KEPT:
            _plans.clear()
        _plans[key] = plan
    return plan


# ------------------------------------------------------------------------ forward and backward pass


def scan_args(
    plan: MixerPlan,
    xz: Tensor,
    params: MixerParams,
    order: Order,
    x_dbl: Tensor | None = None,
) -> tuple[ScanArgs, Tensor, Tensor]:
    """Return the arguments of the scan, with low-rank step sizes, the small projections and their weight."""
    B, L, R, M = plan.sizes
    x, z = xz.chunk(2, dim=-1)
    convolved = conv_forward(plan.conv, x, params.conv_weight, params.conv_bias, order, params.cls_weight)
    weight, dt_weight = plan.small_weights(params.x_proj_weight, params.dt_weight, plan.columns, convolved.dtype)
    if x_dbl is None:
        x_dbl = torch.bmm(convolved.flatten(1, 2), weight.mT)
    parts = x_dbl.view(2, B, L, plan.columns)
    dt_low, q, k = parts.narrow(3, 2 * M, R), parts.narrow(3, M, M), parts.narrow(3, 0, M)
    args = ScanArgs(convolved, dt_low, params.A, q, k, params.D, params.dt_bias, z, dt_weight=dt_weight)
    return args, x_dbl, weight


def forward(
    plan: MixerPlan, xz: Tensor, params: MixerParams, order: Order, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the output, (B, L, E), and ``Saved``, whose last two are None without ``save``."""
    with without_autocast(xz), plan.arena:
        args, x_dbl, _ = scan_args(plan, xz, params, order)
        out, _, y_pre_gate, states = plan.scan.forward(args, save)
    return out, x_dbl, y_pre_gate, states


def backward(
    plan: MixerPlan,
    grad: Tensor,
    xz: Tensor,
    params: MixerParams,
    order: Order,
    saved: Saved | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients for xz and the parameters.

    Args:
        plan: Same as in ``forward``.
        grad: Gradient of the output, (B, L, E).
        xz: Same as in ``forward``.
        params: Same as in ``forward``.
        order: Same as in ``forward``.
        saved: Tensors that ``forward`` returned after the output. The scan runs again if it saved
            nothing.
    """
    conv_weight, conv_bias, x_proj_weight, dt_weight = params[:4]
    dxz = dx = dz = None
    if plan.writes_halves:
        dxz = torch.empty(xz.shape, dtype=xz.dtype, device=xz.device)
        dx, dz = dxz.chunk(2, dim=-1)
    with without_autocast(xz), plan.arena:
        x_dbl = None if saved is None else saved[0]
        args, x_dbl, small_weight = scan_args(plan, xz, params, order, x_dbl)
        kept = None if saved is None or saved[2] is None else saved[1:]
        B, L, R, M = plan.sizes
        x, tokens = xz.chunk(2, dim=-1)[0], args.x.flatten(1, 2)
        if plan.scan.writes_small:
            dx_dbl = torch.empty_like(x_dbl)
            small = dx_dbl.view(2, B, L, plan.columns)
            grads = plan.scan.backward(args, grad, None, kept, dz, small)
            d_dt_weight = grads.dt_weight
        else:
            grads = plan.scan.backward(args, grad, None, kept, dz)
            ddt, padding = grads.dt.flatten(1, 2), (0, plan.columns - 2 * M - R)
            d_low = torch.bmm(ddt, F.pad(args.dt_weight, padding))
            d_dt_weight = _sum_over_tokens(ddt, x_dbl[..., 2 * M :])[..., :R].contiguous()
            dx_dbl = torch.cat((grads.k.flatten(1, 2), grads.q.flatten(1, 2), d_low), dim=-1)
        d_small_weight = _sum_over_tokens(dx_dbl, tokens)
        d_x_proj_weight = torch.cat((d_small_weight[:, 2 * M : 2 * M + R], d_small_weight[:, : 2 * M]), 1)
        d_convolved = grads.x.flatten(1, 2).baddbmm_(dx_dbl, small_weight).view(2, *x.shape)
        dx, d_conv_weight, d_conv_bias, d_cls_weight = conv_backward(
            plan.conv, d_convolved, x, conv_weight, conv_bias, order, params.cls_weight, dx
        )
        if dxz is None:
            dxz = torch.cat((dx, grads.z), dim=-1)
    return (
        dxz,
        d_conv_weight,
        d_conv_bias,
        d_x_proj_weight.to(x_proj_weight.dtype),
        d_dt_weight.to(dt_weight.dtype),
        grads.bias,
        grads.A,
        grads.D,
        d_cls_weight,
    )


def _sum_over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums over tokens, (2, C, D), of the products of (2, B L, C) and (2, B L, D).

    cuBLAS divides such a long sum among processors for one matrix, but not for a batch of two.
    """
    if a.device.type != "cuda":
        return torch.bmm(a.mT, b)
    half = a.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None
    wide = {"out_dtype": torch.float32} if half else {}
    return torch.stack([torch.mm(x.mT, y, **wide) for x, y in zip(a, b, strict=True)])


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast, in which products keep the dtype of their operands."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return _NOTHING


# ------------------------------------------------------------------------------ function transforms


def plain(xz: Tensor, params: MixerParams, recurrence: str, order: Order) -> Tensor:
    """Return the output by ``reference.py``, in operations that PyTorch can transform."""
    plan = mixer_plan(xz, params, recurrence, order, backend=reference)
    return forward(plan, xz, params, order, False)[0]


def plain_gradients(
    grad: Tensor, inputs: Sequence[Tensor | None], recurrence: str, order: Order
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``plain``, which PyTorch can transform again."""

    def output(xz: Tensor, *params: Tensor | None) -> Tensor:
        return plain(xz, MixerParams(*params), recurrence, order)

    return reference.gradients(output, inputs, grad)


def is_transformed(grad: Tensor) -> bool:
    """Return whether gradients are differentiated again, or batched (``is_grads_batched``)."""
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad)


# -------------------------------------------------------------------------------------- eager calls


def run(xz: Tensor, params: MixerParams, recurrence: str, save: bool, order: Order = SEQUENCE) -> Tensor:
    """Return the first output of ``vil::mixer``, for a call that ``is_eager`` accepts."""
    if torch.is_autocast_enabled(xz.device.type) and xz.dtype != torch.float64:
        xz = xz.to(torch.get_autocast_dtype(xz.device.type))
    plan = mixer_plan(xz, params, recurrence, order)
    record = _NOTHING
    if torch.autograd.profiler._is_profiler_enabled:
        record = torch.profiler.record_function("vil::mixer")
    with record:
        if torch.is_grad_enabled():
            for tensor in (xz, *params):
                if tensor is not None and tensor.requires_grad:
                    return _Mixer.apply(plan, order, save, xz, *params)
        return forward(plan, xz, params, order, False)[0]


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: MixerPlan,
        order: Order,
        save: bool,
        xz: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        out, *saved = forward(plan, xz, MixerParams(*params), order, save)
        ctx.plan, ctx.order, ctx.saves = plan, order, save
        ctx.save_for_backward(xz, *params, *(saved if save else (None,) * 3))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, x_dbl, y_pre_gate, states = ctx.saved_tensors
        xz, params = inputs[0], MixerParams(*inputs[1:])
        if is_transformed(grad):
            grads = plain_gradients(grad, inputs, ctx.plan.recurrence, ctx.order)
        elif not is_eager(grad, params):
            nothing = grad.new_empty(0)
            saved = (nothing if t is None else t for t in (x_dbl, y_pre_gate, states))
            grads = torch.ops.vil.mixer_backward(
                grad, *inputs[:-1], *saved, ctx.plan.recurrence, inputs[-1], *ctx.order
            )
            grads = (None if t is None else g for t, g in zip(inputs, grads, strict=True))
        else:
            saved = (x_dbl, y_pre_gate, states) if ctx.saves else None
            grads = backward(ctx.plan, grad, xz, params, ctx.order, saved)
        return (None, None, None, *grads)
