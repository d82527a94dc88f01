"""Compare every backend of this machine with the reference: ``python -m vil.selfcheck``.

Some released compilers and drivers compute wrong gradients on some hardware. This script runs every
operation on the current machine, forward and backward, in every dtype. It compares the results with
the reference in float64 on the CPU. A case that ends its process does not keep the others from running.
Exit status: 0 if all agree; 1 if any differs or fails, or there is no backend to compare.
"""

import importlib.metadata
import importlib.util
import itertools
import math
import multiprocessing
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

import vil
from vil.kernels import ops
from vil.kernels.backends import automatic_backend, backend_for
from vil.kernels.interface import conv_key
from vil.messages import first_line
from vil.sizes import fit, token_layout

SMALL = (2, 33, 40, 16)  # B, L, D, M: channel and token counts that fill no block
MODEL = (1, 197, 384, 16)  # one image through vil_tiny
WIDTH = 4  # taps of the convolution
GRID = ([5, 6], [3, 4], [8, 8], [8, 8])  # 5 x 6 patches of 8 px, trained at 3 x 4

# Largest allowed error relative to the largest value. Rounding the result once gives eps / 2.
TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
}


# Positions of weights, skips and states in the tensors of each operation; 16-bit dtypes keep them float32.
_PARAMETERS = {
    "convolution": {1, 2},
    "bidirectional_scan": {2, 5, 6},
    "scan": {2, 5, 6, 7},
    "mixer": {1, 2, 3, 4, 5, 7},
}


class Case(NamedTuple):
    """One operation to compare; ``tensors`` are float64 on the CPU, or None if omitted."""

    name: str
    tensors: tuple[Tensor | None, ...]
    options: tuple


def available_backends() -> dict[str, str]:
    """Return the available backends and the device type of each."""
    backends = {}
    if torch.cuda.is_available() and automatic_backend("cuda", double=False) == "triton":
        backends["triton"] = "cuda"
    if importlib.util.find_spec("numba") is not None:
        backends["cpu"] = "cpu"
    return backends


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield the operations to compare in a dtype.

    Each width and dtype needs its own kernel, and a GPU kernel takes seconds to compile. Scans of one
    direction and odd sizes are therefore compared in float32 and float64 only.
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    low = dtype in (torch.bfloat16, torch.float16)
    for shape in (MODEL,) if low else (SMALL, MODEL):
        B, L, D, M = shape
        conv = (randn(B, L, D), randn(2, D, WIDTH), randn(2, D))
        yield Case("convolution", conv, ())
        if not low:  # each intermediate step of the mixer rounds
            weights = (randn(2, 2 + 2 * M, D), randn(2, D, 2), randn(2, D), None, randn(2, D))
            yield Case("mixer", (randn(B, 31, 2 * D), *conv[1:], *weights), ("longhorn",))
        for recurrence in ops.RECURRENCES:
            A = -randn(2, D, M).exp() if recurrence == "mamba" else None
            x, dt = randn(2, B, L, D), randn(2, B, L, D)
            q, k = randn(2, B, L, M), randn(2, B, L, M)
            both = (x, dt, A, q, k, randn(2, D), randn(2, D))
            yield Case("bidirectional_scan", (*both, randn(B, L, D)), (recurrence,))
            if shape == MODEL:
                continue
            one = tuple(None if tensor is None else tensor[0] for tensor in both)
            for reverse in (False, True):
                yield Case("scan", (*one, randn(B, D, M)), (recurrence, reverse))


