"""Contestants of ``scan.py``: their code, the layout of their inputs, and the exact results.

The task is the mixer's: scan in both directions with step bias and skip D, average the two outputs,
gate by silu(z). Activations are bfloat16, parameters float32. A contestant gets the inputs in its
usual layout, made before the clock starts.

mamba-ssm: the average of two calls of its CUDA selective scan on channels-first tensors (B, D, L),
each with the gate z as in Vision Mamba ("bimamba v2"). Vision Mamba flips x and z before the second
direction and its output afterwards; these three flips and their gradients' are timed. Step, keys
and queries of that direction are given flipped, as Vision Mamba computes them. The compiled module
is called directly: importing the package pulls in language models and their dependencies.

The PyTorch scan under torch.compile: the diagonal recurrence is linear, S <- a S + b with one a and
b per state. So chunks of 16 tokens can run at once. Each chunk is scanned from zero for its end
state and its product of a. A scan over chunks, by the same rule, gives the state before each chunk.
A second pass over the 16 tokens reads the outputs. Work stays linear in L, unrolled loops always
have 16 steps, and autograd works. A loop over all tokens would take the compiler minutes at L =
197. torch's own associative_scan is not public yet and writes all L x M states to memory. A
cumulative sum of logarithms would overflow where a is small.

Letters: B batch, L tokens, D channels of the scan, M states per channel.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.roofline import M
from vil.kernels import ops, reference
from vil.kernels.args import ScanArgs

CHUNK = 16  # tokens of a chunk of the PyTorch scan
HEAD = 64  # channels of a head of attention

MAMBA_SSM = "mamba-ssm, both directions"
MAMBA_TRITON = "Mamba (ours, Triton)"
FLASH = "flash attention (SDPA)"
COMPILED = "PyTorch, compiled (diagonal)"
PARAMETERS = ("A", "D", "bias")


@dataclass(frozen=True)
class Contestant:
    """An implementation of a task.

    Attributes:
        name: Shown in the results.
        task: A recurrence of the library, or "attention".
        run: Function to time: takes the tensors of ``arrange``, in order, and returns the output.
        ours: Whether it belongs to this library.
        missing: Reason why it cannot run on this machine, "" if it can.
    """

    name: str
    task: str
    run: Callable[..., Tensor]
    ours: bool = False
    missing: str = ""

    def arrange(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the inputs in the layout of this contestant."""
        return tuple(tensors.values())

    def restore(self, own: tuple[Tensor, ...], names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return gradients by name in the common layout, given this contestant's layout."""
        return dict(zip(names, own, strict=True))

    def turn(self, out: Tensor) -> Tensor:
        """Convert an output or its gradient, (B, L, D), to this contestant's layout or back."""
        return out


class SelectiveScanPair(Contestant):
    """The contestant with channels-first activations, in separate tensors for each direction."""

    REVERSED = ("dt", "q", "k")  # computed by Vision Mamba in the order of the scan

    def arrange(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return both directions of each input, or z once; activations are (B, D or M, L)."""
        own = []
        for name, tensor in tensors.items():
            if name in PARAMETERS:
                own += tensor.unbind()
            elif name == "z":
                own.append(self.turn(tensor))
            else:
                second = tensor[1].flip(1) if name in self.REVERSED else tensor[1]
                own += [self.turn(tensor[0]), self.turn(second)]
        return tuple(tensor.contiguous() for tensor in own)

    def restore(self, own: tuple[Tensor, ...], names: tuple[str, ...]) -> dict[str, Tensor]:
        """Undo ``arrange``."""
        rest, tensors = list(own), {}
        for name in names:
            if name == "z":
                tensors[name] = self.turn(rest.pop(0))
                continue
            pair = [rest.pop(0), rest.pop(0)]
            if name not in PARAMETERS:
                pair = [self.turn(tensor) for tensor in pair]
            if name in self.REVERSED:
                pair[1] = pair[1].flip(1)
            tensors[name] = torch.stack(pair)
        return tensors

    def turn(self, out: Tensor) -> Tensor:
        """Swap the axes of tokens and channels."""
        return out.transpose(1, 2).contiguous()


# ------------------------------------------------------------------------------------ contestants


def contestants() -> list[Contestant]:
    """Return all contestants, ours first."""
    ours = [
        Contestant("Longhorn exact (ours)", "longhorn_exact", _longhorn("longhorn_exact"), True),
        Contestant("Longhorn diagonal (ours)", "longhorn", _longhorn("longhorn"), True),
        Contestant(MAMBA_TRITON, "mamba", _mamba, True),
    ]
    compiled = torch.compile(chunked_scan, dynamic=False)
    return [
        *ours,
        mamba_ssm(),
        Contestant(COMPILED, "longhorn", compiled),
        Contestant(FLASH, "attention", attention),
    ]


def _longhorn(recurrence: str) -> Callable[..., Tensor]:
    def run(x: Tensor, dt: Tensor, *rest: Tensor) -> Tensor:
        return ops.bidirectional_scan(x, dt, None, *rest, recurrence)

    return run


def _mamba(*tensors: Tensor) -> Tensor:
    return ops.bidirectional_scan(*tensors, "mamba")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with heads of 64 channels by flash attention; q, k, v and the result are (B, L, D)."""
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # no silent fallback to another
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def mamba_ssm() -> Contestant:
    """Return the contestant of mamba-ssm; ``missing`` says why it cannot be imported."""
    missing, extension = "", None
    if importlib.util.find_spec("selective_scan_cuda") is None:
        missing = "not installed"
    else:
        try:
            extension = importlib.import_module("selective_scan_cuda")
        except ImportError as error:  # built for another torch
            missing = f"cannot be imported: {str(error).splitlines()[0]}"
    run = selective_scan_pair(selective_scan_by(extension))
    return SelectiveScanPair(MAMBA_SSM, "mamba", run, missing=missing)


class _SelectiveScan(torch.autograd.Function):
    """mamba-ssm's compiled forward and backward functions, with gate, as one operation."""

    @staticmethod
    def forward(ctx, extension: ModuleType, *inputs: Tensor) -> Tensor:
        u, delta, A, B, C, D, z, delta_bias = inputs
        groups = B.unsqueeze(1), C.unsqueeze(1)
        out, states, gated = extension.fwd(u, delta, A, *groups, D, z, delta_bias, True)
        ctx.extension = extension
        ctx.save_for_backward(*inputs, states, out)
        return gated

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, delta, A, B, C, D, z, delta_bias, states, out = ctx.saved_tensors
        # None: allocate the gradient of z; True: softplus; False: do not return the output again.
        du, ddelta, dA, dB, dC, dD, ddelta_bias, dz = ctx.extension.bwd(
            *(u, delta, A, B.unsqueeze(1), C.unsqueeze(1), D, z, delta_bias),
            *(grad.contiguous(), states, out, None, True, False),
        )
        return None, du, ddelta, dA, dB.squeeze(1), dC.squeeze(1), dD, dz, ddelta_bias


def selective_scan_by(extension: ModuleType | None) -> Callable[..., Tensor]:
    """Return mamba-ssm's ``selective_scan_fn``, for gated calls, on its compiled module."""

    def selective_scan_fn(
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor,
        delta_softplus: bool,
    ) -> Tensor:
        assert delta_softplus, "the wrapper passes on no other"
        return _SelectiveScan.apply(extension, u, delta, A, B, C, D, z, delta_bias)

    return selective_scan_fn


def selective_scan_pair(selective_scan_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return Vision Mamba's bidirectional scan: once on the inputs, once on flipped copies.

    Args:
        selective_scan_fn: ``mamba_ssm.ops.selective_scan_interface.selective_scan_fn`` or similar.

    Returns:
        A function that takes the tensors of ``SelectiveScanPair.arrange`` and returns (B, D, L).
    """

    def run(*own: Tensor) -> Tensor:
        x, x_b, dt, dt_b, A, A_b, q, q_b, k, k_b, D, D_b, bias, bias_b, z = own
        y = selective_scan_fn(x, dt, A, k, q, D, z, bias, True)
        flipped = x_b.flip(-1), z.flip(-1)
        y_b = selective_scan_fn(flipped[0], dt_b, A_b, k_b, q_b, D_b, flipped[1], bias_b, True)
        return (y + y_b.flip(-1)) / 2

    return run


# ------------------------------------------------------------------------ the scan in plain PyTorch


def chunked_scan(
    x: Tensor, dt: Tensor, q: Tensor, k: Tensor, D: Tensor, bias: Tensor, z: Tensor
) -> Tensor:
    """Scan in both directions by the diagonal Longhorn recurrence, all chunks at once.

    Arguments as in ``vil.kernels.ops.bidirectional_scan``. Computes in float32, or float64 if x is.
    """
    length, out_dtype = x.shape[2], x.dtype
    dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    x, dt, q, k = (torch.stack((t[0], t[1].flip(1))).to(dtype) for t in (x, dt, q, k))
    beta = torch.sigmoid(dt + bias[:, None, None])
    eps = beta / (1 + beta * k.square().sum(-1, keepdim=True))
    tokens = zip(*(_by_token(t) for t in (eps, eps * x, k)), strict=True)
    steps = [
        (1 - e[..., None] * k_t.square()[..., None, :], ex[..., None] * k_t[..., None, :])
        for e, ex, k_t in tokens
    ]
    states = _states(steps)
    y = [(q_t[..., None, :] * S).sum(-1) for q_t, S in zip(_by_token(q), states, strict=True)]
    y = torch.stack(y, 3).flatten(2, 3)[:, :, :length] + D[:, None, None] * x
    return (F.silu(z.to(dtype)) * (y[0] + y[1].flip(1)) / 2).to(out_dtype)


def _by_token(tensor: Tensor, padding: float = 0.0) -> tuple[Tensor, ...]:
    """Split (2, B, L, ...) into 16 tensors (2, B, C, ...); the i-th has token i of all C chunks."""
    missing = -tensor.shape[2] % CHUNK
    padded = F.pad(tensor, (0, 0) * (tensor.ndim - 3) + (0, missing), value=padding)
    return padded.unflatten(2, (-1, CHUNK)).unbind(3)


def _states(steps: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return S <- a S + b after every token, given each token's (a, b) of (2, B, C, D, M)."""
    decay, end = steps[0]
    for a, b in steps[1:]:
        decay, end = decay * a, a * end + b
    states = [_before(decay, end)]
    for a, b in steps:
        states.append(a * states[-1] + b)
    return states[1:]


def _before(decay: Tensor, end: Tensor) -> Tensor:
    """Return the state before each chunk, given its product of a and its end state from zero."""
    if end.shape[2] == 1:
        return torch.zeros_like(end)
    steps = list(zip(_by_token(decay, 1.0), _by_token(end), strict=True))
    after = torch.stack(_states(steps), 3).flatten(2, 3)[:, :, : end.shape[2] - 1]
    return F.pad(after, (0, 0, 0, 0, 1, 0))


# ---------------------------------------------------------------------------------- inputs, results


def make_inputs(
    shape: tuple[int, int, int], device: str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Return random inputs of a bidirectional scan and ``grad``, the gradient of its output.

    Args:
        shape: (B, L, D).
        device: Device of the inputs.
        dtype: Dtype of the activations; parameters are float64 if it is, else float32.
    """
    B, L, D = shape
    generator = torch.Generator(device).manual_seed(0)
    parameter = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    return {
        "x": randn(2, B, L, D),
        "dt": randn(2, B, L, D),
        "A": -randn(2, D, M, dtype=parameter).exp(),
        "q": randn(2, B, L, M),
        "k": randn(2, B, L, M),
        "D": randn(2, D, dtype=parameter),
        "bias": randn(2, D, dtype=parameter),
        "z": randn(B, L, D),
        "grad": randn(B, L, D),
    }


def tensors_of(task: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of a task by name, in the order of its arguments."""
    if task == "attention":
        return {"q": inputs["x"][0], "k": inputs["x"][1], "v": inputs["z"]}
    left_out = ("grad",) if task == "mamba" else ("grad", "A")
    return {name: tensor for name, tensor in inputs.items() if name not in left_out}


def truth(task: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return output and gradients in float64, computed by the reference on the device of the inputs.

    Returns:
        "inference" and "output", the same tensor, and the gradient of every input by its name.
    """
    tensors = tensors_of(task, inputs)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in tensors.values())
    grad = inputs["grad"].double()
    if task == "attention":
        out, grads = _truth_by_sequence(_exact_attention, exact, grad)
    else:
        arguments = exact if task == "mamba" else (*exact[:2], None, *exact[2:])
        out, *_ = reference.scan(ScanArgs(*arguments), task)
        grads = torch.autograd.grad(out, exact, grad)
    out = out.detach()
    return {"inference": out, "output": out, **dict(zip(tensors, grads, strict=True))}


def _exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within one sequence, (L, D)."""
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(0, 1) for t in (q, k, v))
    weights = torch.softmax(q @ k.transpose(1, 2) / HEAD**0.5, -1)
    return (weights @ v).transpose(0, 1).flatten(1)


def _truth_by_sequence(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, list[Tensor]]:
    # One batch element at a time: the L x L matrices of all in float64 would fill a GPU.
    parts = []
    for *tokens, grad_b in zip(*inputs, grad, strict=True):
        tokens = [t.detach().requires_grad_() for t in tokens]
        out = function(*tokens)
        parts.append((out.detach(), *torch.autograd.grad(out, tokens, grad_b)))
    out, *grads = (torch.stack(part) for part in zip(*parts, strict=True))
    return out, grads
