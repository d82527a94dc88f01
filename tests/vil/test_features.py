"""What ``features_only=True`` gives: which blocks, normalised or not, by timm's own class."""

from functools import partial

import pytest
import timm
import torch
from timm.models._features import FeatureGetterNet
from torch import nn

import vil
from vil.registry import dense_indices

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_classes": 5}


def features(name: str = "vil_tiny", **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, features_only=True, **(SMALL | {"depth": 4} | kwargs)).eval()


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
    assert dense_indices(depth) == expected
    net = features(depth=depth, device="meta")
    assert tuple(net.out_indices) == tuple(net.feature_info.out_indices) == expected
    assert len(net.model.blocks) == depth
    maps = net(torch.empty(1, 3, 32, 48, device="meta"))
    assert [tuple(m.shape) for m in maps] == [(1, 32, 4, 6)] * len(expected)


@pytest.mark.parametrize("name", ["vil_tiny", "vil_small_exact", "vim_base"])
def test_every_model_gives_the_quarters_of_its_24_blocks(name: str) -> None:
    net = timm.create_model(name, features_only=True, device="meta")
    assert list(net.out_indices) == [5, 11, 17, 23]


@pytest.mark.parametrize(
    ("asked", "given"), [(3, [1, 2, 3]), ([-1], [3]), ((0, -2), [0, 2]), ([1], [1])]
)
def test_features_that_are_asked_for_are_given(asked: object, given: list[int]) -> None:
    net = features(out_indices=asked)
    assert list(net.out_indices) == given
    assert len(net.model.blocks) == given[-1] + 1
    x = torch.randn(1, 3, 32, 32)
    whole = features(out_indices=4)(x)
    assert all(torch.equal(one, whole[i]) for one, i in zip(net(x), given, strict=True))


def test_other_feature_classes_of_timm_give_the_same_blocks() -> None:
    net = features(depth=8, feature_cls="hook")
    assert list(net.feature_info.out_indices) == [1, 3, 5, 7]
    assert len(net(torch.randn(1, 3, 32, 32))) == 4


def test_a_feature_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"last-n \(5\) is out of range"):
        features(out_indices=5)


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_pyramid"])
def test_features_are_normalised_by_a_class_that_says_so(name: str) -> None:
    """``norm=True`` is an argument of timm's FeatureGetterNet and, as in timm's models, of no model."""
    x = torch.randn(1, 3, 32, 32)
    plain, normalised = (
        features(name),
        features(name, feature_cls=partial(FeatureGetterNet, norm=True)),
    )
    normalised.model.load_state_dict(plain.model.state_dict(), strict=False)
    with torch.no_grad():  # by channel, since levels of a pyramid undo what is one factor
        normalised.model.norm.weight.uniform_(0.5, 2)
    expected = normalised.model.forward_intermediates(x, norm=True, intermediates_only=True)
    for one, other, raw in zip(normalised(x), expected, plain(x), strict=True):
        assert torch.equal(one, other)
        assert not torch.allclose(one, raw, atol=1e-3)
    for model in (name, "vit_tiny_patch16_224"):
        with pytest.raises(TypeError, match="'norm'"):
            timm.create_model(model, features_only=True, norm=True)


def test_normalised_features_of_weights(tmp_path) -> None:
    model = timm.create_model("vil_tiny", **SMALL, depth=4).eval()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "weights.pt")
    getter = partial(FeatureGetterNet, norm=True)
    net = vil.load(
        tmp_path / "weights.pt",
        "vil_tiny",
        features_only=True,
        feature_cls=getter,
        **SMALL,
        depth=4,
    )
    x = torch.randn(1, 3, 32, 32)
    expected = model.forward_intermediates(x, norm=True, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(net.eval()(x), expected, strict=True))
