"""transformers' heads on a TimmBackbone, which is built by name only."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.clients.small_models import backbone_in
from tests.documents.pages import block_with
from vil.sizes import bits_of

transformers = pytest.importorskip("transformers", minversion="5")

LEVELS = [0, 1, 2, 3]  # levels of the pyramid, or blocks of the small plain model
CHANNELS = 32


def backbone(levels: list[int], name: str = "vil_test_pyramid", **arguments: Any) -> Any:
    return transformers.TimmBackboneConfig(backbone=name, out_indices=levels, **arguments)


@pytest.mark.parametrize("name", ["vil_test", "vil_test_pyramid"])
def test_a_backbone_gives_the_intermediates(name: str, images: Callable) -> None:
    model = transformers.TimmBackbone(backbone([1, 3], name)).eval()
    assert model.channels == [CHANNELS] * 2
    bare = timm.create_model(name, num_classes=0).eval()
    weights = {n.removeprefix("model."): p for n, p in model._backbone.state_dict().items()}
    bare.load_state_dict(weights, strict=False)  # the features have no final norm
    x = images(128, 96)
    with torch.no_grad():
        expected = bare.forward_intermediates(x, indices=[1, 3], intermediates_only=True)
        maps = model(x).feature_maps
    for features, intermediate in zip(maps, expected, strict=True):
        assert torch.equal(features, intermediate)


SMALL = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
}


def detr(name: str = "vil_test_pyramid") -> nn.Module:
    small = {**SMALL, "decoder_layers": 1, "num_queries": 5, "num_labels": 3}
    config = transformers.DetrConfig(backbone_config=backbone([3], name), **small)
    return transformers.DetrForObjectDetection(config)


def rt_detr() -> nn.Module:
    config = transformers.RTDetrConfig(
        backbone_config=backbone([1, 2, 3]),
        encoder_in_channels=[CHANNELS] * 3,
        decoder_in_channels=[32] * 3,
        encoder_hidden_dim=32,
        decoder_layers=2,
        num_denoising=0,
        num_queries=8,
        num_labels=3,
        **SMALL,
    )
    return transformers.RTDetrForObjectDetection(config)


def deformable_detr() -> nn.Module:
    small = {**SMALL, "decoder_layers": 2, "num_queries": 5, "num_labels": 3}
    config = transformers.DeformableDetrConfig(backbone_config=backbone([1, 2, 3]), **small)
    return transformers.DeformableDetrForObjectDetection(config)


def mask2former(name: str = "vil_test_pyramid") -> nn.Module:
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone(LEVELS, name),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        num_queries=5,
        num_labels=2,
        train_num_points=64,
    )
    return transformers.Mask2FormerForUniversalSegmentation(config)


def upernet(name: str = "vil_test_pyramid") -> nn.Module:
    config = transformers.UperNetConfig(
        backbone_config=backbone(LEVELS, name),
        hidden_size=16,
        auxiliary_channels=16,
        auxiliary_in_channels=CHANNELS,
        num_labels=4,
    )
    return transformers.UperNetForSemanticSegmentation(config)


def dpt() -> nn.Module:
    """DPT's neck expects tokens with a class token first; it passes maps on at ignored stages."""
    config = transformers.DPTConfig(
        backbone_config=backbone(LEVELS, patch_size=16),
        neck_hidden_sizes=[CHANNELS] * 4,
        fusion_hidden_size=16,
    )
    config.neck_ignore_stages = LEVELS  # the constructor takes it for hybrids only
    return transformers.DPTForDepthEstimation(config)


def wrapper() -> nn.Module:
    sizes = {"img_size": 64, "ref_feat_shape": (3, 5)}
    config = transformers.TimmWrapperConfig(architecture="vil_test", num_labels=3, model_args=sizes)
    return transformers.TimmWrapperForImageClassification(config)


@pytest.mark.parametrize(
    ("build", "name", "shape"),
    [
        (detr, "pred_boxes", (5, 4)),
        (partial(detr, "vil_test"), "pred_boxes", (5, 4)),
        (rt_detr, "pred_boxes", (8, 4)),
        (deformable_detr, "pred_boxes", (5, 4)),
        (mask2former, "masks_queries_logits", (5, 32, 24)),
        (partial(mask2former, "vil_test"), "masks_queries_logits", (5, 8, 6)),
        (upernet, "logits", (4, 128, 96)),
        (partial(upernet, "vil_test"), "logits", (4, 128, 96)),
        (dpt, "predicted_depth", (128, 96)),
    ],
)
def test_a_model_trains(build: Callable, name: str, shape: tuple, images: Callable, assert_trains: Callable) -> None:
    model = build()
    output = model(pixel_values=images(128, 96, 2))
    assert output[name].shape == (2, *shape)
    made = [t for t in output.values() if isinstance(t, Tensor) and t.requires_grad]
    assert_trains(model, sum((t - 1).square().mean() for t in made))


@pytest.mark.parametrize("build", [detr, rt_detr, deformable_detr, mask2former, upernet, dpt, wrapper])
def test_a_saved_model_comes_back(build: Callable, images: Callable, tmp_path: Path) -> None:
    """transformers renames tensors by tables of patterns, and sets them one by one."""
    torch.manual_seed(1)
    model, x = build().eval(), images(128, 96)
    part = backbone_in(model)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        part.ref_feat_bits.copy_(bits_of((3, 5)))
    model.save_pretrained(tmp_path)
    torch.manual_seed(2)
    again, told = type(model).from_pretrained(tmp_path, config=model.config, output_loading_info=True)
    assert not any(told.values()), told
    assert backbone_in(again).ref_feat_shape == (3, 5)
    with torch.no_grad():
        for output, expected in zip(again.eval()(x).values(), model(x).values(), strict=True):
            if isinstance(output, Tensor):
                torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_files_without_a_grid(images: Callable, tmp_path: Path) -> None:
    model, x = wrapper().eval(), images(64, 96)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    del saved["timm_model.ref_feat_bits"]
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    load = type(model).from_pretrained
    assert torch.equal(load(tmp_path)(x).logits, model(x).logits)


def test_mamba_runs_on_our_scan_by_the_adapter_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mamba import modeling_mamba

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "state_size": 4, "use_mambapy": False}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    ids = torch.randint(50, (2, 40))

    def results() -> tuple[Tensor, list[Tensor], Tensor]:
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        written = model.generate(ids[:, :30], max_new_tokens=8, do_sample=False, pad_token_id=0)
        return out.logits.detach(), [p.grad for p in model.parameters()], written

    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", modeling_mamba.mamba_selective_scan)
    logits, grads, written = results()
    session: dict[str, Any] = {}
    exec(block_with("scans", "modeling_mamba.mamba_selective_scan ="), session)
    assert modeling_mamba.mamba_selective_scan is session["selective_scan"]
    own_logits, own_grads, own_written = results()
    torch.testing.assert_close(own_logits, logits, rtol=1e-4, atol=1e-5)
    for own, grad in zip(own_grads, grads, strict=True):
        assert (own - grad).norm() <= 1e-4 * grad.norm()
    assert torch.equal(own_written, written)
