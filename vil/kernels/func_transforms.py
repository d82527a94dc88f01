"""The operators under torch.func, forward-mode and second derivatives.

Here each operator is composed from ``reference.py``, in operations that PyTorch can transform. This
is correct for any nesting of grad, vjp, jvp, jacrev, jacfwd, hessian and vmap, but slow, token by
token.
Three routes lead here:

    torch.func          A kernel at functorch's dispatch key serves every call of an operator.
    dual tensors        torch.autograd.forward_ad has no such key. The model and the functions of
                        ``ops.py`` check for dual tensors. An operator that gets one by another
                        route raises.
    second derivatives  A backward pass whose result is differentiated again, or comes in batches,
                        is the reference's (``mixer.is_transformed``).
"""

from typing import Any

import torch
from torch import Tensor

from vil.kernels import autocast, reference
from vil.kernels.checks import check_scan
from vil.kernels.interface import ScanArgs
from vil.kernels.mixer import arguments as mixer_arguments
from vil.kernels.mixer import plain

_FUNCTORCH = "FuncTorchDynamicLayerFrontMode"  # active during any torch.func transform

_library = torch.library.Library("vil", "FRAGMENT")


def scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of ``vil::scan``."""
    *tensors, recurrence, reverse, _ = autocast.cast("scan", arguments)
    args = ScanArgs(*tensors)
    check_scan(args, recurrence)
    out, final, *_ = reference.scan(args, recurrence, reverse)
    return out, *(out.new_empty(0) if t is None else t for t in (final, None, None))


def mixer(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs of ``vil::mixer``; those for the backward pass are empty."""
    xz, *inputs = autocast.cast("mixer", arguments)
    params, recurrence, _, order = mixer_arguments(inputs)
    out = plain(xz, params, recurrence, order)
    return out, *(out.new_empty(0) for _ in range(3))


_library.impl("scan", scan, _FUNCTORCH)
_library.impl("mixer", mixer, _FUNCTORCH)
