"""The Triton kernels of the exact form against the reference in float64.

Without a GPU they run in Triton's interpreter, which computes matrix products in float32.
"""

import pytest
import torch
from torch import Tensor

from vil.kernels import reference

longhorn_exact = pytest.importorskip("vil.kernels.longhorn_exact")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "dt", "q", "k", "D", "bias", "z")


def arguments(B: int, L: int, D: int, M: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return x, dt, q, k, D, bias and z, strided as in the backbone."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    x, z = randn(2, B, L, D).to(dtype), randn(B, L, 2 * D).to(dtype)[..., D:]
    projected = randn(2, B, L, 3 + 2 * M).to(dtype)
    k, q = projected[..., 3 : 3 + M], projected[..., 3 + M :]
    return [x, randn(2, B, L, D).to(dtype), q, k, randn(2, D), randn(2, D), z]


def expected(inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return output and gradients of the reference in float64."""
    x, dt, *rest = (tensor.detach().double().requires_grad_() for tensor in inputs)
    out = reference.bidirectional_scan(x, dt, None, *rest, recurrence="longhorn_exact")
    return out.detach(), torch.autograd.grad(out, (x, dt, *rest), dout.double())


def error(result: Tensor, truth: Tensor) -> float:
    assert torch.isfinite(result).all()
    return float((result.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30))


@pytest.fixture(autouse=True)
def nan_where_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(
        longhorn_exact.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan"))
    )
    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, *a, **k: new_empty(self, *a, **k).fill_(float("nan"))
    )


@pytest.mark.parametrize(
    ("B", "L", "D", "M"), [(1, 1, 8, 5), (2, 17, 40, 16), (1, 33, 32, 4), (1, 16, 32, 32)]
)
@pytest.mark.parametrize("saved", [True, False])
def test_values_and_gradients(B: int, L: int, D: int, M: int, saved: bool) -> None:
    inputs = arguments(B, L, D, M)
    dout = torch.randn(B, L, D, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    truth, gradients = expected(inputs, dout)
    out, *kept = longhorn_exact.bidirectional_forward(*inputs, save=saved)
    tolerance = 2e-6 if DEVICE == "cpu" else 1e-5
    assert error(out, truth) < tolerance
    results = longhorn_exact.bidirectional_backward(dout, *inputs, *kept)
    for name, result, gradient in zip(NAMES, results, gradients, strict=True):
        assert error(result, gradient) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    inputs = arguments(1, 20, 32, 16, dtype)
    dout = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    truth, gradients = expected(inputs, dout)
    out, *kept = longhorn_exact.bidirectional_forward(*inputs, save=True)
    results = longhorn_exact.bidirectional_backward(dout, *inputs, *kept)
    assert out.dtype == dtype
    assert error(out, truth) < 2 * torch.finfo(dtype).eps
    for given, result, gradient in zip(inputs, results, gradients, strict=True):
        assert result.dtype == given.dtype
        assert error(result, gradient) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("raw", [-60.0, 0.0, 60.0])
@pytest.mark.parametrize("key_norm", [0.0, 1e3])
def test_extreme_inputs_stay_finite_and_right(raw: float, key_norm: float) -> None:
    x, dt, q, k, skip, bias, z = arguments(1, 18, 32, 16)
    inputs = [x, torch.full_like(dt, raw), q, k * key_norm, skip, bias, z]
    dout = torch.ones_like(z)
    truth, gradients = expected(inputs, dout)
    out, *kept = longhorn_exact.bidirectional_forward(*inputs, save=True)
    tolerance = 2e-6 if DEVICE == "cpu" else 1e-5
    assert error(out, truth) < tolerance
    results = longhorn_exact.bidirectional_backward(dout, *inputs, *kept)
    for name, result, gradient in zip(NAMES, results, gradients, strict=True):
        assert torch.isfinite(result).all(), name
        if gradient.abs().max() > 1e-20:
            assert error(result, gradient) < tolerance, name
        else:  # too small for float32's products: nothing must come of it
            assert result.abs().max() < 1e-18, name


def test_gradients_are_the_same_bits_twice() -> None:
    inputs = arguments(1, 19, 32, 16)
    dout = torch.ones_like(inputs[-1])
    first = longhorn_exact.bidirectional_backward(dout, *inputs, None, None)
    second = longhorn_exact.bidirectional_backward(dout, *inputs, None, None)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
