"""Run scans and convolutions with a backend, and compare them with the float64 reference."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vil.kernels import reference
from vil.kernels.interface import ScanArgs, compute_dtype, conv_key, scan_key

Shape = tuple[int, int, int, int]  # B, L, D, M
Results = dict[str, Tensor]


def random_args(
    recurrence: str,
    shape: Shape,
    N: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ScanArgs:
    """Return random arguments, strided as in the backbone; with N = 1, also an initial state."""
    B, L, D, M = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    rows, z, keys = randn(N, B, L, 2 * D), randn(B, L, 2 * D), randn(N, B, L, 3 + 2 * M)
    rows, z, keys = (t.to(dtype) for t in (rows, z, keys))
    args = ScanArgs(
        x=rows[..., :D],
        dt=rows[..., D:],
        A=-randn(N, D, M).exp() if recurrence == "mamba" else None,
        q=keys[..., 3 + M :],
        k=keys[..., 3 : 3 + M],
        D=randn(N, D),
        bias=randn(N, D),
        z=z[..., D:] if N == 2 else None,
        initial_state=randn(1, B, D, M) if N == 1 else None,
    )
    parameters = {name: getattr(args, name) for name in ("A", "D", "bias", "initial_state")}
    exact = compute_dtype(args.x)
    return args._replace(**{n: None if t is None else t.to(exact) for n, t in parameters.items()})


def random_gradients(args: ScanArgs) -> tuple[Tensor, Tensor | None]:
    """Return gradients of the output and, for one direction, of its last state."""
    generator = torch.Generator().manual_seed(1)
    _, B, L, D = args.x.shape
    grad = torch.randn(B, L, D, generator=generator, dtype=torch.float64).to(args.x)
    if args.z is not None:
        return grad, None
    final = torch.randn(1, B, D, args.k.shape[3], generator=generator, dtype=torch.float64)
    return grad, final.to(args.x.device, compute_dtype(args.x))


def plan_of(
    backend: ModuleType,
    args: ScanArgs,
    recurrence: str,
    reverse: bool = False,
    kappa_scale: float = 1.0,
) -> Any:
    return backend.scan_plan(scan_key(args, recurrence, reverse, kappa_scale))


def results_of(
    backend: ModuleType,
    args: ScanArgs,
    recurrence: str,
    reverse: bool = False,
    kappa_scale: float = 1.0,
    save: bool = True,
    grads: tuple[Tensor, Tensor | None] | None = None,
) -> Results:
    """Return output, last state and gradients by their names."""
    plan = plan_of(backend, args, recurrence, reverse, kappa_scale)
    out, final, *saved = plan.forward(args, save)
    saved = None if saved[1] is None else tuple(saved)
    grads = random_gradients(args) if grads is None else grads
    gradients = plan.backward(args, *grads, saved)
    named = {"out": out, "final": final, **gradients._asdict()}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def truth_of(args: ScanArgs, recurrence: str, reverse: bool = False, kappa_scale: float = 1.0) -> Results:
    """Return the reference's results for the same numbers in float64."""
    grads = tuple(None if g is None else g.double() for g in random_gradients(args))
    exact = args.to(torch.float64)
    return results_of(reference, exact, recurrence, reverse, kappa_scale, grads=grads)


def assert_near(found: Results, expected: Results, tolerance: float, floor: float = 1e-24) -> None:
    """Compare results relative to the largest value of each; ``floor`` is allowed on top."""
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        assert found[name].shape == truth.shape, name
        error = (found[name].double() - truth.double()).abs()
        bound = tolerance * truth.abs().max().item() + floor if truth.numel() else 0
        assert (error <= bound).all(), f"{name}: {error.max()} > {bound}"  # fails for NaN, too


def assert_right(
    backend: ModuleType,
    args: ScanArgs,
    recurrence: str,
    tolerance: float,
    reverse: bool = False,
    kappa_scale: float = 1.0,
    save: bool = True,
    floor: float = 1e-24,
) -> None:
    """Compare a backend with the reference: values, gradients, and their dtypes."""
    found = results_of(backend, args, recurrence, reverse, kappa_scale, save)
    assert_near(found, truth_of(args, recurrence, reverse, kappa_scale), tolerance, floor)
    assert found["out"].dtype == args.x.dtype
    for name, argument in args._asdict().items():
        assert argument is None or found[name].dtype == argument.dtype, name


def assert_same_bits(a: Results, b: Results) -> None:
    """Compare results bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def conv_results(
    backend: ModuleType,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    grad: Tensor,
    order: Tensor | None = None,
) -> list[Tensor]:
    """Return the output of a backend's convolution and its gradients for x, weight and bias.

    Backends do not write tokens without a position in the order (P,); these are set to zero.
    """
    plan = backend.conv_plan(conv_key(x, weight, order))
    out = plan.forward(x, weight, bias, order)
    dx, *others = plan.backward(grad, x, weight, bias, order)
    if order is not None:
        absent = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
        absent[order[order >= 0].long()] = False
        out, dx = (t.masked_fill(absent[:, None], 0) for t in (out, dx))
    return [out, dx, *others]
