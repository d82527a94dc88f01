"""The token mixer between its two outer projections, shared by the operator, eager calls and torch.func.

The mixer is a convolution, projections to step sizes, keys and queries, a scan and a gate. It saves the input, the
small projections and the states of the scan for the backward pass. The convolution and the step sizes, each as large
as the input, are recomputed, as in Mamba's fused block. ``grid.py`` handles grids that differ from the trained one.
The small projections of a token are its key, its query, and its step size of low rank. Zeros pad them to a multiple of 8
columns, because matrix products on a GPU are several times slower with unaligned columns.

Letters as in ``args.py``; E channels of the scan, K taps, P columns of the small projections.
"""

import contextlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.kernels import grid as grids
from vil.kernels import reference
from vil.kernels.args import ScanArgs
from vil.kernels.backends import backend_for
from vil.kernels.checks import check_mixer, in_forward_mode
from vil.kernels.grid import DtScale, GridSpec, TokenLayout
from vil.kernels.plan import ConvKey, ScanKey, plans

Saved = tuple[Tensor, Tensor | None, Tensor | None]
"""The small projections, (2, B L, P), and, if the backend keeps them, the sum of both directions and states."""


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


def small_columns(rank: int, states: int) -> int:
    """Return the number of columns P of the small projections."""
    return math.ceil((2 * states + rank) / 8) * 8


class MixerKey(NamedTuple):
    """Everything that a ``MixerPlan`` depends on."""

    backend: ModuleType
    recurrence: str
    shape: tuple[int, ...]
    """Shape of xz, (B, L, 2 E)."""
    strides: tuple[int, ...]
    aligned: bool
    dtype: torch.dtype
    device: torch.device
    params: tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...]
    grid: tuple[int, ...] | None
    """Grid of the layout; None without a layout."""
    positions: int
    """Positions in the order; 0 without one."""
    taps: int
    """Resampled taps; 0 without resampling."""


class MixerPlan:
    """Mixer prepared for arguments of given shapes, strides, dtypes and grid.

    Args:
        key: Description of the arguments.
    """

    def __init__(self, key: MixerKey) -> None:
        params = (None if p is None else _Described(*p) for p in key.params)
        check_mixer(_Described(key.shape, key.dtype, key.device), *params, key.recurrence, key.grid)
        (B, L, width), half = key.shape, key.strides
        (_, columns, E), _, _ = key.params[2]
        R = key.params[3][0][2]
        M = (columns - R) // 2
        self.key, self.sizes = key, (B, L, R, M)
        self.tokens_per_ref = 1.0 if key.grid is None else GridSpec(*key.grid).tokens_per_ref
        taps, positions = key.taps or key.params[0][0][2], key.positions or None
        self.writes_halves = key.backend.writes_halves
        one = (L * width, width, 1) if self.writes_halves else None
        of_x = (taps, positions, key.aligned, key.dtype, key.device)
        self.conv = key.backend.conv_plan(ConvKey((B, L, E), half, *of_x, dx=one))
        self.columns = small_columns(R, M)
        x_dbl = (B * L * self.columns, L * self.columns, self.columns, 1)
        kappa_scale = DtScale.kappa_scale_of(key.recurrence, self.tokens_per_ref)
        strides = (self.conv.out_strides, x_dbl, x_dbl, x_dbl, half)
        described = ScanKey(
            key.recurrence, False, kappa_scale, (2, B, L, E), M, R, strides, False, key.dtype, key.device, one
        )  # fmt: skip
        self.scan = key.backend.scan_plan(described)
        self.arena = getattr(key.backend, "arena", contextlib.nullcontext)


