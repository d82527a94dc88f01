"""The mixer as one operator equals its parts, for every backend, with or without saved tensors."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from tests.grids import Grid, convolve, mixer_arguments
from vil.block import BidirectionalMixer, Recurrence
from vil.kernels import ops, reference
from vil.sizes import TokenLayout

B, L, C, M, K = 2, 6, 4, 4, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["reference", "cpu", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    if request.param == "cpu" and DEVICE != "cpu":
        pytest.skip("the tensors are on a GPU")
    for package in {"cpu": ["numba"], "triton": ["triton"]}.get(request.param, []):
        pytest.importorskip(package)
    with ops.use_backend(request.param):
        yield request.param


def mixer_of(recurrence: Recurrence, dtype: torch.dtype) -> BidirectionalMixer:
    torch.manual_seed(0)
    mixer = BidirectionalMixer(C, recurrence, d_state=M, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        mixer.dt_bias.normal_()
        mixer.D.normal_()
    return mixer


def arguments(recurrence: Recurrence, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return the tensors of ``vil::mixer``, each a leaf that requires gradients."""
    m = mixer_of(recurrence, dtype)
    xz = torch.randn(B, L, 4 * C, device=DEVICE, dtype=dtype)
    A = None if m.A_log is None else -m.A_log.exp()
    given = (xz, m.conv_weight, m.conv_bias, m.x_proj_weight, m.dt_weight, m.dt_bias, A, m.D)
    return tuple(None if t is None else t.detach().clone().requires_grad_() for t in given)


# Grids for weights trained on 2 x 2 patches, as large as possible without slow tests.
GRIDS = {
    "the trained grid": None,
    "2.25 times the tokens": Grid(3, 3, (2, 2)),
    "half the tokens": Grid(1, 2, (2, 2)),
    "step sizes alone": Grid(3, 3, (2, 2), scale_conv=False),
    "twice, no class token": Grid(2, 4, (2, 2), class_token=0),
}


def layout_on(grid: Grid | None) -> TokenLayout | None:
    return None if grid is None else grid.layout(K, DEVICE)


def in_parts(mixer: BidirectionalMixer, x: Tensor, grid: Grid | None = None) -> Tensor:
    """Mix with the reference and autograd; apply ``tokens_per_ref`` directly to every step size."""
    rank, states = mixer.dt_rank, mixer.d_state
    layout, tokens_per_ref = layout_on(grid), 1.0 if grid is None else grid.tokens_per_ref
    x, z = mixer.in_proj(x).chunk(2, dim=-1)
    x = convolve(x, mixer.conv_weight, mixer.conv_bias, layout)
    x_dbl = torch.einsum("nble,nce->nblc", x, mixer.x_proj_weight)
    dt, k, q = x_dbl.split([rank, states, states], dim=-1)
    dt = torch.einsum("nblr,ner->nble", dt, mixer.dt_weight)
    A = None if mixer.A_log is None else -mixer.A_log.exp()
    y = sum(_scan(mixer, x[i], dt[i], None if A is None else A[i], q[i], k[i], tokens_per_ref, i) for i in (0, 1))
    return mixer.proj(torch.nn.functional.silu(z) * y / 2)


def _scan(
    mixer: BidirectionalMixer,
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    q: Tensor,
    k: Tensor,
    tokens_per_ref: float,
    i: int,
) -> Tensor:
    step = reference.step_size(dt, k, mixer.dt_bias[i], mixer.recurrence)
    if mixer.recurrence != "mamba" and tokens_per_ref < 1:  # here beta is divided
        beta = torch.sigmoid(dt + mixer.dt_bias[i]) / tokens_per_ref
        step = beta / (1 + beta * k.square().sum(-1, keepdim=True))
    elif mixer.recurrence == "longhorn_exact":
        beta = torch.sigmoid(dt + mixer.dt_bias[i])
        step = beta / (tokens_per_ref + tokens_per_ref**0.5 * beta * k.square().sum(-1, keepdim=True))
    else:
        step = step / tokens_per_ref
    state, outputs = x.new_zeros(len(x), x.shape[2], k.shape[2]), [None] * x.shape[1]
    for t in range(x.shape[1]) if i == 0 else reversed(range(x.shape[1])):
        state, outputs[t] = reference.advance(state, x[:, t], step[:, t], A, q[:, t], k[:, t], mixer.recurrence)
    return torch.stack(outputs, 1) + mixer.D[i] * x


