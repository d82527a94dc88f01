"""What a block keeps of a long sequence for its backward pass: its input and the mixer's output.

Nearly what gradient checkpointing saves, for less time: the norm and the input projection are computed
again, and the operator's backward pass computes again what it otherwise keeps, but its forward pass does
not run twice. PyTorch's selective checkpointing does it, which torch.compile follows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from vil.kernels.checks import in_forward_mode


def is_recomputed(x: Tensor, above: int | None) -> bool:
    """Tell whether a block that trains is to compute things again.

    Args:
        x: Its tokens, (B, L, C).
        above: It is for more than so many; None is never.
    """
    if above is None or isinstance(x, torch.fx.Proxy) or not torch.is_grad_enabled():
        return False
    # Tracers have no backward pass, and torch.func has no hooks for saved tensors.
    traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
    transformed = in_forward_mode() or torch._C._functorch.peek_interpreter_stack() is not None
    return not (traced or transformed) and x.shape[1] > above


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return ``function(*arguments)``, of whose inside the backward pass finds the mixer's output only."""
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=_contexts)


def _keep(context: object, operator: object, *arguments: Any, **options: Any) -> CheckpointPolicy:
    if operator == torch.ops.vil.mixer.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _keep)
