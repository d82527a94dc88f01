"""What the tests of all clients share: small models by name, and the question whether a step trains."""

from collections.abc import Callable, Iterator

import pytest
import timm
import torch
from timm.models import register_model
from torch import Tensor, nn

import vil


@register_model
def vil_test(pretrained: bool = False, **kwargs: object) -> nn.Module:
    """A small model that clients find by its name, since few of them hand arguments on."""
    return timm.create_model("vil_tiny", pretrained, **({"embed_dim": 32, "depth": 4} | kwargs))


@register_model
def vil_test_pyramid(pretrained: bool = False, **kwargs: object) -> nn.Module:
    """The same with a pyramid."""
    small = {"embed_dim": 32, "depth": 4}
    return timm.create_model("vil_tiny_pyramid", pretrained, **(small | kwargs))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def images() -> Callable[..., Tensor]:
    def make(height: int = 128, width: int = 128, count: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, 3, height, width, generator=generator)

    return make


def backbone_in(model: nn.Module) -> vil.VisionLonghorn:
    (backbone,) = (m for m in model.modules() if isinstance(m, vil.VisionLonghorn))
    return backbone


@pytest.fixture
def assert_trains() -> Iterator[Callable[[nn.Module, Tensor], None]]:
    def check(model: nn.Module, loss: Tensor, unused: tuple[str, ...] = ()) -> None:
        """Fail unless one step of SGD changes every parameter of the backbone but those named.

        Args:
            model: Has one of our models somewhere in it.
            loss: Of its output.
            unused: What the names of parameters begin with that this client leaves alone.
        """
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
