"""The operations as torch.library operators: registration, autograd, dispatch to a backend.

FX, TorchScript, torch.export and torch.compile see one opaque node instead of a loop over tokens. The
checks run inside the operator and its fake implementation alike: whoever calls it, by whatever route,
gets them. What the backward pass needs of the forward pass are further outputs of the operator.
Letters as in ``ops.py``.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor

from vil.kernels import grid_conv, workspace
from vil.kernels.args import ScanArgs, compute_dtype
from vil.kernels.backends import backend_for
from vil.kernels.checks import (
    check_conv,
    check_mixer,
    check_positions,
    check_scan,
    refuse_onnx,
    refuse_tangents,
)
from vil.kernels.grid import Layout, layout_of, without_missing
from vil.kernels.reference import full_steps
from vil.kernels.step_area import Steps


def _operator(name: str) -> Callable[[Callable[..., object]], torch.library.CustomOpDef]:
    """Register an operator, which refuses tensors whose derivatives it would lose."""

    def register(function: Callable[..., object]) -> torch.library.CustomOpDef:
        @functools.wraps(function)
        def refusing(*arguments: object) -> object:
            refuse_tangents(name, arguments)
            return function(*arguments)

        return torch.library.custom_op(f"vil::{name}", refusing, mutates_args=())

    return register


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _empty_gradients(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Return tensors of the shapes of gradients, empty for None."""
    return tuple(inputs[0].new_empty(0) if t is None else _empty(t) for t in inputs)


