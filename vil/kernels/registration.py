"""The operations as torch.library operators: registration, autograd, dispatch to a backend.

FX, TorchScript, torch.export and torch.compile see one opaque node instead of a loop over tokens.
Checks run inside both the operator and its fake implementation, so every call is checked. Tensors
that the backward pass needs are additional outputs of the operator. Letters as in ``ops.py``.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import CustomOpDef

from vil.kernels import mixer, reference
from vil.kernels.backends import backend_for, operator_saves
from vil.kernels.checks import (
    check_mixer,
    check_no_tangents,
    check_not_onnx,
    check_scan,
)
from vil.kernels.interface import SavedShapes, ScanArgs, ScanPlan, compute_dtype, scan_key
from vil.kernels.mixer import MixerParams, mixer_plan
from vil.kernels.order import Order
from vil.kernels.plan import MAX_KEPT, kept_plans


def _operator(name: str, schema: str) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Register an operator that rejects dual tensors, whose tangents it would lose."""

    def register(function: Callable[..., object]) -> CustomOpDef:
        @functools.wraps(function)
        def checked(*arguments: object) -> object:
            check_no_tangents(name, arguments)
            return function(*arguments)

        return torch.library.custom_op(f"vil::{name}", checked, mutates_args=(), schema=schema)

    return register


_SCANNED = (
    "Tensor x, Tensor dt, Tensor? A, Tensor q, Tensor k, Tensor? D, Tensor? bias, Tensor? z, Tensor? initial_state"
)
_MIXED = (
    "Tensor xz, Tensor conv_weight, Tensor conv_bias, Tensor x_proj_weight, Tensor dt_weight, "
    "Tensor dt_bias, Tensor? A, Tensor D"
)
_ORDERED = "Tensor? cls_weight{0}, Tensor? order{0}, Tensor? cls_index{0}, SymInt[2] tokens_per_ref{1}"


_CONTIGUOUS = torch.contiguous_format


