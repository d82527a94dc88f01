"""Batches of padded images with a mask: each image gives what it gives alone."""

import pytest
import timm
import torch
from torch import Tensor, nn

from vil.masks import boxes, valid_patches

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
    """Return padded images, with something in the padding, their mask, and the images alone."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(len(PLACES), 3, 48, 64, generator=generator)
    mask, alone = torch.zeros(len(PLACES), 48, 64, dtype=torch.int64), []
    for i, (height, width, top, left) in enumerate(PLACES):
        inside = (slice(top, top + height), slice(left, left + width))
        mask[i][inside] = 1
        alone.append(batch[i : i + 1, :, inside[0], inside[1]].contiguous())
    return batch, mask, alone


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pool", ["token", "avg", "max", "avgmax"])
@pytest.mark.parametrize("grid_aware", [True, "steps"])
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


def test_images_that_are_padded_to_whole_patches() -> None:
    model = small(dynamic_img_pad=True)
    image = torch.randn(1, 3, 30, 45)
    batch, mask = torch.zeros(1, 3, 48, 64), torch.zeros(1, 48, 64)
    batch[:, :, :30, :45], mask[:, :30, :45] = image, 1
    torch.testing.assert_close(model(batch, mask), model(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_nothing_is_none(name: str) -> None:
    model, x = small(name), torch.randn(2, 3, 32, 40)
    torch.testing.assert_close(model(x, torch.ones(2, 32, 40)), model(x))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [(32, 32), (48, 64)])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_patches_that_are_missing_have_no_influence(
    name: str, size: tuple[int, int], pool: str
) -> None:
    """Inside an image, at its own grid and another: whatever is in them, nothing else changes."""
    model = small(name, global_pool=pool)
    x, mask = torch.randn(3, 3, *size), torch.ones(3, *size)
    mask[0, 8:16, 8:24], mask[1, 16:24] = 0, 0
    other = torch.where(mask[:, None] == 0, 100.0, x)
    assert torch.equal(model(x, mask), model(other, mask))
    torch.testing.assert_close(model(x, mask)[2:], model(x[2:]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(x, mask)[:2], model(x)[:2], atol=1e-3)


def test_missing_rows_at_the_trained_grid_join_what_is_around_them() -> None:
    """Empty rows inside an image are as if its halves stood on each other, but for their positions."""
    model = small()
    with torch.no_grad():
        model.pos_embed[:, 1:] = 0
    x, mask = torch.randn(1, 3, 32, 32), torch.ones(1, 32, 32)
    mask[:, 8:16] = 0
    joined = torch.cat([x[:, :, :8], x[:, :, 16:]], 2)
    plain = small(grid_aware=False)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x, mask), plain(joined), rtol=1e-4, atol=1e-5)


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
    mask[4, 8:16, 8:24] = 0
    batch.requires_grad_()
    model.set_grad_checkpointing()
    model(batch, mask).square().sum().backward()
    reached = batch.grad.abs().sum(1) != 0
    assert torch.equal(reached, mask.bool())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_are_those_without_a_mask(dtype: torch.dtype) -> None:
    model, x = small(), torch.randn(2, 3, 32, 40)
    if dtype == torch.float64:
        model, x = model.double(), x.double()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        masked, plain = model.forward_features(x, torch.ones(2, 32, 40)), model.forward_features(x)
    assert masked.dtype == plain.dtype
    torch.testing.assert_close(masked, plain)


def test_boxes_group_images_by_size() -> None:
    _, mask, _ = padded()
    valid = valid_patches(mask, torch.empty(5, 3, 48, 64), (6, 8), (8, 8), (8, 8))
    found = {box.size: box.images.tolist() for box in boxes(valid)}
    assert found == {(1, 1): [3], (3, 8): [2], (4, 4): [0, 1], (6, 8): [4]}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 16, 32), r"mask must have the shape of the images, \(2, 32, 32\), or of"),
        (torch.zeros(2, 32, 32), r"mask must leave each image a patch, images \[0, 1\] have none"),
    ],
)
def test_bad_masks_are_named(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small()(torch.randn(2, 3, 32, 32), mask)


def test_head_of_masked_features_averages_what_is_there() -> None:
    model = small(global_pool="avg")
    batch, mask, _ = padded()
    patches = torch.nn.functional.max_pool2d(mask[:, None].float(), 8).flatten(1).bool()
    logits = model.forward_head(model.forward_features(batch, mask), patch_valid=patches)
    assert torch.equal(logits, model(batch, mask))


def test_a_model_of_one_size_refuses_masks_of_others() -> None:
    model, x, mask = small(dynamic_img_size=False), torch.randn(2, 3, 32, 32), torch.ones(2, 32, 32)
    torch.testing.assert_close(model(x, mask), model(x))
    mask[0, 24:] = 0
    with pytest.raises(
        ValueError, match=r"mask leaves images of \(3, 4\) patches, and dynamic_img"
    ):
        model(x, mask)


def test_a_scripted_program_refuses_a_mask() -> None:
    scripted = torch.jit.script(small(depth=1))
    x = torch.randn(2, 3, 32, 32)
    assert scripted(x).shape == (2, 5)
    with pytest.raises(Exception, match="a scripted program takes no mask"):
        scripted(x, torch.ones(2, 32, 32))
