"""Operators and models under PyTorch's function transforms: derivatives of every kind, and vmap."""

from collections.abc import Callable, Iterator

import pytest
import timm
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.grids import Grid
from vil.block import BidirectionalMixer
from vil.kernels.ops import (
    bidirectional_scan,
    longhorn_scan,
    mamba_scan,
)

B, L, D, M = 2, 4, 3, 2
Function = Callable[[Tensor], Tensor]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _longhorn(scan: Callable[..., Tensor]) -> Function:
    beta, q, k = randn(B, L, D, seed=1), randn(B, L, M, seed=2), randn(B, L, M, seed=3)
    return lambda x: scan(x, beta + x, q, k)


def _mamba(scan: Callable[..., Tensor]) -> Function:
    A, q, k = -randn(D, M).exp(), randn(B, L, M, seed=2), randn(B, L, M, seed=3)
    skip, bias = randn(D), randn(D, seed=1)
    return lambda x: scan(x, x.sin(), A, q, k, skip, bias)


def _both_ways(scan: Callable[..., Tensor]) -> Function:
    q, k = randn(2, B, L, M, seed=2), randn(2, B, L, M, seed=3)
    D_, bias = randn(2, D, seed=4), randn(2, D, seed=5)

    def function(x: Tensor) -> Tensor:
        both = torch.stack((x, x.cos()))
        return scan(both, both.flip(0), None, q, k, D_, bias, x, "longhorn_exact")

    return function


def _mixer(grid: Grid | None = None) -> Function:
    torch.manual_seed(0)
    mixer = BidirectionalMixer(D, d_state=M, dt_rank=1, dtype=torch.float64)
    layout = None if grid is None else grid.layout()
    return lambda x: mixer(x, layout)


def _model(name: str) -> Function:
    """Return a function that runs a model on an 8 x 8 image made of the sum of the tokens."""
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 4, "depth": 2, "num_classes": 3}
    model = timm.create_model(name, in_chans=D, **sizes).eval().double()
    pixels = randn(D, 8, 8)
    return lambda x: model((x.sum(1)[:, :, None, None] * pixels).sin())


CASES: dict[str, Function] = {
    "longhorn_scan": _longhorn(longhorn_scan),
    "mamba_scan": _mamba(mamba_scan),
    "bidirectional_scan": _both_ways(bidirectional_scan),
    "mixer": _mixer(),
    "mixer on a grid": _mixer(Grid(2, 2, (1, 1), (1, 1), (1, 1), class_token=0)),
    "vil_tiny": _model("vil_tiny"),
    "vil_tiny_exact": _model("vil_tiny_exact"),
    "vim_tiny": _model("vim_tiny"),
}
INPUT = randn(B, L, D)
DIRECTION = randn(B, L, D, seed=9)


def derivative(function: Function) -> Tensor:
    """Return the derivative along DIRECTION from fourth-order finite differences."""
    h = 1e-3
    a, b, c, d = (function(INPUT + s * h * DIRECTION) for s in (-2, -1, 1, 2))
    return (a - 8 * b + 8 * c - d) / (12 * h)


def loss(function: Function) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).square().sum()


def by_autograd(function: Function) -> Tensor:
    x = INPUT.clone().requires_grad_()
    return torch.autograd.grad(loss(function)(x), x)[0]


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-7) -> None:
    assert found.shape == expected.shape
    assert expected.any()
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


each = pytest.mark.parametrize("name", CASES)


@each
def test_jvp(name: str) -> None:
    function = CASES[name]
    value, tangent = torch.func.jvp(function, (INPUT,), (DIRECTION,))
    near(value, function(INPUT))
    near(tangent, derivative(function))


@pytest.mark.ci
@each
def test_jacobians(name: str) -> None:
    function = CASES[name]
    by_rows = torch.autograd.functional.jacobian(function, INPUT)
    near(torch.func.jacrev(function)(INPUT), by_rows)
    near(torch.func.jacfwd(function)(INPUT), by_rows)
    near(torch.autograd.functional.jacobian(function, INPUT, vectorize=True), by_rows)


@each
def test_vmap(name: str) -> None:
    function = CASES[name]
    inputs = torch.stack((INPUT, DIRECTION, INPUT + DIRECTION))
    near(torch.func.vmap(function)(inputs), torch.stack([function(x) for x in inputs]))
    gradients = torch.func.vmap(torch.func.grad(loss(function)))(inputs)
    near(gradients[0], by_autograd(function))


@each
def test_second_derivatives(name: str) -> None:
    """Double backward, hessian, forward over reverse and finite differences agree."""
    function = CASES[name]
    x = INPUT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(function)(x), x, create_graph=True)
    (product,) = torch.autograd.grad(gradient, x, DIRECTION)
    near(product, derivative(torch.func.grad(loss(function))))
    near(torch.func.jvp(torch.func.grad(loss(function)), (INPUT,), (DIRECTION,))[1], product)
    if "tiny" not in name:
        hessian = torch.func.hessian(loss(function))(INPUT)
        near(torch.tensordot(hessian, DIRECTION, 3), product)


IMAGES, TANGENTS = randn(2, 3, 8, 8), randn(2, 3, 8, 8, seed=1)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_classes": 3}
    return timm.create_model("vil_tiny", **sizes).eval().double()


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    """Reset dynamo after each test: it never again compiles code that was given a dual tensor."""
    yield
    torch.compiler.reset()


WAYS = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, IMAGES),
    "export": lambda model: torch.export.export(model, (IMAGES,)).module(),
    "compile": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_call_a_model_loses_a_tangent(way: str, model: torch.nn.Module) -> None:
    if way == "compile" and torch.__version__ < (2, 12):
        pytest.skip("PyTorch 2.11 raises RuntimeError when a compiled operator looks for tangents")
    expected = torch.func.jvp(model, (IMAGES,), (TANGENTS,))[1]
    other = WAYS[way](model)
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(IMAGES, TANGENTS)
        if way == "compile":
            near(forward_ad.unpack_dual(other(dual)).tangent, expected)
        else:
            with pytest.raises((NotImplementedError, RuntimeError), match="forward-mode"):
                other(dual)
    # Last, because TorchScript drops the dual tensors of any model after it was differentiated.
    near(torch.func.jvp(other, (IMAGES,), (TANGENTS,))[1], expected)


@pytest.mark.ci
def test_gradients_per_sample(model: torch.nn.Module) -> None:
    """As in torch.func's documentation."""
    parameters = dict(model.named_parameters())

    def loss_of(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (image[None],)).square().sum()

    each_image = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, IMAGES)
    whole = torch.autograd.grad(model(IMAGES).square().sum(), list(parameters.values()))
    for found, expected in zip(each_image.values(), whole, strict=True):
        near(found.sum(0), expected)
