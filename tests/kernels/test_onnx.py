"""The exporters' mixer equals the operator in eager mode; ``tests/vil`` tests ONNX itself."""

import pytest
import torch
from torch import Tensor

from tests.grids import Grid, mixer_arguments
from vil.kernels import onnx, ops, reference
from vil.kernels.mixer import arguments as mixer_parts

E, M, R, K = 6, 4, 3, 4
ROUNDING = {"longhorn": 1e-11, "longhorn_exact": 1e-11, "mamba": 1e-8}  # softplus(20) is 20


def arguments(recurrence: str, length: int, key: float = 1.0, bias: float = 0.0) -> list:
    """Return the mixer's arguments up to ``recurrence``, in float64, for two sequences."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x_proj = randn(2, R + 2 * M, E)
    x_proj[:, R : R + M] *= key
    return [
        *(randn(2, length, 2 * E), randn(2, E, K), randn(2, E), x_proj, randn(2, E, R)),
        *(randn(2, E) + bias, -randn(2, E, M).exp() if recurrence == "mamba" else None),
        *(randn(2, E), recurrence),
    ]


def by_reference(given: list, grid: Grid | None = None) -> Tensor:
    with ops.use_backend("reference"):
        return torch.ops.vil.mixer(*mixer_arguments(given[:8], given[8], grid))[0]


def by_onnx(given: list, grid: Grid | None = None) -> Tensor:
    xz, *inputs = mixer_arguments(given[:8], given[8], grid)
    params, recurrence, _, order = mixer_parts(inputs)
    return onnx.mixer(xz, params, recurrence, order)


def to(arguments: list, dtype: torch.dtype) -> list:
    return [a.to(dtype) if isinstance(a, Tensor) else a for a in arguments]


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize(
    ("length", "grid"),
    [
        *((length, None) for length in (1, 3, 8, 17)),
        *((21, Grid(4, 5, trained)) for trained in ((2, 3), (8, 9))),
    ],
)
def test_agrees_with_the_operator(recurrence: str, length: int, grid: Grid | None) -> None:
    given = arguments(recurrence, length)
    made, expected = by_onnx(given, grid), by_reference(given, grid)
    torch.testing.assert_close(made, expected, rtol=0, atol=ROUNDING[recurrence])


@pytest.mark.pairs
@pytest.mark.ci
@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize("bias", [-100.0, -12.0, 0.0, 100.0])
@pytest.mark.parametrize("key", [1e-3, 1.0, 1e3])
def test_is_accurate_for_extreme_keys_and_steps(recurrence: str, bias: float, key: float) -> None:
    given = to(arguments(recurrence, 18, key, bias), torch.float32)
    expected = by_reference(to(given, torch.float64))
    errors = [(mixer(given) - expected).abs().max() / expected.abs().max() for mixer in (by_onnx, by_reference)]
    assert errors[0] < max(2 * errors[1], 2e-6)