def rounded(case: Case, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return the tensors of a case in a dtype; parameters and states stay float32 if it has 16 bits."""
    low, parameters = dtype in (torch.bfloat16, torch.float16), _PARAMETERS[case.name]
    return tuple(
        None if tensor is None else tensor.to(torch.float32 if low and i in parameters else dtype)
        for i, tensor in enumerate(case.tensors)
    )


def dtypes_on(device: str) -> list[torch.dtype]:
    """Return the dtypes to compare on a device; kernels of GPUs compute in float32."""
    return [dtype for dtype in TOLERANCES if dtype != torch.float64 or device == "cpu"]


def outcomes(case: Case, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Return the outputs of an operation and the gradients of a fixed weighted sum of the outputs."""
    operator = {
        "convolution": _Convolution.apply,
        "bidirectional_scan": ops.bidirectional_scan,
        "scan": _scan,
        "mixer": _mixer,
    }[case.name]
    inputs = tuple(None if t is None else t.detach().requires_grad_() for t in tensors)
    outputs = operator(*inputs, *case.options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum(
        (out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
        .to(torch.float64 if out.dtype == torch.float64 else torch.float32)
        .sum()
        for out in outputs
    )
    gradients = torch.autograd.grad(loss, [t for t in inputs if t is not None])
    return (*(out.detach() for out in outputs), *gradients)


def _moved(tensors: tuple[Tensor | None, ...], device: str) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.to(device) for t in tensors)


class _Convolution(torch.autograd.Function):
    """The convolution of a mixer alone, on the trained grid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.plan = backend_for(x.device, x.dtype).conv_plan(conv_key(x, weight, None))
        return ctx.plan.forward(x, weight, bias, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return ctx.plan.backward(grad, *ctx.saved_tensors, None)


def _scan(*arguments: object) -> tuple[Tensor, Tensor]:
    return ops._scan_one_direction(arguments[:8], *arguments[8:])


def _mixer(xz, conv_weight, conv_bias, x_proj_weight, dt_weight, dt_bias, A, D, recurrence) -> Tensor:
    """Run the mixer at a grid other than the trained one, where the convolution follows an index order."""
    layout = token_layout(*GRID, 1, WIDTH, xz)
    own = fit(conv_weight, x_proj_weight, A, layout, recurrence, dt_weight.shape[2])
    return torch.ops.vil.mixer(
        *(xz, own.conv_weight, conv_bias, own.x_proj_weight, dt_weight, dt_bias, own.A, D),
        *(recurrence, True, own.cls_weight, own.order, own.cls_index, own.tokens_per_ref),
    )[0]


def largest_error(case: Case, dtype: torch.dtype, device: str) -> float:
    """Return the largest error of a case on a device, relative to the largest value of each result.

    Args:
        case: Operation to compute; the reference gets the same rounded inputs.
        dtype: Dtype of the activations; parameters and states stay in float32 if it is a 16-bit dtype.
        device: Device type.
    """
    tensors = rounded(case, dtype)
    exact = tuple(None if tensor is None else tensor.double() for tensor in tensors)
    with ops.use_backend("reference"):
        truth = outcomes(case, exact)
    results = outcomes(case, _moved(tensors, device))
    errors = []
    for result, exact in zip(results, truth, strict=True):
        scale = exact.abs().max().clamp(min=1e-30)
        error = ((result.cpu().double() - exact).abs().max() / scale).item()
        errors.append(error if error == error else float("inf"))  # NaN counts as infinite error
    return max(errors)


def compile_kernels(device: str) -> None:
    """Compile all kernels of the Triton backend at the same time, into Triton's cache."""
    from vil.kernels.triton.launch import compiling  # triton may be missing

    with ops.use_backend("triton"), compiling():
        for dtype in dtypes_on("cuda"):
            for case in cases(dtype):
                outcomes(case, _moved(rounded(case, dtype), device))


def _error(backend: str, device: str, dtype: torch.dtype, number: int) -> float:
    """Return the error of a case, given by its place among the cases of a dtype."""
    with ops.use_backend(backend):
        return largest_error(next(itertools.islice(cases(dtype), number, None)), dtype, device)


def _errors(backend: str, device: str, dtype: torch.dtype) -> Iterator[tuple[Case, float | None, str]]:
    """Yield each case, its error, None if the backend does not support it, and what ended its process, if it did.

    Another process runs the cases: after an illegal access, every later CUDA call of a process fails.
    """
    pool = _process()
    for number, case in enumerate(cases(dtype)):
        try:
            yield case, pool.submit(_error, backend, device, dtype, number).result(), ""
        except NotImplementedError:  # as for users
            yield case, None, ""
        except Exception as error:  # also of a process that a signal ended
            yield case, math.inf, f", {type(error).__name__}: {first_line(error)}"
            pool.shutdown(wait=False)
            pool = _process()
    pool.shutdown()


def _process() -> ProcessPoolExecutor:
    # CUDA does not work in a forked process.
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def check(backend: str, device: str) -> tuple[int, int]:
    """Compare a backend with the reference, print a line per case, and return (passed, failed)."""
    counts = [0, 0]
    if backend == "triton":  # in another process, which a compiler may end; then, cases compile
        with _process() as pool:
            pool.submit(compile_kernels, device).exception()
    for dtype in dtypes_on(device):
        for case, error, end in _errors(backend, device, dtype):
            if error is None:
                continue
            label = " ".join(map(str, case.options))
            shape = "x".join(map(str, case.tensors[0].shape))
            passed = error <= TOLERANCES[dtype]
            counts[not passed] += 1
            verdict = "pass" if passed else "FAIL"
            name = f"{backend} {case.name} {label}".strip()
            print(f"{verdict}  {str(dtype)[6:]:9} {name:48} {shape:14} error {error:.1e}{end}")
    return counts[0], counts[1]


def main() -> int:
    """Check every backend and return the exit status."""
    packages = {"vil": vil.__version__, "torch": torch.__version__}
    for name in ("triton", "numba"):
        if importlib.util.find_spec(name) is not None:
            packages[name] = importlib.metadata.version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    print(f"{platform.machine()}, {device}; python {platform.python_version()}, {versions}")
    backends = available_backends()
    if not backends:
        print("only the reference backend is available; pip install numba for CPUs, triton for GPUs")
        return 1
    totals = [check(backend, device) for backend, device in backends.items()]
    passed, failed = (sum(counts) for counts in zip(*totals, strict=True))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
