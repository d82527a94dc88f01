"""Patches that are left out of the sequence, at random while training or by their numbers."""

import copy

import pytest
import timm
import torch
from torch import Tensor

import vil

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 5}
MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny"]


def small(name: str = "vil_tiny", **kwargs: object) -> vil.VisionLonghorn:
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | kwargs)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def sequence(model: vil.VisionLonghorn) -> Tensor:
    """Return the tokens that go into the first block of a model whose patches are their numbers."""
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


# ----------------------------------------------------------------------------------------- at random


def test_patches_that_are_dropped_are_gone_and_the_others_in_order() -> None:
    tokens = sequence(small(patch_drop_rate=0.7).train())
    assert tokens.shape == (64, 5)  # int(16 * 0.3) and the class token in the middle of them
    assert (tokens[:, 2] == -1).all()
    patches = torch.cat([tokens[:, :2], tokens[:, 3:]], 1)
    assert (patches.diff() > 0).all()
    assert patches.unique().tolist() == list(range(16))
    assert len(patches.unique(dim=0)) > 50  # each image goes without others
    whole = sequence(small(patch_drop_rate=0.7).eval())
    assert torch.equal(whole[0], torch.tensor([*range(8), -1, *range(8, 16)]).float())


@pytest.mark.parametrize("name", MODELS)
def test_a_rate_of_nothing_changes_no_bit_and_evaluation_knows_none(name: str) -> None:
    models = [small(name), small(name, patch_drop_rate=0.0), small(name, patch_drop_rate=0.5)]
    assert models[0].state_dict().keys() == models[2].state_dict().keys()
    for size in ((32, 32), (40, 48)):
        logits = [model(images(*size)) for model in models]
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])
    trained = [model.train()(images()) for model in models]
    assert torch.equal(trained[0], trained[1])
    assert not torch.allclose(trained[0], trained[2], atol=1e-3)


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
    assert cells.flatten(1).sum(1).tolist() == [8, 8]  # of 16, and no other is reached


def test_dropping_goes_through_scripts_and_compiled_models() -> None:
    model = small(patch_drop_rate=0.5).train()
    torch.manual_seed(0)
    expected = model(images())
    for made in (torch.jit.script(model), torch.compile(model, fullgraph=True, backend="eager")):
        torch.manual_seed(0)
        torch.testing.assert_close(made(images()), expected)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    compiled(images()).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in compiled.parameters())


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_scripted_models_are_saved(rate: float, tmp_path) -> None:
    model = small(patch_drop_rate=rate)
    torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    assert torch.allclose(loaded(images()), model(images()))


def test_tokens_of_features_are_those_that_are_left() -> None:
    model = small(patch_drop_rate=0.5).train()
    final, taps = model.forward_intermediates(images(), output_fmt="NLC")
    assert final.shape == (2, 9, 32)
    assert [tap.shape for tap in taps] == [(2, 8, 32)] * 2


def test_other_grids_are_refused_unless_taps_are_of_neighbours() -> None:
    told = r"patches can be left out .*, 4 x 4 patches, .*grid_aware=False at any, got 6 x 7"
    model = small(patch_drop_rate=0.5).train()
    with pytest.raises(ValueError, match=told):
        model(images(48, 56))
    with pytest.raises(Exception, match="patches can be left out"):
        torch.jit.script(model)(images(48, 56))
    plain = small(patch_drop_rate=0.5, grid_aware=False).train()
    assert plain.forward_features(images(48, 56)).shape == (2, 22, 32)
    other = small(patch_drop_rate=0.5)
    other.set_input_size((48, 56))  # the weights stay those of their grid
    with pytest.raises(ValueError, match=told):
        other.train()(images(48, 56))


def test_what_needs_every_patch_is_refused() -> None:
    model = small(patch_drop_rate=0.5).train()
    with pytest.raises(ValueError, match=r"maps have all patches: patch_drop_rate must be 0"):
        model.forward_intermediates(images())
    features = timm.create_model("vil_tiny", features_only=True, patch_drop_rate=0.5, **SMALL)
    with pytest.raises(ValueError, match=r"to train with them, got 0\.5"):
        features(images())
    assert len(features.eval()(images())) == 2
    with pytest.raises(ValueError, match=r"mask must be None while patches are dropped.* = 0\.5"):
        model(images(), torch.ones(2, 32, 32))
    with pytest.raises(ValueError, match=r"keep must be None while patches are dropped.* = 0\.5"):
        model.forward_patches(model.patch_embed(images()), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"patch_drop_rate must be 0 for a pyramid.*0\.5"):
        small("vil_tiny_pyramid", patch_drop_rate=0.5)


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan")])
def test_rates_out_of_range_are_named(rate: float) -> None:
    with pytest.raises(ValueError, match=f"patch_drop_rate must be at least 0 .*, got {rate}"):
        small(patch_drop_rate=rate)


# ----------------------------------------------------------------------------------------- by numbers


