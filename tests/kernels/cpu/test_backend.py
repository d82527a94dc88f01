"""The compiled CPU backend gives what the reference gives in float64, whatever it is handed."""

import concurrent.futures
import os
import platform
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vil.kernels import reference
from vil.kernels.reference import RECURRENCES

pytest.importorskip("numba")

from vil.kernels.cpu import backend as cpu

# Relative to the largest value; the compiled loops add up in another order than the reference.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# (B, L, D, M): one token, odd sizes, channels that do not fill vectors, several blocks and chunks.
SHAPES = [(1, 1, 1, 1), (2, 37, 70, 7), (1, 50, 192, 16), (2, 17, 64, 4)]


def scan_inputs(
    shape: tuple[int, int, int, int], recurrence: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor | None]:
    """Return random arguments of ``scan``, A only for Mamba."""
    B, L, D, M = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    state_dtype = dtype if dtype == torch.float64 else torch.float32
    return {
        "x": normal(B, L, D),
        "dt": normal(B, L, D),
        "A": -normal(D, M).exp() if recurrence == "mamba" else None,
        "q": normal(B, L, M),
        "k": normal(B, L, M),
        "D": normal(D),
        "bias": normal(D),
        "initial_state": normal(B, D, M).to(state_dtype),
    }


def bidirectional_inputs(
    shape: tuple[int, int, int, int], recurrence: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor | None]:
    """Return random arguments of ``bidirectional_scan``, A only for Mamba."""
    B, *rest = shape
    one = scan_inputs((2 * B, *rest), recurrence, dtype)
    del one["initial_state"]
    two = {n: None if t is None else torch.stack([t, t.flip(0)]) for n, t in one.items()}
    for name in ("x", "dt", "q", "k"):
        two[name] = one[name].unflatten(0, (2, B))
    return {**two, "z": two["x"].flip(0, 2)[0]}


