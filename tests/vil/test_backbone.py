"""The models: sizes, initial values, decay groups, and timm's interface beyond timm's own tests."""

import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import vil
from tests.small import images
from vil.block import BidirectionalMixer
from vil.patch_embed import OverlapPatchEmbed
from vil.profile import count_macs, count_parameters

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_classes": 5}
TINY_MODELS = ["vil_tiny", "vil_tiny_exact", "vim_tiny"]

SIZES = {  # parameters, and GMACs at 224 px
    "vil_tiny": (6_853_096, 1.53),
    "vil_small": (25_206_760, 5.33),
    "vil_base": (96_418_792, 19.7),
    "vil_tiny_exact": (6_853_096, 1.47),
    "vil_small_exact": (25_206_760, 5.21),
    "vil_base_exact": (96_418_792, 19.5),
    "vim_tiny": (7_148_008, 1.53),
    "vim_small": (25_796_584, 5.33),
    "vim_base": (97_598_440, 19.7),
}


def small(name: str = "vil_tiny", **kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **(SMALL | kwargs)).eval()


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_multiply_adds(name: str) -> None:
    model = timm.create_model(name, device="meta")
    macs = count_macs(model, (3, 224, 224))
    assert (count_parameters(model), float(f"{macs / 1e9:.3g}")) == SIZES[name]


