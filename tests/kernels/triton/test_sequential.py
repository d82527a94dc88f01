"""The Triton kernels of the diagonal Longhorn and the Mamba scan against the reference in float64.

Without a GPU they run in Triton's interpreter, which computes matrix products in float32.
"""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from vil.kernels import reference
from vil.kernels.triton import tuning

sequential = pytest.importorskip("vil.kernels.triton.sequential")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-6 if DEVICE == "cpu" else 1e-5
# (B, L, D, M): one token; a group and a chunk that are not full; channels short of a block and over
# one; a state size that is no power of two.
SHAPES = [
    (2, 1, 40, 4),
    (1, 2, 8, 16),
    (1, 17, 140, 4),
    (1, 19, 64, 16),
    (1, 34, 8, 5),
    (1, 5, 8, 64),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.parametrize("recurrence", ["longhorn", "mamba"]),
]


@dataclass
class Inputs:
    """Arguments of the launchers, in their order."""

    x: Tensor
    dt: Tensor
    A: Tensor | None
    q: Tensor
    k: Tensor
    D: Tensor
    bias: Tensor
    z: Tensor | None
    initial_state: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def inputs_of(
    recurrence: str,
    shape: tuple[int, int, int, int],
    directions: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Return random inputs, strided as in the backbone; of one direction, with an initial state."""
    B, L, D, M = shape
    N, generator = directions, torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    projected = randn(N, B, L, 3 + 2 * M).to(dtype)
    return Inputs(
        x=randn(N, B, L, D).to(dtype),
        dt=randn(N, B, L, D).to(dtype),
        A=-randn(N, D, M).exp() if recurrence == "mamba" else None,
        q=projected[..., 3 + M :],
        k=projected[..., 3 : 3 + M],
        D=randn(N, D),
        bias=randn(N, D),
        z=randn(B, L, 2 * D).to(dtype)[..., D:] if N == 2 else None,
        initial_state=randn(B, D, M) if N == 1 else None,
    )


def expected(
    inputs: Inputs, recurrence: str, reverse: bool, grads: list[Tensor]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return outputs and gradients of the reference in float64."""
    given = [None if t is None else t.detach().double() for t in inputs.tensors()]
    given = [None if t is None else t.requires_grad_() for t in given]
    if inputs.z is not None:
        outputs = [reference.bidirectional_scan(*given[:8], recurrence)]
    else:
        one = [None if t is None else t[0] for t in given[:7]]
        outputs = list(reference.scan(*one, given[8], recurrence, reverse))
    gradients = torch.autograd.grad(
        outputs, [t for t in given if t is not None], [g.double() for g in grads]
    )
    return [out.detach() for out in outputs], gradients


def gradients_like(inputs: Inputs) -> list[Tensor]:
    """Return random gradients of the outputs: of out and, of one direction, of the last state."""
    generator = torch.Generator().manual_seed(1)
    _, B, L, D = inputs.x.shape
    shapes = [(B, L, D)] + ([(B, D, inputs.k.shape[-1])] if inputs.z is None else [])
    grads = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    grads[0] = grads[0].to(inputs.x.dtype)
    return grads


def error(result: Tensor, truth: Tensor) -> float:
    """Return the largest error relative to the largest value."""
    assert result.shape == truth.shape
    assert torch.isfinite(result).all()
    return float((result.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30))


def scan(
    inputs: Inputs, grads: list[Tensor], reverse: bool = False, keep: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and gradients of the kernels, from saved states if ``keep``."""
    out, y_sum, states, final = sequential.forward(*inputs.tensors(), reverse, save=keep)
    dfinal = grads[1] if len(grads) == 2 else None
    results = sequential.backward(grads[0], dfinal, *inputs.tensors(), y_sum, states, reverse)
    outputs = [out] if final is None else [out, final]
    return outputs, [result for result in results if result is not None]


def check(
    inputs: Inputs, recurrence: str, reverse: bool = False, tolerance: float = TOLERANCE
) -> None:
    """Compare outputs and gradients with the reference."""
    grads = gradients_like(inputs)
    truths, gradients = expected(inputs, recurrence, reverse, grads)
    outputs, results = scan(inputs, grads, reverse)
    for output, truth in zip(outputs, truths, strict=True):
        assert error(output, truth) < tolerance
    given = [field.name for field in fields(inputs) if getattr(inputs, field.name) is not None]
    for name, result, gradient in zip(given, results, gradients, strict=True):
        assert result.dtype == getattr(inputs, name).dtype
        assert error(result, gradient) < tolerance, name


@pytest.fixture(autouse=True)
def nan_where_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, new_empty = torch.empty, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, *a, **k: new_empty(self, *a, **k).fill_(float("nan"))
    )


@pytest.fixture
def in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every sequence into segments of one chunk."""
    monkeypatch.setattr(tuning, "segments", lambda warps, chunks, device, overhead: (chunks, 1))


@pytest.mark.pairs
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=[] if shape[2] < 100 else pytest.mark.ci, id=str(shape))
        for shape in SHAPES
    ],
)
def test_both_directions(recurrence: str, shape: tuple[int, int, int, int]) -> None:
    check(inputs_of(recurrence, shape), recurrence)


@pytest.mark.pairs
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 8, 4), (1, 19, 40, 5)], ids=str)
def test_one_direction(recurrence: str, shape: tuple[int, int, int, int], reverse: bool) -> None:
    check(inputs_of(recurrence, shape, directions=1), recurrence, reverse)


@pytest.mark.usefixtures("in_segments")
def test_both_directions_in_segments(recurrence: str) -> None:
    check(inputs_of(recurrence, (1, 35, 8, 4)), recurrence)


@pytest.mark.usefixtures("in_segments")
@pytest.mark.parametrize("reverse", [False, True])
def test_one_direction_in_segments(recurrence: str, reverse: bool) -> None:
    check(inputs_of(recurrence, (1, 35, 8, 4), directions=1), recurrence, reverse)


def test_inputs_of_any_strides(recurrence: str) -> None:
    inputs = inputs_of(recurrence, (2, 5, 36, 4))
    transposed = {
        name: getattr(inputs, name).mT.contiguous().mT for name in ("x", "dt", "q", "k", "z")
    }
    strided, grads = replace(inputs, **transposed), gradients_like(inputs)
    for a, b in zip(scan(inputs, grads), scan(strided, grads), strict=True):
        assert all(torch.equal(c, d) for c, d in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(recurrence: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(recurrence, (1, 18, 32, 4), dtype=dtype)
    check(inputs, recurrence, tolerance=torch.finfo(dtype).eps)


@pytest.mark.parametrize("key_norm", [0.0, 1e3])
def test_extreme_inputs_stay_finite_and_right(recurrence: str, key_norm: float) -> None:
    inputs = inputs_of(recurrence, (1, 18, 32, 4))
    dt = torch.where(inputs.dt < -0.4, -60.0, torch.where(inputs.dt > 0.4, 60.0, inputs.dt))
    k = inputs.k * (key_norm / inputs.k.norm(dim=-1, keepdim=True))
    check(replace(inputs, dt=dt, k=k), recurrence)
