"""The operators under PyTorch's function transforms: torch.func, forward-mode and second derivatives.

Here each operator is composed from ``reference.py``, in operations that PyTorch can transform. This is
correct for any nesting of grad, vjp, jvp, jacrev, jacfwd, hessian and vmap, but slow, token by token.
Three routes lead here:

    torch.func          A kernel at functorch's dispatch key serves every call of an operator.
    dual tensors        torch.autograd.forward_ad has no such key. The model and the functions of ``ops.py``
                        check for dual tensors. An operator that gets one by another route raises.
    second derivatives  Backward operators are differentiated through these plain operators.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vil.kernels import autocast, reference
from vil.kernels import mixer as mixer_parts
from vil.kernels.args import ScanArgs
from vil.kernels.checks import check_conv, check_scan
from vil.kernels.grid import TokenLayout
from vil.kernels.mixer import MixerParams, mixer_plan

_FUNCTORCH = "FuncTorchDynamicLayerFrontMode"  # active during any torch.func transform

_library = torch.library.Library("vil", "FRAGMENT")


def scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of ``vil::scan``."""
    arguments = autocast.cast("scan", arguments)
    args, (recurrence, reverse, _) = ScanArgs(*arguments[:9]), arguments[9:]
    check_scan(args, recurrence)
    out, final, *_ = reference.scan(args, recurrence, reverse)
    return out, *(out.new_empty(0) if t is None else t for t in (final, None, None))


def causal_conv1d_bidirectional(*arguments: Any) -> Tensor:
    """Return the result of ``vil::causal_conv1d_bidirectional``."""
    arguments = autocast.cast("causal_conv1d_bidirectional", arguments)
    check_conv(*arguments)
    return reference.causal_conv1d_bidirectional(*arguments)


def mixer(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs of ``vil::mixer``; those for the backward pass are empty."""
    arguments = autocast.cast("mixer", arguments)
    xz, params, (recurrence, _, *layout) = arguments[0], MixerParams(*arguments[1:8]), arguments[8:]
    layout = TokenLayout(*layout) if layout and layout[0] is not None else None
    plan = mixer_plan(xz, params, recurrence, layout, backend=reference)
    out, *_ = mixer_parts.forward(plan, xz, params, layout, False)
    return out, *(out.new_empty(0) for _ in range(3))


class _Backward(NamedTuple):
    """A backward operator in plain, differentiable PyTorch."""

    forward: Callable[..., Any]
    """The plain forward operator."""
    given: int
    """Number of output gradients, the first arguments."""
    inputs: int
    """Number of differentiable inputs of the operator, the next arguments."""
    rest: Callable[..., tuple]
    """Maps the remaining arguments here to those of the operator."""

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the gradients in the form of the operator."""
        count = self.given + self.inputs
        tensors, others = arguments[self.given : count], self.rest(*arguments[count:])

        def outputs(*tensors: Tensor | None) -> tuple[Tensor, ...]:
            made = self.forward(*tensors, *others)
            return (made,) if isinstance(made, Tensor) else made[: self.given]

        found = reference.gradients(outputs, tensors, arguments[: self.given])
        return tuple(tensors[0].new_empty(0) if g is None else g for g in found)

    def gradients(self, grads: tuple[Tensor, ...], arguments: list[Any]) -> tuple:
        """Return second derivatives: a gradient for each argument, None if it has none."""
        count = self.given + self.inputs
        tensors, others = tuple(arguments[:count]), arguments[count:]
        found = reference.gradients(lambda *tensors: self(*tensors, *others), tensors, grads)
        return (*found, *(None for _ in others))


_FORWARD = {
    "scan": scan,
    "causal_conv1d_bidirectional": causal_conv1d_bidirectional,
    "mixer": mixer,
}
_BACKWARD = {
    "scan_backward": _Backward(
        scan, 2, 9, lambda y_pre_gate, states, recurrence, reverse: (recurrence, reverse, False)
    ),
    "causal_conv1d_bidirectional_backward": _Backward(
        causal_conv1d_bidirectional, 1, 3, lambda: ()
    ),
    "mixer_backward": _Backward(
        mixer,
        1,
        8,
        lambda x_dbl, y_pre_gate, states, recurrence, *layout: (recurrence, False, *layout),
    ),
}


def _differentiate_twice(name: str, backward: _Backward) -> None:
    """Register the derivatives of a backward operator."""

    def setup(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in inputs))
        ctx.others = [None if isinstance(a, Tensor) else a for a in inputs]

    def again(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        arguments = [other if tensor is None else tensor for tensor, other in saved]
        return backward.gradients(grads, arguments)

    torch.library.register_autograd(f"vil::{name}", again, setup_context=setup)


for _name, _kernel in (_FORWARD | _BACKWARD).items():
    _library.impl(_name, _kernel, _FUNCTORCH)
for _name, _backward in _BACKWARD.items():
    _differentiate_twice(_name, _backward)
