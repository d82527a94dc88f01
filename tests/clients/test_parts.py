"""Packages like lightly rebuild a ViT from its parts: right without a class token, else refused."""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn


def encoded(model: nn.Module, images: Tensor) -> Tensor:
    """Return tokens as lightly's MaskedVisionTransformerTIMM does, with the class token first."""
    x = model.patch_embed(images).flatten(1, 2)
    prefix = [t.expand(len(x), -1, -1) for t in (model.cls_token, model.reg_token) if t is not None]
    x = torch.cat([*prefix, x], 1) + model.pos_embed
    assert not model.no_embed_class
    return model.norm(model.blocks(model.norm_pre(model.pos_drop(x))))


def test_the_parts_give_the_features(images: Callable) -> None:
    x = images(64, 64, 2)
    model = timm.create_model("vil_test", img_size=64, class_token=False, global_pool="avg").eval()
    with torch.no_grad():
        assert (encoded(model, x) - model.forward_features(x)).abs().max() < 1e-5
        with pytest.raises(AttributeError, match="reg_token"):
            encoded(timm.create_model("vil_test", img_size=64).eval(), x)
