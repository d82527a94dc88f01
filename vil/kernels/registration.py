"""The operations as torch.library operators: registration, autograd, dispatch to a backend.

FX, TorchScript, torch.export and torch.compile see one opaque node instead of a loop over tokens. Checks
run inside both the operator and its fake implementation, so every call is checked. Tensors that the
backward pass needs are additional outputs of the operator. Letters as in ``ops.py``.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import CustomOpDef

from vil.kernels import mixer, reference
from vil.kernels.args import ScanArgs, compute_dtype, kept_dtype
from vil.kernels.backends import backend_for
from vil.kernels.checks import (
    check_mixer,
    check_no_tangents,
    check_not_onnx,
    check_scan,
    in_forward_mode,
)
from vil.kernels.grid import TokenLayout, layout_of, layout_sizes
from vil.kernels.mixer import MixerParams, mixer_plan
from vil.kernels.plan import MOST_KEPT, scan_key


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
    "Tensor x, Tensor dt, Tensor? A, Tensor q, Tensor k, Tensor? D, Tensor? bias, Tensor? z, "
    "Tensor? initial_state"
)
_MIXED = (
    "Tensor xz, Tensor conv_weight, Tensor conv_bias, Tensor x_proj_weight, Tensor dt_weight, "
    "Tensor dt_bias, Tensor? A, Tensor D"
)
_GRID = (
    "SymInt[]? grid=None, Tensor? order=None, Tensor? kernel_resample=None, Tensor? cls_index=None, "
    "Tensor? cls_weight=None"
)


_CONTIGUOUS = torch.contiguous_format


def _tensors(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


def _empty_gradients(inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return uninitialised gradients for ``inputs``, empty for None."""
    like = inputs[0]
    return tuple(
        like.new_empty(0) if t is None else torch.empty_like(t, memory_format=_CONTIGUOUS)
        for t in inputs
    )


