"""The operators: gradients, registration, argument checks, choice of backend, FLOP counts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vil.kernels import backends, ops, reference
from vil.kernels.interface import Backend, ScanArgs, scan_key

B, L, D, M = 2, 5, 3, 4


def randn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def scan_arguments(recurrence: str) -> tuple[Tensor | None, ...]:
    """Return x, dt, A, q, k, D, bias and initial_state."""
    A = -randn(D, M).exp() if recurrence == "mamba" else None
    x, dt, q, k = randn(B, L, D), randn(B, L, D) + 0.1, randn(B, L, M), randn(B, L, M) - 0.1
    return x, dt, A, q, k, randn(D), randn(D) + 0.1, randn(B, D, M)


def bidirectional_arguments(recurrence: str) -> tuple[Tensor | None, ...]:
    """Return x, dt, A, q, k, D, bias and z."""
    *arguments, _ = scan_arguments(recurrence)
    both = [None if t is None else torch.stack([t, 0.7 * t]) for t in arguments]
    return (*both, randn(B, L, D))


def with_gradient(arguments: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.detach().requires_grad_() for t in arguments)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest):
    if request.param == "cpu":
        pytest.importorskip("numba")
    with ops.use_backend(request.param):
        yield request.param


@pytest.mark.pairs
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_gradients(recurrence: str, reverse: bool) -> None:
    arguments = with_gradient(scan_arguments(recurrence))
    assert torch.autograd.gradcheck(lambda *a: ops._scan_one_direction(a, recurrence, reverse), arguments)
    *one, state = (None if t is None else t.detach()[None].requires_grad_() for t in arguments)
    torch.library.opcheck(torch.ops.vil.scan, (*one, None, state, recurrence, reverse, True))


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_bidirectional_scan_gradients(backend: str, recurrence: str) -> None:
    arguments = with_gradient(bidirectional_arguments(recurrence))
    assert torch.autograd.gradcheck(lambda *a: ops.bidirectional_scan(*a, recurrence), arguments)
    torch.library.opcheck(torch.ops.vil.scan, (*arguments, None, recurrence, False, True))
    if backend == "reference":
        return  # opcheck cannot look into torch.func, which the reference uses for gradients
    detached = tuple(None if t is None else t.detach() for t in arguments)
    nothing = torch.empty(0, dtype=torch.float64)
    torch.library.opcheck(
        torch.ops.vil.scan_backward,
        (randn(B, L, D), nothing, *detached, None, nothing, nothing, recurrence, False),
    )


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize("sizes", [(1, 1), (0, 5)], ids=["one token", "empty batch"])
def test_gradients_where_parts_of_one_result_are_contiguous(
    backend: str, recurrence: str, sizes: tuple[int, int]
) -> None:
    """Two outputs of an operator must not share memory."""
    x, dt, A, q, k, *weights, _ = scan_arguments(recurrence)
    tokens = [t[: sizes[0], : sizes[1]] for t in (x, dt, q, k)]
    one = (*tokens[:2], A, *tokens[2:], *weights, None)
    both = (*(None if t is None else torch.stack([t, t]) for t in one[:-1]), tokens[0])
    for scan, arguments in (
        (lambda *a: ops._scan_one_direction(a, recurrence, False)[0], one),
        (lambda *a: ops.bidirectional_scan(*a, recurrence), both),
    ):
        found = []
        for name in (backend, "reference"):
            given = with_gradient(arguments)
            with ops.use_backend(name):
                scan(*given).square().sum().backward()
            found.append([t.grad for t in given if t is not None])
        for own, expected in zip(*found, strict=True):
            torch.testing.assert_close(own, expected)


@pytest.mark.usefixtures("backend")
def test_public_functions_reach_their_recurrence() -> None:
    x, beta, _, q, k, skip, bias, state = scan_arguments("longhorn")
    options = {"reverse": True, "initial_state": state, "return_final_state": True}
    given = (x, beta, None, q, k, skip, bias, None, state)
    one = ScanArgs(*(None if t is None else t[None] for t in given))
    for recurrence in ("longhorn", "longhorn_exact"):
        y, final = ops.longhorn_scan(x, beta, q, k, skip, bias, recurrence=recurrence, **options)
        expected = reference.scan(one, recurrence, True)
        torch.testing.assert_close((y, final[None]), expected[:2], rtol=1e-10, atol=1e-12)
    x, dt, A, q, k, *_ = scan_arguments("mamba")
    one = ScanArgs(*(t[None] for t in (x, dt, A, q, k)), None, None, None)
    expected, *_ = reference.scan(one, "mamba")
    torch.testing.assert_close(ops.mamba_scan(x, dt, A, q, k), expected, rtol=1e-10, atol=1e-12)


def replaced(position: int, value: object) -> tuple:
    arguments = [*bidirectional_arguments("longhorn"), "longhorn"]
    arguments[position] = value
    return tuple(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (replaced(0, randn(3, B, L, D)), r"x must have shape \(2, B, L, D\).*\(3, 2, 5, 3\)"),
        (replaced(0, torch.ones(2, B, L, D, dtype=torch.int64)), "x must have one of the dtypes"),
        (replaced(1, randn(2, B, L, D + 1)), r"beta must have shape .*= \(2, 2, 5, 3\), got"),
        (replaced(1, randn(2, B, L, D).float()), "beta must be torch.float64 .* torch.float32"),
        (replaced(2, randn(2, D, M)), 'A must be given for recurrence "mamba"'),
        (replaced(3, randn(2, B, L, M + 1)), r"q must have shape .*= \(2, 2, 5, 4\)"),
        (replaced(4, randn(2, B, L + 1, M)), r"k must have shape .*= \(2, 2, 5, 4\)"),
        (replaced(5, randn(D)), r"D must have shape \(2, D\) = \(2, 3\)"),
        (replaced(6, randn(2, D).float()), "bias must be torch.float64"),
        (replaced(7, randn(2, B, L, D)), r"z must have shape \(B, L, D\) = \(2, 5, 3\)"),
        (replaced(7, randn(B, L, D).to("meta")), "z must be on the device of x"),
        (replaced(8, "Longhorn"), "recurrence must be one of .* got 'Longhorn'"),
    ],
)
def test_bidirectional_scan_names_the_wrong_argument(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.bidirectional_scan(*arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", randn(L, D), r"x must have shape \(B, L, D\), got \(5, 3\)"),
        ("x", randn(B, 0, D), r"x must have shape \(B, L, D\) with L >= 1, got \(2, 0, 3\)"),
        ("k", randn(B, L, 0), r"k must have shape \(B, L, M\) with M >= 1, got \(2, 5, 0\)"),
        ("D", randn(D + 1), r"D must have shape \(D\) = \(3,\), got \(4,\)"),
        ("initial_state", randn(B, D, M + 1), r"\(B, D, M\) = \(2, 3, 4\), got \(2, 3, 5\)"),
        ("recurrence", "closed", 'recurrence must be "longhorn" or "longhorn_exact"'),
    ],
)
def test_a_scan_of_one_direction_names_the_wrong_argument(name: str, value: object, message: str) -> None:
    x, beta, _, q, k, *_ = scan_arguments("longhorn")
    with pytest.raises(ValueError, match=message):
        ops.longhorn_scan(**{"x": x, "beta": beta, "q": q, "k": k, name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("D", 1.0, r"D must be a torch.Tensor or None, got float 1.0"),
        ("x", randn(B, L, D).numpy(), "x must be a torch.Tensor, got ndarray"),
        ("k", None, "k must be a torch.Tensor, got NoneType"),
    ],
)
def test_arguments_that_are_no_tensors_are_named(name: str, value: object, message: str) -> None:
    x, beta, _, q, k, *_ = scan_arguments("longhorn")
    with pytest.raises(TypeError, match=message):
        ops.longhorn_scan(**{"x": x, "beta": beta, "q": q, "k": k, name: value})
    with pytest.raises(TypeError, match=r"z must be a torch.Tensor, got NoneType"):
        ops.bidirectional_scan(*replaced(7, None))


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_eager_calls_without_gradients_equal_the_operator(
    backend: str, recurrence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    operator = torch.ops.vil.scan
    monkeypatch.setattr(torch.ops.vil, "scan", lambda *inputs: calls.append(inputs) or operator(*inputs))
    x, dt, A, q, k, *weights, state = scan_arguments(recurrence)
    # One token of a longer sequence: rows are apart, as in a decoder's projections.
    for part in (slice(0, 1), slice(None)):
        one = (*(t[:, part] for t in (x, dt)), A, *(t[:, part] for t in (q, k)), *weights, state)
        both = tuple(None if t is None else torch.stack([t, t]) for t in one[:-1])
        functions = (
            lambda *a: ops._scan_one_direction(a, recurrence, True),
            lambda *a: ops.bidirectional_scan(*a, recurrence),
        )
        for function, given in zip(functions, (one, (*both, x[:, part])), strict=True):
            calls.clear()
            plain = function(*given)
            assert not calls
            with torch.no_grad():
                without = function(*with_gradient(given))
            assert not calls
            recorded = function(*with_gradient(given))
            assert len(calls) == 1
            for results in (without, recorded):
                torch.testing.assert_close(results, plain, rtol=0, atol=0)
            for t in plain if isinstance(plain, tuple) else (plain,):
                assert t.is_contiguous()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize("kept", [slice(0, 3), slice(2, 5)], ids=["after", "before"])
def test_padding_by_steps_of_minus_infinity(recurrence: str, kept: slice) -> None:
    *tokens, skip, bias, _ = scan_arguments(recurrence)
    x, dt, A, q, k = tokens
    padded = torch.full_like(dt, -torch.inf)
    padded[:, kept] = dt[:, kept]
    given = with_gradient((x, padded, A, q, k, skip, bias, None))
    y, final = ops._scan_one_direction(given, recurrence, False)
    short = [t if t is A else t[:, kept] for t in (x, dt, A, q, k)]
    expected = ops._scan_one_direction((*short, skip, bias, None), recurrence, False)
    torch.testing.assert_close((y[:, kept], final), expected)
    (y.square().sum() + final.square().sum()).backward()
    assert all(t.grad.isfinite().all() for t in given if t is not None)


@pytest.mark.ci
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_scan_cannot_be_exported_to_onnx(dynamo: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.longhorn_scan(x, x, x, x)

    with pytest.raises(Exception, match="ONNX has no operator vil::scan") as raised:
        torch.onnx.export(Model().eval(), (randn(B, L, D).float(),), tmp_path / "x.onnx", dynamo=dynamo)
    assert "torch.export" in str(raised.value)


def flops(function: Callable[..., object], *arguments: object) -> tuple[int, int]:
    """Return the FLOPs of a function and of its backward pass."""
    with FlopCounterMode(display=False) as counter:
        out = function(*(a.requires_grad_() if isinstance(a, Tensor) else a for a in arguments))
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_flop_counts_are_the_documented_multiply_adds(backend: str) -> None:
    x, beta, _, q, k, skip, bias, _ = scan_arguments("longhorn")
    scan, both = 2 * B * L * D * (4 * M + 1), 2 * B * L * D * (2 * (3 * M + 1) + 1)
    arguments = bidirectional_arguments("longhorn_exact")
    with ops.use_backend(backend):
        assert flops(ops.longhorn_scan, x, beta, q, k, skip, bias) == (scan, 3 * scan)
        assert flops(ops.bidirectional_scan, *arguments, "longhorn_exact") == (both, 3 * both)


def chosen(device: str, dtype: torch.dtype) -> str:
    module = backends.backend_for(torch.device(device), dtype)
    return module.__name__.removeprefix("vil.kernels.")


def test_backend_by_environment_and_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "reference")
    assert chosen("cpu", torch.float32) == "reference"
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "fast")
    with pytest.raises(ValueError, match=r'VIL_BACKEND must be one of .* got "fast"'):
        chosen("cpu", torch.float32)
    with ops.use_backend("reference"):  # overrides the environment
        assert chosen("cpu", torch.float32) == "reference"
        with ops.use_backend("auto"):
            pass
        assert chosen("cpu", torch.float32) == "reference"
    with pytest.raises(ValueError, match="use_backend"), ops.use_backend("fast"):
        pass


@pytest.mark.ci
def test_explicit_backend_that_cannot_serve_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ops.use_backend("triton"), pytest.raises(RuntimeError, match="got tensors on cpu"):
        chosen("cpu", torch.float32)
    with ops.use_backend("cpu"), pytest.raises(RuntimeError, match="got tensors on cuda"):
        chosen("cuda", torch.float32)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_activations_and_nothing_within(dtype: torch.dtype, recurrence: str) -> None:
    given = [None if t is None else t.float() for t in bidirectional_arguments(recurrence)]
    low = [t if t is None or i in (2, 5, 6) else t.to(dtype) for i, t in enumerate(given)]
    one, one_low = ([*(None if t is None else t[0] for t in both[:-1]), None] for both in (given, low))
    with torch.autocast("cpu", dtype=dtype):
        out = ops.bidirectional_scan(*given, recurrence)
        y, state = ops._scan_one_direction(tuple(one), recurrence, False)
        in_double = ops.longhorn_scan(*(t for t in scan_arguments("longhorn")[:5] if t is not None))
    assert torch.equal(out, ops.bidirectional_scan(*low, recurrence))
    expected = ops._scan_one_direction(tuple(one_low), recurrence, False)
    assert torch.equal(y, expected[0])
    assert torch.equal(state, expected[1])
    assert in_double.dtype == torch.float64  # autocast leaves it alone


def test_automatic_choice(caplog: pytest.LogCaptureFixture) -> None:
    backends.automatic_backend.cache_clear()
    with ops.use_backend("auto"):
        assert chosen("cuda", torch.bfloat16) == "triton.backend"
        assert not caplog.records
        assert chosen("cuda", torch.float64) == "reference"
    assert "float64 on a GPU" in caplog.text


@pytest.mark.parametrize("name", ops.BACKENDS)
def test_a_backend_states_all_that_is_asked_of_it(name: str) -> None:
    package = {"cpu": "numba", "triton": "triton"}.get(name)
    if package is not None:
        pytest.importorskip(package)
    assert isinstance(backends._module(name), Backend)


@pytest.mark.usefixtures("backend")
def test_a_backend_for_cpus_saves_nothing() -> None:
    module, x = backends.backend_for(torch.device("cpu"), torch.float32), randn(1, B, L, D)
    args = ScanArgs(x, x, None, x, x, None, None, None)
    plan = module.scan_plan(scan_key(args, "longhorn", False, 1.0))
    assert plan.forward(args, True)[2:] == (None, None)