def _tensors(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


def _empty_gradients(inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return uninitialised gradients for ``inputs``, empty for None."""
    like = inputs[0]
    return tuple(like.new_empty(0) if t is None else torch.empty_like(t, memory_format=_CONTIGUOUS) for t in inputs)


def _pack_grads(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Replace None by an empty tensor and views by copies.

    Operators cannot return None, and two outputs must not share memory. For one token of one
    sequence, dq and dk would.
    """
    return tuple(like.new_empty(0) if g is None else _own_memory(g) for g in grads)


def _own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous and fills its storage, else a contiguous copy."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes > 0
    if whole and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _unpack_grads(grads: tuple[Tensor, ...], inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Undo ``_pack_grads`` for the gradients of ``inputs``."""
    return tuple(None if t is None else g for g, t in zip(grads, inputs, strict=True))


def _empty_saved(like: Tensor, shapes: SavedShapes | None) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors for what an operator saves; empty if it saves nothing."""
    if shapes is None:
        return tuple(like.new_empty(0, dtype=compute_dtype(like)) for _ in range(2))
    return tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def _as_saved(
    y_pre_gate: Tensor | None, states: Tensor | None, like: Tensor, shapes: SavedShapes | None
) -> tuple[Tensor, Tensor]:
    """Return the saved outputs of an operator: a backend's, or NaN if it saves nothing."""
    empty = _empty_saved(like, shapes)
    if states is None:
        return tuple(t.fill_(torch.nan) for t in empty)
    return empty[0] if y_pre_gate is None else y_pre_gate, states


def _as_kept(y_pre_gate: Tensor, states: Tensor) -> tuple[Tensor | None, Tensor] | None:
    """Convert the saved outputs of an operator to the argument ``saved`` of a backend."""
    if not states.numel():
        return None
    return y_pre_gate if y_pre_gate.numel() else None, states


@_operator("scan", f"({_SCANNED}, str recurrence, bool reverse, bool save) -> {_tensors(4)}")
def _scan(*inputs) -> tuple[Tensor, ...]:
    *tensors, recurrence, reverse, save = inputs
    args = ScanArgs(*tensors)
    plan, x = _scan_plan(args, recurrence, reverse), args.x
    shapes = _scan_saves(args, recurrence) if save else None
    out, final, *saved = plan.forward(args, shapes is not None)
    # A new empty tensor for no state: two outputs of an operator must not be the same.
    final = x.new_empty(0, dtype=compute_dtype(x)) if final is None else final
    return out.contiguous(), final.contiguous(), *_as_saved(*saved, x, shapes)


def scan(*inputs) -> tuple[Tensor, Tensor | None]:
    """Return the output and the last state of ``vil::scan``, without a gradient."""
    *tensors, recurrence, reverse, _ = inputs
    args = ScanArgs(*tensors)
    out, final, *_ = _scan_plan(args, recurrence, reverse).forward(args)
    return out.contiguous(), None if final is None else final.contiguous()


_scan_plans: dict[tuple, ScanPlan] = kept_plans()


def _scan_plan(args: ScanArgs, recurrence: str, reverse: bool) -> ScanPlan:
    """Return the plan of a scan; arguments like those of an earlier call are not checked again."""
    x = args.x
    backend = backend_for(x.device, x.dtype)
    tensors = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in args]
    key = (backend, recurrence, reverse, *tensors)
    plan = _scan_plans.get(key)
    if plan is None:
        check_scan(args, recurrence)
        plan = backend.scan_plan(scan_key(args, recurrence, reverse, 1.0))
        if len(_scan_plans) >= MAX_KEPT:
            _scan_plans.clear()
        _scan_plans[key] = plan
    return plan


def _scan_saves(args: ScanArgs, recurrence: str) -> SavedShapes | None:
    x = args.x
    return operator_saves(x.device, tuple(x.shape), args.k.shape[3], recurrence, x.dtype)


@_scan.register_fake
def _(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, recurrence, _, save = inputs
    args = ScanArgs(*tensors)
    check_scan(args, recurrence)
    check_not_onnx("scan")
    x, shapes = args.x, _scan_saves(args, recurrence) if save else None
    N, B, _, D = x.shape
    shape = (0,) if args.z is not None else (N, B, D, args.k.shape[3])
    final = x.new_empty(shape, dtype=compute_dtype(x))
    return x.new_empty(x.shape[1:]), final, *_empty_saved(x, shapes)


@_operator(
    "scan_backward",
    f"(Tensor grad, Tensor grad_final, {_SCANNED}, Tensor y_pre_gate, Tensor states, "
    f"str recurrence, bool reverse) -> {_tensors(9)}",
)
def _scan_backward(grad: Tensor, grad_final: Tensor, *inputs) -> tuple[Tensor, ...]:
    *tensors, y_pre_gate, states, recurrence, reverse = inputs
    args = ScanArgs(*tensors)
    x = args.x
    plan = _scan_plan(args, recurrence, reverse)
    of_final = grad_final if args.z is None else None
    grads = plan.backward(args, grad, of_final, _as_kept(y_pre_gate, states))
    return _pack_grads(grads[: len(tensors)], x)


@_scan_backward.register_fake
def _(grad: Tensor, grad_final: Tensor, *inputs) -> tuple[Tensor, ...]:
    *tensors, _, _, _, _ = inputs
    return _empty_gradients(tensors)


def _scan_setup(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.recurrence, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.of_final = output[1].new_empty(()).expand(output[1].shape)
    ctx.set_materialize_grads(False)  # no zeros for y_pre_gate and states


def _scan_autograd(ctx, grad: Tensor | None, grad_final: Tensor | None, *_: None) -> tuple:
    if grad is None and grad_final is None:
        return (None,) * 12
    *inputs, y_pre_gate, states = ctx.saved_tensors
    grad = inputs[0].new_zeros(inputs[0].shape[1:]) if grad is None else grad
    grad_final = torch.zeros_like(ctx.of_final) if grad_final is None else grad_final
    if mixer.is_transformed(grad):

        def outputs(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
            out, final, *_ = reference.scan(ScanArgs(*tensors), ctx.recurrence, ctx.reverse)
            return out, out.new_empty(0, dtype=grad_final.dtype) if final is None else final

        return (*reference.gradients(outputs, inputs, (grad, grad_final)), None, None, None)
    grads = torch.ops.vil.scan_backward(grad, grad_final, *inputs, y_pre_gate, states, ctx.recurrence, ctx.reverse)
    return (*_unpack_grads(grads, inputs), None, None, None)


_scan.register_autograd(_scan_autograd, setup_context=_scan_setup)


# ------------------------------------------------------------------------------------ whole mixer


@_operator(
    "mixer",
    f"({_MIXED}, str recurrence, bool save, {_ORDERED.format('=None', '=1')}) -> {_tensors(4)}",
)
def _mixer(xz: Tensor, *inputs) -> tuple[Tensor, ...]:
    params, recurrence, save, order = mixer.arguments(inputs)
    plan = mixer_plan(xz, params, recurrence, order)
    shapes = _mixer_saves(xz, params, recurrence) if save else None
    out, x_dbl, *saved = mixer.forward(plan, xz, params, order, shapes is not None)
    return out, x_dbl if save else xz.new_empty(0), *_as_saved(*saved, xz, shapes)


def _mixer_saves(xz: Tensor, params: MixerParams, recurrence: str) -> SavedShapes | None:
    B, L, width = xz.shape
    M = (params.x_proj_weight.shape[1] - params.dt_weight.shape[2]) // 2
    return operator_saves(xz.device, (2, B, L, width // 2), M, recurrence, xz.dtype)


@_mixer.register_fake
def _(xz: Tensor, *inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    params, recurrence, save, order = mixer.arguments(inputs)
    check_mixer(xz, *params, recurrence, order.order, order.cls_index)
    check_not_onnx("mixer")
    B, L, width = xz.shape
    shapes = _mixer_saves(xz, params, recurrence) if save else None
    rows = params.x_proj_weight.shape[1]
    x_dbl = xz.new_empty((2, B * L, mixer.small_columns(rows)) if save else 0)
    return xz.new_empty(B, L, width // 2), x_dbl, *_empty_saved(xz, shapes)


@_operator(
    "mixer_backward",
    f"(Tensor grad, {_MIXED}, Tensor x_dbl, Tensor y_pre_gate, Tensor states, str recurrence, "
    f"{_ORDERED.format('', '')}) -> {_tensors(9)}",
)
def _mixer_backward(grad: Tensor, xz: Tensor, *inputs) -> tuple[Tensor, ...]:
    *params, x_dbl, y_pre_gate, states, recurrence, cls_weight, order, reads, ratio = inputs
    params, order = MixerParams(*params, cls_weight), Order(order, reads, ratio)
    plan = mixer_plan(xz, params, recurrence, order)
    kept = _as_kept(y_pre_gate, states) or (None, None)
    saved = (x_dbl, *kept) if x_dbl.numel() else None
    return _pack_grads(mixer.backward(plan, grad, xz, params, order, saved), xz)


@_mixer_backward.register_fake
def _(grad: Tensor, xz: Tensor, *inputs) -> tuple[Tensor, ...]:
    *params, _, _, _, _, cls_weight, _, _, _ = inputs
    return _empty_gradients((xz, *params, cls_weight))


def _mixer_setup(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.recurrence, _, cls_weight, order, reads, ctx.tokens_per_ref = inputs
    ctx.save_for_backward(*tensors, cls_weight, *output[1:], order, reads)
    ctx.set_materialize_grads(False)


def _mixer_autograd(ctx, grad: Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * 14
    # Read once: checkpointing counts accesses.
    *inputs, x_dbl, y_pre_gate, states, order, reads = ctx.saved_tensors
    order = Order(order, reads, ctx.tokens_per_ref)
    if mixer.is_transformed(grad):
        grads = mixer.plain_gradients(grad, inputs, ctx.recurrence, order)
    else:
        saved = (x_dbl, y_pre_gate, states)
        *tensors, cls_weight = inputs
        grads = torch.ops.vil.mixer_backward(grad, *tensors, *saved, ctx.recurrence, cls_weight, *order)
        grads = _unpack_grads(grads, inputs)
    *grads, d_cls_weight = grads
    return (*grads, None, None, d_cls_weight, None, None, None)


_mixer.register_autograd(_mixer_autograd, setup_context=_mixer_setup)