class _Described(NamedTuple):
    """Stand-in for a tensor, with the attributes that the checks read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        return len(self.shape)


_plan_of = plans(MixerPlan)


def mixer_plan(
    xz: Tensor,
    params: MixerParams,
    recurrence: str,
    layout: TokenLayout | None = None,
    backend: ModuleType | None = None,
) -> MixerPlan:
    """Return the plan for the arguments. Arguments without a cached plan are checked first.

    Args:
        xz: Input, (B, L, 2 E).
        params: Parameters of the mixer.
        recurrence: One of ``RECURRENCES``.
        layout: Layout of the tokens; None to convolve them in sequence order.
        backend: Backend module; if None, chosen by device and dtype.

    Raises:
        ValueError, NotImplementedError: If an argument is invalid, or the backend does not support it.
    """
    chosen, aligned = backend, True
    if backend is None:
        chosen = backend_for(xz.device, xz.dtype)
        aligned = xz.data_ptr() % (2 * xz.element_size()) == 0
    key = MixerKey(
        chosen, recurrence, tuple(xz.shape), xz.stride(), aligned, xz.dtype, xz.device,
        tuple(None if p is None else (p.shape, p.dtype, p.device) for p in params),
        *((None, 0, 0) if layout is None else _sizes(layout)),
    )  # fmt: skip
    return _plan_of(key)


def _sizes(layout: TokenLayout) -> tuple[tuple[int, ...], int, int]:
    return tuple(layout.grid), layout.order.shape[0], layout.kernel_resample.shape[1]


# -------------------------------------------------------------------------- forward and backward pass


def scan_args(
    plan: MixerPlan,
    xz: Tensor,
    params: MixerParams,
    layout: TokenLayout | None,
    x_dbl: Tensor | None = None,
) -> tuple[ScanArgs, Tensor]:
    """Return the arguments of the scan, with low-rank step sizes, and the small projections, unless given."""
    x, z = xz.chunk(2, dim=-1)
    convolved = grids.conv_forward(plan.conv, x, params.conv_weight, params.conv_bias, layout)
    steps = _steps(plan, params)
    if x_dbl is None:
        made = _small_weight(plan, steps.x_proj_weight, convolved.dtype)
        x_dbl = torch.bmm(convolved.flatten(1, 2), made.mT)
    dt_low, q, k = _parts(plan, x_dbl)
    D, bias, dt_weight = params.D, params.dt_bias, params.dt_weight
    return ScanArgs(convolved, dt_low, steps.A, q, k, D, bias, z, dt_weight=dt_weight), x_dbl


def forward(
    plan: MixerPlan, xz: Tensor, params: MixerParams, layout: TokenLayout | None, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the output, (B, L, E), and the tensors of ``Saved``; without ``save``, the last two are None."""
    with _as_given(xz), plan.arena():
        args, x_dbl = scan_args(plan, xz, params, layout)
        out, _, y_pre_gate, states = plan.scan.forward(args, save)
    return out, x_dbl, y_pre_gate, states