def double(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return everything in float64."""
    return tuple(None if t is None else t.double() for t in tensors)


def assert_matches(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    """Compare with the reference's float64 result, relative to its largest value."""
    assert (actual is None) == (expected is None)
    if actual is not None:
        assert actual.shape == expected.shape
        bound = TOLERANCE[dtype] * expected.abs().max().item() + 1e-24  # what underflows
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


def assert_scan_matches(inputs: dict[str, Tensor | None], recurrence: str, reverse: bool) -> None:
    """Compare ``scan`` and its gradients with the reference."""
    tensors, dtype = tuple(inputs.values()), inputs["x"].dtype
    y, state = cpu.scan(*tensors, recurrence, reverse)
    expected_y, expected_state = reference.scan(*double(tensors), recurrence, reverse)
    assert y.dtype == dtype
    assert_matches(y, expected_y, dtype)
    assert_matches(state, expected_state, dtype)
    grads = torch.cos(expected_y).to(dtype), torch.sin(expected_state).to(state.dtype)
    actual = cpu.scan_backward(*grads, *tensors, recurrence, reverse)
    expected = reference.scan_backward(*double((*grads, *tensors)), recurrence, reverse)
    for tensor, a, e in zip(tensors, actual, expected, strict=True):
        assert_matches(a, e, dtype)
        assert tensor is None or a.dtype == tensor.dtype


def assert_bidirectional_matches(
    inputs: dict[str, Tensor | None], recurrence: str, key_norm: float = 1.0
) -> None:
    """Compare ``bidirectional_scan`` and its gradients with the reference."""
    tensors, dtype = tuple(inputs.values()), inputs["x"].dtype
    y = cpu.bidirectional_scan(*tensors, recurrence, key_norm)
    expected_y = reference.bidirectional_scan(*double(tensors), recurrence, key_norm)
    assert y.dtype == dtype
    assert_matches(y, expected_y, dtype)
    grad = torch.cos(expected_y).to(dtype)
    actual = cpu.bidirectional_scan_backward(grad, *tensors, recurrence, key_norm)
    expected = reference.bidirectional_scan_backward(
        *double((grad, *tensors)), recurrence, key_norm
    )
    for tensor, a, e in zip(tensors, actual, expected, strict=True):
        assert_matches(a, e, dtype)
        assert tensor is None or a.dtype == tensor.dtype


def all_results(shape: tuple[int, int, int, int], recurrence: str) -> list[Tensor | None]:
    """Return the results of every function of the backend on the same random inputs."""
    single = tuple(scan_inputs(shape, recurrence).values())
    double_ = tuple(bidirectional_inputs(shape, recurrence).values())
    x, weight, bias, grad = conv_inputs(shape[:3], 4)
    order = scattered(*shape[:2])
    y, state = cpu.scan(*single, recurrence, True)
    out = cpu.bidirectional_scan(*double_, recurrence)
    return [
        y,
        state,
        *cpu.scan_backward(y, state, *single, recurrence, True),
        out,
        *cpu.bidirectional_scan_backward(out, *double_, recurrence),
        cpu.bidirectional_scan(*double_, recurrence, 2.0),
        *cpu.bidirectional_scan_backward(out, *double_, recurrence, 2.0),
        cpu.causal_conv1d_bidirectional(x, weight, bias),
        *cpu.causal_conv1d_bidirectional_backward(grad, x, weight, bias),
        cpu.causal_conv1d_bidirectional(x, weight, bias, order),
        *cpu.causal_conv1d_bidirectional_backward(grad, x, weight, bias, order),
    ]


def conv_inputs(
    shape: tuple[int, int, int], K: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a random x, weight, bias and gradient of the result of the convolution."""
    generator = torch.Generator().manual_seed(sum(shape) + K)
    sizes = shape, (2, shape[2], K), (2, shape[2]), (2, *shape)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes)


@pytest.mark.pairs
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_matches_reference(shape, dtype, recurrence, reverse):
    assert_scan_matches(scan_inputs(shape, recurrence, dtype), recurrence, reverse)


@pytest.mark.pairs
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bidirectional_scan_matches_reference(shape, dtype, recurrence):
    assert_bidirectional_matches(bidirectional_inputs(shape, recurrence, dtype), recurrence)


@pytest.mark.pairs
@pytest.mark.parametrize("key_norm", [0.25, 4.0, 1e3])
@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_factor_on_the_norm_of_keys(dtype, recurrence, key_norm):
    inputs = bidirectional_inputs((2, 21, 70, 7), recurrence, dtype)
    if recurrence != "mamba" and key_norm < 1:
        inputs["k"] = inputs["k"] / 2  # states may grow where k.k eps is beyond 2
    assert_bidirectional_matches(inputs, recurrence, key_norm)


@pytest.mark.pairs
@pytest.mark.parametrize("K", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 130), (1, 33, 64)], ids=str)
def test_conv_matches_reference(shape, dtype, K):
    x, weight, bias, grad = conv_inputs(shape, K, dtype)
    y = cpu.causal_conv1d_bidirectional(x, weight, bias)
    assert y.dtype == dtype
    assert_matches(y, reference.causal_conv1d_bidirectional(*double((x, weight, bias))), dtype)
    actual = cpu.causal_conv1d_bidirectional_backward(grad, x, weight, bias)
    expected = reference.causal_conv1d_bidirectional_backward(*double((grad, x, weight, bias)))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert_matches(a, e, dtype)


def phases(rows: int, columns: int, gap: int) -> Tensor:
    """Return the order (1, P) of a grid and one token after it: four grids of every other patch.

    They stand a gap of empty positions apart.
    """
    grid, empty = torch.arange(rows * columns).view(rows, columns), torch.full((gap,), -1)
    parts = (t for i in (0, 1) for j in (0, 1) for t in (grid[i::2, j::2].flatten(), empty))
    return torch.cat([*parts, torch.tensor([rows * columns])]).int()[None]


def scattered(B: int, L: int) -> Tensor:
    """Return an order of its own for each batch element, (B, P), with gaps of any length.

    Some tokens take no part: a fourth or so, and all of the last batch element.
    """
    generator = torch.Generator().manual_seed(B + L)
    order = torch.full((B, 2 * L + 3), -1)
    for b in range(B):
        tokens = torch.randperm(L, generator=generator)
        without = (torch.rand(L, generator=generator) < 0.25) | (b == B - 1)
        positions = torch.randperm(order.shape[1], generator=generator)[:L].sort().values
        order[b, positions] = torch.where(without, -2 - tokens, tokens)
    return order.int()


def assert_conv_matches(
    x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, order: Tensor
) -> None:
    """Compare the convolution in an order and its gradients with the reference."""
    inputs, dtype = (x, weight, bias), x.dtype
    y = cpu.causal_conv1d_bidirectional(*inputs, order)
    assert y.dtype == dtype
    assert_matches(y, reference.causal_conv1d_bidirectional(*double(inputs), order), dtype)
    actual = cpu.causal_conv1d_bidirectional_backward(grad, *inputs, order)
    expected = reference.causal_conv1d_bidirectional_backward(*double((grad, *inputs)), order)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert_matches(a, e, dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("K", [1, 4, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, 64, 130])
def test_conv_in_an_order_matches_reference(channels, dtype, K):
    inputs = conv_inputs((2, 4 * 6 + 1, channels), K, dtype)
    assert_conv_matches(*inputs, phases(4, 6, K - 1))
    assert_conv_matches(*inputs, phases(4, 6, 0))
    assert_conv_matches(*inputs, scattered(2, 25))


@pytest.mark.parametrize("K", [4, 5])
def test_tokens_that_take_no_part_are_not_read(K):
    x, weight, bias, grad = conv_inputs((3, 25, 70), K)
    order = scattered(3, 25)
    tokens = torch.zeros(3, 26, dtype=torch.bool)
    tokens = tokens.scatter(1, torch.where(order < -1, -2 - order, 25).long(), True)[:, :25]
    assert tokens[-1].all()
    assert not tokens.all()
    y = cpu.causal_conv1d_bidirectional(x, weight, bias, order)
    assert not y[:, tokens].any()
    expected = cpu.causal_conv1d_bidirectional_backward(grad, x, weight, bias, order)
    assert not expected[0][tokens].any()
    x[tokens], grad[:, tokens] = torch.nan, torch.nan
    assert cpu.causal_conv1d_bidirectional(x, weight, bias, order).equal(y)
    actual = cpu.causal_conv1d_bidirectional_backward(grad, x, weight, bias, order)
    assert all(a.equal(e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs(recurrence, dtype):
    assert_scan_matches(scan_inputs((2, 21, 70, 7), recurrence, dtype), recurrence, True)
    inputs = bidirectional_inputs((1, 21, 70, 16), recurrence, dtype)
    for name in ("A", "D", "bias"):
        inputs[name] = None if inputs[name] is None else inputs[name].float()
    assert_bidirectional_matches(inputs, recurrence)


def types_compiled_for(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """Return a set that is told the dtype of every kernel that runs from now on."""
    dtypes, compiled = set(), cpu._compiled
    monkeypatch.setattr(cpu, "_compiled", lambda k, dtype: dtypes.add(dtype) or compiled(k, dtype))
    return dtypes


@pytest.mark.ci
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_bfloat16_is_rounded_once(recurrence, monkeypatch):
    """Results are those for the same numbers in float32, rounded."""
    tensors = tuple(bidirectional_inputs((2, 37, 70, 7), recurrence, torch.bfloat16).values())
    single = tuple(scan_inputs((2, 37, 70, 7), recurrence, torch.bfloat16).values())
    x, weight, bias, grad = conv_inputs((2, 37, 70), 4, torch.bfloat16)

    def results(given: Callable[[Tensor | None], Tensor | None]) -> list[Tensor]:
        many, one, conv = (tuple(map(given, t)) for t in (tensors, single, (x, weight, bias)))
        y, state = cpu.scan(*one, recurrence, True)
        found = [
            cpu.bidirectional_scan(*many, recurrence),
            *cpu.bidirectional_scan_backward(given(x), *many, recurrence),
            *(y, *cpu.scan_backward(given(x), state, *one, recurrence, True)),
            cpu.causal_conv1d_bidirectional(*conv),
            *cpu.causal_conv1d_bidirectional_backward(given(grad), *conv),
            cpu.causal_conv1d_bidirectional(*conv, scattered(2, 37)),
            *cpu.causal_conv1d_bidirectional_backward(given(grad), *conv, scattered(2, 37)),
        ]
        return [t for t in found if t is not None]

    expected = results(lambda t: None if t is None else t.float())
    dtypes = types_compiled_for(monkeypatch)
    actual = results(lambda t: t)
    assert dtypes == {torch.bfloat16}
    for a, e in zip(actual, expected, strict=True):
        assert a.equal(e.to(a.dtype))


@pytest.mark.ci
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="others keep them")
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_subnormal_numbers_are_zeros_within_the_loops_alone(recurrence):
    """Whatever the thread does with them, which it does afterwards, too."""
    inputs = bidirectional_inputs((1, 21, 70, 16), recurrence)
    inputs["x"] = inputs["x"] * 1e-38
    tensors, subnormal = tuple(inputs.values()), torch.tensor([1e-40])
    results = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            y = cpu.bidirectional_scan(*tensors, recurrence)
            results.append([y, *cpu.bidirectional_scan_backward(y, *tensors, recurrence)])
            assert (subnormal * 1 == 0).item() is flush
        finally:
            torch.set_flush_denormal(False)
    for a, e in zip(*results, strict=True):
        assert a is e is None or a.equal(e)
    y = results[0][0]
    assert y.any()
    assert y[y != 0].abs().min() >= torch.finfo(y.dtype).tiny


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_inputs_of_any_strides(recurrence):
    inputs = bidirectional_inputs((2, 9, 70, 5), recurrence)
    # As in the backbone: x and z halves of one projection, dt, q and k slices of another.
    inputs["x"], inputs["dt"] = torch.cat([inputs["x"], inputs["dt"]], -1).split(70, -1)
    inputs["q"], inputs["k"] = torch.cat([inputs["q"], inputs["k"]], -1).split(5, -1)
    inputs["z"] = inputs["z"].mT.contiguous().mT
    assert not any(inputs[name].is_contiguous() for name in ("x", "dt", "q", "k", "z"))
    assert_bidirectional_matches(inputs, recurrence)
    single = scan_inputs((2, 9, 70, 5), recurrence)
    single = {
        n: t if t is None else t.movedim(0, -1).contiguous().movedim(-1, 0)
        for n, t in single.items()
    }
    single["D"] = single["D"][:1].expand(70)
    assert_scan_matches(single, recurrence, False)


@pytest.mark.parametrize("given", ["D", "bias", "initial_state", None])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_optional_inputs(recurrence, given):
    inputs = scan_inputs((2, 5, 70, 4), recurrence)
    for name in {"D", "bias", "initial_state"} - {given}:
        inputs[name] = None
    assert_scan_matches(inputs, recurrence, True)


@pytest.mark.parametrize("dt", [-1e4, -60.0, 60.0, 1e4])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_extreme_step_sizes_and_keys(recurrence, dt):
    inputs = bidirectional_inputs((1, 20, 64, 16), recurrence)
    inputs["dt"] = inputs["dt"].sign() * 0.5 + dt
    if recurrence != "mamba":
        inputs["k"] = inputs["k"] * 1e3
    results = all_gradients(inputs, recurrence)
    assert all(tensor.isfinite().all() for tensor in results if tensor is not None)
    y, expected = (
        module.bidirectional_scan(*tensors, recurrence)
        for module, tensors in (
            (cpu, tuple(inputs.values())),
            (reference, double(tuple(inputs.values()))),
        )
    )
    assert_matches(y, expected, torch.float32)


def all_gradients(inputs: dict[str, Tensor | None], recurrence: str) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``bidirectional_scan`` for gradients of 1."""
    tensors = tuple(inputs.values())
    return cpu.bidirectional_scan_backward(torch.ones_like(inputs["z"]), *tensors, recurrence)


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("name", ["x", "dt", "q", "k", "z"])
def test_nan_is_passed_on(recurrence, name):
    inputs = bidirectional_inputs((1, 6, 64, 4), recurrence)
    inputs[name][..., 3, :1] = torch.nan
    expected = reference.bidirectional_scan(*inputs.values(), recurrence).isnan()
    actual = cpu.bidirectional_scan(*inputs.values(), recurrence).isnan()
    assert expected.any()
    assert actual.equal(expected)


@pytest.fixture
def threads():
    """Give ``torch.set_num_threads``, and the number from before back at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_bits_do_not_depend_on_threads(recurrence, threads, monkeypatch):
    monkeypatch.setattr(cpu, "_UPDATES_PER_THREAD", 1)
    threads(1)
    expected = all_results((3, 21, 200, 7), recurrence)
    for count in (2, 5):
        threads(count)
        for a, e in zip(all_results((3, 21, 200, 7), recurrence), expected, strict=True):
            assert a is e is None or a.equal(e)


@pytest.mark.parametrize("openmp", [True, False], ids=["openmp", "own threads"])
def test_concurrent_calls(openmp, threads, monkeypatch):
    monkeypatch.setattr(cpu, "_UPDATES_PER_THREAD", 1)
    if not openmp:
        monkeypatch.setattr(cpu, "_openmp", lambda: None)
    threads(1)
    expected = all_results((2, 21, 130, 7), "longhorn")
    threads(2)
    with concurrent.futures.ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(all_results, (2, 21, 130, 7), "longhorn") for _ in range(16)]
        for call in calls:
            for a, e in zip(call.result(timeout=900), expected, strict=True):
                assert a is e is None or a.equal(e)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_forked_child(threads, monkeypatch):
    monkeypatch.setattr(cpu, "_UPDATES_PER_THREAD", 1)
    threads(2)
    inputs = tuple(bidirectional_inputs((2, 9, 64, 4), "longhorn").values())
    expected = cpu.bidirectional_scan(*inputs, "longhorn")
    child = os.fork()
    if child == 0:
        os._exit(0 if cpu.bidirectional_scan(*inputs, "longhorn").equal(expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_all_memory_is_written(recurrence, monkeypatch):
    expected = all_results((2, 21, 70, 7), recurrence)
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **kw: empty_like(*a, **kw).fill_(torch.nan))
    for a, e in zip(all_results((2, 21, 70, 7), recurrence), expected, strict=True):
        assert a is e is None or a.equal(e)


def test_no_batch_elements():
    inputs = tuple(bidirectional_inputs((1, 5, 64, 4), "longhorn").values())
    x, dt, A, q, k, D, bias, z = inputs
    inputs = (x[:, :0], dt[:, :0], A, q[:, :0], k[:, :0], D, bias, z[:0])
    assert cpu.bidirectional_scan(*inputs, "longhorn").shape == (0, 5, 64)
    grads = cpu.bidirectional_scan_backward(z[:0], *inputs, "longhorn")
    assert grads[5].equal(torch.zeros_like(D))
