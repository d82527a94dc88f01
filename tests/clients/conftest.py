"""Fixtures of all client tests: images, and a check that one step trains the backbone."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.clients.small_models import backbone_in


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def images() -> Callable[..., Tensor]:
    def make(height: int = 128, width: int = 128, count: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, 3, height, width, generator=generator)

    return make


@pytest.fixture
def assert_trains() -> Iterator[Callable[[nn.Module, Tensor], None]]:
    def check(model: nn.Module, loss: Tensor, unused: tuple[str, ...] = ()) -> None:
        """Check that one SGD step changes every parameter of the backbone, except those that begin with ``unused``."""
        backbone = backbone_in(model)
        named = dict(backbone.named_parameters())
        before = {name: p.detach().clone() for name, p in named.items()}
        assert loss.isfinite()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        torch.optim.SGD(model.parameters(), lr=1e3).step()
        same = {name for name, p in named.items() if torch.equal(p, before[name])}
        assert same == {name for name in named if name.startswith(unused)} if unused else not same

    return check