@pytest.mark.parametrize("name", [*MODELS, "vil_tiny_pyramid"])
@pytest.mark.parametrize("size", [(32, 32), (48, 56)])
def test_patches_give_what_images_do(name: str, size: tuple[int, int]) -> None:
    model = small(name)
    tokens = model.forward_patches(model.patch_embed(images(*size)))
    assert torch.equal(tokens, model.forward_features(images(*size)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", [{}, {"global_pool": "avg", "class_token": False}])
def test_kept_patches_give_what_a_mask_of_them_does(name: str, arguments: dict) -> None:
    model = small(name, **arguments)
    keep = torch.tensor([[0, 3, 5, 9, 12, 15], [0, 15, 7, 1, 2, 14]])  # a box around is all
    mask = torch.zeros(2, 16).scatter_(1, keep, 1.0).view(2, 4, 4)
    masked = model.forward_features(images(), mask)
    prefix = model.num_prefix_tokens
    tokens = model.forward_patches(model.patch_embed(images()), keep)
    torch.testing.assert_close(tokens[:, :prefix], masked[:, :prefix], rtol=1e-4, atol=1e-5)
    places = (prefix + keep)[..., None]
    torch.testing.assert_close(
        tokens[:, prefix:], masked.take_along_dim(places, 1), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(tokens[:, prefix:], model.forward_features(images())[:, keep[0]])


def test_the_order_of_the_numbers_is_that_of_the_tokens_alone() -> None:
    model = small()
    patches = model.patch_embed(images())
    keep = torch.stack([torch.randperm(16)[:7] for _ in range(2)])
    order = torch.randperm(7)
    tokens, shuffled = (model.forward_patches(patches, k) for k in (keep, keep[:, order]))
    assert torch.equal(shuffled[:, 0], tokens[:, 0])
    assert torch.equal(shuffled[:, 1:], tokens[:, 1:][:, order])
    every = torch.arange(16).expand(2, -1)
    torch.testing.assert_close(
        model.forward_patches(patches, every), model.forward_patches(patches), rtol=1e-4, atol=1e-5
    )


def test_gradients_reach_what_is_kept() -> None:
    model = small().train()
    patches = model.patch_embed(images()).detach().requires_grad_()
    keep = torch.tensor([[3, 1, 8], [0, 2, 15]])
    model.forward_patches(patches, keep)[:, 0].sum().backward()
    reached = patches.grad.abs().sum(-1).flatten(1) > 0
    assert torch.equal(reached, torch.zeros(2, 16, dtype=torch.bool).scatter_(1, keep, True))


def test_one_patch_alone_and_other_grids() -> None:
    keep = torch.tensor([[4], [11]])
    model = small(grid_aware=False)
    assert model.forward_patches(model.patch_embed(images(48, 56)), keep).shape == (2, 2, 32)
    model = small()
    with pytest.raises(ValueError, match=r"patches can be left out .* got 6 x 7"):
        model.forward_patches(model.patch_embed(images(48, 56)), keep)


def test_kept_patches_are_compiled() -> None:
    model = small()
    patches, keep = model.patch_embed(images()), torch.tensor([[3, 1, 8], [0, 2, 15]])
    compiled = torch.compile(model.forward_patches, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(patches, keep), model.forward_patches(patches, keep))


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (torch.zeros(1, 3, dtype=torch.int64), r"B = 2 and n of 1 to 16, got torch.int64 \(1, 3\)"),
        (torch.zeros(2, 0, dtype=torch.int64), r"got torch.int64 \(2, 0\)"),
        (torch.zeros(2, 17, dtype=torch.int64), r"got torch.int64 \(2, 17\)"),
        (torch.ones(2, 16, dtype=torch.bool), r"got torch.bool \(2, 16\)"),
        (
            torch.tensor([[0, 16], [1, 2]]),
            r"different numbers of 0 to 15 .* \[\[0, 16\], \[1, 2\]\]",
        ),
        (torch.tensor([[0, 1], [-1, 2]]), "different numbers of 0 to 15"),
        (torch.tensor([[0, 1], [2, 2]]), "different numbers of 0 to 15"),
    ],
)
def test_bad_numbers_are_named(keep: Tensor, told: str) -> None:
    model = small()
    with pytest.raises(ValueError, match=f"keep must (be|have) .*{told}"):
        model.forward_patches(model.patch_embed(images()), keep)


def test_bad_patches_are_named() -> None:
    model = small()
    for shape in ((2, 16, 32), (2, 32, 4, 4)):
        with pytest.raises(ValueError, match=r"patches must be \(B, H, W, 32\) of any grid, got"):
            model.forward_patches(torch.zeros(shape))
    fixed = small(dynamic_img_size=False)
    with pytest.raises(ValueError, match=r"of \(4, 4\) grid, got \(2, 5, 6, 32\)"):
        fixed.forward_patches(torch.zeros(2, 5, 6, 32))
