"""Backbones of the downstream runs and the learning rates of their layers."""

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

pytest.importorskip("lightning")

from downstream.features import make_features, parameter_groups
from vil.training.errors import ConfigError

SMALL = {"embed_dim": 16, "depth": 4, "img_size": 32}


class Network(nn.Module):
    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.backbone = features
        self.head = nn.Conv2d(16, 2, 1)


def groups_by_name(network: Network, decay: float) -> dict[str, dict]:
    groups = parameter_groups(network, network.backbone, 2.0, 0.1, decay)
    names = {parameter: name for name, parameter in network.named_parameters()}
    found = [(names[each], group) for group in groups for each in group["params"]]
    assert len(found) == len(names)
    return dict(found)


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_layers_have_their_learning_rates_and_weights_alone_decay(decay: float) -> None:
    network = Network(make_features("vil_tiny_pyramid", **SMALL))
    groups = groups_by_name(network, decay)
    assert set(groups) == {name for name, _ in network.named_parameters()}
    kept = ("pos_embed", "cls_token", "conv_bias", "dt_bias", "mixer.D")
    for name, parameter in network.named_parameters():
        parts, group = name.split("."), groups[name]
        if name.startswith("backbone.model.blocks."):
            assert group["lr"] == 2 * decay ** (4 - int(parts[3])), name
        elif parts[-1] in ("pos_embed", "cls_token") or "patch_embed" in name:
            assert group["lr"] == 2 * decay**5, name
        else:
            assert name.startswith(("head.", "backbone.model.pyramid.")), name
            assert group["lr"] == 2, name
        none = name.endswith(kept) or parameter.ndim <= 1
        assert group["weight_decay"] == (0 if none else 0.1), name


def test_other_backbones_of_timm_serve() -> None:
    features = make_features(
        "resnet18", img_size=64, drop_path_rate=0.1, pyramid_blocks=(1, 2, 3, 4)
    )
    assert [each.shape[-1] for each in features(torch.zeros(1, 3, 64, 64))] == [16, 8, 4, 2]
    with pytest.raises(ConfigError, match="--layer-decay must be 1"):
        parameter_groups(features, features, 1.0, 0.1, 0.9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vil_tinny", "--model must be the name of a timm model, got vil_tinny"),
        ("vil_tiny", "--model vil_tiny must have maps of strides"),
    ],
)
def test_what_makes_no_pyramid_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_features(name, **SMALL)


def test_weights_of_the_plain_model_are_taken(tmp_path: Path) -> None:
    plain = timm.create_model("vil_tiny", **SMALL | {"img_size": 64})
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    features = make_features("vil_tiny_pyramid", str(tmp_path / "plain.pt"), **SMALL)
    own, theirs = (dict(each.named_parameters()) for each in (features.model, plain))
    assert own["pos_embed"].shape != theirs["pos_embed"].shape
    for name in (name for name in own if name.startswith(("blocks", "patch_embed", "cls_token"))):
        assert torch.equal(own[name], theirs[name]), name
    assert features.model.ref_feat_shape == (4, 4)
