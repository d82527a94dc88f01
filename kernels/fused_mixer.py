"""The whole token mixer between its two outer projections as one operator, ``vil::mixer``.

Convolution, projections to step sizes, keys and queries, scan and gate. One operator, because what
its backward pass needs is more than what it is cheapest to keep: the input, the small projections and
the states of the scan are saved; the convolution and the step sizes, each as large as the input, are
computed again, as in Mamba's fused block.

Letters: B batch, L tokens, E channels of the scan, M state size, R rank of the step size, K width of
the convolution.
"""

import torch
from torch import Tensor

from vil.kernels.backends import backend_for
from vil.kernels.checks import check_mixer
from vil.kernels.operators import (
    bidirectional_scan_backward,
    bidirectional_scan_saving,
    empty_gradients,
    empty_saved,
    from_operator,
    to_operator,
)


def _project(x: Tensor, x_proj_weight: Tensor) -> Tensor:
    """Return raw step sizes of rank R, keys and queries of (2, B, L, E): (2, B, L, R + 2 M)."""
    projected = torch.bmm(x.flatten(1, 2), x_proj_weight.to(x.dtype).mT)
    return projected.unflatten(1, x.shape[1:3])


def _split(projected: Tensor, dt_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what ``_project`` made: low-rank step sizes, these in full, queries and keys."""
    rank = dt_weight.shape[-1]
    states = (projected.shape[-1] - rank) // 2
    low, k, q = projected.split([rank, states, states], dim=-1)
    dt = torch.bmm(low.flatten(1, 2), dt_weight.to(low.dtype).mT).unflatten(1, low.shape[1:3])
    return low, dt, q, k


@torch.library.custom_op("vil::mixer", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_mixer(xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, recurrence)
    x, z = xz.chunk(2, dim=-1)
    backend = backend_for(x.device, x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        x = backend.causal_conv1d_bidirectional(x, conv_weight, conv_bias)
        projected = _project(x, x_proj_weight)
        _, dt, q, k = _split(projected, dt_weight)
        out, y_sum, states = bidirectional_scan_saving(
            x, dt, A, q, k, D, dt_bias, z, recurrence, save
        )
    return out, projected if save else x.new_empty(0), y_sum, states


@_mixer.register_fake
def _(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_mixer(*inputs[:-1])
    xz, _, _, x_proj_weight, dt_weight, *_, recurrence, save = inputs
    B, L, E = *xz.shape[:2], xz.shape[2] // 2
    columns = x_proj_weight.shape[1]
    x = xz.new_empty(2, B, L, E)
    k = xz.new_empty(2, B, L, (columns - dt_weight.shape[-1]) // 2)
    projected = xz.new_empty((2, B, L, columns) if save else 0)
    return xz.new_empty(B, L, E), projected, *empty_saved(x, k, recurrence, save)


@torch.library.custom_op("vil::mixer_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, z = xz.chunk(2, dim=-1)
    backend = backend_for(x.device, x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        convolved = backend.causal_conv1d_bidirectional(x, conv_weight, conv_bias)
        if not projected.numel():
            projected = _project(convolved, x_proj_weight)
        low, dt, q, k = _split(projected, dt_weight)
        dx, ddt, dA, dq, dk, dD, dbias, dz = bidirectional_scan_backward(
            grad, convolved, dt, A, q, k, D, dt_bias, z, y_sum, states, recurrence
        )
        ddt, low = ddt.flatten(1, 2), low.flatten(1, 2)
        d_low = torch.bmm(ddt, dt_weight.to(ddt.dtype))
        d_dt_weight = torch.bmm(ddt.mT, low)
        d_projected = torch.cat((d_low, dk.flatten(1, 2), dq.flatten(1, 2)), dim=-1)
        d_x_proj_weight = torch.bmm(d_projected.mT, convolved.flatten(1, 2))
        dx = torch.baddbmm(dx.flatten(1, 2), d_projected, x_proj_weight.to(dx.dtype))
        dx, d_conv_weight, d_conv_bias = backend.causal_conv1d_bidirectional_backward(
            dx.view(convolved.shape), x, conv_weight, conv_bias
        )
    gradients = (
        torch.cat((dx, dz), dim=-1),
        d_conv_weight,
        d_conv_bias,
        d_x_proj_weight.to(x_proj_weight.dtype),
        d_dt_weight.to(dt_weight.dtype),
        dbias,
        dA,
        dD,
    )
    return to_operator(gradients, xz)


@_mixer_backward.register_fake
def _(grad: Tensor, *inputs) -> tuple[Tensor, ...]:
    return empty_gradients(inputs[:8])


def _mixer_setup(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.recurrence, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _mixer_autograd(ctx, grad: Tensor | None, *_: None) -> tuple:
    if grad is None:
        return (None,) * 10
    inputs = ctx.saved_tensors
    grads = torch.ops.vil.mixer_backward(grad, *inputs, ctx.recurrence)
    return (*from_operator(grads, inputs[:8]), None, None)


_mixer.register_autograd(_mixer_autograd, setup_context=_mixer_setup)
