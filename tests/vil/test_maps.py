"""Maps: exact where they claim to be, of every model, in their places, and refusing what they cannot show."""

import io
import json
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from vil import maps
from vil.kernels import ops
from vil.tokens import class_token_first

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 5}
NAMES = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
KINDS = ({}, {"class_token": False, "global_pool": "avg"}, {"patch_stride": 4})
SIZES = ((32, 32), (48, 64), (16, 24))  # the trained one, and others by orders that follow the grid


def small(name: str = "vil_tiny", dtype: torch.dtype = torch.float32, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | kwargs)).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pictures(height: int = 32, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, height, width, generator=generator, dtype=dtype)


def scanned(model: nn.Module, images: Tensor, block: int) -> Tensor:
    """Return what the output projection of a block is given, (B, E, L), class token first."""
    given: list[Tensor] = []
    hook = model.blocks[block].mixer.out_proj.register_forward_pre_hook(
        lambda _, args: given.append(args[0])
    )
    with torch.no_grad():
        model.forward_features(images)
    hook.remove()
    return class_token_first(given[0], model.num_prefix_tokens).mT


@pytest.mark.pairs
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", KINDS, ids=str)
def test_matrices_times_values_are_the_mixer(
    name: str, kwargs: dict, dtype: torch.dtype, tolerance: float
) -> None:
    model = small(name, dtype, **kwargs)
    for size in SIZES:
        images = pictures(*size, dtype=dtype)
        matrices, values = maps.channel_matrices(model, images, block=0)
        expected = scanned(model, images, 0)
        error = (matrices @ values[..., None]).sum(0).squeeze(-1) - expected
        assert matrices.dtype == values.dtype == dtype
        assert error.abs().max() < tolerance * expected.abs().max()
        mean = matrices.sum(0).abs().mean(1)
        torch.testing.assert_close(maps.token_matrix(model, images, 0), mean)


def test_rollout_is_the_product_over_blocks() -> None:
    model, images = small(), pictures()
    rolled = maps.rollout(model, images)
    expected = torch.eye(17).expand(2, -1, -1)
    for block in (0, 1):
        matrix = maps.token_matrix(model, images, block)
        expected = (torch.eye(17) + matrix / matrix.sum(-1, keepdim=True)) / 2 @ expected
    torch.testing.assert_close(rolled, expected)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 17))


@pytest.mark.parametrize("name", NAMES)
def test_patches_are_in_their_places(name: str) -> None:
    """In the first block, without a convolution, a patch writes and forgets by what is in it alone."""
    model = small(name, d_conv=1, resize_below_scale=0)
    with torch.no_grad():
        model.pos_embed.zero_()
    images = pictures(24, 40)[:1].repeat(2, 1, 1, 1)
    images[1, :, 8:16, 32:40] = 3.0
    for values in (maps.step_size(model, images, 0), maps.decay(model, images, 0)):
        assert values.shape == (2, 3, 5)
        assert values.min() >= 0
        assert (values[0] != values[1]).nonzero().tolist() == [[1, 4]]


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_what_a_scan_forgets(name: str) -> None:
    """By a scan of one token over unit states, whose query reads each of them."""
    model, images = small(name, img_size=8, class_token=False, global_pool="avg"), pictures(8, 8)
    [scan] = maps.scans._scans(model, images, [0])
    kept = 0.0
    for direction in (0, 1):
        for j in range(16):
            state = torch.zeros(2, 64, 16)
            state[..., j] = 1
            query = state[:, :1, :]
            tensors = (torch.zeros(2, 1, 64), scan.args.dt[direction])
            last = (query, scan.args.k[direction], None, scan.args.bias[direction])
            with ops.use_backend("reference"):
                if name == "vim_tiny":
                    read = ops.mamba_scan(
                        *tensors, scan.args.A[direction], *last, initial_state=state
                    )
                else:
                    exact = "longhorn_exact" if name.endswith("exact") else "longhorn"
                    read = ops.longhorn_scan(*tensors, *last, recurrence=exact, initial_state=state)
            kept = kept + read.mean((1, 2)) / 32
    torch.testing.assert_close(maps.decay(model, images, 0), (1 - kept)[:, None, None])


@pytest.mark.parametrize("name", [*NAMES, "vil_tiny_pyramid", "test_resnet"])
def test_evidence_adds_up_to_the_logit(name: str) -> None:
    others = name == "test_resnet"
    model = timm.create_model(name, num_classes=5).eval() if others else small(name)
    images, target = pictures(), torch.tensor([1, 3])
    assert torch.equal(
        maps.evidence(model, images, 1, 8),
        maps.evidence(model, images, 1, 8, baseline=torch.zeros(3, 1, 1)),
    )
    with torch.no_grad():
        logits = (model(images) - model(0 * images)).gather(1, target[:, None])[:, 0]
    found = maps.evidence(model, images, target, steps=32)
    torch.testing.assert_close(found.sum((1, 2)), logits, rtol=2e-2, atol=2e-2)
    patches = maps.evidence(model, images, target, (8, 16), steps=32)
    nothing = maps.evidence(model, images, target, steps=2, baseline=images)
    assert not nothing.any()
    assert patches.shape == (2, 4, 2)
    torch.testing.assert_close(patches[:, 0, 0], found[:, :8, :16].sum((1, 2)))