@pytest.mark.pairs
@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize(("training", "grid"), [(True, None), (False, None), *((True, name) for name in [*GRIDS][1:])])
def test_equals_its_parts(backend: str, recurrence: Recurrence, training: bool, grid: str | None) -> None:
    dtype = torch.float32 if backend == "triton" else torch.float64
    mixer = mixer_of(recurrence, dtype).train(training)
    own = GRIDS[grid] if grid else None
    tokens = L if own is None else own.length
    x = torch.randn(B, tokens, C, device=DEVICE, dtype=dtype)
    results = []
    for run in (mixer, in_parts):
        if run is in_parts:
            mixer.double()
        mixer.zero_grad()
        leaf = x.detach().clone().to(mixer.D.dtype).requires_grad_()
        out = run(leaf, layout_on(own)) if run is mixer else in_parts(mixer, leaf, own)
        out.square().sum().backward()
        gradients = {name: p.grad.double() for name, p in mixer.named_parameters()}
        results.append({"out": out.detach().double(), "x": leaf.grad.double(), **gradients})
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for name, expected in results[1].items():
        error = (results[0][name] - expected).abs().max() / expected.abs().max()
        assert error < tolerance, name


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param("reference", None, marks=pytest.mark.ci),
        ("cpu", None),
        ("cpu", Grid(1, 5, (1, 2))),
    ],
)
def test_gradients_and_registration(name: str, grid: Grid | None, recurrence: Recurrence) -> None:
    if name == "cpu":
        pytest.importorskip("numba")
    given = [None if t is None else t.detach().cpu() for t in arguments(recurrence, torch.float64)]
    given = [None if t is None else t.requires_grad_() for t in given]
    fitted = mixer_arguments(given, recurrence, grid)
    with ops.use_backend(name):
        fitted = [t.detach().requires_grad_(t.is_floating_point()) if isinstance(t, Tensor) else t for t in fitted]
        torch.library.opcheck(torch.ops.vil.mixer, fitted)
        assert torch.autograd.gradcheck(
            lambda *t: torch.ops.vil.mixer(*mixer_arguments(t, recurrence, grid))[0],
            given,
            fast_mode=grid is not None,
        )


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize(
    "save",
    [pytest.param(True, marks=pytest.mark.ci), pytest.param(False, marks=pytest.mark.nightly)],
)
def test_registration_of_the_triton_backend(recurrence: Recurrence, save: bool) -> None:
    pytest.importorskip("triton")
    given = arguments(recurrence, torch.float32)
    with ops.use_backend("triton"):
        torch.library.opcheck(torch.ops.vil.mixer, (*given, recurrence, save))


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_flop_counts_include_what_is_computed_again(recurrence: Recurrence) -> None:
    given = arguments(recurrence, torch.float32)
    tokens, rank = 2 * B * L * 2 * C, given[4].shape[2]
    per_state = 3 if recurrence == "longhorn_exact" else 4
    again = tokens * (K + rank + per_state * M + 1) + tokens // 2  # taps, steps, scans and gate
    with FlopCounterMode(display=False) as counter:
        out = torch.ops.vil.mixer(*given, recurrence, True)[0]
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * (again + tokens * given[3].shape[1])
    assert counter.get_total_flops() == 3 * forward + 2 * again


