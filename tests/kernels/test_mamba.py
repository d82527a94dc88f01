"""The Triton kernels of the Mamba scan against the reference in float64.

Without a GPU they run in Triton's interpreter, which computes matrix products in float32.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vil.kernels import reference

mamba = pytest.importorskip("vil.kernels.mamba")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "dt", "A", "q", "k", "D", "bias", "z")
# (B, L, D, M): one token; a group and an interval that are not full; channels short of a block and
# over one; a state size that is no power of two.
SHAPES = [(2, 1, 40, 4), (1, 2, 8, 16), (1, 17, 70, 4), (1, 33, 32, 16), (1, 50, 8, 5)]
TOLERANCE = 2e-6 if DEVICE == "cpu" else 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def arguments(B: int, L: int, D: int, M: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return x, dt, A, q, k, D, bias and z, strided as in the backbone."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    x, z = randn(2, B, L, D).to(dtype), randn(B, L, 2 * D).to(dtype)[..., D:]
    projected = randn(2, B, L, 3 + 2 * M).to(dtype)
    k, q = projected[..., 3 : 3 + M], projected[..., 3 + M :]
    A = -randn(2, D, M).exp()
    return [x, randn(2, B, L, D).to(dtype), A, q, k, randn(2, D), randn(2, D), z]


def gradient_of(out: Tensor) -> Tensor:
    """Return a random gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).to(out.device, out.dtype)


def expected(inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return output and gradients of the reference in float64."""
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = reference.bidirectional_scan(*doubles, recurrence="mamba")
    return out.detach(), torch.autograd.grad(out, doubles, dout.double())


def error(result: Tensor, truth: Tensor) -> float:
    """Return the largest error relative to the largest value."""
    assert torch.isfinite(result).all()
    return float((result.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30))


@pytest.fixture(autouse=True)
def nan_where_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, new_empty = torch.empty, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, *a, **k: new_empty(self, *a, **k).fill_(float("nan"))
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, int, int, int]) -> None:
    inputs = arguments(*shape)
    dout = gradient_of(inputs[-1])
    truth, gradients = expected(inputs, dout)
    out, y_sum, states = mamba.bidirectional_forward(*inputs, save=True)
    assert error(out, truth) < TOLERANCE
    results = mamba.bidirectional_backward(dout, *inputs, y_sum, states)
    for name, result, gradient in zip(NAMES, results, gradients, strict=True):
        assert result.shape == gradient.shape
        assert error(result, gradient) < TOLERANCE, name


def test_inputs_of_any_strides() -> None:
    inputs = arguments(2, 5, 36, 4)
    dout = gradient_of(inputs[-1])
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs]
    out, *saved = mamba.bidirectional_forward(*inputs, save=True)
    assert torch.equal(mamba.bidirectional_forward(*strided, save=False)[0], out)
    results = mamba.bidirectional_backward(dout, *inputs, *saved)
    same = mamba.bidirectional_backward(
        dout.transpose(0, 1).contiguous().transpose(0, 1), *strided, *saved
    )
    assert all(torch.equal(a, b) for a, b in zip(results, same, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    inputs = arguments(1, 18, 32, 4, dtype)
    dout = gradient_of(inputs[-1])
    truth, gradients = expected(inputs, dout)
    out, *saved = mamba.bidirectional_forward(*inputs, save=True)
    results = mamba.bidirectional_backward(dout, *inputs, *saved)
    assert out.dtype == dtype
    assert error(out, truth) < torch.finfo(dtype).eps
    for given, result, gradient in zip(inputs, results, gradients, strict=True):
        assert result.dtype == given.dtype
        assert error(result, gradient) < torch.finfo(dtype).eps


@pytest.mark.parametrize("key_norm", [0.0, 1e3])
def test_extreme_inputs_stay_finite_and_right(key_norm: float) -> None:
    x, dt, A, q, k, skip, bias, z = arguments(1, 18, 32, 4)
    dt = torch.where(dt < -0.4, -60.0, torch.where(dt > 0.4, 60.0, dt))
    k = k * (key_norm / k.norm(dim=-1, keepdim=True))
    inputs = [x, dt, A, q, k, skip, bias, z]
    dout = gradient_of(z)
    truth, gradients = expected(inputs, dout)
    out, *saved = mamba.bidirectional_forward(*inputs, save=True)
    assert error(out, truth) < TOLERANCE
    results = mamba.bidirectional_backward(dout, *inputs, *saved)
    for name, result, gradient in zip(NAMES, results, gradients, strict=True):
        assert error(result, gradient) < TOLERANCE, name


def test_backward_without_saved_states_gives_the_same_bits() -> None:
    inputs = arguments(2, 7, 40, 4)
    dout = gradient_of(inputs[-1])
    out, *saved = mamba.bidirectional_forward(*inputs, save=True)
    assert torch.equal(mamba.bidirectional_forward(*inputs, save=False)[0], out)
    first = mamba.bidirectional_backward(dout, *inputs, *saved)
    second = mamba.bidirectional_backward(dout, *inputs, None, None)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------- ahead-of-time compiling

# A kernel imported under the interpreter cannot be compiled, hence a process of its own.
_COUNT = """
import json, sys
from benchmarks.static_cost import Variant, cost
from vil.kernels import mamba as module
name, given, types, warps = json.loads(sys.argv[1])
kernel = getattr(module, name)
signature = {n: types.get(n, "*bf16:16" if n.endswith("_ptr") else "i32:16")
             for n in kernel.arg_names if n not in given}
c = cost(Variant(name, kernel, signature, given, warps, "iteration", 1), "90")
print(json.dumps([c.registers, c.spills, c.loops]))
"""
_TYPES = {"L": "i32"} | {
    f"{name}_ptr": "*fp32:16"
    for name in (
        "rows",
        "rates",
        "skip",
        "bias",
        "y",
        "states",
        "scratch",
        "drows",
        "drates",
        "dskip",
        "dbias",
    )
}


def compiled(kernel: str, constexprs: dict[str, int | bool | str], warps: int) -> tuple:
    """Return registers, spills and lengths of the loops, longest first, on sm_90."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    request = json.dumps([kernel, constexprs, _TYPES, warps])
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, request],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.slow
def test_forward_compiles_within_its_budget() -> None:
    sizes = {"D": 384, "M": 16, "INTERVAL": 16, "BLOCK_D": 128}
    registers, spills, loops = compiled(
        "_forward_kernel", {**sizes, "SAVE": False, "FAST": True}, 4
    )
    assert spills == 0
    assert registers <= 80
    # Two directions, each an outer loop over intervals around one over tokens.
    per_update = (loops[1] + loops[3]) / 2 / 16
    assert per_update <= 10


@pytest.mark.slow
def test_backward_compiles_within_its_budget() -> None:
    sizes = {"D": 384, "M": 16, "BITS": 5, "INTERVAL": 16, "GROUP": 2, "BLOCK_D": 64}
    registers, spills, loops = compiled(
        "_backward_kernel", {**sizes, "FAST": True, "PRECISION": "tf32"}, 2
    )
    assert spills == 0
    assert registers <= 255
    # Within the loop over intervals: taking a group of 2 tokens back, and repeating its scan.
    per_update = (loops[1] + loops[2]) / (2 * 16)
    assert per_update <= 36
