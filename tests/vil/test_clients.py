"""Packages that build a backbone by its name alone, at an image size that nobody told it."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import vil

TAPS = [5, 11, 17, 23]  # the blocks whose tokens dense heads take


def images(height: int = 128, width: int = 128) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_trains(model: nn.Module, output: Tensor, shape: tuple[int, ...]) -> None:
    """Fail unless the output is of that shape, finite, and teaches every part of the backbone."""
    assert output.shape == shape
    assert output.isfinite().all()
    output.square().mean().backward()
    (backbone,) = (m for m in model.modules() if isinstance(m, vil.VisionLonghorn))
    for part in (
        backbone.pos_embed,
        backbone.patch_embed.proj.weight,
        *backbone.blocks[0].parameters(),
    ):
        assert part.grad.isfinite().all()
        assert part.grad.any()


@pytest.mark.parametrize(("height", "width"), [(128, 128), (96, 160)])
def test_segmentation_models_dpt(height: int, width: int) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.DPT(
        encoder_name="tu-vil_tiny",
        encoder_weights=None,
        decoder_intermediate_channels=(8, 8, 8, 8),
        decoder_fusion_channels=16,
        classes=4,
        embed_dim=32,
    )
    assert_trains(model, model(images(height, width)), (1, 4, height, width))


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", minversion="5")


def test_transformers_backbone_gives_the_intermediates(transformers) -> None:
    config = transformers.TimmBackboneConfig(backbone="vil_tiny", out_indices=TAPS)
    model = transformers.TimmBackbone(config).eval()
    assert model.channels == [192] * 4
    bare = timm.create_model("vil_tiny", num_classes=0).eval()
    weights = {n.removeprefix("model."): p for n, p in model._backbone.state_dict().items()}
    bare.load_state_dict(weights, strict=False)  # the features have no final norm
    x = images(128, 96)
    with torch.no_grad():
        expected = bare.forward_intermediates(x, indices=TAPS, intermediates_only=True)
        maps = model(x).feature_maps
    assert maps[0].shape == (1, 192, 8, 6)
    for features, intermediate in zip(maps, expected, strict=True):
        assert torch.equal(features, intermediate)


DETR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 5,
}


@pytest.mark.parametrize("by_name", [True, False])
def test_transformers_detr(by_name: bool, transformers) -> None:
    if by_name:
        config = transformers.DetrConfig(use_timm_backbone=True, backbone="vil_tiny", **DETR)
    else:
        backbone = transformers.TimmBackboneConfig(backbone="vil_tiny", out_indices=TAPS[-1:])
        config = transformers.DetrConfig(backbone_config=backbone, **DETR)
    model = transformers.DetrForObjectDetection(config)
    output = model(pixel_values=images())
    assert output.pred_boxes.shape == (1, 5, 4)
    assert_trains(model, output.logits, (1, 5, 3))


def test_transformers_detr_hands_its_mask_on(transformers) -> None:
    """By the hook of docs/features.md: a padded image then gives the features that it gives alone."""
    text = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    hook = text[text.rindex("from functools import partial") :]
    names = {"vil": vil}
    exec(hook[: hook.index("detr.register")], names)
    config = transformers.DetrConfig(use_timm_backbone=True, backbone="vil_tiny", **DETR)
    detr = transformers.DetrForObjectDetection(config).eval()
    image = torch.randn(1, 3, 64, 96)
    padded, mask = torch.randn(1, 3, 128, 128), torch.zeros(1, 128, 128, dtype=torch.int64)
    padded[:, :, :64, :96], mask[:, :64, :96] = image, 1
    detr.register_forward_pre_hook(names["hand_on"], with_kwargs=True)
    features = []
    detr.model.backbone.register_forward_hook(lambda _, args, out: features.append(out[0][0][0]))
    with torch.no_grad():
        detr(pixel_values=padded, pixel_mask=mask)
        detr(pixel_values=image, pixel_mask=torch.ones(1, 64, 96))
    torch.testing.assert_close(features[0][..., :4, :6], features[1], rtol=1e-4, atol=1e-4)
    assert not features[0][..., 4:, :].any()


def test_transformers_mask2former(transformers) -> None:
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.TimmBackboneConfig(backbone="vil_tiny", out_indices=TAPS),
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
    )
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    output = model(pixel_values=images())
    assert output.class_queries_logits.shape == (1, 5, 3)
    assert_trains(model, output.masks_queries_logits, (1, 5, 8, 8))


def test_transformers_upernet(transformers) -> None:
    config = transformers.UperNetConfig(
        backbone_config=transformers.TimmBackboneConfig(backbone="vil_tiny", out_indices=TAPS),
        hidden_size=16,
        use_auxiliary_head=False,
        num_labels=4,
    )
    model = transformers.UperNetForSemanticSegmentation(config)
    model.decode_head.eval()  # one image of 1 x 1 pooled features has no batch statistics
    assert_trains(model, model(pixel_values=images(128, 96)).logits, (1, 4, 128, 96))
