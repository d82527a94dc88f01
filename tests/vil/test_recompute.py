"""Long sequences: what a block keeps for its backward pass; nothing else changes."""

import weakref
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

import vil  # noqa: F401  (registers the models)

NAMES = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
TOKENS = 17  # of the images below


def small(name: str = "vil_tiny", above: int | None = TOKENS - 1, **options: object) -> nn.Module:
    torch.manual_seed(0)
    options = {"depth": 2, "embed_dim": 32, "num_classes": 5, "drop_path_rate": 0.3} | options
    model = timm.create_model(name, img_size=32, patch_size=8, checkpoint_min_tokens=above, **options)
    return model.train()


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    torch.manual_seed(2)
    logits = (model if call is None else call)(images())
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def keeps_projection(model: nn.Module) -> bool:
    """Return whether the output of in_proj is still in memory when the logits are computed."""
    made = []
    model.blocks[0].mixer.in_proj.register_forward_hook(
        lambda module, inputs, output: made.append(weakref.ref(output.untyped_storage()))
    )
    logits = model(images())
    return made[0]() is not None and logits.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bits(name: str) -> None:
    expected, found = gradients(small(name, None)), gradients(small(name))
    assert all(map(torch.equal, found, expected))


def test_checkpointed_blocks_are_dropped_alike_when_they_are_computed_again() -> None:
    models = small(above=None, depth=6), small(above=None, depth=6)
    models[1].set_grad_checkpointing()
    expected, found = (
        gradients(m, lambda x, m=m: m.forward_intermediates(x, intermediates_only=True)[-1]) for m in models
    )
    for one, other in zip(expected, found, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_the_input_projection_is_not_kept() -> None:
    assert keeps_projection(small(above=None))
    assert keeps_projection(small(above=TOKENS))
    assert not keeps_projection(small())


@pytest.mark.ci
def test_what_is_random_is_drawn_once() -> None:
    """Projections differ at each call in training with LoRA's dropout, for example."""
    models = small(above=None, depth=1), small(depth=1)
    for model in models:
        mixer = model.blocks[0].mixer
        mixer.in_proj = nn.Sequential(nn.Dropout(0.5), mixer.in_proj)
    expected, found = map(gradients, models)
    assert all(map(torch.equal, found, expected))
