"""The pyramid: its maps, the plain model's weights, and what stays as in the plain model."""

import logging
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

import vil
from vil.pyramid import PyramidLevel

SMALL = {"embed_dim": 32, "depth": 4, "num_classes": 0}
KINDS = ("longhorn", "longhorn_exact", "mamba")


def model(name: str = "vil_tiny_pyramid", **arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **(SMALL | arguments)).eval()


def features(**arguments: object) -> nn.Module:
    return model(features_only=True, **arguments)


def images(height: int = 64, width: int = 96, count: int = 2) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
@pytest.mark.parametrize("kind", ["vil_{}", "vil_{}_exact", "vim_{}"])
def test_every_model_has_a_pyramid_of_its_own_kind(size: str, kind: str) -> None:
    name = kind.format(size)
    with torch.device("meta"):  # segmentation_models_pytorch first inspects a model this way
        plain, pyramid = (timm.create_model(n, num_classes=0) for n in (name, f"{name}_pyramid"))
        classifiers = timm.create_model(name), timm.create_model(f"{name}_pyramid")
        found = timm.create_model(f"{name}_pyramid", features_only=True).feature_info
    assert pyramid.blocks[0].mixer.recurrence == plain.blocks[0].mixer.recurrence
    levels = {key for key in pyramid.state_dict() if key.startswith("pyramid.")}
    assert levels
    assert pyramid.state_dict().keys() - levels == plain.state_dict().keys()
    assert classifiers[0].state_dict().keys() == classifiers[1].state_dict().keys()
    assert found.reduction() == [4, 8, 16, 32]
    assert found.channels() == [plain.embed_dim] * 4
    assert found.module_name() == [f"pyramid.{i}" for i in range(4)]
    assert pyramid.pretrained_cfg["mean"] == plain.pretrained_cfg["mean"]


