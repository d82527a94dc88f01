"""Sizes that are not the trained one: the grid of weights, however they are loaded and used."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.small import SMALL, images, small
from vil.backbone import checkpoint_filter_fn

MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny"]
SIZES = [(64, 64), (48, 48), (40, 72), (24, 32), (16, 16), (8, 8)]


@pytest.mark.parametrize("name", MODELS)
def test_at_the_trained_grid_nothing_changes(name: str) -> None:
    ways = [small(name, grid_aware=way) for way in (True, "dt", False)]
    assert all(torch.equal(model(images()), ways[0](images())) for model in ways[1:])
    for size in SIZES:
        for one, other in itertools.combinations([model(images(*size)) for model in ways], 2):
            assert not torch.allclose(one, other, atol=1e-3), size


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_another_size_is_one_function(name: str, class_token: bool, tmp_path: Path) -> None:
    pooled = {} if class_token else {"class_token": False, "global_pool": "avg"}
    model, x = small(name, **pooled), images(64, 48)
    expected = model(x)
    resized = copy.deepcopy(model)
    resized.set_input_size((64, 48))
    assert resized.ref_feat_shape == (4, 4)
    built = small(name, img_size=(64, 48), **pooled)
    assert built.ref_feat_shape == (8, 6)
    built.load_state_dict(model.state_dict())
    save_file(resized.state_dict(), tmp_path / "resized.safetensors")
    again = small(name, img_size=(64, 48), **pooled)
    again.load_state_dict(load_file(tmp_path / "resized.safetensors"))
    filtered = small(name, img_size=(64, 48), **pooled)
    filtered.load_state_dict(checkpoint_filter_fn(dict(model.state_dict()), filtered))
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    by_timm = timm.create_model(
        name, **(SMALL | {"img_size": (64, 48)} | pooled), pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "own.safetensors"), "num_classes": 5},
    ).eval()  # fmt: skip
    for other in (resized, built, again, filtered, by_timm):
        assert other.ref_feat_shape == (4, 4)
        assert torch.allclose(other(x), expected, atol=1e-5)
        assert torch.equal(other(images()), built(images()))


def test_weights_of_a_grid_are_plain_at_it() -> None:
    """An example is Vision Mamba's weights fine-tuned at half the stride."""
    trained = small(patch_stride=4, grid_aware=False)
    assert "ref_feat_bits" not in trained.state_dict()
    model = small(patch_stride=4)
    model.load_state_dict(trained.state_dict())
    assert model.ref_feat_shape == (7, 7)
    assert torch.equal(model(images()), trained(images()))
    coarse = small()
    finer = small(patch_stride=4)
    finer.load_state_dict(coarse.state_dict())
    assert finer.ref_feat_shape == (4, 4)
    assert not torch.allclose(finer(images()), trained(images()), atol=1e-3)


def test_fine_tuning_goes_on_from_what_was_loaded() -> None:
    """A training step at another size changes the weights, but not the grid that they belong to."""
    model = small().train()
    model.pos_embed.requires_grad_(False)
    model.set_input_size(64)
    assert not model.pos_embed.requires_grad  # frozen as before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images(64, 64)).square().sum().backward()
    optimizer.step()
    again = small(img_size=64)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(images(64, 64)), model.eval()(images(64, 64)))


@pytest.mark.ci
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [(32, 32), (48, 64)], ids=["the trained grid", "another"])
def test_compiled_and_exported(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    model, x, results = small(name), images(*size), []
    for call in (model, torch.compile(model.train(), fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        logits = call(x)
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)
    # Not x itself: PyTorch 2.11 marks a tensor of a compiled call as dynamic, and then exports for any size.
    torch.export.save(torch.export.export(model.eval(), (x.clone(),)), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.allclose(program(x), results[0][0], atol=1e-6)


def onnx(model: nn.Module, x: Tensor, path: Path, axes: tuple[int, ...] = ()) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the model in ONNX Runtime, with any size along ``axes``.

    OpenVINO refuses loops that read tensors of the program around them, so there must be none.
    """
    onnxruntime = pytest.importorskip("onnxruntime")
    shapes = (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),)
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    nodes = pytest.importorskip("onnx").load(path).graph.node
    loops = [a.g for node in nodes for a in node.attribute if a.HasField("g")]
    assert loops
    for loop in loops:
        own = {t.name for t in (*loop.input, *loop.initializer)}
        own |= {name for node in loop.node for name in node.output}
        assert own.issuperset(name for node in loop.node for name in node.input)
    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


@pytest.mark.ci
def test_onnx_at_another_grid(tmp_path: Path) -> None:
    for name in MODELS:
        model, x = small(name, depth=1), images(48, 40)
        exportable = small(name, depth=1, exportable=True)
        exportable.load_state_dict(model.state_dict())
        run = onnx(exportable, x, tmp_path / f"{name}.onnx", (0,))
        for batch in (x, x[:1], torch.cat((x, x[:1]))):
            assert torch.allclose(run(batch), model(batch), atol=1e-4)
        assert torch.allclose(exportable(x), model(x), atol=1e-5)  # the export left nothing behind


@pytest.mark.ci
def test_onnx_of_any_size_is_refused_where_it_would_be_wrong(tmp_path: Path) -> None:
    arguments, x, path = {"depth": 1, "exportable": True}, images(), tmp_path / "model.onnx"
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"static, because.*dynamic_img_pad=True"):
        onnx(small(grid_aware=False, **arguments), x, path, (3,))
    arguments["dynamic_img_pad"] = True
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"must be static.*grid_aware=False"):
        onnx(small(**arguments), x, path, (3,))
    model = small(grid_aware=False, **arguments)
    run = onnx(model, x, path, (2, 3))
    for other in (x, images(39, 39), images(7, 64)):
        assert torch.allclose(run(other), model(other), atol=1e-5)


@pytest.mark.parametrize("above", [20, None], ids=["recomputed", "second derivatives"])
def test_trains_at_a_grid_that_was_first_evaluated(above: int | None) -> None:
    """What evaluation in inference mode caches for the next call works in training, too."""
    model, x = small(checkpoint_min_tokens=above), images(72, 64)  # no other test has this grid
    with torch.inference_mode():
        expected = model(x)
    x.requires_grad_()
    logits = model.train()(x)
    torch.testing.assert_close(logits.detach(), expected)
    (gradient,) = torch.autograd.grad(logits.square().sum(), x, create_graph=above is None)
    if above is None:
        gradient.square().sum().backward()
    assert gradient.any()