def _to_operator(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Replace None, which an operator cannot return, by an empty tensor, and part by a copy.

    Two outputs must not share memory, as dq and dk of one token of one sequence would.
    """
    return tuple(like.new_empty(0) if g is None else _of_its_own(g) for g in grads)


def _of_its_own(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous and all that is in its memory, else a copy that is."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes > 0
    if whole and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _from_operator(
    grads: tuple[Tensor, ...], inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Undo ``_to_operator`` for the gradients of ``inputs``."""
    return tuple(None if t is None else g for g, t in zip(grads, inputs, strict=True))


def _run_scan(
    args: ScanArgs, recurrence: str, reverse: bool, save: bool, key_norm: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a backend's ``scan``: out, the last state of one direction, y_sum and states.

    The last two are for the backward pass, if ``save`` and the backend saves anything. What is not there is
    an empty tensor.
    """
    x = args.x
    backend = backend_for(x.device, x.dtype)
    save = save and backend.saved(x, args.k, recurrence) is not None
    out, *others = backend.scan(args, recurrence, reverse, key_norm, save)
    # An empty tensor for each, since two outputs of an operator must not be the same.
    final, y_sum, states = (
        x.new_empty(0, dtype=compute_dtype(x)) if t is None else t for t in others
    )
    return out.contiguous(), final.contiguous(), y_sum, states


def _empty_saved(x: Tensor, k: Tensor, recurrence: str, save: bool) -> tuple[Tensor, Tensor]:
    """Return tensors such as ``_run_scan`` gives for y_sum and states."""
    saved = backend_for(x.device, x.dtype).saved(x, k, recurrence) if save else None
    if saved is None:
        saved = (((0,), compute_dtype(x)),) * 2
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in saved)


def _scan_gradients(
    args: ScanArgs,
    grad: Tensor,
    grad_final: Tensor | None,
    y_sum: Tensor,
    states: Tensor,
    recurrence: str,
    reverse: bool,
    key_norm: float = 1.0,
) -> ScanArgs:
    """Return a backend's gradients of ``scan``, from what was saved if anything was."""
    saved = (y_sum if y_sum.numel() else None, states) if states.numel() else None
    backend = backend_for(args.x.device, args.x.dtype)
    return backend.scan_backward(args, grad, grad_final, recurrence, reverse, key_norm, saved)


@_operator("scan")
def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    recurrence: str,
    reverse: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = ScanArgs(x, dt, A, q, k, D, bias, z, initial_state)
    check_scan(args, recurrence)
    return _run_scan(args, recurrence, reverse, save)


@_scan.register_fake
def _(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args, (recurrence, _, save) = ScanArgs(*inputs[:9]), inputs[9:]
    check_scan(args, recurrence)
    N, B, _, D = args.x.shape
    shape = (0,) if args.z is not None else (N, B, D, args.k.shape[3])
    final = args.x.new_empty(shape, dtype=compute_dtype(args.x))
    return (
        args.x.new_empty(args.x.shape[1:]),
        final,
        *_empty_saved(args.x, args.k, recurrence, save),
    )


@_operator("scan_backward")
def _scan_backward(
    grad: Tensor,
    grad_final: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    D: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    y_sum: Tensor,
    states: Tensor,
    recurrence: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    args = ScanArgs(x, dt, A, q, k, D, bias, z, initial_state)
    grad_final = grad_final if z is None else None
    grads = _scan_gradients(args, grad, grad_final, y_sum, states, recurrence, reverse)
    return _to_operator(grads[:9], x)


@_scan_backward.register_fake
def _(grad: Tensor, grad_final: Tensor, *inputs) -> tuple[Tensor, ...]:
    return _empty_gradients(inputs[:9])


def _scan_setup(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.recurrence, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.of_final = output[1].new_empty(()).expand(output[1].shape)
    ctx.set_materialize_grads(False)  # or zeros were made for y_sum and states


def _scan_autograd(ctx, grad: Tensor | None, grad_final: Tensor | None, *_: None) -> tuple:
    if grad is None and grad_final is None:
        return (None,) * 12
    *inputs, y_sum, states = ctx.saved_tensors
    grad = inputs[0].new_zeros(inputs[0].shape[1:]) if grad is None else grad
    grad_final = torch.zeros_like(ctx.of_final) if grad_final is None else grad_final
    grads = torch.ops.vil.scan_backward(
        grad, grad_final, *inputs, y_sum, states, ctx.recurrence, ctx.reverse
    )
    return (*_from_operator(grads, tuple(inputs)), None, None, None)


_scan.register_autograd(_scan_autograd, setup_context=_scan_setup)


@_operator("causal_conv1d_bidirectional")
def _conv(x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None) -> Tensor:
    check_conv(x, weight, bias, order)
    check_positions(order, x.shape[1])
    backend = backend_for(x.device, x.dtype)
    return backend.causal_conv1d_bidirectional(x, weight, bias, order).contiguous()


@_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None) -> Tensor:
    check_conv(x, weight, bias, order)
    return x.new_empty((2, *x.shape))


@_operator("causal_conv1d_bidirectional_backward")
def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    backend = backend_for(x.device, x.dtype)
    grads = backend.causal_conv1d_bidirectional_backward(grad, x, weight, bias, order)
    return _to_operator(grads, x)


@_conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x), _empty(weight), _empty(bias)


def _conv_setup(ctx, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _conv_autograd(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.vil.causal_conv1d_bidirectional_backward(grad, *ctx.saved_tensors)
    return (*grads, None)


_conv.register_autograd(_conv_autograd, setup_context=_conv_setup)

# ------------------------------------------------------------------------------------ whole mixer
#
# The token mixer between its two outer projections: convolution, projections to step sizes, keys and
# queries, scan and gate. One operator, because what its backward pass needs is more than what it is
# cheapest to keep: the input, the small projections and the states of the scan are saved; the
# convolution and the step sizes, each as large as the input, are computed again, as in Mamba's fused
# block. Of tokens on another grid than the trained one, ``grid.py`` says what changes. E channels of the
# scan, R rank of the step size.


def project(x: Tensor, x_proj_weight: Tensor) -> Tensor:
    """Return raw step sizes of rank R, keys and queries of (2, B, L, E): (2, B L, R + 2 M)."""
    return torch.bmm(x.flatten(1, 2), x_proj_weight.to(x.dtype).mT)


def split(projected: Tensor, dt_weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``project`` made of x: step sizes of rank R, (2, B, L, R), queries and keys."""
    rank = dt_weight.shape[-1]
    states = (projected.shape[-1] - rank) // 2
    low, k, q = projected.split([rank, states, states], dim=-1)
    low, q, k = (part.unflatten(1, x.shape[1:3]) for part in (low, q, k))
    return low, q, k


def _lent(backend: ModuleType) -> AbstractContextManager[None]:
    """Return the context in which a backend that keeps a workspace, as on CPUs, hands it out."""
    return getattr(backend, "lent", nullcontext)()


_layout_of = functools.lru_cache(64)(layout_of)  # the same for every block


def _layout(
    grid: Sequence[int] | None, taps: int, device: torch.device, valid: Tensor | None
) -> Layout:
    layout = _layout_of(None if grid is None else tuple(grid), taps, device)
    return layout if valid is None else without_missing(layout, valid, grid[8])


@_operator("mixer")
def _mixer(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj_weight: Tensor,
    dt_weight: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    recurrence: str,
    save: bool,
    grid: Sequence[int] | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_mixer(
        xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, recurrence, grid, valid
    )  # fmt: skip
    x, z = xz.chunk(2, dim=-1)
    backend = backend_for(x.device, x.dtype)
    layout = _layout(grid, conv_weight.shape[2], x.device, valid)
    steps = Steps(x_proj_weight, dt_weight, A, recurrence, layout.area)
    with torch.autocast(x.device.type, enabled=False), _lent(backend):
        x = grid_conv.forward(backend, x, conv_weight, conv_bias, layout)
        projected = project(x, steps.x_proj_weight)
        low, q, k = split(projected, dt_weight, x)
        args = ScanArgs(x, low, steps.A, q, k, D, dt_bias, z, dt_weight=dt_weight)
        out, _, y_sum, states = _run_scan(args, recurrence, False, save, steps.key_norm)
    return out, projected if save else x.new_empty(0), y_sum, states


@_mixer.register_fake
def _(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_mixer(*inputs[:9], *inputs[10:])
    refuse_onnx()
    xz, _, _, x_proj_weight, dt_weight = inputs[:5]
    recurrence, save = inputs[8:10]
    B, L, E = *xz.shape[:2], xz.shape[2] // 2
    columns = x_proj_weight.shape[1]
    x = xz.new_empty(2, B, L, E)
    k = xz.new_empty(2, B, L, (columns - dt_weight.shape[-1]) // 2)
    projected = xz.new_empty((2, B * L, columns) if save else 0)
    return xz.new_empty(B, L, E), projected, *_empty_saved(x, k, recurrence, save)


@_operator("mixer_backward")
def _mixer_backward(
    grad: Tensor,
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj_weight: Tensor,
    dt_weight: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    projected: Tensor,
    y_sum: Tensor,
    states: Tensor,
    recurrence: str,
    grid: Sequence[int] | None,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, z = xz.chunk(2, dim=-1)
    backend = backend_for(x.device, x.dtype)
    layout = _layout(grid, conv_weight.shape[2], x.device, valid)
    steps = Steps(x_proj_weight, dt_weight, A, recurrence, layout.area)
    with torch.autocast(x.device.type, enabled=False), _lent(backend):
        convolved = grid_conv.forward(backend, x, conv_weight, conv_bias, layout)
        if not projected.numel():
            projected = project(convolved, steps.x_proj_weight)
        low, q, k = split(projected, dt_weight, convolved)
        dt = full_steps(low, dt_weight, workspace.bmm)
        args = ScanArgs(convolved, dt, steps.A, q, k, D, dt_bias, z)
        grads = _scan_gradients(args, grad, None, y_sum, states, recurrence, False, steps.key_norm)
        ddt = grads.dt.flatten(1, 2)
        d_low = torch.bmm(ddt, dt_weight.to(ddt.dtype))
        d_dt_weight = torch.bmm(ddt.mT, low.flatten(1, 2))
        d_projected = torch.cat((d_low, grads.k.flatten(1, 2), grads.q.flatten(1, 2)), dim=-1)
        d_x_proj_weight = torch.bmm(d_projected.mT, convolved.flatten(1, 2))
        dx = grads.x.flatten(1, 2)
        dx = dx.baddbmm_(d_projected, steps.x_proj_weight.to(dx.dtype))
        dx, d_conv_weight, d_conv_bias = grid_conv.backward(
            backend, dx.view(convolved.shape), x, conv_weight, conv_bias, layout
        )
    gradients = (
        torch.cat((dx, grads.z), dim=-1),
        d_conv_weight,
        d_conv_bias,
        steps.undo_x_proj(d_x_proj_weight.to(x_proj_weight.dtype)),
        d_dt_weight.to(dt_weight.dtype),
        grads.bias,
        steps.undo_A(grads.A),
        grads.D,
    )
    return _to_operator(gradients, xz)


@_mixer_backward.register_fake
def _(grad: Tensor, *inputs) -> tuple[Tensor, ...]:
    return _empty_gradients(inputs[:8])


def _mixer_setup(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.recurrence, _, ctx.grid, valid = inputs[8:]
    ctx.save_for_backward(*inputs[:8], *output[1:], valid)
    ctx.set_materialize_grads(False)


def _mixer_autograd(ctx, grad: Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * 12
    *inputs, valid = ctx.saved_tensors
    grads = torch.ops.vil.mixer_backward(grad, *inputs, ctx.recurrence, ctx.grid, valid)
    return (*_from_operator(grads, tuple(inputs[:8])), *(None,) * 4)


_mixer.register_autograd(_mixer_autograd, setup_context=_mixer_setup)
