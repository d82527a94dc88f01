"""Small models that clients build by name, because few clients pass model arguments on."""

import timm
from timm.models import register_model
from torch import nn

import vil


@register_model
def vil_test(pretrained: bool = False, **kwargs: object) -> nn.Module:
    """Return a small plain model."""
    return timm.create_model("vil_tiny", pretrained, **({"embed_dim": 32, "depth": 4} | kwargs))


@register_model
def vil_test_pyramid(pretrained: bool = False, **kwargs: object) -> nn.Module:
    """Return the same model with a pyramid."""
    small = {"embed_dim": 32, "depth": 4}
    return timm.create_model("vil_tiny_pyramid", pretrained, **(small | kwargs))


def backbone_in(model: nn.Module) -> vil.VisionLonghorn:
    (backbone,) = (m for m in model.modules() if isinstance(m, vil.VisionLonghorn))
    return backbone
