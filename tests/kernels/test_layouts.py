"""Strides change no result: operators on random layouts against the reference on plain ones."""

import random

import pytest
import torch
from torch import Tensor

from tests.grids import Grid
from tests.strategies import laid_out
from vil.kernels import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest value; reading another token, or the gap beside it, is off by far more.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.2}
OPERATORS = ["scan", "scan both ways", "mixer"]


def drawn(operator: str, recurrence: str, dtype: torch.dtype, most: tuple[int, int, int], seed: int) -> list:
    """Return arguments of an operator, with at most ``most`` tokens, channels and states."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, channels, states = (rng.randint(1, n) for n in most)
    channels = rng.choice([channels, channels, most[1]])
    B, lead = rng.randint(1, 3), (1,) if operator == "scan" else (2,)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        values = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return laid_out(values.to(DEVICE, dtype), rng)

    def parameter(*shape: int) -> Tensor:
        return normal(*lead, *shape, dtype=rng.choice([dtype, max(dtype, torch.float32, key=bits)]))

    def rates() -> Tensor | None:
        values = -parameter(channels, states).double().exp()
        return laid_out(values.to(dtype), rng) if recurrence == "mamba" else None

    if operator == "mixer":
        H, W = rng.randint(1, 4), rng.randint(1, max(tokens // 4, 1))
        class_token, rank = rng.randint(0, 1), rng.randint(1, 3)
        grid = Grid(H, W, (2, 2), class_token=class_token)
        layout = rng.choice([None, grid.layout(device=DEVICE)])
        weights = parameter(rank + 2 * states, channels), parameter(channels, rank)
        taps, ordered = rng.randint(1, 5), ()
        if layout is not None:
            tokens, taps = grid.length, layout.taps.shape[0]
            reads = parameter(len(layout.cls_index), channels) if class_token else None
            ordered = (reads, layout.order, layout.cls_index, layout.tokens_per_ref)
        return [
            *(normal(B, tokens, 2 * channels),),
            *(parameter(channels, taps), parameter(channels), *weights, parameter(channels)),
            *(rates(), parameter(channels), recurrence, True, *ordered),
        ]
    rows, keys = (*lead, B, tokens, channels), (*lead, B, tokens, states)
    arguments = [normal(*rows), normal(*rows), rates(), normal(*keys), normal(*keys)]
    arguments += [parameter(channels), parameter(channels)]
    save = rng.random() < 0.5
    if operator == "scan both ways":
        return [*arguments, normal(*rows[1:]), None, recurrence, False, save]
    state = normal(1, B, channels, states, dtype=max(dtype, torch.float32, key=bits))
    return [*arguments, None, rng.choice([None, state]), recurrence, rng.random() < 0.5, save]


def bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def results(operator: str, backend: str, arguments: list, seed: int) -> list[Tensor]:
    """Return outputs and gradients; the gradients of outputs have random memory layouts."""
    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    with ops.use_backend(backend):
        out = getattr(torch.ops.vil, operator.partition(" ")[0])(*leaves)
        out = [out] if isinstance(out, Tensor) else out
        outputs = [*out[:2]] if operator == "scan" else [out[0]]
        grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
        grads = [laid_out(g.to(o.device, o.dtype), rng) for g, o in zip(grads, outputs, strict=True)]
        if backend == "reference":
            grads = [g.contiguous() for g in grads]
        return [*outputs, *torch.autograd.grad(outputs, wanted, grads)]


def plain(argument: object) -> object:
    if not isinstance(argument, Tensor):
        return argument
    argument = argument.clone(memory_format=torch.contiguous_format)
    return argument.double() if argument.is_floating_point() else argument


def assert_as_in_plain_memory(
    operator: str, backend: str, dtype: torch.dtype, most: tuple[int, int, int], seed: int
) -> None:
    recurrence = ops.RECURRENCES[seed % len(ops.RECURRENCES)]
    arguments = drawn(operator, recurrence, dtype, most, seed)
    truths = results(operator, "reference", [plain(a) for a in arguments], seed)
    for i, result in enumerate(results(operator, backend, arguments, seed)):
        error = (result.double() - truths[i]).abs().max()
        bound = TOLERANCE[dtype] * truths[i].abs().max() + 1e-24
        assert error <= bound, f"result {i} for {recurrence} with seed {seed}: {error} > {bound}"


@pytest.mark.skipif(DEVICE != "cpu", reason="the tensors are on a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_loops(operator: str, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    for seed in range(60):
        assert_as_in_plain_memory(operator, "cpu", dtype, (20, 64, 7), seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.ci) for n in (1, 2))])
@pytest.mark.parametrize("operator", OPERATORS)
def test_triton_kernels(operator: str, seed: int) -> None:
    pytest.importorskip("triton")
    assert_as_in_plain_memory(operator, "triton", torch.float32, (5, 6, 3), seed)
