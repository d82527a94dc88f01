"""Backbones with four feature maps, and their layer-wise learning rates."""

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
    """Build a backbone with four feature maps.

    Args:
        name: timm model name: a ``*_pyramid``, or another model whose last four stages have strides of
            4, 8, 16 and 32 px.
        weights: SOURCE of ``vil.load``; None for new weights.
        grad_checkpointing: Recompute each block in the backward pass.
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
    if grad_checkpointing:
        getattr(features, "model", features).set_grad_checkpointing(True)
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
    prefix = next(name for name, module in network.named_modules() if module is backbone) + "."
    kept = getattr(backbone, "no_weight_decay", set)()
    kept = {f"{prefix}{pattern}" for pattern in kept}
    if layer_decay == 1:
        groups = param_groups_weight_decay(network, weight_decay, no_weight_decay_list=kept)
        return [{**group, "lr": lr} for group in groups]
    if not hasattr(backbone, "group_matcher"):
        name = type(backbone).__name__
        raise ConfigError(
            f"--layer-decay must be 1 for {name}, which has no group_matcher(), got {layer_decay}"
        )
    network.group_matcher = lambda coarse: {
        layer: _prefixed(patterns, prefix) for layer, patterns in backbone.group_matcher().items()
    }
    groups = param_groups_layer_decay(
        network, weight_decay, no_weight_decay_list=kept, layer_decay=layer_decay
    )
    del network.group_matcher
    return [{**group, "lr": lr * group.pop("lr_scale")} for group in groups]


def _prefixed(patterns: Any, prefix: str) -> Any:
    """Add the prefix of the backbone's parameter names to timm's patterns."""
    if isinstance(patterns, str):
        return f"^{re.escape(prefix)}(?:{patterns.replace('^', '')})"
    return [(_prefixed(pattern, prefix), suffix) for pattern, suffix in patterns]