@pytest.mark.ci
def test_receptive_field_is_the_norm_of_the_derivative() -> None:
    model, images = small("vil_tiny_exact"), pictures(24, 24)[:1]

    def feature(image: Tensor) -> Tensor:
        [tokens] = model.forward_intermediates(image, 1, intermediates_only=True)
        return tokens[0, :, 1, 2]

    derivative = torch.autograd.functional.jacobian(feature, images)  # (C, 1, 3, 24, 24)
    expected = derivative.square().sum((0, 2)).sqrt()
    found = maps.receptive_field(model, images, (1, 2), probes=200)
    assert (found - expected).abs().max() < 0.15 * expected.max()
    centre = maps.receptive_field(model, images)
    torch.testing.assert_close(centre, maps.receptive_field(model, images, (1, 1)))


def test_what_cannot_be_shown_is_an_error_that_names_it() -> None:
    model, images = small(), pictures()
    deit = timm.create_model("deit_tiny_patch16_224", depth=1)
    for function in (maps.token_matrix, maps.rollout, maps.step_size, maps.decay):
        with pytest.raises(ValueError, match="model must be one of this package"):
            function(deit, images)
        with pytest.raises(ValueError, match="images must be floating-point"):
            function(model, images[0])
    with pytest.raises(ValueError, match="block must be a number of the 2 blocks, got 2"):
        maps.token_matrix(model, images, 2)
    with pytest.raises(ValueError, match="target must be 0 to 4, got 5"):
        maps.evidence(model, images, 5)
    with pytest.raises(ValueError, match="target must be a number of a class or int64"):
        maps.evidence(model, images, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="model must return logits"):
        maps.evidence(small(num_classes=0, global_pool=""), images, 0)
    with pytest.raises(ValueError, match="patch_size must be at least 1, got 0"):
        maps.evidence(model, images, 0, 0)
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        maps.evidence(model, images, 0, steps=-1)
    with pytest.raises(ValueError, match=r"baseline must expand to \(2, 3, 32, 32\), got \(4,\)"):
        maps.evidence(model, images, 0, baseline=torch.zeros(4))
    with pytest.raises(ValueError, match="probes must be at least 1, got 0"):
        maps.receptive_field(model, images, probes=0)
    with pytest.raises(ValueError, match=r"position must be in the map of 4 x 4, got \(4, 0\)"):
        maps.receptive_field(model, images, (4, 0))
    with pytest.raises(ValueError, match="model must have timm's forward_intermediates"):
        maps.receptive_field(nn.Flatten(), images)


@pytest.mark.ci
def test_drawing_takes_any_map_and_image() -> None:
    pytest.importorskip("matplotlib")
    panels = [
        maps.Panel("a", torch.rand(3, 5), "b"),
        maps.Panel("flat", torch.zeros(2, 2), "0"),
        maps.Panel("signed", torch.randn(24, 40), "c", "signed"),
        maps.Panel("log", torch.rand(4, 4), "d", "log"),
    ]
    name = "great grey owl, great gray owl, Strix nebulosa at $5 or $6"
    figure = maps.draw(torch.rand(1, 24, 40), [*panels, panels[0]._replace(label=name)], name)
    figure.savefig(io.BytesIO(), format="png", dpi=30)
    assert figure.get_suptitle().split() == name.split()
    assert max(map(len, figure.get_suptitle().splitlines())) <= 36
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["image", "a", "flat", "signed", "log", "a"]
    signed = next(axes for axes in figure.axes if axes.get_xlabel() == "c")
    low, high = signed.get_xlim()
    assert low == -high
    with pytest.raises(ValueError, match=r"image must be \(C, height, width\)"):
        maps.draw(torch.rand(24, 40), panels, "")
    with pytest.raises(ValueError, match=r"values of 'a' must be \(h, w\)"):
        maps.draw(torch.rand(3, 8, 8), [maps.Panel("a", torch.rand(3), "")], "")
    with pytest.raises(ValueError, match="values of 'a' must be finite"):
        maps.draw(torch.rand(3, 8, 8), [maps.Panel("a", torch.tensor([[torch.nan]]), "")], "")


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    sources = pytest.importorskip("vil.training.images")
    pytest.importorskip("sklearn")
    path = tmp_path / "digit.png"
    path.write_bytes(sources.DigitSource(training=False).read(0))
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A released folder of a small model of digits."""
    from safetensors.torch import save_file

    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "in_chans": 1}
    model = timm.create_model("vil_tiny", num_classes=10, **arguments)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    cfg = {
        "num_classes": 10,
        "input_size": [1, 16, 16],
        "mean": [0.3],
        "std": [0.4],
        "crop_pct": 1.0,
        "label_names": ["zero", *map(str, range(1, 10))],
    }
    config = {"architecture": "vil_tiny", "model_args": arguments, "pretrained_cfg": cfg}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_classes": 10}))
    return tmp_path


@pytest.mark.ci
def test_command_draws_a_picture(
    weights: Path, digit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    command = pytest.importorskip("vil.maps.command")
    from vil.training import errors, recipes

    output = weights / "maps.png"
    arguments = [str(weights), str(digit), "--output", str(output), "--img-size", "24"]
    for target in ("zero", "3"):
        options = recipes.parse(command.MapsConfig, [*arguments, "--target", target])
        assert errors.run_script(lambda options=options: command.draw_as(options)) == 0
        assert output.read_bytes().startswith(b"\x89PNG")
        assert f"class    {target}, " in capsys.readouterr().out
