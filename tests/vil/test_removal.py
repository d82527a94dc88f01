"""Patches left out of the sequence, at random in training or by index."""

import pytest
import timm
import torch
from torch import Tensor

import vil
from tests.small import SMALL, images, small

MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny"]


def sequence(model: vil.VisionLonghorn) -> Tensor:
    """Return the tokens that enter the first block; the value of each patch is its index."""
    entered: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    H, W = model.patch_embed.grid_size
    with torch.no_grad():
        model.pos_embed.zero_()
        model.cls_token.fill_(-1)
        numbers = torch.arange(H * W).view(1, H, W, 1).expand(64, -1, -1, 32).float()
        model.forward_patches(numbers)
    handle.remove()
    return entered[0][..., 0]


def test_patches_that_are_dropped_are_gone_and_the_others_in_order() -> None:
    tokens = sequence(small(patch_drop_rate=0.7).train())
    assert tokens.shape == (64, 5)  # int(16 * 0.3) patches, and the class token in the middle
    assert (tokens[:, 2] == -1).all()
    patches = torch.cat([tokens[:, :2], tokens[:, 3:]], 1)
    assert (patches.diff() > 0).all()
    assert patches.unique().tolist() == list(range(16))
    assert len(patches.unique(dim=0)) > 50  # each image drops different patches
    whole = sequence(small(patch_drop_rate=0.7).eval())
    assert torch.equal(whole[0], torch.tensor([*range(8), -1, *range(8, 16)]).float())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", [{}, {"global_pool": "avg", "class_token": False}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_parameter_gets_a_gradient(name: str, arguments: dict, checkpointing: bool) -> None:
    model = small(name, patch_drop_rate=0.5, **arguments).train()
    model.set_grad_checkpointing(checkpointing)
    x = images().requires_grad_()
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    cells = x.grad.abs().unfold(2, 8, 8).unfold(3, 8, 8).sum((1, 4, 5)) > 0
    assert cells.flatten(1).sum(1).tolist() == [8, 8]  # of 16; no other has a gradient


def test_what_needs_every_patch_is_refused() -> None:
    model = small(patch_drop_rate=0.5).train()
    with pytest.raises(ValueError, match=r'output_fmt="NCHW" needs all patches: in training'):
        model.forward_intermediates(images())
    features = timm.create_model("vil_tiny", features_only=True, patch_drop_rate=0.5, **SMALL)
    with pytest.raises(ValueError, match=r"in training, patch_drop_rate must be 0, got 0\.5"):
        features(images())
    assert len(features.eval()(images())) == 2
    with pytest.raises(ValueError, match=r"keep must be None while patches are dropped.* = 0\.5"):
        model.forward_patches(model.patch_embed(images()), torch.zeros(2, 1, dtype=torch.int64))
    patches = model.eval().patch_embed(images())
    for wrong in ([3, 7, 3], [0, 16, 1], [-1, 0, 1]):
        with pytest.raises(ValueError, match=r"keep must have distinct indices 0 to 15 in each"):
            model.forward_patches(patches, torch.tensor([[0, 1, 2], wrong]))
    for call in (
        lambda x: small(patch_drop_rate=0.5).train()(x),
        lambda x: model.forward_patches(model.patch_embed(x), torch.zeros(2, 1, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"need a grid of 4 x 4 patches .*, got 6 x 8"):
            call(images(48, 64))
    with pytest.raises(ValueError, match=r"patch_drop_rate must be 0 for a pyramid.*0\.5"):
        small("vil_tiny_pyramid", patch_drop_rate=0.5, num_classes=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", [{}, {"global_pool": "avg", "class_token": False}])
def test_kept_patches_alone_go_through_the_blocks(name: str, arguments: dict) -> None:
    model = small(name, **arguments)
    keep = torch.tensor([[0, 3, 5, 9, 12, 15], [0, 15, 7, 1, 2, 14]])
    prefix = model.num_prefix_tokens
    tokens = model.forward_patches(model.patch_embed(images()), keep)
    x = model.patch_embed(images()).flatten(1, 2) + model.pos_embed[:, prefix:]
    x = x.take_along_dim(keep.sort(1).values[..., None], 1)
    if prefix:
        class_token = (model.cls_token + model.pos_embed[:, :1]).expand(2, -1, -1)
        x = torch.cat([x[:, :3], class_token, x[:, 3:]], 1)
    for block in model.blocks:
        x = block(x)
    x = model.norm(x)
    if prefix:
        torch.testing.assert_close(tokens[:, 0], x[:, 3])
        x = torch.cat([x[:, :3], x[:, 4:]], 1)
    places = keep.argsort(1).argsort(1)[..., None]
    torch.testing.assert_close(tokens[:, prefix:], x.take_along_dim(places, 1))
    assert not torch.allclose(tokens[:, prefix:], model.forward_features(images())[:, keep[0]])
