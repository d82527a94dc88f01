"""The GPU benchmark of the scans, all but its clock: on the CPU, in plain PyTorch."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import contestants, scan
from benchmarks.contestants import Contestant


def fake_selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
) -> Tensor:
    """Compute what mamba-ssm documents: u, delta, z (B, D, L), B, C (B, N, L), A (D, N)."""
    assert delta_softplus
    step = F.softplus(delta + delta_bias[:, None])
    state, outputs = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        write = (step * u)[..., t, None] * B[:, None, :, t]
        state = torch.exp(step[..., t, None] * A) * state + write
        outputs.append((state * C[:, None, :, t]).sum(-1))
    return (torch.stack(outputs, -1) + D[:, None] * u) * F.silu(z)


def error_in_float64(contestant: Contestant, shape: tuple[int, int, int]) -> float:
    """Return the worst error of outputs and gradients, in float64."""
    inputs = contestants.make_inputs(shape, "cpu", torch.float64)
    entry = scan.admit(contestant, inputs, contestants.truth(contestant.task, inputs), 60)
    assert entry.status == "ok"
    return entry.error


@pytest.mark.parametrize("length", [1, 16, 33, 300])
def test_pytorch_scan_matches_reference(length: int) -> None:
    contestant = Contestant("PyTorch", "longhorn", contestants.chunked_scan)
    assert error_in_float64(contestant, (2, length, 3)) < 1e-12


def test_layout_for_mamba_ssm_matches_reference() -> None:
    run = contestants.selective_scan_pair(fake_selective_scan)
    contestant = contestants.SelectiveScanPair("pair", "mamba", run)
    assert error_in_float64(contestant, (2, 19, 5)) < 1e-12


def test_attention_matches_softmax() -> None:
    contestant = Contestant("SDPA", "attention", contestants.attention)
    assert error_in_float64(contestant, (2, 9, 128)) < 1e-12


def wrong_gradient(*tensors: Tensor) -> Tensor:
    """Scan with the gradient of q doubled."""
    x, dt, q, *rest = tensors
    return contestants.chunked_scan(x, dt, 2 * q - q.detach(), *rest)


def not_finite(*tensors: Tensor) -> Tensor:
    """Scan with one output that is not a number."""
    out = contestants.chunked_scan(*tensors)
    return torch.cat((out[:-1], out[-1:] * float("nan")))


def only_wrong_without_autograd(*tensors: Tensor) -> Tensor:
    """Scan rightly as long as gradients are recorded."""
    return contestants.chunked_scan(*tensors) * (1 if torch.is_grad_enabled() else 1.1)


def raises(*tensors: Tensor) -> Tensor:
    """Fail as a compiler does."""
    raise RuntimeError("out of resource: shared memory\nRequired: 1")


def sleeps(*tensors: Tensor) -> Tensor:
    """Take longer than the limit."""
    time.sleep(10)
    return tensors[0]


@pytest.mark.parametrize(
    ("run", "status", "disagrees"),
    [
        (contestants.chunked_scan, "ok", False),
        (wrong_gradient, "disagrees with the reference (gradient of q: error 1 > 0.016)", True),
        (not_finite, "disagrees with the reference (inference: error inf > 0.016)", True),
        (only_wrong_without_autograd, "disagrees with the reference (inference: error 0.1", True),
        (raises, "failed: RuntimeError: out of resource: shared memory", False),
        (sleeps, "failed: TimeLimitError: not compiled within 0.2 s", False),
    ],
)
def test_gate(run: Callable[..., Tensor], status: str, disagrees: bool) -> None:
    inputs = contestants.make_inputs((2, 17, 4), "cpu")
    exact = contestants.truth("longhorn", inputs)
    entry = scan.admit(
        Contestant("it", "longhorn", run), inputs, exact, 0.2 if run is sleeps else 60
    )
    assert entry.status.startswith(status)
    assert entry.disagrees == disagrees
    assert bool(entry.passes) == (status == "ok")


def test_failure_of_ours_is_refused_but_not_of_others() -> None:
    row = {"shape": [1, 1, 64], "contestant": "it", "status": "failed", "disagrees": False}
    assert scan.refused([{**row, "ours": True}])
    assert not scan.refused([{**row, "ours": False}])