def _pack_grads(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Replace None by an empty tensor and views by copies.

    Operators cannot return None, and two outputs must not share memory. For one token of one sequence,
    dq and dk would.
    """
    return tuple(like.new_empty(0) if g is None else _own_memory(g) for g in grads)


def _own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous and fills its storage, else a contiguous copy."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes > 0
    if whole and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _unpack_grads(
    grads: tuple[Tensor, ...], inputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Undo ``_pack_grads`` for the gradients of ``inputs``."""
    return tuple(None if t is None else g for g, t in zip(grads, inputs, strict=True))


def saved_shapes(
    x: Tensor, k: Tensor, recurrence: str
) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the tensors that an operator saves: the sum of both directions, and states.

    The shapes match the Triton kernels wherever these may run, and are empty elsewhere. A compiled program needs
    the shapes before its backend is known.
    """
    N, B, L, D = x.shape
    M, exact = k.shape[3], recurrence == "longhorn_exact"
    compute = compute_dtype(x)
    if not _are_kept(x.device) or x.dtype == torch.float64:
        return ((0,), compute), ((0,), compute)
    lead = (N, B, -(-L // 16))  # chunks
    states = (*lead, D, max(16, 1 << (M - 1).bit_length())) if exact else (*lead, -(-M // 4), D, 4)
    kept = kept_dtype(x.dtype)
    return ((B, L, D) if N == 2 else (0,), kept if exact else compute), (states, kept)


def _are_kept(device: torch.device) -> bool:
    return device.type == "cuda"


def _empty_saved(x: Tensor, k: Tensor, recurrence: str, save: bool) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors of ``saved_shapes``; empty unless ``save``."""
    none = ((0,), compute_dtype(x))
    shapes = saved_shapes(x, k, recurrence) if save else (none, none)
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def _as_saved(
    y_pre_gate: Tensor | None,
    states: Tensor | None,
    x: Tensor,
    k: Tensor,
    recurrence: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return the saved outputs of an operator, given a backend's; NaN if the backend saves nothing."""
    empty = _empty_saved(x, k, recurrence, save)
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
    check_scan(args, recurrence)
    x = args.x
    plan = backend_for(x.device, x.dtype).scan_plan(scan_key(args, recurrence, reverse, 1.0))
    out, final, *saved = plan.forward(args, save and _are_kept(x.device))
    # A new empty tensor for no state: two outputs of an operator must not be the same.
    final = x.new_empty(0, dtype=compute_dtype(x)) if final is None else final
    saved = _as_saved(*saved, x, args.k, recurrence, save)
    return out.contiguous(), final.contiguous(), *saved


@_scan.register_fake
def _(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, recurrence, _, save = inputs
    args = ScanArgs(*tensors)
    check_scan(args, recurrence)
    N, B, _, D = args.x.shape
    shape = (0,) if args.z is not None else (N, B, D, args.k.shape[3])
    final = args.x.new_empty(shape, dtype=compute_dtype(args.x))
    return (
        args.x.new_empty(args.x.shape[1:]),
        final,
        *_empty_saved(args.x, args.k, recurrence, save),
    )


@_operator(
    "scan_backward",
    f"(Tensor grad, Tensor grad_final, {_SCANNED}, Tensor y_pre_gate, Tensor states, str recurrence, "
    f"bool reverse) -> {_tensors(9)}",
)
def _scan_backward(grad: Tensor, grad_final: Tensor, *inputs) -> tuple[Tensor, ...]:
    *tensors, y_pre_gate, states, recurrence, reverse = inputs
    args = ScanArgs(*tensors)
    x = args.x
    plan = backend_for(x.device, x.dtype).scan_plan(scan_key(args, recurrence, reverse, 1.0))
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
    grads = torch.ops.vil.scan_backward(
        grad, grad_final, *inputs, y_pre_gate, states, ctx.recurrence, ctx.reverse
    )
    return (*_unpack_grads(grads, inputs), None, None, None)


_scan.register_autograd(_scan_autograd, setup_context=_scan_setup)


# ------------------------------------------------------------------------------------ whole mixer


@_operator("mixer", f"({_MIXED}, str recurrence, bool save, {_GRID}) -> {_tensors(4)}")
def _mixer(
    xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, recurrence, save, *layout
) -> tuple[Tensor, ...]:
    params = MixerParams(conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D)
    layout = _layout_from(layout)
    plan = mixer_plan(xz, params, recurrence, layout)
    x, k = _scanned(xz, x_proj_weight, dt_weight)
    out, x_dbl, *saved = mixer.forward(plan, xz, params, layout, save and _are_kept(xz.device))
    saved = _as_saved(*saved, x, k, recurrence, save)
    return out, x_dbl if save else xz.new_empty(0), *saved


def _layout_from(arguments: Sequence) -> TokenLayout | None:
    return TokenLayout(*arguments) if arguments and arguments[0] is not None else None


def _scanned(xz: Tensor, x_proj_weight: Tensor, dt_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors with the shapes of the scan's x, (2, B, L, E), and keys, (2, B, L, M)."""
    B, L, width = xz.shape
    M = (x_proj_weight.shape[1] - dt_weight.shape[2]) // 2
    one = xz.new_empty(1)
    return one.expand(2, B, L, width // 2), one.expand(2, B, L, M)


@_mixer.register_fake
def _(
    xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, recurrence, save, *layout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    params = MixerParams(conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D)
    check_mixer(xz, *params, recurrence, layout[0] if layout else None)
    check_not_onnx()
    x, k = _scanned(xz, x_proj_weight, dt_weight)
    _, B, L, E = x.shape
    columns = mixer.small_columns(dt_weight.shape[2], k.shape[3])
    x_dbl = xz.new_empty((2, B * L, columns) if save else 0)
    return xz.new_empty(B, L, E), x_dbl, *_empty_saved(x, k, recurrence, save)


@_operator(
    "mixer_backward",
    f"(Tensor grad, {_MIXED}, Tensor x_dbl, Tensor y_pre_gate, Tensor states, str recurrence, "
    f"{_GRID.replace('=None', '')}) -> {_tensors(8)}",
)
def _mixer_backward(grad: Tensor, xz: Tensor, *inputs) -> tuple[Tensor, ...]:
    *params, x_dbl, y_pre_gate, states, recurrence, grid, order, taps, reads, shares = inputs
    params, layout = MixerParams(*params), _layout_from((grid, order, taps, reads, shares))
    plan = mixer_plan(xz, params, recurrence, layout)
    kept = _as_kept(y_pre_gate, states) or (None, None)
    saved = (x_dbl, *kept) if x_dbl.numel() else None
    return _pack_grads(mixer.backward(plan, grad, xz, params, layout, saved), xz)


@_mixer_backward.register_fake
def _(grad: Tensor, xz: Tensor, *inputs) -> tuple[Tensor, ...]:
    params = inputs[: len(MixerParams._fields)]
    return _empty_gradients((xz, *params))


def _mixer_setup(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.recurrence, _, ctx.grid, order, taps, reads, shares = inputs
    ctx.save_for_backward(*tensors, *output[1:], order, taps, reads, shares)
    ctx.set_materialize_grads(False)


def _mixer_autograd(ctx, grad: Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * 15
    # Read once: checkpointing counts accesses.
    *inputs, x_dbl, y_pre_gate, states, order, taps, reads, shares = ctx.saved_tensors
    layout = (ctx.grid, order, taps, reads, shares)
    if mixer.is_transformed(grad):
        grads = mixer.plain_gradients(grad, inputs, ctx.recurrence, _layout_from(layout))
    else:
        saved = (x_dbl, y_pre_gate, states)
        grads = torch.ops.vil.mixer_backward(grad, *inputs, *saved, ctx.recurrence, *layout)
        grads = _unpack_grads(grads, inputs)
    return (*grads, *(None,) * 7)


_mixer.register_autograd(_mixer_autograd, setup_context=_mixer_setup)

# --------------------------------------------------------------------------------- tokens of a grid


def _make_layout(
    grid: tuple[int, ...], taps: int, device: torch.device, pinned: bool = False
) -> TokenLayout:
    with torch.inference_mode(False):  # else training could not save tensors made in evaluation
        layout = layout_of(grid, taps, device)
        tables = (t.view(torch.int32) if t.is_floating_point() else t for t in layout[1:])
        return TokenLayout(layout.grid, *(t.pin_memory() if pinned else t for t in tables))


_recent_layout = functools.lru_cache(MOST_KEPT)(_make_layout)
# Never evicted: a recorded CUDA graph reads these tensors, or copies from them.
_gpu_layout = functools.cache(_make_layout)


def assert_grid(grid: Sequence[int], bits: Tensor) -> None:
    """Raise RuntimeError, on a GPU without waiting for it, unless (rows, columns) have these binary digits, (2, n)."""
    places = torch.arange(bits.shape[-1], device=bits.device)
    rows, columns = ((bits > 0.5).long() << places).sum(-1)
    torch._assert_async(
        (rows == grid[0]) & (columns == grid[1]),
        "ref_feat_bits has another grid than this program was made for: load weights by load_state_dict, or call "
        "the model once, and then compile, export or script it",
    )


@_operator(
    "token_layout",
    f"(SymInt[] grid, SymInt taps, Tensor like, Tensor? bits=None) -> {_tensors(4)}",
)
def _token_layout(
    grid: Sequence[int], taps: int, like: Tensor, bits: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return new copies of the tensors of ``_make_layout``; check that the weights still are of its trained grid.

    Tensors that an operator makes lie in the memory of a CUDA graph and must not outlive the call. A graph can
    record copies from pinned memory.
    """
    if bits is not None:
        assert_grid(grid[2:4], bits)
    on_gpu, cpu = like.device.type == "cuda", torch.device("cpu")
    layout = (_gpu_layout if on_gpu else _recent_layout)(tuple(grid), taps, cpu, on_gpu)
    return tuple(t.to(like.device, non_blocking=True, copy=True) for t in layout[1:])


@_token_layout.register_fake
def _(
    grid: Sequence[int], taps: int, like: Tensor, bits: Tensor | None = None
) -> tuple[Tensor, ...]:
    if all(isinstance(number, int) for number in grid):
        shapes = layout_sizes(grid, taps)
    else:
        P, T, U = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
        shapes = ((P,), (taps, T), (U,), (1, 2, taps, U))
    dtypes = (torch.int32, torch.int32, torch.int64, torch.int32)
    return tuple(like.new_empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))


def token_layout(
    grid: list[int], taps: int, like: Tensor, bits: Tensor | None = None
) -> TokenLayout:
    """Return the layout of the tokens, for all blocks of a model.

    Args:
        grid: Numbers of a ``GridSpec``.
        taps: Number of taps of the convolution.
        like: Any tensor on the device of the tokens.
        bits: Binary digits of the trained grid in the weights; a program checks them in every call.
    """
    if mixer.is_eager(like, ()):
        kept = _gpu_layout if like.device.type == "cuda" else _recent_layout
        return kept(tuple(grid), taps, like.device)
    if not torch.compiler.is_compiling() and (
        in_forward_mode() or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return layout_of(grid, taps, like.device)
    made = torch.ops.vil.token_layout(grid, taps, like.detach(), bits)
    return TokenLayout(grid, made[0], made[1], made[2], made[3])  # FX cannot iterate over ``made``