def test_saves_the_projections_and_not_the_convolution() -> None:
    given = arguments("longhorn", torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ops.vil.mixer(*given, "longhorn", True)
    kept = [t.shape for t in saved if all(t is not g for g in given)]
    assert kept[0][:2] == (2, B * L)
    assert (2, B, L, 2 * C) not in kept


@pytest.mark.usefixtures("backend")
def test_later_calls_change_no_result_and_nothing_saved() -> None:
    mixer = mixer_of("longhorn", torch.float32)

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out.square().sum(), [*mixer.parameters()])

    inputs = torch.randn(3, B, L, C, device=DEVICE)
    expected = [[t.clone() for t in gradients(mixer(x))] for x in inputs]
    found = [gradients(out) for out in [mixer(x) for x in inputs]]
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.randn(B, L, 4 * C + 1), r"xz must have shape \(B, L, 2E\)"),
        (1, torch.randn(2, 3, K), r"conv_weight must have shape \(2, E, K\) = \(2, 8, 4\)"),
        (3, torch.randn(2, 8, 2 * C), r"x_proj_weight must have shape \(2, R \+ 2 M, E\)"),
        (4, torch.randn(2, 2 * C), r"dt_weight must have 3 axes, got shape \(2, 8\)"),
        (6, torch.randn(2, 2 * C, M), 'A must be given for recurrence "mamba"'),
        (7, torch.randn(2 * C), r"D must have shape \(2, E\) = \(2, 8\)"),
        (8, "Longhorn", "recurrence must be one of"),
    ],
)
def test_names_the_wrong_argument(position: int, value: object, message: str) -> None:
    given = [None if t is None else t.detach().cpu() for t in arguments("longhorn", torch.float32)]
    given += ["longhorn", False]
    given[position] = value
    with pytest.raises(ValueError, match=message):
        torch.ops.vil.mixer(*given)


@pytest.mark.pairs
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
@pytest.mark.parametrize("grid", ["the trained grid", "2.25 times the tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_an_eager_call_has_the_bits_of_the_operator(
    recurrence: Recurrence, grid: str, dtype: torch.dtype, training: bool
) -> None:
    mixer = mixer_of(recurrence, torch.float32).train(training)
    own = GRIDS[grid]
    x = torch.randn(B, L if own is None else own.length, C, device=DEVICE)
    torch.compiler.reset()  # else it may count this as one compilation too many
    called, results = [], []
    for call in (mixer, torch.compile(mixer, backend="eager")):  # compilers see operators alone
        mixer.zero_grad()
        with (
            torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        ):
            out = call(x, layout_on(own))
            out.float().square().sum().backward()
        called.append({event.key for event in profile.key_averages()})
        results.append([out, *(p.grad.clone() for p in mixer.parameters())])
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)
    assert all("vil::mixer" in names for names in called)
    assert ["vil::mixer_backward" in names for names in called] == [False, True]


def test_modes_and_subclasses_of_tensors_see_the_operator() -> None:
    mixer, x = mixer_of("longhorn", torch.float32), torch.randn(B, L, C, device=DEVICE)
    with torch.no_grad():
        expected = mixer(x), mixer(2 * x)
        with FlopCounterMode(display=False) as counter:
            mixer(x)
        assert torch.ops.vil.mixer in counter.get_flop_counts()["Global"]
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(mixer(torch.ones(B, L, C, device=DEVICE)), FakeTensor)
        both = mixer(TwoTensor(x, 2 * x))
        assert torch.equal(both.a, expected[0])
        assert torch.equal(both.b, expected[1])
        bias = mixer.dt_bias.detach()
        mixer.dt_bias = torch.nn.Parameter(TwoTensor(bias, bias + 1))
        assert not torch.equal(mixer(x).b, expected[0])


@pytest.mark.ci
@pytest.mark.parametrize(("ahead", "back"), [("cpu", "reference"), ("reference", "triton")])
def test_a_compiled_program_does_not_depend_on_the_backend_chosen_later(ahead: str, back: str) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("triton")
    mixer, x = mixer_of("longhorn_exact", torch.float32).cpu(), torch.randn(B, L, C)
    results = []
    for compiled in (mixer, torch.compile(mixer, fullgraph=True, backend="aot_eager")):
        with ops.use_backend("cpu"):
            compiled(x).sum().backward()  # this call compiles
        mixer.zero_grad()
        with ops.use_backend(ahead):
            out = compiled(x)
        with ops.use_backend(back):
            out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in mixer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
