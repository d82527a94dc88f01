"""Backbones of the downstream runs: four maps, and the learning rate of every layer."""

import re
from typing import Any

import timm
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import vil
from vil.training.errors import ConfigError
from vil.weights.build import create

STRIDES = [4, 8, 16, 32]


def make_features(
    name: str, weights: str | None = None, grad_checkpointing: bool = False, **arguments: Any
) -> nn.Module:
    """Build a backbone that makes four maps.

    Args:
        name: timm's name of the model: a ``*_pyramid``, or any whose last four stages have strides of
            4, 8, 16 and 32 px.
        weights: SOURCE of ``vil.load``; None for new weights.
        grad_checkpointing: Compute each block again in the backward pass.
        **arguments: Of ``timm.create_model``. ``img_size`` is left out for models that take none.

    Returns:
        A module from images (B, 3, height, width) to a list of four maps (B, C, H, W).

    Raises:
        ConfigError: there is no such model, it refuses its arguments, or its strides are others.
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
        raise ConfigError(f"--model {name} cannot be made: {error}") from error
    if (strides := features.feature_info.reduction()) != STRIDES:
        raise ConfigError(f"--model {name} must have maps of strides {STRIDES}, has {strides}")
    if grad_checkpointing:
        getattr(features, "model", features).set_grad_checkpointing(True)
    return features


def parameter_groups(
    network: nn.Module, features: nn.Module, lr: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Group the parameters of a network by learning rate and weight decay.

    With D blocks, what is above the blocks has the learning rate lr, block i of them lr *
    layer_decay^(D - i), the embeddings lr * layer_decay^(D + 1): those of BEiT, ViTDet and mmseg. What
    has one dimension is not decayed, nor what the backbone's ``no_weight_decay`` names.

    Args:
        network: The whole network.
        features: The part of it that ``make_features`` made.
        lr: Learning rate.
        weight_decay: Of AdamW.
        layer_decay: From a layer to the one below; 1 for one learning rate.

    Returns:
        Groups for torch's optimizers, in the order of the network's parameters.

    Raises:
        ConfigError: the backbone does not say which of its layers is where.
    """
    backbone = getattr(features, "model", features)
    prefix = next(name for name, module in network.named_modules() if module is backbone) + "."
    kept = getattr(backbone, "no_weight_decay", set)()
    kept = {f"{prefix}{pattern}" for pattern in kept}
    if layer_decay == 1:
        groups = param_groups_weight_decay(network, weight_decay, no_weight_decay_list=kept)
        return [{**group, "lr": lr} for group in groups]
    if not hasattr(backbone, "group_matcher"):
        name = type(backbone).__name__
        raise ConfigError(f"--layer-decay must be 1 for {name}, whose layers have no order")
    network.group_matcher = lambda coarse: {
        layer: _prefixed(patterns, prefix) for layer, patterns in backbone.group_matcher().items()
    }
    groups = param_groups_layer_decay(
        network, weight_decay, no_weight_decay_list=kept, layer_decay=layer_decay
    )
    del network.group_matcher
    return [{**group, "lr": lr * group.pop("lr_scale")} for group in groups]


def _prefixed(patterns: Any, prefix: str) -> Any:
    """Put what names begin with before timm's patterns of names."""
    if isinstance(patterns, str):
        return f"^{re.escape(prefix)}(?:{patterns.replace('^', '')})"
    return [(_prefixed(pattern, prefix), suffix) for pattern, suffix in patterns]
