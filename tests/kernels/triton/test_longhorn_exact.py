"""The Triton kernels of the exact form against the reference in float64.

Without a GPU they run in Triton's interpreter, which computes matrix products in float32.
"""

import pytest
import torch
from torch import Tensor

from vil.kernels import reference

longhorn_exact = pytest.importorskip("vil.kernels.triton.longhorn_exact")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-6 if DEVICE == "cpu" else 1e-5
NAMES = ("x", "dt", "q", "k", "D", "bias", "z", "initial_state")


def arguments(
    N: int, B: int, L: int, D: int, M: int, dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    """Return x, dt, q, k, D, bias, z and initial state, strided as in the backbone.

    There is a z for two directions and an initial state for one.
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    x, z = randn(N, B, L, D).to(dtype), randn(B, L, 2 * D).to(dtype)[..., D:]
    projected = randn(N, B, L, 3 + 2 * M).to(dtype)
    k, q = projected[..., 3 : 3 + M], projected[..., 3 + M :]
    values = [x, randn(N, B, L, D).to(dtype), q, k, randn(N, D), randn(N, D)]
    return [*values, z, None] if N == 2 else [*values, None, randn(B, D, M)]


def given_gradients(inputs: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return gradients of the output and, of a single direction, of the final state."""
    generator = torch.Generator().manual_seed(1)
    x, k = inputs[0], inputs[3]
    dout = torch.randn(x.shape[1:], generator=generator).to(x)
    if x.shape[0] == 2:
        return dout, None
    shape = (*k.shape[1:2], x.shape[3], k.shape[3])
    return dout, torch.randn(shape, generator=generator).to(DEVICE)


def expected(
    inputs: list[Tensor | None], dout: Tensor, dfinal: Tensor | None, reverse: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and final state, then the gradients of what is given: float64 reference."""
    leaves = [None if t is None else t.double().requires_grad_() for t in inputs]
    x, dt, q, k, D, bias, z, initial_state = leaves
    if z is not None:
        recurrence = "longhorn_exact"
        outputs = [reference.bidirectional_scan(x, dt, None, q, k, D, bias, z, recurrence)]
    else:
        single = (x[0], dt[0], None, q[0], k[0], D[0], bias[0], initial_state)
        outputs = list(reference.scan(*single, "longhorn_exact", reverse))
    grads = [g.double() for g in (dout, dfinal) if g is not None]
    gradients = torch.autograd.grad(outputs, [t for t in leaves if t is not None], grads)
    return [out.detach() for out in outputs], list(gradients)


def error(result: Tensor, truth: Tensor) -> float:
    assert result.shape == truth.shape
    assert torch.isfinite(result).all()
    return float((result.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30))


def check(inputs: list[Tensor | None], reverse: bool = False, save: bool = True) -> None:
    """Compare values and every gradient with the reference."""
    dout, dfinal = given_gradients(inputs)
    truths, gradients = expected(inputs, dout, dfinal, reverse)
    out, y_sum, states, final_state = longhorn_exact.forward(*inputs, reverse=reverse, save=save)
    outputs = [out] if final_state is None else [out, final_state]
    for result, truth in zip(outputs, truths, strict=True):
        assert error(result, truth) < TOLERANCE
    results = longhorn_exact.backward(dout, dfinal, *inputs, y_sum, states, reverse)
    for name, given, result in zip(NAMES, inputs, results, strict=True):
        if given is None:
            assert result is None, name
        else:
            assert error(result, gradients.pop(0)) < TOLERANCE, name


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
    ("B", "L", "D", "M", "save"),
    [
        (1, 1, 8, 5, True),
        (2, 17, 40, 16, True),
        (1, 33, 32, 4, False),
        (1, 16, 32, 32, True),
        (1, 18, 8, 64, True),
    ],
)
def test_both_directions(B: int, L: int, D: int, M: int, save: bool) -> None:
    check(arguments(2, B, L, D, M), save=save)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("B", "L", "D", "M", "save"), [(2, 1, 8, 5, False), (1, 18, 40, 16, True)])
def test_one_direction(B: int, L: int, D: int, M: int, save: bool, reverse: bool) -> None:
    check(arguments(1, B, L, D, M), reverse, save)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_segments_of_one_direction(
    reverse: bool, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longhorn_exact.tuning, "segments", lambda *a, **k: (3, 2))
    *inputs, initial_state = arguments(1, 1, 66, 7, 2)  # 5 chunks, the last of 2 tokens
    check([*inputs, initial_state if started else None], reverse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [1, 2])
def test_low_precision_is_rounded_little(N: int, dtype: torch.dtype) -> None:
    inputs = arguments(N, 1, 20, 32, 16, dtype)
    dout, dfinal = given_gradients(inputs)
    truths, gradients = expected(inputs, dout, dfinal)
    out, y_sum, states, _ = longhorn_exact.forward(*inputs, reverse=False, save=True)
    results = longhorn_exact.backward(dout, dfinal, *inputs, y_sum, states, reverse=False)
    assert out.dtype == dtype
    assert error(out, truths[0]) < torch.finfo(dtype).eps
    for given, result in zip(inputs, results, strict=True):
        if given is not None:
            assert result.dtype == given.dtype
            assert error(result, gradients.pop(0)) < torch.finfo(dtype).eps


@pytest.mark.pairs
@pytest.mark.ci
@pytest.mark.parametrize(("B", "L", "D", "R"), [(2, 19, 40, 3), (1, 5, 8, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segments", [1, 3])
def test_step_sizes_of_low_rank_are_their_products(
    B: int, L: int, D: int, R: int, dtype: torch.dtype, segments: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if segments > 1:
        monkeypatch.setattr(longhorn_exact.tuning, "segments", lambda *a, **k: (2, 1))
    x, _, *rest = arguments(2, B, L, D, 4, dtype)
    generator = torch.Generator().manual_seed(2)
    projected = torch.randn(2, B, L, R + 2, generator=generator).to(DEVICE, dtype)
    low, weight = projected[..., 1 : R + 1], torch.randn(2, D, R, generator=generator).to(DEVICE)
    full = torch.einsum("nblr,ndr->nbld", low.double(), weight.to(dtype).double()).to(dtype)
    (truth,), _ = expected([x, full, *rest], torch.ones_like(rest[4]), None)
    out, y_sum, states, _ = longhorn_exact.forward(x, low, *rest, False, True, dt_weight=weight)
    plain, *_ = longhorn_exact.forward(x, low, *rest, False, False, dt_weight=weight)
    assert torch.equal(out, plain)
    given = longhorn_exact.forward(x, full, *rest, False, True)
    if dtype == torch.float32:
        assert error(out, truth) < TOLERANCE
        assert error(states, given[2]) < TOLERANCE
    else:  # a product on the verge of two numbers may be rounded to the other
        assert error(out, truth) < torch.finfo(dtype).eps
        assert error(states, given[2].double()) < torch.finfo(dtype).eps
    assert error(y_sum, given[1].double()) < torch.finfo(dtype).eps


@pytest.mark.parametrize("raw", [-60.0, 0.0, 60.0])
@pytest.mark.parametrize("key_norm", [0.0, 1e3])
def test_extreme_inputs_stay_finite_and_right(raw: float, key_norm: float) -> None:
    x, dt, q, k, skip, bias, z, _ = arguments(2, 1, 18, 32, 16)
    inputs = [x, torch.full_like(dt, raw), q, k * key_norm, skip, bias, z, None]
    dout = torch.ones_like(z)
    (truth,), gradients = expected(inputs, dout, None)
    out, *kept, _ = longhorn_exact.forward(*inputs, reverse=False, save=True)
    assert error(out, truth) < TOLERANCE
    *results, _ = longhorn_exact.backward(dout, None, *inputs, *kept, reverse=False)
    for name, result, gradient in zip(NAMES, results, gradients, strict=False):
        assert torch.isfinite(result).all(), name
        if gradient.abs().max() > 1e-20:
            assert error(result, gradient) < TOLERANCE, name
        else:  # too small for float32's products: nothing must come of it
            assert result.abs().max() < 1e-18, name
