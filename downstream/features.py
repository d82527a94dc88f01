"""Backbones with four feature maps."""

from typing import Any

import timm
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
