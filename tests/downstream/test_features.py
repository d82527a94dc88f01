"""Backbones of the downstream runs."""

from pathlib import Path

import pytest
import timm
import torch

pytest.importorskip("lightning")

from downstream.features import make_features
from vil.training.errors import ConfigError

SMALL = {"embed_dim": 16, "depth": 4, "img_size": 32}


def test_other_backbones_of_timm_serve() -> None:
    features = make_features("resnet18", img_size=64, drop_path_rate=0.1, pyramid_blocks=(1, 2, 3, 4))
    assert [each.shape[-1] for each in features(torch.zeros(1, 3, 64, 64))] == [16, 8, 4, 2]


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