def backward(
    plan: MixerPlan,
    grad: Tensor,
    xz: Tensor,
    params: MixerParams,
    layout: TokenLayout | None,
    saved: Saved | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients for xz and the parameters.

    Args:
        plan: Same as in ``forward``.
        grad: Gradient of the output, (B, L, E).
        xz: Same as in ``forward``.
        params: Same as in ``forward``.
        layout: Same as in ``forward``.
        saved: Tensors that ``forward`` returned after the output. The scan runs again if it saved nothing.
    """
    conv_weight, conv_bias, x_proj_weight, dt_weight = params[:4]
    steps, dxz, dx, dz = _steps(plan, params), None, None, None
    if plan.writes_halves:
        dxz = torch.empty(xz.shape, dtype=xz.dtype, device=xz.device)
        dx, dz = dxz.chunk(2, dim=-1)
    with _as_given(xz), plan.arena():
        x_dbl = None if saved is None else saved[0]
        args, x_dbl = scan_args(plan, xz, params, layout, x_dbl)
        kept = None if saved is None or saved[2] is None else saved[1:]
        grads = plan.scan.backward(args, grad, None, kept, dz)
        x, tokens, ddt = xz.chunk(2, dim=-1)[0], args.x.flatten(1, 2), grads.dt.flatten(1, 2)
        _, _, R, M = plan.sizes
        padding = (0, plan.columns - 2 * M - R)
        d_low = torch.bmm(ddt, F.pad(dt_weight.to(ddt.dtype), padding))
        d_dt_weight = _sum_over_tokens(ddt, x_dbl[..., 2 * M :])[..., :R].contiguous()
        dx_dbl = torch.cat((grads.k.flatten(1, 2), grads.q.flatten(1, 2), d_low), dim=-1)
        d_made = _sum_over_tokens(dx_dbl, tokens)
        d_x_proj_weight = torch.cat((d_made[:, 2 * M : 2 * M + R], d_made[:, : 2 * M]), 1)
        made = _small_weight(plan, steps.x_proj_weight, xz.dtype)
        d_convolved = grads.x.flatten(1, 2).baddbmm_(dx_dbl, made).view(2, *x.shape)
        dx, d_conv_weight, d_conv_bias = grids.conv_backward(
            plan.conv, d_convolved, x, conv_weight, conv_bias, layout, dx
        )
        if dxz is None:
            dxz = torch.cat((dx, grads.z), dim=-1)
    return (
        dxz,
        d_conv_weight,
        d_conv_bias,
        steps.undo_x_proj(d_x_proj_weight.to(x_proj_weight.dtype)),
        d_dt_weight.to(dt_weight.dtype),
        grads.bias,
        steps.undo_A(grads.A),
        grads.D,
    )


def _steps(plan: MixerPlan, params: MixerParams) -> DtScale:
    recurrence, tokens_per_ref = plan.key.recurrence, plan.tokens_per_ref
    return DtScale(params.x_proj_weight, params.dt_weight, params.A, recurrence, tokens_per_ref)


def _parts(plan: MixerPlan, x_dbl: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return low-rank step sizes, (2, B, L, R), queries and keys, (2, B, L, M)."""
    B, L, R, M = plan.sizes
    parts = x_dbl.view(2, B, L, plan.columns)
    return parts.narrow(3, 2 * M, R), parts.narrow(3, M, M), parts.narrow(3, 0, M)


def _small_weight(plan: MixerPlan, x_proj_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x_proj_weight``, (2, R + 2 M, E), with its rows in the order of the small projections, (2, P, E)."""
    _, _, R, M = plan.sizes
    made = x_proj_weight.new_empty((2, plan.columns, x_proj_weight.shape[2]), dtype=dtype)
    made[:, : 2 * M] = x_proj_weight[:, R:]
    made[:, 2 * M : 2 * M + R] = x_proj_weight[:, :R]
    made[:, 2 * M + R :] = 0
    return made


def _sum_over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums over tokens, (2, C, D), of the products of columns (2, B L, C) and (2, B L, D).

    cuBLAS divides such a long sum among processors for one matrix, but not for a batch of two.
    """
    if a.device.type != "cuda":
        return torch.bmm(a.mT, b)
    half = a.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None
    wide = {"out_dtype": torch.float32} if half else {}
    return torch.stack([torch.mm(x.mT, y, **wide) for x, y in zip(a, b, strict=True)])


def _as_given(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast, in which products keep the dtype of their operands."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return _NOTHING


_NOTHING = contextlib.nullcontext()

# ------------------------------------------------------------------------------------ function transforms


def plain(xz: Tensor, params: MixerParams, recurrence: str, layout: TokenLayout | None) -> Tensor:
    """Return the output by ``reference.py``, in operations that PyTorch can transform."""
    plan = mixer_plan(xz, params, recurrence, layout, backend=reference)
    return forward(plan, xz, params, layout, False)[0]


def plain_gradients(
    grad: Tensor, inputs: Sequence[Tensor | None], recurrence: str, layout: TokenLayout | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``plain`` for xz and the parameters, which PyTorch can transform again."""

    def output(xz: Tensor, *params: Tensor | None) -> Tensor:
        return plain(xz, MixerParams(*params), recurrence, layout)

    return reference.gradients(output, inputs, grad)


def is_transformed(grad: Tensor) -> bool:
    """Return whether gradients are to be differentiated again, or come in batches (``is_grads_batched``)."""
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad)


# ---------------------------------------------------------------------------------------- eager calls
#
# A registered operator is visible to compilers, exporters and transforms, but calling it costs more than all the
# Python code here. Calls that none of these tools sees bypass the operator.


def is_eager(xz: Tensor, params: MixerParams) -> bool:
    """Return whether only autograd and profilers see a call: plain tensors on a CPU or GPU."""
    return (
        type(xz) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not in_forward_mode()
        and xz.device.type in ("cpu", "cuda")
        and _PLAIN.issuperset(map(type, params))
    )


_PLAIN = {torch.nn.Parameter, Tensor, type(None)}


def run(
    xz: Tensor, params: MixerParams, recurrence: str, save: bool, layout: TokenLayout | None
) -> Tensor:
    """Return the first output of ``vil::mixer``, for a call that ``is_eager`` accepts."""
    if torch.is_autocast_enabled(xz.device.type) and xz.dtype != torch.float64:
        xz = xz.to(torch.get_autocast_dtype(xz.device.type))
    plan = mixer_plan(xz, params, recurrence, layout)
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function("vil::mixer"):
            return _run(plan, xz, params, layout, save)
    return _run(plan, xz, params, layout, save)


def _run(
    plan: MixerPlan, xz: Tensor, params: MixerParams, layout: TokenLayout | None, save: bool
) -> Tensor:
    if torch.is_grad_enabled():
        for tensor in (xz, *params):
            if tensor is not None and tensor.requires_grad:
                return _Mixer.apply(plan, layout, save, xz, *params)
    return forward(plan, xz, params, layout, False)[0]


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: MixerPlan,
        layout: TokenLayout | None,
        save: bool,
        xz: Tensor,
        *params: Tensor | None,
    ) -> Tensor:
        out, *saved = forward(plan, xz, MixerParams(*params), layout, save)
        ctx.plan, ctx.layout, ctx.saves = plan, layout, save
        ctx.save_for_backward(xz, *params, *(saved if save else (None,) * 3))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, x_dbl, y_pre_gate, states = ctx.saved_tensors
        xz, params = inputs[0], MixerParams(*inputs[1:])
        if is_transformed(grad):
            grads = plain_gradients(grad, inputs, ctx.plan.key.recurrence, ctx.layout)
        elif not is_eager(grad, params):
            nothing = grad.new_empty(0)
            saved = (nothing if t is None else t for t in (x_dbl, y_pre_gate, states))
            grads = torch.ops.vil.mixer_backward(
                grad, *inputs, *saved, ctx.plan.key.recurrence, *(ctx.layout or (None,) * 5)
            )
            grads = (None if t is None else g for t, g in zip(inputs, grads, strict=True))
        else:
            saved = (x_dbl, y_pre_gate, states) if ctx.saves else None
            grads = backward(ctx.plan, grad, xz, params, ctx.layout, saved)
        return (None, None, None, *grads)
