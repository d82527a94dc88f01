"""Backbones with four feature maps, and their layer-wise learning rates."""

from typing import Any

import timm
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import vil
from vil.timm_models import create
from vil.training.errors import ConfigError

STRIDES = [4, 8, 16, 32]


def make_features(name: str, weights: str | None = None, **arguments: Any) -> nn.Module:
    """Build a backbone with four feature maps.

    Args:
        name: timm model name: a ``*_pyramid``, or another model whose last four stages have strides of
            4, 8, 16 and 32 px.
        weights: SOURCE of ``vil.load``; None for new weights.
        **arguments: Arguments of ``timm.create_model``. Models without ``img_size`` do not get it.

    Returns:
        A module that returns four maps (B, C, h, w) for images (B, 3, H, W).

    Raises:
        ConfigError: If there is no such model, it refuses its arguments, or it has other strides.
    """
    if not timm.is_model(name):
        raise ConfigError(f"--model must be the name of a timm model, got {name}")
    if not name.endswith("_pyramid"):
        arguments = {"out_indices": (-4, -3, -2, -1)} | arguments
        arguments.pop("pyramid_blocks", None)
    try:
        if weights is None:
            features = create(name, features_only=True, **arguments)
        else:
            features = vil.load(weights, name, features_only=True, **arguments)
    except (RuntimeError, TypeError, ValueError, AssertionError, OSError) as error:
        raise ConfigError(f"--model {name} cannot be created: {error}") from error
    if (strides := features.feature_info.reduction()) != STRIDES:
        raise ConfigError(f"--model {name} must have maps of strides {STRIDES}, got {strides}")
    return features


def parameter_groups(
    network: nn.Module, features: nn.Module, lr: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Group the parameters of a network by learning rate and weight decay.

    With D blocks, parameters above the blocks have the learning rate lr, block i has
    lr * layer_decay^(D - i), and the embeddings have lr * layer_decay^(D + 1), as in BEiT, ViTDet and
    mmsegmentation. One-dimensional parameters and the backbone's ``no_weight_decay`` are not decayed.

    Args:
        network: Whole network.
        features: Backbone in the network, from ``make_features``.
        lr: Learning rate.
        weight_decay: Weight decay of AdamW.
        layer_decay: Factor from a layer to the layer below; 1 for one learning rate.

    Returns:
        Parameter groups for torch's optimizers.

    Raises:
        ConfigError: If the backbone does not define the order of its layers.
    """
    backbone = getattr(features, "model", features)
    if layer_decay == 1:
        kept = getattr(backbone, "no_weight_decay", set)()
        groups = param_groups_weight_decay(backbone, weight_decay, no_weight_decay_list=kept)
    elif hasattr(backbone, "group_matcher"):
        kept = backbone.no_weight_decay()
        groups = param_groups_layer_decay(backbone, weight_decay, kept, layer_decay=layer_decay)
    else:
        name = type(backbone).__name__
        raise ConfigError(
            f"--layer-decay must be 1 for {name}, which has no group_matcher(), got {layer_decay}"
        )
    own = {id(parameter) for parameter in backbone.parameters()}
    heads = [parameter for parameter in network.parameters() if id(parameter) not in own]
    groups += [
        {"params": [p for p in heads if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in heads if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [{**group, "lr": lr * group.pop("lr_scale", 1.0)} for group in groups]
