"""The Triton kernels of all scans against the reference in float64.

Without a GPU they run in Triton's interpreter, which computes matrix products in float32.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.scans import (
    Shape,
    assert_near,
    assert_right,
    assert_same_bits,
    plan_of,
    random_args,
    random_gradients,
    results_of,
)
from vil.kernels import backends, ops, reference
from vil.kernels.interface import ScanArgs
from vil.kernels.ops import RECURRENCES
from vil.kernels.plan import forget_plans
from vil.kernels.triton import tuning

backend = pytest.importorskip("vil.kernels.triton.backend")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-6 if DEVICE == "cpu" else 1e-5
EXACT = "longhorn_exact"
# (B, L, D, M) with one token, a group and a chunk that are not full, and channels fewer and more than
# a block. Also a state size that is no power of two, and the largest number of states.
TOKEN_BY_TOKEN = [
    (2, 1, 40, 4),
    (1, 2, 8, 16),
    (1, 17, 140, 4),
    (1, 19, 64, 16),
    (1, 34, 8, 5),
    (1, 5, 8, 64),
]
IN_CHUNKS = [(1, 1, 8, 5), (2, 17, 40, 16), (1, 33, 32, 4), (1, 16, 32, 32), (1, 18, 8, 64)]
SHAPES = [
    *((r, shape) for r in ("longhorn", "mamba") for shape in TOKEN_BY_TOKEN),
    *((EXACT, shape) for shape in IN_CHUNKS),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_where_nothing_is_written"),
]
each = pytest.mark.parametrize("recurrence", RECURRENCES)


@pytest.fixture(autouse=True)
def plans_of_this_test() -> Iterator[None]:
    yield
    forget_plans()


def in_splits(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """Cut every sequence into splits of ``chunks`` chunks."""
    monkeypatch.setattr(tuning, "num_splits", lambda kernel, warps, count, *_: (-(-count // chunks), chunks))
    forget_plans()


def args_of(recurrence: str, shape: Shape, N: int = 2, dtype: torch.dtype = torch.float32) -> ScanArgs:
    return random_args(recurrence, shape, N, dtype, DEVICE)


@pytest.mark.parametrize(
    ("recurrence", "shape"),
    [pytest.param(r, shape, marks=[] if shape[2] < 100 else pytest.mark.ci, id=f"{r}-{shape}") for r, shape in SHAPES],
)
def test_both_directions(recurrence: str, shape: Shape) -> None:
    """Results are bit-identical with saved states and with states that another scan computes."""
    args = args_of(recurrence, shape)
    assert_right(backend, args, recurrence, TOLERANCE)
    if shape[0] == 1 and shape[2] < 64:
        anew = results_of(backend, args, recurrence, save=False)
        assert_same_bits(results_of(backend, args, recurrence), anew)


@pytest.mark.pairs
@each
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 8, 4), (1, 19, 40, 5)], ids=str)
@pytest.mark.parametrize("save", [False, True])
def test_one_direction(recurrence: str, shape: Shape, reverse: bool, save: bool) -> None:
    args = args_of(recurrence, shape, N=1)
    assert_right(backend, args, recurrence, TOLERANCE, reverse, save=save)


@each
def test_both_directions_in_splits(recurrence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_splits(monkeypatch, 1)
    assert_right(backend, args_of(recurrence, (1, 35, 8, 4)), recurrence, TOLERANCE, kappa_scale=4.0)


@each
def test_offsets_beyond_32_bits(recurrence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of all tokens lie 2^27 or 2^28 elements apart, in files of which only these rows take space."""
    apart = 2**28 if recurrence == "mamba" else 2**27

    def spread(rows: Tensor, name: str) -> Tensor:
        strides = (rows.shape[-1], rows.shape[-1] * rows.shape[0], apart, 1)[-rows.ndim :]
        size = apart * rows.shape[-2]
        file = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=rows.dtype)
        return file.as_strided(rows.shape, strides).copy_(rows)

    in_splits(monkeypatch, 1)
    args = args_of(recurrence, (1, 18, 8, 4), dtype=torch.bfloat16)
    rows = ("x", "dt", "q", "k", "z")
    far = args._replace(**{name: spread(getattr(args, name), name) for name in rows})
    assert far.x.stride(2) * (far.x.shape[2] - 1) > 2**31
    assert_same_bits(results_of(backend, far, recurrence), results_of(backend, args, recurrence))


