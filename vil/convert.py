"""Checkpoints of the official Vision Mamba, by its own parameter names, as checkpoints of ours.

Names and shapes follow hustvl/Vim (``models_mamba.py``, ``mamba_simple.py``): the directions are
separate parameters there and stacked here, and its position embedding is in the order of the
sequence, with the class token in the middle, where ours has the class token first.
"""

import re

import torch
from torch import Tensor

# Ours -> official names of the forward and the backward direction.
_STACKED = {
    "conv_weight": ("conv1d.weight", "conv1d_b.weight"),
    "conv_bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj_weight": ("x_proj.weight", "x_proj_b.weight"),
    "dt_weight": ("dt_proj.weight", "dt_proj_b.weight"),
    "dt_bias": ("dt_proj.bias", "dt_proj_b.bias"),
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
}
_OFFICIAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def is_official_vim(state_dict: dict[str, Tensor], prefix: str = "") -> bool:
    """Tell whether a state dict has the parameter names of the official Vision Mamba."""
    return prefix + "layers.0.mixer.in_proj.weight" in state_dict


def convert_official_vim(state_dict: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Rename and stack the parameters of an official Vision Mamba checkpoint.

    Args:
        state_dict: Official names behind ``prefix``; entries without the prefix are passed on.
        prefix: Of the model's own names, for a model inside another module.

    Returns:
        A new state dict with the names of ``vil.backbone.VisionLonghorn``.

    Raises:
        ValueError: The checkpoint has rotary position embeddings, or a direction is missing.
    """
    if any(name.startswith(prefix + "rope.") for name in state_dict):
        raise ValueError(
            "the checkpoint has rotary position embeddings (rope.*), which no model here has; "
            "expected one of the official midclstok checkpoints"
        )
    converted: dict[str, Tensor] = {}
    mixers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state_dict.items():
        if not name.startswith(prefix):
            converted[name] = tensor
            continue
        own = name[len(prefix) :]
        layer = _OFFICIAL_LAYER.fullmatch(own)
        if layer is None:
            converted[prefix + own.replace("norm_f.", "norm.")] = tensor
            continue
        index, rest = layer.groups()
        if rest.startswith("mixer.") and rest[6:] in _OFFICIAL_DIRECTIONS:
            mixers.setdefault(f"{prefix}blocks.{index}.mixer.", {})[rest[6:]] = tensor
        else:
            converted[f"{prefix}blocks.{index}.{rest}"] = tensor
    for mixer, parameters in mixers.items():
        converted.update(_stack_directions(mixer, parameters))
    if prefix + "pos_embed" in converted and prefix + "cls_token" in converted:
        converted[prefix + "pos_embed"] = _class_token_first(converted[prefix + "pos_embed"])
    return converted


_OFFICIAL_DIRECTIONS = {name for names in _STACKED.values() for name in names}


def _stack_directions(mixer: str, official: dict[str, Tensor]) -> dict[str, Tensor]:
    stacked = {}
    for ours, names in _STACKED.items():
        missing = [name for name in names if name not in official]
        if len(missing) == 1:
            raise ValueError(
                f"the checkpoint has only one direction: {mixer}{missing[0]} is missing"
            )
        if not missing:
            pair = torch.stack([official[name] for name in names])
            stacked[mixer + ours] = pair.squeeze(2) if ours == "conv_weight" else pair
    return stacked


def _class_token_first(pos_embed: Tensor) -> Tensor:
    """Move the middle row of (1, 1 + N, C) to the front."""
    middle = (pos_embed.shape[1] - 1) // 2
    return torch.cat(
        [pos_embed[:, middle : middle + 1], pos_embed[:, :middle], pos_embed[:, middle + 1 :]], 1
    )
