"""Batches of padded images with a mask: each image gives the same results as alone."""

import itertools
import random

import pytest
import timm
import torch
from torch import Tensor, nn

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 5}
MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny"]
# Height, width, top and left of each image in a padded one of 48 x 64 pixels.
PLACES = [(32, 32, 0, 0), (32, 32, 8, 16), (24, 64, 0, 0), (8, 8, 40, 56), (48, 64, 0, 0)]


def small(name: str = "vil_tiny", **kwargs) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | kwargs)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def padded() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return images padded with noise, their mask, and the images alone."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(len(PLACES), 3, 48, 64, generator=generator)
    mask, alone = torch.zeros(len(PLACES), 48, 64, dtype=torch.int64), []
    for i, (height, width, top, left) in enumerate(PLACES):
        inside = (slice(top, top + height), slice(left, left + width))
        mask[i][inside] = 1
        alone.append(batch[i : i + 1, :, inside[0], inside[1]].contiguous())
    return batch, mask, alone


@pytest.mark.pairs
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pool", ["token", "avg", "max", "avgmax"])
@pytest.mark.parametrize("grid_aware", [True, "dt"])
def test_padded_images_give_what_they_give_alone(
    name: str, pool: str, grid_aware: bool | str
) -> None:
    model = small(name, global_pool=pool, grid_aware=grid_aware)
    batch, mask, alone = padded()
    expected = torch.cat([model(image) for image in alone])
    torch.testing.assert_close(model(batch, mask), expected, rtol=1e-4, atol=1e-5)
    patches = torch.nn.functional.max_pool2d(mask[:, None].float(), 8)[:, 0].bool()
    assert torch.equal(model(batch, patches), model(batch, mask))


def test_without_class_token_and_with_overlapping_patches() -> None:
    batch, mask, alone = padded()
    for model in (small(class_token=False, global_pool="avg"), small(patch_stride=4)):
        expected = torch.cat([model(image) for image in alone])
        torch.testing.assert_close(model(batch, mask), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_features_are_zeros_where_the_mask_is(name: str) -> None:
    model = small(name)
    batch, mask, alone = padded()
    final, maps = model.forward_intermediates(batch, mask=mask, norm=True)
    assert torch.equal(final, model.forward_features(batch, mask))
    for i, (height, width, top, left) in enumerate(PLACES):
        rows = slice(top // 8, (top + height) // 8)
        columns = slice(left // 8, (left + width) // 8)
        own = model.forward_intermediates(alone[i], norm=True)[1][-1][0]
        torch.testing.assert_close(maps[-1][i, :, rows, columns], own, rtol=1e-4, atol=1e-5)
        outside = maps[-1][i].clone()
        outside[:, rows, columns] = 0
        assert not outside.any()


def test_gradients_do_not_reach_what_is_masked() -> None:
    model = small("vim_tiny").train()
    batch, mask, _ = padded()
    mask[4, 8:12, 8:13] = 0  # pixels of patches that stay
    batch.requires_grad_()
    model.set_grad_checkpointing()
    model(batch, mask).square().sum().backward()
    reached = batch.grad.abs().sum(1) != 0
    assert torch.equal(reached, mask.bool())


def drawn_model(rng: random.Random) -> nn.Module:
    """Return a model with random options, for images of 32 x 32 px."""
    name = rng.choice(MODELS) + rng.choice(["", "_pyramid"])
    class_token, plain = rng.random() < 0.7, not name.endswith("pyramid")
    return small(
        name,
        embed_dim=16,
        num_classes=5 if plain else 0,
        class_token=class_token,
        global_pool=rng.choice(["token", "avg", "max"] if class_token else ["avg", "max"]),
        grid_aware=rng.choice([True, "dt", False]),
        patch_stride=rng.choice([None, 4]) if plain else None,
    ).train(rng.random() < 0.5)


def drawn_mask(rng: random.Random, images: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return a mask of pixels or patches, and which pixels it leaves out, bool (B, height, width).

    The mask keeps a random box. A mask of pixels also leaves out strips at the edge of some patches, if patches do
    not overlap. A mask of patches leaves out the pixels that no kept patch covers.
    """
    (B, _, height, width), of_patches = images.shape, rng.random() < 0.5
    patch, (stride, _) = 8, model.patch_embed.stride
    H, W = model.patch_embed.dynamic_feat_size((height, width)) if of_patches else (height, width)
    mask, unit = torch.zeros(B, H, W, dtype=torch.bool), 1 if of_patches else patch
    for own in mask:
        top, left = rng.randrange(H // unit) * unit, rng.randrange(W // unit) * unit
        own[rng.choice([0, top]) :, rng.choice([0, left]) :] = True
        for i, j in itertools.product(range(0, H, unit), range(0, W, unit)):
            if not of_patches and stride == patch and rng.random() < 0.2:
                own[i : i + 3, j : j + unit] = False
    mask[0, :unit] = False  # so that something is left out
    if not of_patches:
        return mask.to(rng.choice([torch.bool, torch.float32])), ~mask
    left_out = torch.ones(B, height, width, dtype=torch.bool)
    for b, i, j in mask.nonzero().tolist():
        left_out[b, i * stride : i * stride + patch, j * stride : j * stride + patch] = False
    return mask, left_out


def outcomes(model: nn.Module, images: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the results of every method of a model, and all gradients."""
    images = images.clone().requires_grad_()
    model.zero_grad()
    final, maps = model.forward_intermediates(images, mask=mask, norm=True)
    features = model.forward_features(images, mask)
    found = {"logits": model(images, mask), "features": features, "final": final}
    found |= {f"map {i}": made for i, made in enumerate(maps)}
    sum(t.square().sum() for t in found.values()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | gradients | {"images": images.grad}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_masked_may_be_anything(seed: int) -> None:
    rng = random.Random(seed)
    model = drawn_model(rng)
    size = rng.choice([(32, 32), (32, 32), (40, 24), (48, 64), (16, 72)])
    images = torch.randn(3, 3, *size)
    mask, left_out = drawn_mask(rng, images, model)
    left_out = left_out[:, None].expand_as(images)
    assert left_out.any()
    anything = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])[
        torch.randint(4, images.shape)
    ]
    expected = outcomes(model, images.masked_fill(left_out, 0), mask)
    found = outcomes(model, torch.where(left_out, anything, images), mask)
    assert found.keys() == expected.keys()
    for name in expected:
        assert expected[name].isfinite().all(), name
        assert torch.equal(found[name], expected[name]), name
    assert not found["images"][left_out].any()
    assert found["images"].any()


def with_a_hole() -> Tensor:
    mask = torch.ones(2, 4, 4)
    mask[1, 2, 1] = 0
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 16, 32), r"mask must have the shape of the images, \(2, 32, 32\), or of"),
        (torch.zeros(2, 32, 32), r"mask must keep at least one patch.* images \[0, 1\] have none"),
        (with_a_hole(), r"mask must keep a rectangle .* inside the rectangles of images \[1\]"),
    ],
)
def test_bad_masks_are_named(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small()(torch.randn(2, 3, 32, 32), mask)