@pytest.mark.parametrize("name", [*TINY_MODELS, "vil_tiny_pyramid"])
def test_an_empty_batch_may_be_the_first_of_a_thread(name: str) -> None:
    model = small(name, depth=1)

    def run(height: int, train: bool) -> list[tuple[int, ...]]:
        x = torch.zeros(0, 3, height, 32, requires_grad=True)
        logits = model.train(train)(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x)
        final, maps = model.forward_intermediates(x)
        return [tuple(t.shape) for t in (logits, gradient, final, maps[-1])]

    for height, train in itertools.product((32, 48), (False, True)):
        with ThreadPoolExecutor(1) as thread:
            logits, gradient, final, last = thread.submit(run, height, train).result()
        assert (logits, gradient) == ((0, 5), (0, 3, height, 32))
        assert (final, last[:2]) == ((0, 1 + height // 2, 32), (0, 32))


def test_dropped_blocks_keep_the_mean() -> None:
    first, *_, block = small(drop_path_rate=0.5).train().blocks
    x = torch.randn(1, 17, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = first(x.expand(32, -1, -1))  # never dropped: the rate rises from 0
        torch.testing.assert_close(found, x + first.mixer(first.norm(x)).expand(32, -1, -1))
        kept = x + 2 * block.mixer(block.norm(x))  # kept half of the time
        found = block(x.expand(32, -1, -1))
    is_kept = (found - x).flatten(1).any(1)
    assert 0 < is_kept.sum() < 32
    torch.testing.assert_close(found, torch.where(is_kept[:, None, None], kept, x))


@pytest.mark.parametrize("rate", ["drop_rate", "pos_drop_rate", "drop_path_rate"])
def test_training_drops_and_evaluation_does_not(rate: str) -> None:
    model, expected = small(**{rate: 0.5}), small()(images())
    assert torch.equal(model(images()), expected)
    assert not torch.allclose(model.train()(images()), expected, atol=1e-3)


def test_initial_values() -> None:
    """Initial values follow the official code: bounds and standard deviations agree."""
    torch.manual_seed(0)
    state = timm.create_model("vim_tiny").state_dict()

    def uniform(tensor: Tensor, bound: float) -> None:
        assert tensor.abs().max() <= bound * (1 + 1e-6)
        assert tensor.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)

    for i in (0, 23):
        mixer = {n.split("mixer.")[1]: t for n, t in state.items() if f"blocks.{i}.mixer." in n}
        uniform(mixer["in_proj.weight"], 192**-0.5)
        uniform(mixer["proj.weight"], (384 * 24) ** -0.5)
        for d in (0, 1):
            uniform(mixer["conv_weight"][d], 0.5)
            uniform(mixer["conv_bias"][d], 0.5)
            uniform(mixer["x_proj_weight"][d], 384**-0.5)
            uniform(mixer["dt_weight"][d], 12**-0.5)
            assert torch.equal(mixer["A_log"][d], torch.arange(1.0, 17).log().expand(384, 16))
        assert (mixer["D"] == 1).all()
        assert (mixer["dt_bias"][1] == 0).all()
        dt = torch.nn.functional.softplus(mixer["dt_bias"][0])
        assert dt.min() >= 1e-3 * (1 - 1e-4)
        assert dt.max() <= 1e-1 * (1 + 1e-4)
        assert dt.log().mean() == pytest.approx(math.log(1e-2), abs=0.2)
    assert state["patch_embed.proj.weight"].std() == pytest.approx(0.0361, rel=0.02)
    assert state["pos_embed"].std() == pytest.approx(0.02, rel=0.02)
    assert state["cls_token"].std() == pytest.approx(0.02, rel=0.2)
    assert state["head.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert not state["head.bias"].any()
    assert not state["patch_embed.proj.bias"].any()
    assert (state["norm.weight"] == 1).all()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_token_sees_every_other(name: str) -> None:
    """A scan in one direction alone would leave half of these gradients zero."""
    model = small(name, depth=1)
    x = images().requires_grad_()
    tokens = model.forward_features(x)
    assert tokens.shape == (2, 17, 32)
    for token in (0, 1, 16):  # class token, first and last patch
        (gradient,) = torch.autograd.grad(tokens[0, token].sum(), x, retain_graph=True)
        per_patch = gradient[0].abs().unflatten(1, (4, 8)).unflatten(3, (4, 8)).amax((0, 2, 4))
        assert (per_patch > 0).all()


def test_intermediates_give_patches_in_place_and_the_class_token_apart() -> None:
    model = small()
    final, taps = model.forward_intermediates(images(), indices=[1, 3], return_prefix_tokens=True)
    assert torch.equal(final, model.forward_features(images()))
    assert torch.equal(model.forward_head(final, pre_logits=True), final[:, 0])
    spatial, prefix = taps[1]
    assert (spatial.shape, prefix.shape) == ((2, 32, 4, 4), (2, 1, 32))
    tokens = torch.cat([prefix, spatial.flatten(2).mT], 1)
    assert torch.allclose(model.norm(tokens), final, atol=1e-6)
    ((layer, apart),) = model.get_intermediate_layers(images(), n=1, norm=True, return_prefix_tokens=True)
    assert torch.allclose(torch.cat([apart, layer], 1), final, atol=1e-6)
    early, ((spatial, prefix),) = model.forward_intermediates(
        images(), indices=[1], return_prefix_tokens=True, stop_early=True
    )
    assert torch.equal(model.norm(torch.cat([prefix, spatial.flatten(2).mT], 1)), early)
    assert not torch.allclose(early, final, atol=1e-2)


@pytest.mark.ci
@pytest.mark.parametrize("size", [(32, 32), (40, 64)])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_grad_cam_by_hooks(size: tuple[int, int], pool: str) -> None:
    model, kept = small(global_pool=pool), {}
    grid = dict(zip(("height", "width"), model.grid_inside(size), strict=True))
    for name, module in (("target", model.blocks[-1].norm), ("last", model.blocks[-1])):
        module.register_forward_hook(lambda _, args, out, n=name: kept.update({n: out}))
    model(images(*size))[:, 3].sum().backward(inputs=[*kept.values()])
    features, gradients = (model.reshape_transform(t, **grid) for t in (kept["target"], kept["target"].grad))
    assert gradients.abs().amax(1).all()  # of every token
    cam = (gradients.mean((2, 3), keepdim=True) * features).sum(1).relu()
    assert cam.shape == (2, *grid.values())
    assert (cam.flatten(1).amax(1) > 0).all()
    # After the last mixer only pooled tokens have a gradient, as docs/inspect.md says.
    last = model.reshape_transform(kept["last"].grad, **grid)
    assert bool(last.any()) is (pool == "avg")


@pytest.mark.ci
@pytest.mark.parametrize("class_token", [True, False])
def test_reshape_transform_puts_patches_in_place(class_token: bool) -> None:
    model = small(class_token=class_token, global_pool="avg", resize_below_scale=0)
    kept = []
    model.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output))
    for height, width in ((4, 4), (3, 5)):
        _, (expected,) = model.forward_intermediates(images(8 * height, 8 * width), indices=[1])
        assert torch.equal(model.reshape_transform(kept.pop(), height, width), expected)
    with pytest.raises(ValueError, match=r"tokens must be .* for a grid of \(4, 4\), got \(2, 9, 32"):
        model.reshape_transform(torch.zeros(2, 9, 32))


def test_residual_stream_is_float32_under_autocast() -> None:
    model = small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        taps = model.forward_intermediates(images(), intermediates_only=True)
        logits = model(images())
    assert all(tap.dtype == torch.float32 for tap in taps)
    assert (logits.float() - model(images())).abs().max() < 0.05


@pytest.mark.ci
def test_compiles_images_of_any_size() -> None:
    torch.compiler.reset()  # what other tests compiled counts as recompilation
    model = small(depth=1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    sizes, near = [(32, 32), (48, 64), (64, 48), (80, 56)], [(32, 40), (24, 40), (64, 40)]
    with torch.no_grad():
        for size in (*sizes, *near):
            assert torch.allclose(compiled(images(*size)), model(images(*size)), atol=1e-6)
            # graphs: its own size, any other, and sizes resized along one side or the other
            assert counter.frame_count <= (2 if size in sizes else 5)
    for size in sizes[:2]:
        gradients = []
        for forward in (model, compiled):
            model.zero_grad()
            forward(images(*size)).square().sum().backward()
            gradients.append(model.pos_embed.grad)
        assert torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize(
    "strict",
    [pytest.param(False, marks=pytest.mark.nightly), pytest.param(True, marks=pytest.mark.ci)],
)
def test_exports_of_its_own_size_and_of_any(strict: bool) -> None:
    model = small(depth=1)
    own = torch.export.export(model, (images(),), strict=strict)
    assert not [node for node in own.graph.nodes if "bicubic" in str(node.target)]
    assert torch.equal(own.module()(images()), model(images()))
    rows, columns = (torch.export.Dim(name, min=2, max=16) for name in ("rows", "columns"))
    shapes = ({2: 8 * rows, 3: 8 * columns},)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="grid_aware=False"):
        torch.export.export(model, (images(),), dynamic_shapes=shapes, strict=strict)
    for grid_aware in (False, "dt"):
        model = small(depth=1, grid_aware=grid_aware)
        program = torch.export.export(model, (images(),), dynamic_shapes=shapes, strict=strict)
        for size in ((32, 32), (48, 64), (64, 24)):
            logits = program.module()(images(*size))
            assert torch.allclose(logits, model(images(*size)), atol=1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [*TINY_MODELS, "vil_tiny_pyramid"])
def test_traces(name: str) -> None:
    model = small(name)
    with torch.no_grad():
        traced = torch.jit.trace(model, images(32, 64))
        other = torch.randn_like(images(32, 64))
        assert torch.equal(traced(other), model(other))
        assert torch.equal(traced(other[:1]), model(other[:1]))
        for size in ((64, 32), (32, 72), (8, 64)):  # the first has as many patches
            with pytest.raises(RuntimeError, match="split_sizes to sum exactly"):
                traced(images(*size))


@pytest.mark.ci
@pytest.mark.parametrize("name", TINY_MODELS)
def test_torchscript_saves_and_loads(name: str, tmp_path: Path) -> None:
    model = small(name, depth=2, scriptable=True)
    torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    for size in ((32, 32), (48, 64)):
        assert torch.allclose(loaded(images(*size)), model(images(*size)))


def test_the_mixer_takes_the_place_of_attention_but_no_mask() -> None:
    deit = timm.create_model("deit_tiny_patch16_224", img_size=32, embed_dim=48, depth=2).eval()
    for block in deit.blocks:
        block.attn = BidirectionalMixer(deit.embed_dim, "longhorn_exact", depth=len(deit.blocks))
    assert deit(torch.randn(2, 3, 32, 32)).isfinite().all()
    for mask in ({"attn_mask": torch.ones(5, 5)}, {"is_causal": True}):
        with pytest.raises(ValueError, match="attn_mask must be None and is_causal False"):
            deit.blocks[0](torch.randn(2, 5, 48), **mask)


@pytest.mark.parametrize("exportable", [False, True])
def test_onnx_of_a_traced_program_is_one_error(exportable: bool, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    models = [small("vil_tiny", depth=1, exportable=exportable)]
    models.append(torch.nn.Sequential(BidirectionalMixer(32)).eval())
    for model, x in zip(models, (images(), torch.randn(1, 9, 32)), strict=True):
        with (
            pytest.warns(DeprecationWarning, match="legacy TorchScript-based ONNX"),
            pytest.raises(RuntimeError, match=r"exportable=True.* dynamo=True$"),
        ):
            torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        pytest.param("vil_tiny", 24, marks=pytest.mark.nightly),
        pytest.param("vil_tiny_exact", 4, marks=pytest.mark.ci),
        pytest.param("vim_tiny", 4, marks=pytest.mark.nightly),
    ],
)
def test_exports_at_its_own_size_to_onnx(name: str, depth: int, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = timm.create_model(name, depth=depth, exportable=True).eval(), images(224, 224)
    any_batch = ({0: torch.export.Dim.DYNAMIC},)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False, dynamic_shapes=any_batch)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for batch in (x, x[:1], torch.cat((x, x[:1]))):
        (logits,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        assert torch.allclose(torch.from_numpy(logits), model(batch), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"img_size": 36}, ValueError, r"img_size must be covered by whole patches.*\(36, 36\)"),
        ({"img_size": 4}, ValueError, "img_size must be covered"),
        ({"patch_stride": 9}, ValueError, r"patch_stride must be from 1 to patch_.*\(8\), got 9"),
        ({"recurrence": "lstm"}, ValueError, "recurrence must be one of .*'lstm'"),
        ({"d_state": 0}, ValueError, "d_state must be at least 1, got 0"),
        ({"in_chans": 0}, ValueError, "in_chans must be at least 1, got 0"),
        ({"weight_init": "jax"}, ValueError, "weight_init must be"),
        ({"global_pool": "map"}, AssertionError, "global_pool must be one of .*'map'"),
        ({"class_token": False}, AssertionError, 'global_pool="token" needs class_token=True'),
        ({"num_heads": 3}, TypeError, "num_heads"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        small(**arguments)


@pytest.mark.parametrize(
    ("size", "stride", "told"),
    [
        ((36, 32), 8, r"height \(36"),
        ((32, 4), 8, r"width \(4"),
        ((4, 32), 4, r"height \(4"),
        ((32, 37), 4, r"width \(37"),
    ],
)
def test_images_of_no_whole_patches_are_refused(size: tuple[int, int], stride: int, told: str) -> None:
    message = rf"Input {told}\) is not covered by whole patches of 8 px with stride {stride} px; "
    with pytest.raises(AssertionError, match=f"{message}create .* with dynamic_img_pad=True"):
        small(patch_stride=stride)(images(*size))
    assert small(patch_stride=stride, dynamic_img_pad=True)(images(*size)).shape == (2, 5)


def test_padding_to_whole_patches_leaves_no_pixel_unread() -> None:
    draw = random.Random(0)
    for _ in range(100):
        patch = draw.randint(1, 12)
        stride, size = draw.randint(1, patch), (draw.randint(1, 40), draw.randint(1, 40))
        kwargs = {"dynamic_img_pad": True, "strict_img_size": False}
        embed = OverlapPatchEmbed(patch, stride, img_size=None, embed_dim=1, **kwargs)
        x = torch.ones(1, 3, *size, requires_grad=True)
        found = embed(x)
        assert tuple(found.shape[1:3]) == embed.dynamic_feat_size(size)
        found.sum().backward()
        case = f"patches of {patch} px every {stride} px in {size}"
        assert x.grad.abs().sum((0, 1)).all(), case
        covered = [(length - 1) * stride + patch for length in found.shape[1:3]]
        assert all(c < max(n, patch) + stride for c, n in zip(covered, size, strict=True)), case


WIDE, SQUARE = {"img_size": (16, 64)}, {"img_size": (32, 32)}  # grids of 2 x 8 and 4 x 4


@pytest.mark.parametrize(("of", "into"), [(WIDE, SQUARE), (SQUARE, WIDE)])
@pytest.mark.parametrize("route", ["load_state_dict", "inside", "filter", "cfg"])
def test_equal_count_of_patches_is_resampled_from_its_grid(of: dict, into: dict, route: str, tmp_path: Path) -> None:
    source, expected, model = small(**of), small(**of), small(**into)
    expected.set_input_size(into["img_size"])
    assert not torch.equal(expected.pos_embed, source.pos_embed)
    state = source.state_dict()
    if route == "load_state_dict":
        model.load_state_dict(state)
    elif route == "inside":
        outer = torch.nn.ModuleDict({"m": source}).state_dict()
        torch.nn.ModuleDict({"m": model}).load_state_dict(outer)
    elif route == "filter":
        model.load_state_dict(vil.backbone.checkpoint_filter_fn({"model": state}, model))
    else:  # timm drops the recorded grid; the configuration gives the size
        torch.save(state, tmp_path / "w")
        overlay = {"file": tmp_path / "w", "input_size": (3, *of["img_size"]), "num_classes": 5}
        model = small(pretrained=True, pretrained_cfg_overlay=overlay, **into)
    assert torch.equal(model.pos_embed, expected.pos_embed)


@pytest.mark.parametrize(("of", "into"), [(WIDE, SQUARE), (SQUARE, WIDE)])
def test_a_grid_that_is_not_recorded_is_refused_if_it_may_be_another(of: dict, into: dict) -> None:
    with pytest.raises(RuntimeError, match=r"it may be \(2, 8\) or \(4, 4\); load an unchanged"):
        small(**into).load_state_dict(dict(small(**of).state_dict()))
    source, model = small(img_size=(24, 40)), small(img_size=(48, 80))
    model.load_state_dict(dict(source.state_dict()))  # ref_feat_bits says 3 x 5
    source.set_input_size((48, 80))
    assert torch.equal(model.pos_embed, source.pos_embed)


@pytest.mark.parametrize("into_averaged", [True, False])
def test_weights_with_and_without_a_class_token_are_told_apart(into_averaged: bool, tmp_path: Path) -> None:
    """Load by checkpoint_path and by pretrained=True, where no grid is recorded."""
    averaged = {"class_token": False, "global_pool": "avg"}
    of, into = ({}, averaged) if into_averaged else (averaged, {})
    path = tmp_path / "weights.pt"
    torch.save(small(**of).state_dict(), path)
    found = "17 tokens: 0 for" if into_averaged else "16 tokens: 1 for"
    with pytest.raises(RuntimeError, match=f"pos_embed has {found} .*class_token must be"):
        small(checkpoint_path=path, **into)
    overlay = {"file": path, "num_classes": 5, "input_size": (3, 32, 32)}
    with pytest.raises(ValueError, match="class_token must be the same as in the"):
        small(pretrained=True, pretrained_cfg_overlay=overlay, **into)
    assert small(checkpoint_path=path, **of)(images()).shape == (2, 5)


@pytest.mark.parametrize(
    ("of", "into"),
    [("vil_tiny", "vil_tiny_exact"), ("vim_tiny", "vil_tiny"), ("vil_tiny", "vim_tiny")],
)
def test_weights_of_another_recurrence_are_refused(of: str, into: str) -> None:
    source, model = small(of), small(into)
    kinds = [m.blocks[0].mixer.recurrence for m in (model, source)]
    told = r"blocks\.0\.mixer has recurrence '{}', but the state dict [^\n]* of '{}'".format(*kinds)
    outer = torch.nn.ModuleDict({"m": source}).state_dict()
    with pytest.raises(RuntimeError, match=rf"^m\.{told}[^\n]*$"):
        torch.nn.ModuleDict({"m": model}).load_state_dict(outer)
    with pytest.raises(RuntimeError, match=f"^{told}"):
        model.load_state_dict(source.state_dict(), strict=False)
    small(of).load_state_dict(source.state_dict())
