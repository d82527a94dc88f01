"""The mixer for exporters without custom operators, such as ONNX, and for inference only.

Computes the same function as the operator, for runtimes that execute node by node. There the cost
depends on the nodes per token and on how often a whole sequence goes through memory. From the
convolution on, both directions are in scan order, the second flipped, and share one loop over time.
The loop is the higher-order op ``scan``, which an exporter keeps as one node. Its body reads
nothing from outside, which OpenVINO refuses. Numbers such as in ``1 - x`` would also be outside.
States are (M, E), so operations on all channels access consecutive memory. Diagonal Longhorn and
Mamba take one token per step. Two tokens of diagonal Longhorn in one product, possible because its
decays are bilinear, were no faster in ONNX Runtime. Exact Longhorn takes ``CHUNK`` tokens per step
in matrix products (kernels/README.md, "The exact form in chunks").

Letters: B batch, L tokens, E channels of the scan, K taps, R rank of the step size, M states,
T = CHUNK.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from vil.kernels import reference
from vil.kernels.mixer import MixerParams
from vil.kernels.order import Order, conv_forward, kappa_scale

CHUNK = 4  # fastest of 2, 4, 8 and 16 in ONNX Runtime, and keeps sums of products small


def mixer(xz: Tensor, params: MixerParams, recurrence: str, order: Order) -> Tensor:
    """Return the first output of ``vil::mixer`` for the same arguments, without a gradient."""
    dtype, compute = xz.dtype, torch.float64 if xz.dtype == torch.float64 else torch.float32
    tensors = (None if t is None else t.detach().to(compute) for t in (xz, *params))
    xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, cls_weight = tensors
    x, z = xz.chunk(2, dim=-1)
    x = _convolve(x, conv_weight, conv_bias, order, cls_weight)  # (B, 2, L, E)
    rank = dt_weight.shape[2]
    states = (x_proj_weight.shape[1] - rank) // 2
    # No reshape right before this: with another right after it, ONNX's optimiser (onnxscript 0.7)
    # fails.
    dt_low, k, q = (x @ x_proj_weight.mT).split([rank, states, states], dim=-1)
    v = dt_low @ dt_weight.mT + dt_bias[:, None]
    if recurrence == "mamba":
        y = _mamba(x, _softplus(v), q, k, A)
    else:
        scale = kappa_scale(recurrence, order.tokens_per_ref)
        step = 1 / (torch.exp(-v) + (1 + scale * k.square().sum(-1, keepdim=True)))
        read = {"longhorn": _longhorn, "longhorn_exact": _longhorn_exact}[recurrence]
        y = read(x, step, q, k)
    y = y + D[:, None] * x
    return (F.silu(z) * (y[:, 0] + y[:, 1].flip(1)) / 2).to(dtype)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, order: Order, cls_weight: Tensor | None) -> Tensor:
    """Return ``conv_forward`` of x, (B, L, E), as (B, 2, L, E), each direction in scan order."""
    if order.order is not None:
        ahead, back = conv_forward(reference.ConvPlan(), x, weight, bias, order, cls_weight)
        return torch.stack((ahead, back.flip(1)), 1)
    (B, L, E), taps = x.shape, weight.shape[2]
    both = torch.stack((x, x.flip(1)), 1).flatten(0, 1).mT.reshape(B, 2 * E, L)
    weight = weight.reshape(2 * E, 1, taps)
    y = F.conv1d(F.pad(both, (taps - 1, 0)), weight, bias.flatten(), groups=2 * E)
    return F.silu(y.reshape(2 * B, E, L).mT.reshape(B, 2, L, E))


def _softplus(v: Tensor) -> Tensor:
    """Return log(1 + exp(v)) by Kahan's method: ONNX Runtime's softplus is slow."""
    e = torch.exp(-v.abs())
    rounded = 1 + e
    log = torch.where(rounded == 1, e, torch.log(rounded) * (e / (rounded - 1)))
    return F.relu(v) + log


def _scan(advance: Callable[..., list[Tensor]], tokens: tuple[Tensor, ...], M: int, *constants: Tensor) -> Tensor:
    """Return the outputs of ``advance`` for each token, or chunk, along axis 2: (B, 2, L, T, E).

    Args:
        advance: Takes a state (B, 2, M, E), the constants and one token of each of ``tokens``.
            Returns the next state, copies of the constants and an output (B, 2, T, E).
        tokens: Tensors (B, 2, L, rows, columns); the first has E columns.
        M: States per channel, zero before the first token.
        *constants: Tensors passed with every token.
    """
    B, E = tokens[0].shape[0], tokens[0].shape[4]
    state = tokens[0].new_zeros(B, 2, M, E)
    tokens = [tensor.permute(2, 0, 1, 3, 4) for tensor in tokens]
    # Not ``scan``: it calls the compiler for each block, and strict exports accept it. PyTorch
    # tries a strict export for ONNX after another export raised, and it treats dynamic sizes as
    # fixed numbers.
    y = scan_op(advance, [state, *constants], tokens, ())[-1]
    return y.permute(1, 2, 0, 3, 4)


def _longhorn(x: Tensor, step: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return what queries read, (B, 2, L, E), like x and step; q and k are (B, 2, L, M)."""

    def advance(state, step, value, key, query):
        state = state + key * (value - key * step * state)
        return [state, query @ state]

    tokens = (step[..., None, :], (step * x)[..., None, :], k[..., None], q[..., None, :])
    return _scan(advance, tokens, k.shape[-1]).squeeze(3)


def _mamba(x: Tensor, step: Tensor, q: Tensor, k: Tensor, A: Tensor) -> Tensor:
    """Return the result of ``_longhorn`` for Mamba; A is (2, E, M)."""

    def advance(state, rates, step, value, key, query):
        state = torch.exp(rates * step) * state + key * value
        return [state, rates.clone(), query @ state]

    tokens = (step[..., None, :], (step * x)[..., None, :], k[..., None], q[..., None, :])
    return _scan(advance, tokens, k.shape[-1], A.mT.contiguous()).squeeze(3)


def _longhorn_exact(x: Tensor, step: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the result of ``_longhorn`` for the exact form.

    The writes of a chunk, C = step (x - k.S0 - before C), are found by repeated substitution for C.
    Each token depends only on earlier ones, so it is exact after as many substitutions as tokens
    precede it.
    """
    L = x.shape[2]
    x, step, q, k = (  # padding tokens have zero step and key
        F.pad(tensor, (0, 0, 0, -L % CHUNK)).unflatten(2, (-1, CHUNK)) for tensor in (x, step, q, k)
    )
    before, until = (k @ k.mT).tril(-1), (q @ k.mT).tril()

    def advance(state, x, step, key, column, query, before, until):
        error = x - key @ state
        written = step * error
        for _ in range(CHUNK - 1):
            written = step * (error - before @ written)
        return [state + column @ written, query @ state + until @ written]

    y = _scan(advance, (x, step, k, k.mT, q, before, until), k.shape[-1])
    return y.flatten(2, 3)[:, :, :L]