@pytest.mark.pairs
@each
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_one_direction_in_splits(
    recurrence: str, reverse: bool, started: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_splits(monkeypatch, chunks)
    args = args_of(recurrence, (1, 66, 7, 2) if chunks == 2 else (1, 35, 7, 40), N=1)
    args = args if started else args._replace(initial_state=None)
    assert_right(backend, args, recurrence, TOLERANCE, reverse)


@each
def test_arguments_that_may_be_absent_and_a_factor_on_the_norm_of_keys(recurrence: str) -> None:
    """Mamba ignores this factor."""
    args = args_of(recurrence, (1, 18, 8, 4), N=1)
    args = args._replace(D=None, bias=None, initial_state=None)
    assert_right(backend, args, recurrence, TOLERANCE, True, kappa_scale=4.0)


@pytest.mark.pairs
@each
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(recurrence: str, N: int, dtype: torch.dtype) -> None:
    args = args_of(recurrence, (1, 20, 32, 16), N, dtype)
    assert_right(backend, args, recurrence, torch.finfo(dtype).eps)


@each
def test_saved_states_err_less_than_rounded_inputs(recurrence: str) -> None:
    """Gradients of inputs are rounded themselves, but gradients of parameters are not.

    On a GPU, the exact form rounds what its products multiply, as it does its inputs.
    """
    args = args_of(recurrence, (1, 67, 32, 16), dtype=torch.float64)
    rounded = args_of(recurrence, (1, 67, 32, 16), dtype=torch.bfloat16)
    grads = random_gradients(rounded)[0].double(), None
    unrounded = results_of(reference, args, recurrence, grads=grads)
    truth = results_of(reference, rounded.to(torch.float64), recurrence, grads=grads)
    found = results_of(backend, rounded, recurrence)
    of_parameters = 1 if DEVICE == "cuda" and recurrence == EXACT else 3
    for name, least in {"A": 3, "bias": of_parameters, "dt": 1, "q": 1, "k": 1}.items():
        if name in truth:
            error, of_inputs = ((r[name].double() - truth[name]).norm().item() for r in (found, unrounded))
            assert 0 < least * error < of_inputs, f"{name}: {error}, {of_inputs}"


@each
@pytest.mark.parametrize("kappa_scale", [0.0, 1e3])
def test_extreme_inputs_stay_finite_and_right(recurrence: str, kappa_scale: float) -> None:
    args = args_of(recurrence, (1, 18, 32, 4))
    dt = torch.where(args.dt < -0.4, -60.0, torch.where(args.dt > 0.4, 60.0, args.dt))
    k = args.k * (kappa_scale / args.k.norm(dim=-1, keepdim=True))
    # Products that are too small for float32 may become zero, so allow a floor.
    assert_right(backend, args._replace(dt=dt, k=k), recurrence, TOLERANCE, floor=1e-18)


@pytest.mark.pairs
@pytest.mark.ci
@pytest.mark.parametrize(("B", "L", "D", "R"), [(2, 19, 40, 3), (1, 5, 8, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [False, True])
def test_step_sizes_of_low_rank_are_their_products(
    B: int, L: int, D: int, R: int, dtype: torch.dtype, splits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if splits:
        in_splits(monkeypatch, 1)
    args = args_of(EXACT, (B, L, D, 4), dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    projected = torch.randn(2, B, L, R + 2, generator=generator).to(DEVICE, dtype)
    low, weight = projected[..., 1 : R + 1], torch.randn(2, D, R, generator=generator).to(DEVICE)
    full = torch.einsum("nblr,ndr->nbld", low.double(), weight.to(dtype).double()).to(dtype)
    of_low = args._replace(dt=low, dt_weight=weight)
    made = plan_of(backend, of_low, EXACT).forward(of_low, True)
    plain, *_ = plan_of(backend, of_low, EXACT).forward(of_low, False)
    assert torch.equal(made[0], plain)
    args = args._replace(dt=full)
    given = plan_of(backend, args, EXACT).forward(args, True)
    # The saved tensor has room for more than the states before all chunks of 16 tokens, 16 for each channel,
    # or for C, which kernels in registers save.
    rows = L if DEVICE == "cuda" and dtype == torch.bfloat16 else -(-L // 16) * 16
    count = 2 * B * rows * D
    found, expected = ({"out": r[0], "y_pre_gate": r[2], "states": r[3].flatten()[:count]} for r in (made, given))
    # In bfloat16, a product about halfway between two numbers may be rounded to either of them.
    assert_near(found, expected, TOLERANCE if dtype == torch.float32 else torch.finfo(dtype).eps)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [1, 2])
def test_operators_know_what_is_saved(recurrence: str, dtype: torch.dtype, N: int) -> None:
    """Operators on a GPU ask for the shapes before they know the backend."""
    for shape in ((1, 1, 4, 4), (1, 17, 4, 5)):
        args = args_of(recurrence, shape, N, dtype)
        _, _, y_pre_gate, states = plan_of(backend, args, recurrence).forward(args, True)
        summed = states.dtype if recurrence == EXACT else torch.float32
        y_pre_gate = args.x.new_empty(0, dtype=summed) if y_pre_gate is None else y_pre_gate
        saved = tuple((t.shape, t.dtype) for t in (y_pre_gate, states))
        of_scan = (tuple(args.x.shape), shape[3], recurrence, dtype)
        assert backends.operator_saves(torch.device("cuda"), *of_scan) == saved


@pytest.mark.ci
def test_more_states_than_a_program_holds_are_refused() -> None:
    x, q = torch.randn(1, 4, 8, device=DEVICE), torch.randn(1, 4, 256, device=DEVICE)
    with ops.use_backend("triton"):
        with pytest.raises(NotImplementedError, match=r"up to 64 states of longhorn, k has 256"):
            ops.longhorn_scan(x, x, q, q)
        with pytest.raises(NotImplementedError, match=r"up to 128 states of longhorn_exact, k has"):
            ops.longhorn_scan(x, x, q, q, recurrence="longhorn_exact")
