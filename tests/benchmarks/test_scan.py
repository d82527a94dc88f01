"""The GPU benchmark of the scans times only implementations with correct results."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import contestants, scan
from benchmarks.contestants import Contestant


def wrong_gradient(*tensors: Tensor) -> Tensor:
    """Scan with the gradient of q doubled."""
    x, dt, q, *rest = tensors
    return contestants.chunked_scan(x, dt, 2 * q - q.detach(), *rest)


def not_finite(*tensors: Tensor) -> Tensor:
    """Scan with one output that is not a number."""
    out = contestants.chunked_scan(*tensors)
    return torch.cat((out[:-1], out[-1:] * float("nan")))


def only_wrong_without_autograd(*tensors: Tensor) -> Tensor:
    """Scan correctly only while gradients are recorded."""
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