@pytest.mark.parametrize("size", [(64, 96), (16, 16), (100, 75), (1, 33)])
@pytest.mark.parametrize("patch", [{}, {"patch_size": 8}, {"patch_size": 32}, {"patch_stride": 8}])
def test_maps_are_as_large_as_a_convolutional_networks(size: tuple, patch: dict) -> None:
    maps = features(**patch)(images(*size))
    expected = [tuple(-(-side // stride) for side in size) for stride in (4, 8, 16, 32)]
    assert [tuple(m.shape[-2:]) for m in maps] == expected
    assert all(m.isfinite().all() for m in maps)


def test_a_classifier_takes_images_of_any_size_too() -> None:
    logits = model(num_classes=3)(images(50, 75))
    assert logits.shape == (2, 3)
    plain = model("vil_tiny", num_classes=3, dynamic_img_pad=True)
    assert torch.equal(plain(images(50, 75)), logits)


def test_all_maps_have_one_dtype_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert [m.dtype for m in features()(images())] == [torch.float32] * 4


def test_overlapping_patches_have_the_centres_of_their_cells() -> None:
    net, kept, x = features(patch_stride=8, img_size=64), [], images(64, 64).requires_grad_()
    net.model.patch_embed.register_forward_hook(lambda _, args, patches: kept.append(patches))
    assert [m.shape[-1] for m in net(x)] == [16, 8, 4, 2]
    for row, column in ((1, 2), (6, 5)):
        (grad,) = torch.autograd.grad(kept[0][0, row, column].sum(), x, retain_graph=True)
        for first, touched in zip((row, column), grad[0, 0].nonzero().T, strict=True):
            assert (touched.min(), touched.max()) == (8 * first - 4, 8 * first + 11)


def test_a_level_sees_its_own_place_alone() -> None:
    """At each level, a cell of the map depends only on the tokens whose pixels it covers."""
    for stride, to in ((16, 4), (16, 8), (16, 16), (16, 32), (8, 32)):
        level, cells = PyramidLevel(8, stride, to), max(1, to // stride)
        x = torch.randn(1, 8, 6, 6, requires_grad=True)
        made = level(x)
        row, column = made.shape[-2] // 2, made.shape[-1] - 1
        (grad,) = torch.autograd.grad(made[0, :, row, column].pow(3).sum(), x)
        first = row * to // stride, column * to // stride
        for touched, begin in zip(grad[0].abs().sum(0).nonzero().T, first, strict=True):
            assert {*touched.tolist()} <= {*range(begin, begin + cells)}, (stride, to)
        if cells > 1:  # of each channel, the largest token alone
            assert (grad[0] != 0).flatten(1).sum(1).max() == 1


@pytest.mark.parametrize("blocks", [(0, 1, 2, 3), (3, 1, 1, -1)])
def test_each_level_is_made_of_its_block(blocks: tuple[int, ...]) -> None:
    net, x = model(pyramid_blocks=blocks), images()
    final, maps = net.forward_intermediates(x)
    plain = model("vil_tiny", num_classes=0)
    plain.load_state_dict({k: v for k, v in net.state_dict().items() if "pyramid" not in k})
    plain = plain.forward_intermediates(x, intermediates_only=True)
    assert torch.equal(final, net.forward_features(x))
    for level, block, made in zip(net.pyramid, blocks, maps, strict=True):
        assert torch.equal(made, level(plain[block]))
    sequences = net.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    for made, sequence in zip(maps, sequences, strict=True):
        assert torch.equal(sequence.mT.view_as(made), made)


@pytest.mark.parametrize("recurrence", KINDS)
@pytest.mark.parametrize("indices", [(0, 1, 2, 3), (1, 2), (3,)])
def test_features_have_no_parameter_without_a_gradient(recurrence: str, indices: tuple) -> None:
    """DistributedDataParallel demands this, and finds such a parameter at the first step."""
    net = features(out_indices=indices, pyramid_blocks=(0, 1, 1, 2), recurrence=recurrence)
    maps = net.train()(images())
    assert len(maps) == len(indices)
    sum(m.pow(3).mean() for m in maps).backward()
    assert {name for name, p in net.named_parameters() if p.grad is None} == set()
    with torch.no_grad():
        whole = model(pyramid_blocks=(0, 1, 1, 2), recurrence=recurrence)
        expected = whole.forward_intermediates(images(), list(indices), intermediates_only=True)
    for made, same in zip(maps, expected, strict=True):
        torch.testing.assert_close(made, same)


def test_weights_of_the_plain_model_load_strictly_and_leave_the_levels_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, pyramid = model("vil_tiny"), model()
    before = {key: value.clone() for key, value in pyramid.state_dict().items()}
    nn.init.normal_(plain.blocks[2].mixer.D)
    with caplog.at_level(logging.WARNING, "vil"):
        assert pyramid.load_state_dict(plain.state_dict()) == ([], [])
    assert "the weights have no pyramid levels" in caplog.text
    for key, value in pyramid.state_dict().items():
        source = before if key.startswith("pyramid.") else plain.state_dict()
        assert torch.equal(value, source[key]), key


@pytest.mark.parametrize(
    ("of", "missing"),
    [("vil_tiny", "blocks.1.mixer.D"), ("vil_tiny_pyramid", "pyramid.0.norm.weight")],
)
def test_anything_else_that_is_missing_is_an_error(of: str, missing: str) -> None:
    state_dict = model(of).state_dict()
    del state_dict[missing]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{missing}"'):
        model().load_state_dict(state_dict)


@pytest.mark.parametrize("how", ["checkpoint_path", "overlay", "vil.load", "into another's"])
def test_weights_of_the_plain_model_through_every_door(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classes = 0 if how == "checkpoint_path" else 5  # timm is strict with checkpoint_path
    size = 64 if how == "into another's" else 224
    plain, path = model("vil_tiny", num_classes=classes, img_size=size), tmp_path / "a.safetensors"
    save_file(plain.state_dict(), path)
    if how == "checkpoint_path":
        net = model(checkpoint_path=str(path))
    elif how == "overlay":
        cfg = {"file": str(path), "num_classes": 5}
        net = features(pretrained=True, pretrained_cfg_overlay=cfg).model
    elif how == "vil.load":
        net = vil.load(path, "vil_tiny_pyramid", features_only=True, **SMALL).eval().model
    else:  # a module that another package built
        outer = nn.Sequential(features(), nn.Identity())
        with caplog.at_level(logging.INFO, "vil"):
            assert vil.load(path, outer) is outer
        net = outer[0].model
        told = "resampled pos_embed (1, 17, 32) -> (1, 197, 32)", "new pyramid, 16 tensors"
        for part in (*told, "left out head.bias, head.weight, norm.weight"):
            assert part in caplog.messages[-1]
        assert net.ref_feat_shape == (4, 4)
        plain.set_input_size(224)
    for key, value in net.state_dict().items():
        if not key.startswith(("pyramid.", "head.", "norm.")):
            assert torch.equal(value, plain.state_dict()[key]), key
    expected = plain.forward_intermediates(images(), 1, intermediates_only=True)[0]
    made = net.forward_intermediates(images(), intermediates_only=True)[3]
    assert torch.equal(made, net.pyramid[3](expected))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_stride": 4}, "output_stride must be 8, 16 or 32, got 4"),
        ({"patch_size": 14}, "a map of stride 4 px needs a patch_stride of .* got 14 px"),
        ({"patch_size": (16, 8), "img_size": 224}, "a pyramid needs square patches"),
        ({"pyramid_blocks": (0, 1, 2)}, "pyramid_blocks must be 4 indices from -4 to 3, got"),
        ({"pyramid_blocks": (0, 1, 2, 4)}, r"got \(0, 1, 2, 4\)"),
        ({"patch_stride": 8, "dynamic_img_size": False}, "needs dynamic_img_size=True"),
        ({"features_only": True, "feature_cls": "hook"}, 'feature_cls must be "getter" to return'),
        ({"num_classes": 5, "output_stride": 8}, "output_stride needs features_only=True or"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**arguments)


@pytest.mark.ci
def test_layer_decay_takes_the_levels_for_the_last() -> None:
    net = model()
    groups = param_groups_layer_decay(net, layer_decay=0.5)
    names = {id(p): n for n, p in net.named_parameters()}
    scales = {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}
    assert {s for n, s in scales.items() if n.startswith(("pyramid.", "head."))} == {1.0}
    assert scales["blocks.0.mixer.in_proj.weight"] < scales["blocks.3.mixer.in_proj.weight"] < 1


@pytest.mark.ci
def test_features_compile_whole() -> None:
    net, x = features(), images()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for one, other in zip(net(x), compiled(x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="pooling there is for even or odd sizes")
@pytest.mark.parametrize(
    "example",
    [
        pytest.param((96, 128), marks=pytest.mark.nightly),
        pytest.param((90, 131), marks=pytest.mark.ci),
    ],
)
def test_features_export_for_any_size(example: tuple[int, int]) -> None:
    net, any_size = features(grid_aware=False), torch.export.Dim.DYNAMIC
    dynamic = ({0: any_size, 2: any_size, 3: any_size},)
    program = torch.export.export(net, (images(*example),), dynamic_shapes=dynamic).module()
    for size in ((64, 64), (100, 75), (48, 160)):
        x = images(*size, count=1)
        for one, other in zip(net(x), program(x), strict=True):
            torch.testing.assert_close(one, other)
