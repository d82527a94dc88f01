"""The exporters' mixer equals the operator in eager mode; ``tests/vil`` tests ONNX itself."""

import pytest
import torch
from torch import Tensor

from vil.kernels import onnx, ops, reference
from vil.kernels.grid import layout_of

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


def by_reference(*given: object) -> Tensor:
    with ops.use_backend("reference"):
        layout = layout_of(given[9], 4, torch.device("cpu")) if given[9:] else ()
        return torch.ops.vil.mixer(*given[:9], False, *layout)[0]


def to(arguments: list, dtype: torch.dtype) -> list:
    return [a.to(dtype) if isinstance(a, Tensor) else a for a in arguments]


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize(
    ("length", "grid"),
    [
        *((length, []) for length in (1, 3, 8, 17)),
        *((21, [[4, 5, *trained, 8, 8, 8, 8, 1]]) for trained in ((2, 3), (8, 9))),
    ],
)
def test_agrees_with_the_operator(recurrence: str, length: int, grid: list) -> None:
    given = arguments(recurrence, length)
    made, expected = onnx.mixer(*given, *grid), by_reference(*given, *grid)
    torch.testing.assert_close(made, expected, rtol=0, atol=ROUNDING[recurrence])


@pytest.mark.pairs
@pytest.mark.ci
@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize("bias", [-100.0, -12.0, 0.0, 100.0])
@pytest.mark.parametrize("key", [1e-3, 1.0, 1e3])
def test_is_accurate_for_extreme_keys_and_steps(recurrence: str, bias: float, key: float) -> None:
    given = to(arguments(recurrence, 18, key, bias), torch.float32)
    expected = by_reference(*to(given, torch.float64))
    errors = [
        (mixer(*given) - expected).abs().max() / expected.abs().max()
        for mixer in (onnx.mixer, by_reference)
    ]
    assert errors[0] < max(2 * errors[1], 2e-6)
