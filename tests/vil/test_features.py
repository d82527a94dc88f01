"""``features_only=True``: which blocks it returns by default, and for given ``out_indices``."""

import pytest
import timm
import torch

import vil  # noqa: F401  registers the models

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "features_only": True}


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (24, (5, 11, 17, 23)),
        (12, (2, 5, 8, 11)),
        (10, (2, 4, 7, 9)),
        (4, (0, 1, 2, 3)),
        (3, (0, 1, 2)),
        (2, (0, 1)),
        (1, (0,)),
    ],
)
def test_the_ends_of_four_quarters_are_given(depth: int, expected: tuple[int, ...]) -> None:
    net = timm.create_model("vil_tiny", depth=depth, device="meta", **SMALL)
    assert tuple(net.out_indices) == tuple(net.feature_info.out_indices) == expected
    assert len(net.model.blocks) == depth
    maps = net(torch.empty(1, 3, 32, 48, device="meta"))
    assert [tuple(m.shape) for m in maps] == [(1, 32, 4, 6)] * len(expected)


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_pyramid"])
def test_features_may_be_sequences(name: str) -> None:
    images, features = torch.randn(1, 3, 32, 48), {}
    for output_fmt in ("NCHW", "NLC"):
        torch.manual_seed(0)
        net = timm.create_model(name, depth=2, output_fmt=output_fmt, **SMALL).eval()
        features[output_fmt] = net(images)
    for sequence, image in zip(features["NLC"], features["NCHW"], strict=True):
        assert torch.equal(sequence, image.flatten(2).mT)
    for wrong in ({"output_fmt": "NHWC"}, {"output_fmt": "NLC", "features_only": False}):
        with pytest.raises(ValueError, match='output_fmt must be "NCHW" or "NLC", with features_on'):
            timm.create_model(name, depth=2, **SMALL | wrong)
