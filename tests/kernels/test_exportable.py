"""The mixer for exporters against the operator, in eager mode; ONNX itself is in ``tests/vil``."""

import pytest
import torch
from torch import Tensor

from vil.kernels import exportable, ops, reference

E, M, R, K = 6, 4, 3, 4
ROUNDING = {
    "longhorn": 1e-11,
    "longhorn_exact": 1e-11,
    "mamba": 1e-8,
}  # softplus(20) is 20 in PyTorch


def arguments(recurrence: str, length: int, key: float = 1.0, bias: float = 0.0) -> list:
    """Return those of the mixer up to the recurrence, in float64, for two sequences."""
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
        return torch.ops.vil.mixer(*given[:9], False, *given[9:])[0]


def to(arguments: list, dtype: torch.dtype) -> list:
    return [a.to(dtype) if isinstance(a, Tensor) else a for a in arguments]


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize("length", [1, 3, 8, 17])
def test_agrees_with_the_operator(recurrence: str, length: int) -> None:
    given = arguments(recurrence, length)
    made, expected = exportable.mixer(*given), by_reference(*given)
    torch.testing.assert_close(made, expected, rtol=0, atol=ROUNDING[recurrence])


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize("trained", [(2, 3), (8, 9)])  # the first with a factor of |k|^2
def test_agrees_at_another_grid(recurrence: str, trained: tuple[int, int]) -> None:
    given, grid = arguments(recurrence, 4 * 5 + 1), [4, 5, *trained, 8, 8, 8, 8, 1]
    made, expected = exportable.mixer(*given, grid), by_reference(*given, grid)
    torch.testing.assert_close(made, expected, rtol=0, atol=ROUNDING[recurrence])
    assert (expected - by_reference(*given)).abs().max() > 1e-3


def test_agrees_where_patches_are_missing() -> None:
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 15:] = False
    given, grid = arguments("longhorn", 21), [4, 5, 2, 3, 8, 8, 8, 8, 1]
    made, expected = (mixer(*given, grid, valid) for mixer in (exportable.mixer, by_reference))
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize("bias", [-100.0, -12.0, 0.0, 100.0])
@pytest.mark.parametrize("key", [1e-3, 1.0, 1e3])
def test_is_accurate_for_extreme_keys_and_steps(recurrence: str, bias: float, key: float) -> None:
    given = to(arguments(recurrence, 18, key, bias), torch.float32)
    expected = by_reference(*to(given, torch.float64))
    errors = [
        (mixer(*given) - expected).abs().max() / expected.abs().max()
        for mixer in (exportable.mixer, by_reference)
    ]
    assert errors[0] < max(2 * errors[1], 2e-6)


@pytest.mark.parametrize("recurrence", ["longhorn", "longhorn_exact"])
def test_equal_keys_in_full_steps_stay_bounded(recurrence: str) -> None:
    """Here what a token writes depends most on those before it in its chunk."""
    given = arguments(recurrence, 40, key=0.0, bias=100.0)
    given[3][:, R : R + M] = 0.5 * torch.ones(E)
    given[1], given[2] = given[1] * 0, given[2] * 0 + 10  # the convolution's output is its bias
    single = to(given, torch.float32)
    torch.testing.assert_close(
        exportable.mixer(*single).double(), by_reference(*given), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_returns_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    given = to(arguments("longhorn_exact", 9), dtype)
    made, expected = exportable.mixer(*given), by_reference(*to(given, torch.float32))
    assert made.dtype == dtype
    assert (made.float() - expected).abs().max() < 0.01 * expected.abs().max()


def test_softplus_keeps_small_steps() -> None:
    v = torch.tensor([-80.0, -17.0, -16.0, -10.0, -1.0, 0.0, 1.0, 15.0, 90.0])
    expected = torch.nn.functional.softplus(v.double(), threshold=100)
    torch.testing.assert_close(exportable._softplus(v).double(), expected, rtol=3e-7, atol=0)
