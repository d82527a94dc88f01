"""Argument checks of the operators; errors name the argument, its value and the requirement."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vil.kernels.interface import ScanArgs, compute_dtype
from vil.kernels.reference import RECURRENCES

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def in_forward_mode() -> bool:
    """Return whether a level of torch.autograd.forward_ad is active, where tensors may be dual."""
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Return whether torch.func transforms the call, or a level of forward_ad is active."""
    return in_forward_mode() or torch._C._functorch.peek_interpreter_stack() is not None


_PLAIN = {torch.nn.Parameter, Tensor, type(None)}


def is_eager(x: Tensor, others: Sequence[Tensor | None] = ()) -> bool:
    """Return whether only autograd and profilers see a call: plain tensors on a CPU or GPU.

    A registered operator is visible to compilers, exporters and transforms, but calling it costs more
    than all the Python code around a backend. Calls that none of these tools sees bypass it.
    """
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not in_forward_mode()
        and x.device.type in ("cpu", "cuda")
        and _PLAIN.issuperset(map(type, others))
    )


@torch.jit.unused
def is_exporting() -> bool:
    """Return whether torch.export runs in this thread.

    Until PyTorch 2.11, ``torch.compiler.is_exporting`` is also true within torch.compile. In all
    versions it is also true in other threads, which compute as always: they trace nothing.
    """
    return torch.compiler._is_exporting_flag and (
        torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
    )


def check_no_tangents(name: str, arguments: tuple[object, ...]) -> None:
    """Check that no argument has a tangent, which an operator's implementation would lose.

    Raises:
        NotImplementedError: If an argument has a tangent.
    """
    if in_forward_mode() and any(
        isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in arguments
    ):
        raise NotImplementedError(
            f"vil::{name} does not support forward-mode AD in direct calls, or in scripted, "
            "compiled or exported models; call the original model, or use torch.func.jvp"
        )


@torch.jit.unused
def check_not_onnx(name: str) -> None:
    """Check that no ONNX export is running, because ONNX has none of this library's operators.

    Fake implementations call this. Exports of a traced program call none, so mixers and scans ask
    while they are traced.

    Args:
        name: Name of the operator: "mixer" or "scan".

    Raises:
        RuntimeError: If an ONNX export is running.
    """
    if torch.onnx.is_in_onnx_export():
        if name == "scan":
            raise RuntimeError(
                "ONNX has no operator vil::scan: of the scans only those inside the library's models can be "
                "exported to ONNX; save your own model with torch.export"
            )
        raise RuntimeError(
            "ONNX has no operator vil::mixer: create the model with exportable=True, call its "
            "eval(), and give it to torch.onnx.export with dynamo=True"
        )


