"""The Triton kernels at a dozen shapes that differ in what matters to them, values and gradients.

On a GPU in bfloat16 against the reference in float64 on the same GPU; without one, the small shapes in
Triton's interpreter. And the cases of ``python -m vil.selfcheck``, each by itself, so that processes can
share them: the compiler takes long, and the check itself then finds all compiled.
"""

from collections.abc import Iterator

import pytest
import torch

from vil import selfcheck
from vil.kernels import ops, reference

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps

# B, L, D, M
SHAPES = (
    (1, 1, 1, 1),  # nothing to scan
    (2, 16, 32, 16),  # one chunk, one warp
    (2, 17, 33, 16),  # one more of each
    (3, 15, 40, 3),  # no chunk is full, few states
    (1, 64, 24, 32),  # many states
    (5, 33, 130, 16),
    (2, 197, 96, 8),
    (16, 197, 384, 16),  # vil_tiny at 224 px
    (4, 197, 1536, 16),  # vil_base
    (16, 1025, 128, 16),  # as many tokens as at 512 px
    (8, 4097, 128, 16),  # at 1024 px, in segments
    (300, 50, 64, 16),  # many short ones
)
LOW_AND_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
SMALL = SHAPES[:2]  # the rest takes the interpreter a minute


@pytest.fixture(autouse=True)
def _leave_memory_to_others() -> Iterator[None]:
    """Several processes share the GPU, and the reference takes gigabytes."""
    yield
    if ON_GPU:
        torch.cuda.empty_cache()


def tensors(shape: tuple[int, int, int, int], recurrence: str) -> list[torch.Tensor | None]:
    """Return x, dt, A, q, k, D, bias and z: activations in bfloat16, parameters in float32."""
    B, L, D, M = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE)

    A = -randn(2, D, M).exp() if recurrence == "mamba" else None
    x, dt, q, k = randn(2, B, L, D), randn(2, B, L, D), randn(2, B, L, M), randn(2, B, L, M)
    x, dt, q, k, z = (t.bfloat16() for t in (x, dt, q, k, randn(B, L, D)))
    return [x, dt, A, q, k, randn(2, D), randn(2, D), z]


def outcomes(function: object, given: list[torch.Tensor | None], recurrence: str) -> list:
    """Return the output and the gradients of a fixed weighting of it."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in given]
    out = function(*leaves, recurrence)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    wanted = [t for t in leaves if t is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, weights.to(out.dtype))]


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else SMALL, ids=str)
def test_agrees_with_the_reference(shape: tuple[int, int, int, int], recurrence: str) -> None:
    given = tensors(shape, recurrence)
    with ops.use_backend("triton"):
        results = outcomes(ops.bidirectional_scan, given, recurrence)
    doubles = [None if t is None else t.double() for t in given]
    truths = outcomes(reference.bidirectional_scan, doubles, recurrence)
    for result, truth in zip(results, truths, strict=True):
        scale = truth.abs().max().clamp(min=1e-30)
        assert ((result.double() - truth).abs().max() / scale).item() <= TOLERANCE


CASES = [(dtype, i) for dtype in LOW_AND_SINGLE for i in range(len(list(selfcheck.cases(dtype))))]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "number"), CASES, ids=str)
def test_selfcheck_passes_case_by_case(dtype: torch.dtype, number: int) -> None:
    case = list(selfcheck.cases(dtype))[number]
    with ops.use_backend("triton"):
        error = selfcheck.largest_error(case, dtype, "cuda")
    assert error <= selfcheck.TOLERANCES[dtype], case.name
