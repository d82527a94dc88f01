"""segmentation_models_pytorch builds a backbone by name, first without arguments to inspect it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm import create_model
from torch import nn

import vil
from tests.clients.small_models import backbone_in
from vil.sizes import bits_of

smp = pytest.importorskip("segmentation_models_pytorch")

ARCHITECTURES = sorted(cls.__name__ for cls in smp.MODEL_ARCHITECTURES_MAPPING.values())
# Levels that a decoder does not read, with any encoder.
UNUSED = {
    "PSPNet": ("pyramid.0.",),
    "DeepLabV3": ("pyramid.0.", "pyramid.1.", "pyramid.2."),
    "DeepLabV3Plus": ("pyramid.1.", "pyramid.2."),
}


def build(architecture: str, **arguments: object) -> nn.Module:
    """Build on the pyramid; DPT takes only tokens of one stride, so it gets the plain model."""
    name = "tu-vil_test" if architecture == "DPT" else "tu-vil_test_pyramid"
    arguments = {"encoder_weights": None, "classes": 4} | arguments
    return getattr(smp, architecture)(encoder_name=name, **arguments)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_trains(architecture: str, images: Callable, assert_trains: Callable) -> None:
    model = build(architecture)
    logits = model(images(128, 160, count=2))
    assert logits.shape == (2, 4, 128, 160)
    target = torch.randint(0, 4, (2, 128, 160))
    unused = UNUSED.get(architecture, ())
    if architecture == "DPT":
        unused = ("norm.", "head.")  # its encoder keeps the whole model and reads the blocks
    assert_trains(model, F.cross_entropy(logits, target), unused)


@pytest.mark.parametrize(("architecture", "stride"), [("DeepLabV3Plus", 8), ("PAN", 32)])
def test_output_strides(architecture: str, stride: int, images: Callable) -> None:
    model = build(architecture, encoder_output_stride=stride).eval()
    assert model.encoder.model.feature_info.reduction()[-1] == stride
    assert model(images(256, 256)).shape == (1, 4, 256, 256)


def test_by_the_full_names_at_any_size(images: Callable) -> None:
    model = smp.Unet("tu-vil_tiny_pyramid", encoder_weights=None, classes=4).eval()
    assert model.encoder.out_channels == [3, 0, 192, 192, 192, 192]
    assert model(images(96, 160)).shape == (1, 4, 96, 160)
    groups = vil.param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    for name, parameter in model.encoder.named_parameters():
        rate, decay = found[id(parameter)]
        assert rate == 0.5**25 or not name.endswith(("pos_embed", "cls_token")), name
        assert decay == 0 or not name.endswith(("pos_embed", "cls_token", ".D", "_bias")), name


def test_weights_of_the_plain_model(tmp_path: Path, images: Callable) -> None:
    plain = create_model("vil_test", num_classes=5)
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    overlay = {"file": str(tmp_path / "plain.safetensors"), "num_classes": 5}
    model = build("FPN", encoder_weights=True, pretrained_cfg_overlay=overlay)
    own = backbone_in(model).state_dict()
    taken = [name for name in plain.state_dict() if name in own]
    assert len(taken) == len(plain.state_dict()) - 3  # the final norm and the head
    assert all(torch.equal(own[name], plain.state_dict()[name]) for name in taken)


def test_a_saved_model_comes_back(images: Callable, tmp_path: Path) -> None:
    model = build("FPN").eval()
    backbone_in(model).ref_feat_bits.copy_(bits_of((3, 5)))
    model.save_pretrained(tmp_path)
    again = smp.from_pretrained(tmp_path).eval()
    assert backbone_in(again).ref_feat_shape == (3, 5)
    assert torch.equal(again(images()), model(images()))
