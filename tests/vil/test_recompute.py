"""Long sequences: what a block keeps for its backward pass, and that nothing else changes."""

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
    model = timm.create_model(name, img_size=32, patch_size=8, recompute_above=above, **options)
    return model.train()


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    torch.manual_seed(2)
    logits = (model if call is None else call)(images())
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def keeps_projection(model: nn.Module) -> bool:
    """Tell whether what in_proj returned is still there once the logits are."""
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


def test_the_input_projection_is_not_kept() -> None:
    assert keeps_projection(small(above=None))
    assert keeps_projection(small(above=TOKENS))
    assert not keeps_projection(small())


def test_checkpointing_computes_a_block_again_as_a_whole_and_once() -> None:
    model = small()
    calls = []
    model.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    model.set_grad_checkpointing()
    expected = gradients(small(above=None))
    assert all(map(torch.equal, gradients(model), expected))
    assert len(calls) == 2
    model.set_grad_checkpointing(False)
    assert model.blocks[0].recompute_above == TOKENS - 1


class WithDropout(nn.Module):
    """A projection that is not the same function twice, as LoRA's are in training."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(x, 0.5, self.training))


def test_what_is_random_is_drawn_once() -> None:
    models = small(above=None, depth=1), small(depth=1)
    for model in models:
        model.blocks[0].mixer.in_proj = WithDropout(model.blocks[0].mixer.in_proj)
    expected, found = map(gradients, models)
    assert all(map(torch.equal, found, expected))


def test_compiles() -> None:
    expected, model = gradients(small(above=None)), small()
    found = gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_transforms_and_forward_mode() -> None:
    model = small(depth=1, embed_dim=8).double()
    parameters = dict(model.named_parameters())
    x = images().double()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(2)
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)
    ones = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
    _, slope = torch.func.jvp(loss, (parameters,), (ones,))
    torch.testing.assert_close(
        slope, sum(parameter.grad.sum() for parameter in parameters.values())
    )


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["scripted", "symbolic", "traced"])
def test_programs_made_of_a_model_that_trains(how: str) -> None:
    model = small(dynamic_img_size=False)
    model.pos_drop, model.blocks[1].drop_path = nn.Identity(), nn.Identity()
    program = {
        "scripted": lambda: torch.jit.script(model),
        "symbolic": lambda: torch.fx.symbolic_trace(model),
        "traced": lambda: torch.jit.trace(model, images()),
    }[how]()
    assert torch.equal(program(images()), model(images()))


def test_refuses_less_than_no_tokens() -> None:
    with pytest.raises(ValueError, match="recompute_above must be None or at least 0, got -1"):
        small(above=-1)


def test_masked_images() -> None:
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, 1, 2] = False
    found = []
    for above in (None, TOKENS - 1):
        model = small(above=above, drop_path_rate=0.0)
        model(images(), mask).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
