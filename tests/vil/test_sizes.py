"""Other sizes than the trained one: which grid weights are of, by whatever way they come and are used."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vil
from tests.vil.test_convert import SIZES as OFFICIAL_SIZES
from tests.vil.test_convert import official_state_dict
from vil.backbone import checkpoint_filter_fn

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 5}
MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny"]
SIZES = [(64, 64), (48, 48), (40, 72), (24, 32), (16, 16), (8, 8)]


def small(name: str = "vil_tiny", **kwargs) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | kwargs)).eval()
    with torch.no_grad():  # taps and steps that matter
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(height: int = 32, width: int = 32, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, height, width, generator=generator)


# ------------------------------------------------------------------------------------ what is computed


@pytest.mark.parametrize("name", MODELS)
def test_at_the_trained_grid_nothing_changes(name: str) -> None:
    ways = [small(name, grid_aware=way) for way in (True, "steps", False)]
    assert all(torch.equal(model(images()), ways[0](images())) for model in ways[1:])
    for size in SIZES:
        for one, other in itertools.combinations([model(images(*size)) for model in ways], 2):
            assert not torch.allclose(one, other, atol=1e-3), size


@pytest.mark.parametrize("name", MODELS)
def test_step_sizes_alone(name: str) -> None:
    """Images near the trained size are not resized, and a model without taps is as by default."""
    assert small(name, grid_aware="steps").grid_inside((40, 24)) == (5, 3)
    one, other = (small(name, d_conv=1, grid_aware=way) for way in ("steps", True))
    assert torch.allclose(one(images(64, 48)), other(images(64, 48)), atol=1e-5)
    with pytest.raises(ValueError, match="grid_aware must be True, False or \"steps\", got 'taps'"):
        small(name, grid_aware="taps")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recurrent_part", ["conv_weight", "x_proj_weight", "dt_weight", "D"])
def test_gradients_at_another_grid(name: str, recurrent_part: str) -> None:
    model = small(name, depth=1).double()
    x = images(48, 40, 1).double()
    key = f"blocks.0.mixer.{recurrent_part}"
    value = model.get_parameter(key).detach().clone().requires_grad_()

    def logits(value: Tensor) -> Tensor:
        return torch.func.functional_call(model, {key: value}, (x,))

    assert torch.autograd.gradcheck(logits, value, fast_mode=True)


@pytest.mark.parametrize("class_token", [True, False])
def test_without_a_class_token_too(class_token: bool) -> None:
    model = small(class_token=class_token, global_pool="avg")
    assert model(images(64, 48)).shape == (2, 5)


def test_features_are_those_of_the_model() -> None:
    model, plain = (
        small(features_only=True, out_indices=(0, 1), grid_aware=aware) for aware in (True, False)
    )
    found, other = model(images(64, 40)), plain(images(64, 40))
    assert [features.shape for features in found] == [(2, 32, 8, 5), (2, 32, 8, 5)]
    maps = model.model.forward_intermediates(images(64, 40), intermediates_only=True)
    assert all(torch.equal(one, own) for one, own in zip(found, maps, strict=True))
    assert not torch.allclose(found[1], other[1], atol=1e-3)


# ----------------------------------------------------------------------------------- which grid it is


def test_trained_grid_is_that_of_patches_that_do_not_overlap() -> None:
    assert small().trained_grid == (4, 4)
    assert small(img_size=(32, 64)).trained_grid == (4, 8)
    finer = small(patch_stride=4)
    assert (finer.trained_grid, finer.patch_embed.grid_size) == ((4, 4), (7, 7))
    assert small(trained_grid=(2, 3)).trained_grid == (2, 3)
    assert small(img_size=30, dynamic_img_pad=True).trained_grid == (4, 4)


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_another_size_is_one_function(name: str, tmp_path: Path) -> None:
    model, x = small(name), images(64, 48)
    expected = model(x)
    resized = copy.deepcopy(model)
    resized.set_input_size((64, 48))
    assert resized.trained_grid == (4, 4)
    built = small(name, img_size=(64, 48))
    assert built.trained_grid == (8, 6)
    built.load_state_dict(model.state_dict())
    save_file(resized.state_dict(), tmp_path / "resized.safetensors")
    again = small(name, img_size=(64, 48))
    again.load_state_dict(load_file(tmp_path / "resized.safetensors"))
    filtered = small(name, img_size=(64, 48))
    filtered.load_state_dict(checkpoint_filter_fn(dict(model.state_dict()), filtered))
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    by_timm = timm.create_model(
        name, **(SMALL | {"img_size": (64, 48)}), pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "own.safetensors"), "num_classes": 5},
    ).eval()  # fmt: skip
    for other in (resized, built, again, filtered, by_timm):
        assert other.trained_grid == (4, 4)
        assert torch.allclose(other(x), expected, atol=1e-5)
        assert torch.equal(other(images()), built(images()))


def test_weights_of_a_grid_are_plain_at_it() -> None:
    """As those of Vision Mamba that were fine-tuned at half the stride."""
    trained = small(patch_stride=4, grid_aware=False)
    assert "trained_grid" not in trained.state_dict()
    model = small(patch_stride=4)
    model.load_state_dict(trained.state_dict())
    assert model.trained_grid == (7, 7)
    assert torch.equal(model(images()), trained(images()))
    coarse = small()
    finer = small(patch_stride=4)
    finer.load_state_dict(coarse.state_dict())
    assert finer.trained_grid == (4, 4)
    assert not torch.allclose(finer(images()), trained(images()), atol=1e-3)


def test_official_weights_bring_their_grid() -> None:
    finer = timm.create_model("vim_tiny", **OFFICIAL_SIZES, patch_stride=8)
    finer.load_state_dict(official_state_dict())
    assert finer.trained_grid == (3, 3)
    assert finer.patch_embed.grid_size == (5, 5)


def test_state_dict_names_the_trained_grid_where_it_is_another() -> None:
    model = small()
    assert "trained_grid" not in model.state_dict()
    model.set_input_size(64)
    assert model.state_dict()["trained_grid"].tolist() == [4, 4]
    model.set_input_size(32)
    assert "trained_grid" not in model.state_dict()


def test_release_folder_keeps_it(tmp_path: Path) -> None:
    model, x = small(), images(64, 64)
    model.set_input_size(64)
    timm.models.save_for_hf(
        model, tmp_path, model_args=SMALL | {"img_size": 64}, safe_serialization=True
    )
    for loaded in (
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval(),
        vil.load(tmp_path).eval(),
    ):
        assert loaded.trained_grid == (4, 4)
        assert torch.equal(loaded(x), model(x))


def test_fine_tuning_goes_on_from_what_was_loaded() -> None:
    """A step at another size changes the weights and not the function that they are of."""
    model = small().train()
    model.set_input_size(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images(64, 64)).square().sum().backward()
    optimizer.step()
    again = small(img_size=64)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(images(64, 64)), model.eval()(images(64, 64)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([4.0, 4.0]), "trained_grid must be two positive integers"),
        (torch.tensor([4]), "trained_grid must be two positive integers"),
        (torch.tensor([0, 4]), "trained_grid must be two positive integers"),
    ],
)
def test_a_bad_record_is_refused(value: Tensor, message: str) -> None:
    weights = small().state_dict()
    weights["trained_grid"] = value
    with pytest.raises(RuntimeError, match=message):
        small().load_state_dict(weights)


@pytest.mark.parametrize("value", [(4,), (0, 4), (4, 4, 4)])
def test_a_bad_argument_is_refused(value: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="trained_grid must be"):
        small(trained_grid=value)


# ------------------------------------------------------------------------------------------ programs


@pytest.mark.parametrize("name", MODELS)
def test_compiled_and_exported_at_another_grid(name: str, tmp_path: Path) -> None:
    model, x = small(name), images(48, 64)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), expected, atol=1e-6)
    program = torch.export.export(model, (x,))
    torch.export.save(program, tmp_path / "model.pt2")
    assert torch.allclose(
        torch.export.load(tmp_path / "model.pt2").module()(x), expected, atol=1e-6
    )


def onnx(
    model: nn.Module, x: Tensor, path: Path, axes: tuple[int, ...] = ()
) -> Callable[[Tensor], Tensor]:
    """Return what runs an ONNX model of images whose ``axes`` have any size."""
    onnxruntime = pytest.importorskip("onnxruntime")
    shapes = (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),)
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def test_onnx_at_another_grid(tmp_path: Path) -> None:
    for name in MODELS:
        model, x = small(name, depth=1), images(48, 40)
        exportable = small(name, depth=1, exportable=True)
        exportable.load_state_dict(model.state_dict())
        run = onnx(exportable, x, tmp_path / f"{name}.onnx", (0,))
        for batch in (x, x[:1], torch.cat((x, x[:1]))):
            assert torch.allclose(run(batch), model(batch), atol=1e-4)
        assert torch.allclose(exportable(x), model(x), atol=1e-5)  # the export left nothing behind


def test_onnx_of_any_size_is_refused_where_it_would_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"known numbers.*grid_aware=False"):
        onnx(small(depth=1, exportable=True), images(), tmp_path / "model.onnx", (0, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnx_of_any_size(name: str, tmp_path: Path) -> None:
    model = small(name, depth=1, exportable=True, grid_aware=False)
    run = onnx(model, images(), tmp_path / "model.onnx", (0, 2, 3))
    for x in (images(), images(48, 64)[:1], images(8, 8), images(16, 40)):
        assert torch.allclose(run(x), model(x), atol=1e-5)


def test_checkpointing_and_mixed_precision_at_another_grid() -> None:
    models = [small().train(), small().train()]
    models[1].set_grad_checkpointing()
    for model in models:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(images(64, 40)).float().square().sum().backward()
    for plain, recomputed in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(plain.grad, recomputed.grad)