def check_tensors(required: dict[str, object], optional: dict[str, object]) -> None:
    """Check that arguments, by name, are tensors; optional ones may also be None.

    Raises:
        TypeError: If an argument is something else.
    """
    for arguments, allowed in ((required, "a torch.Tensor"), (optional, "a torch.Tensor or None")):
        for name, value in arguments.items():
            if not isinstance(value, Tensor) and (value is not None or arguments is required):
                raise TypeError(f"{name} must be {allowed}, got {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 and value is not None else type(value).__name__


def _check_activation(x: Tensor, name: str, letters: str) -> None:
    if x.ndim != len(letters.split()):
        raise ValueError(f"{name} must have shape ({letters}), got {tuple(x.shape)}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name} must have one of the dtypes {_DTYPES}, got {x.dtype}")


def _check(tensor: Tensor, name: str, letters: str, shape: tuple[int, ...], dtypes: tuple, like: Tensor) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape ({letters}) = {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise ValueError(f"{name} must be {allowed} where x is {like.dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of x, {like.device}, got {tensor.device}")


def _parameter_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    return (x.dtype,) if x.dtype == torch.float64 else (x.dtype, torch.float32)


def check_recurrence(recurrence: str, A: Tensor | None) -> None:
    """Raise ValueError unless the recurrence is known and A is given for Mamba only."""
    if recurrence not in RECURRENCES:
        raise ValueError(f"recurrence must be one of {RECURRENCES}, got {recurrence!r}")
    if (A is not None) != (recurrence == "mamba"):
        raise ValueError(
            f'A must be given for recurrence "mamba" and None otherwise, got '
            f'{"None" if A is None else "a tensor"} for "{recurrence}"'
        )


def check_scan(args: ScanArgs, recurrence: str) -> None:
    """Raise ValueError for invalid arguments of a scan; one direction has no axis in messages."""
    check_recurrence(recurrence, args.A)
    both = args.z is not None
    lead, N = ("2, ", (2,)) if both else ("", ())
    if not both:
        args = ScanArgs(*(None if t is None else t.squeeze(0) for t in args))
    x, dt, A, q, k, D, bias, z, initial_state, _ = args
    _check_activation(x, "x", f"{lead}B, L, D")
    if x.shape[-2] < 1 or (both and x.shape[0] != 2):
        raise ValueError(f"x must have shape ({lead}B, L, D) with L >= 1, got {tuple(x.shape)}")
    _check_activation(k, "k", f"{lead}B, L, M")
    if k.shape[-1] < 1:
        raise ValueError(f"k must have shape ({lead}B, L, M) with M >= 1, got {tuple(k.shape)}")
    channels, states, same, parameter = x.shape[-1], k.shape[-1], (x.dtype,), _parameter_dtypes(x)
    step = "dt" if recurrence == "mamba" else "beta"
    _check(dt, step, f"{lead}B, L, D", tuple(x.shape), same, x)
    _check(k, "k", f"{lead}B, L, M", (*x.shape[:-1], states), same, x)
    _check(q, "q", f"{lead}B, L, M", (*x.shape[:-1], states), same, x)
    if A is not None:
        _check(A, "A", f"{lead}D, M", (*N, channels, states), parameter, x)
    for name, tensor in (("D", D), ("bias", bias)):
        if tensor is not None:
            _check(tensor, name, f"{lead}D", (*N, channels), parameter, x)
    if z is not None:
        _check(z, "z", "B, L, D", tuple(x.shape[1:]), same, x)
    if initial_state is not None:
        shape = (*N, x.shape[-3], channels, states)
        _check(initial_state, "initial_state", f"{lead}B, D, M", shape, (compute_dtype(x),), x)


def check_mixer(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj_weight: Tensor,
    dt_weight: Tensor,
    dt_bias: Tensor,
    A: Tensor | None,
    D: Tensor,
    cls_weight: Tensor | None,
    recurrence: str,
    order: Tensor | None,
    cls_index: Tensor | None,
) -> None:
    """Raise ValueError for invalid arguments of ``vil::mixer``."""
    check_recurrence(recurrence, A)
    _check_activation(xz, "xz", "B, L, 2E")
    if xz.shape[1] < 1 or xz.shape[2] % 2:
        raise ValueError(f"xz must have shape (B, L, 2E) with L >= 1, got {tuple(xz.shape)}")
    inner, dtypes = xz.shape[2] // 2, _parameter_dtypes(xz)
    weights = {"conv_weight": conv_weight, "x_proj_weight": x_proj_weight, "dt_weight": dt_weight}
    for name, weight in weights.items():
        if weight.ndim != 3 or weight.shape[2] < 1:
            raise ValueError(f"{name} must have 3 axes, got shape {tuple(weight.shape)}")
    rank, taps = dt_weight.shape[2], conv_weight.shape[2]
    columns = x_proj_weight.shape[1]
    if columns <= rank or (columns - rank) % 2:
        raise ValueError(
            f"x_proj_weight must have shape (2, R + 2 M, E) where dt_weight is (2, E, R) with R = "
            f"{rank}, got {tuple(x_proj_weight.shape)}"
        )
    states = (columns - rank) // 2
    _check(conv_weight, "conv_weight", "2, E, K", (2, inner, taps), dtypes, xz)
    _check(conv_bias, "conv_bias", "2, E", (2, inner), dtypes, xz)
    _check(x_proj_weight, "x_proj_weight", "2, R + 2 M, E", (2, columns, inner), dtypes, xz)
    _check(dt_weight, "dt_weight", "2, E, R", (2, inner, rank), dtypes, xz)
    _check(dt_bias, "dt_bias", "2, E", (2, inner), dtypes, xz)
    if A is not None:
        _check(A, "A", "2, E, M", (2, inner, states), dtypes, xz)
    _check(D, "D", "2, E", (2, inner), dtypes, xz)
    if order is not None and (order.dtype != torch.int32 or order.ndim != 1):
        raise ValueError(f"order must be int32 (P,), got {order.dtype} {tuple(order.shape)}")
    if (cls_weight is None) != (cls_index is None):
        raise ValueError("cls_weight and cls_index must be given together, or both be None")
    if cls_weight is not None:
        if order is None:
            raise ValueError("cls_index needs an order, in which the class token has no position")
        if cls_index.dtype != torch.int64 or cls_index.ndim != 1:
            got = f"{cls_index.dtype} {tuple(cls_index.shape)}"
            raise ValueError(f"cls_index must be int64 (U,), got {got}")
        _check(cls_weight, "cls_weight", "2, U, E", (2, cls_index.shape[0], inner), dtypes, xz)
