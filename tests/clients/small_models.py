"""Small models that clients find by their names, since few of them hand arguments on."""

import timm
from timm.models import register_model
from torch import nn

import vil


@register_model
def vil_test(pretrained: bool = False, **kwargs: object) -> nn.Module:
    """The plain model."""
    return timm.create_model("vil_tiny", pretrained, **({"embed_dim": 32, "depth": 4} | kwargs))


@register_model
def vil_test_pyramid(pretrained: bool = False, **kwargs: object) -> nn.Module:
    """The same with a pyramid."""
    small = {"embed_dim": 32, "depth": 4}
    return timm.create_model("vil_tiny_pyramid", pretrained, **(small | kwargs))


def backbone_in(model: nn.Module) -> vil.VisionLonghorn:
    (backbone,) = (m for m in model.modules() if isinstance(m, vil.VisionLonghorn))
    return backbone
