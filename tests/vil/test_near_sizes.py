"""The model resizes images near or below the trained size, and resizes their tokens back."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import vil  # noqa: F401  registers the models
from tests.small import images, small


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_exact", "vim_tiny", "vil_tiny_pyramid"])
@pytest.mark.parametrize(("size", "inside"), [((8, 16), (32, 32)), ((40, 24), (32, 32)), ((24, 48), (32, 48))])
def test_sides_near_the_trained_one_are_resized(name: str, size: tuple[int, int], inside: tuple[int, int]) -> None:
    """Only sides below 1.3 times the trained one are resized; tokens come back on the given grid."""
    model, x = small(name), images(*size)
    resized = F.interpolate(x, inside, mode="bicubic", antialias=True)
    assert model.grid_inside(size) == (inside[0] // 8, inside[1] // 8)
    tokens, expected = model.forward_features(x), model.forward_features(resized)
    assert tokens.shape == (2, 1 + size[0] // 8 * (size[1] // 8), 32)
    assert torch.equal(tokens[:, 0], expected[:, 0])
    (own,) = model.get_intermediate_layers(x, reshape=True)
    if "pyramid" not in name:
        assert torch.equal(model(x), model(resized))
        (of_resized,) = model.get_intermediate_layers(resized, reshape=True)
        back = F.interpolate(of_resized, tuple(own.shape[-2:]), mode="bilinear", antialias=True)
        same_mean = of_resized.mean((2, 3), keepdim=True) - back.mean((2, 3), keepdim=True)
        torch.testing.assert_close(own, back + same_mean)
        model.resize_below_scale = 0.0
        assert not torch.allclose(model(x), model(resized), atol=1e-3)
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad.abs().amax((1, 2, 3)).all()


def test_averaged_tokens_classify_as_those_of_the_resized_image() -> None:
    model = small(class_token=False, global_pool="avg")
    for rows, columns in itertools.product(range(1, 6), repeat=2):
        x = images(8 * rows, 8 * columns)
        resized = F.interpolate(x, (32, 32), mode="bicubic", antialias=True)
        torch.testing.assert_close(model(x), model(resized))
