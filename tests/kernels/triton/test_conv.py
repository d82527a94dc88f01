"""The Triton convolution matches the float64 reference for inputs of every kind.

Without a GPU the kernels run in Triton's interpreter.
"""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton")

from tests.kernels.scans import conv_results
from vil.kernels import reference
from vil.kernels.plan import forget_plans
from vil.kernels.triton import backend, conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest value. Below float32, results are rounded to 8 and 11 bits, which costs
# half a unit in the last bit.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_where_nothing_is_written"),
]


def conv_inputs(
    B: int,
    L: int,
    D: int,
    K: int,
    dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return grad (2, B, L, D), x (B, L, D), half of a projection as in the mixer, weight (2, D, K) and bias (2, D)."""
    generator = torch.Generator().manual_seed(L * D + K)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(DEVICE)

    x = normal(B, L, 2 * D).to(dtype)[..., :D]
    weight, bias = normal(2, D, K).to(parameter_dtype), normal(2, D).to(parameter_dtype)
    return normal(2, B, L, D).to(dtype), x, weight, bias


def table(L: int, gap: int, absent: int = 0) -> Tensor:
    """Return an order (P,) of L tokens but ``absent``, first those at even places, and gaps."""
    without, order = {i * L // absent for i in range(absent)}, []
    for phase in range(2):
        order += [t for t in range(phase, L, 2) if t not in without] + [-1] * gap
    return torch.tensor(order, dtype=torch.int32, device=DEVICE)


def assert_matches_reference(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None = None
) -> None:
    """Compare values and gradients with the float64 reference; check dtypes, shapes and layout."""
    inputs = (x, weight, bias)
    exact = (*(t.double() for t in inputs), order)
    out = reference.causal_conv1d_bidirectional(*exact)
    grads = reference.causal_conv1d_bidirectional_backward(grad.double(), *exact)
    actual = conv_results(backend, *inputs, grad, order)
    for name, ours, expected, like in zip(
        ("out", "dx", "dweight", "dbias"), actual, (out, *grads), (x, *inputs), strict=True
    ):
        assert ours.dtype == like.dtype, name
        assert ours.shape == expected.shape, name
        assert ours.is_contiguous(), name
        error = (ours.double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[like.dtype], f"{name}: {error:.1e}"


@pytest.mark.pairs
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("L", [1, 3, 17, 34])
def test_matches_reference(L: int, K: int) -> None:
    """One token, fewer tokens than taps, one more than a tile, several tiles; channels to mask."""
    assert_matches_reference(*conv_inputs(2, L, 70, K))


@pytest.mark.parametrize("parameter_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, parameter_dtype: torch.dtype | None) -> None:
    """Only the results are rounded; sums of float32 parameters' gradients are not."""
    assert_matches_reference(*conv_inputs(2, 17, 16, 4, dtype, parameter_dtype or dtype))


def test_programs_that_take_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program loops over tiles; the number of programs need not divide the number of tiles."""
    monkeypatch.setattr(conv, "BACKWARD_PROGRAMS", (4, 4))
    forget_plans()
    assert_matches_reference(*conv_inputs(3, 35, 70, 4))
    forget_plans()


@pytest.mark.pairs
@pytest.mark.parametrize("K", [4, 7, pytest.param(8, marks=pytest.mark.ci)])
@pytest.mark.parametrize("L", [3, 19])
def test_an_order(L: int, K: int) -> None:
    assert_matches_reference(*conv_inputs(2, L, 70, K), table(L, K - 1, absent=L // 3))


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_order_in_half_precision(dtype: torch.dtype) -> None:
    assert_matches_reference(*conv_inputs(2, 17, 16, 4, dtype), table(17, 3, absent=2))


def test_no_batch() -> None:
    grad, x, weight, bias = conv_inputs(0, 5, 6, 4)
    out, dx, dweight, dbias = conv_results(backend, x, weight, bias, grad)
    assert out.shape == (2, 0, 5, 6)
    assert dx.shape == x.shape
    assert not dweight.any()
    assert not dbias.any()
