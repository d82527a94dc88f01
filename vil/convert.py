"""Convert state dicts for a backbone: official Vision Mamba names, another grid, levels of a pyramid.

hustvl/Vim (``models_mamba.py``, ``mamba_simple.py``) defines the official names and shapes. It has separate parameters
for the two directions, which are stacked here. Its position embedding has the order of the sequence, with the class
token in the middle; here the class token is first.

``checkpoint_filter_fn`` is for timm and ``vil.load``, ``adapt_inside`` for any ``load_state_dict``.
"""

import logging
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed, to_2tuple
from timm.models._input import get_pretrained_grid_size, update_model_args
from torch import Tensor, nn

from vil.sizes import bits_of, grid_of
from vil.tokens import class_token_first

_logger = logging.getLogger("vil")
_PATCHES = "patch_embed.proj.weight"
# Our names -> official names of the forward and the backward direction.
_STACKED = {
    "conv_weight": ("conv1d.weight", "conv1d_b.weight"),
    "conv_bias": ("conv1d.bias", "conv1d_b.bias"),
    "x_proj_weight": ("x_proj.weight", "x_proj_b.weight"),
    "dt_weight": ("dt_proj.weight", "dt_proj_b.weight"),
    "dt_bias": ("dt_proj.bias", "dt_proj_b.bias"),
    "A_log": ("A_log", "A_b_log"),
    "D": ("D", "D_b"),
}


def adapt(
    state_dict: Mapping[str, Tensor],
    model: nn.Module,
    prefix: str = "",
    grid: tuple[int, int] | None = None,
    resample_patches: bool = False,
) -> dict[str, Tensor]:
    """Return weights with the names and shapes of a backbone; all conversions are made here.

    Args:
        state_dict: Names and tensors; names without the prefix are not changed.
        model: ``VisionLonghorn`` that will load the weights.
        prefix: Prefix of the model's names, if it is inside another module.
        grid: Grid of the position embedding, (rows, columns); None if unknown.
        resample_patches: Resample a patch embedding of another size instead of raising an error.

    Returns:
        The weights. If they have a position embedding, ``ref_feat_bits`` is added: the embedding's grid, unless the
        weights contain another.

    Raises:
        ValueError: If the weights have another width or patch size, or if the grid is unknown or does not match the
            number of tokens. Also if they are an official Vision Mamba's with rotary position embeddings or only one
            direction.
    """
    adapted = with_own_names(state_dict, prefix)
    patches, own = adapted.get(prefix + _PATCHES), model.patch_embed.proj.weight
    if patches is not None and resample_patches and patches.shape[2:] != own.shape[2:]:
        size = [own.shape[2], own.shape[3]]
        adapted[prefix + _PATCHES] = resample_patch_embed(patches, size, verbose=True)
    elif patches is not None and patches.shape[:1] + patches.shape[2:] != own.shape[:1] + own.shape[2:]:
        raise ValueError(
            f"{_PATCHES} has shape {tuple(patches.shape)} in the state dict, but "
            f"{tuple(own.shape)} in the model; vil.load(path) creates the model of a checkpoint"
        )
    if patches is not None:
        _adapt_levels(adapted, model, prefix)
    if prefix + "pos_embed" in adapted:
        bits = adapted.get(prefix + "ref_feat_bits")
        pos_embed, grid = _resized_pos_embed(adapted[prefix + "pos_embed"], model, grid, bits)
        adapted[prefix + "pos_embed"] = pos_embed
        adapted.setdefault(prefix + "ref_feat_bits", bits_of(grid))
    return adapted


def adapt_inside(state_dict: dict[str, Tensor], model: nn.Module, prefix: str, metadata: dict[str, Any]) -> None:
    """Adapt the state dict of ``_load_from_state_dict`` in place.

    A filter function is not enough: timm applies none to ``checkpoint_path``, and other packages load state dicts of
    whole detectors.

    Raises:
        RuntimeError: If ``adapt`` raises ValueError. It is raised at once, because PyTorch would list hundreds of names
            after a collected error.
    """
    try:
        adapted = adapt(state_dict, model, prefix, metadata.get("grid_size"))
        bits = adapted.pop(prefix + "ref_feat_bits", None)
        if bits is not None:
            update_model_args(model, ref_feat_shape=grid_of(bits))
        if bits is not None and model.ref_feat_bits is not None:
            adapted[prefix + "ref_feat_bits"] = bits_of(grid_of(bits))
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    state_dict.clear()
    state_dict.update(adapted)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Adapt a checkpoint for timm: also resample patches, and find the grid from the image size that timm records.

    Args:
        state_dict: State dict, or a checkpoint that has it as "model" or "state_dict".
        model: Model that will load it.

    Returns:
        Result of ``adapt``, with the model's grid in its metadata.

    Raises:
        ValueError: Same as in ``adapt``.
    """
    state_dict = state_dict.get("model", state_dict)
    state_dict = state_dict.get("state_dict", state_dict)
    metadata = OrderedDict(getattr(state_dict, "_metadata", {}))
    recorded = metadata.get("", {})
    grid = recorded.get("grid_size")
    if grid is None and "pos_embed" in state_dict:
        patches = state_dict["pos_embed"].shape[1] - model.num_prefix_tokens
        grid = _grid_of_arguments(model, state_dict.get(_PATCHES), patches)
    adapted = OrderedDict(adapt(state_dict, model, grid=grid, resample_patches=True))
    if "pos_embed" in adapted:
        metadata[""] = recorded | {"grid_size": model.patch_embed.grid_size}
    adapted._metadata = metadata
    return adapted


def _adapt_levels(state_dict: dict[str, Tensor], model: nn.Module, prefix: str) -> None:
    """Fill in the levels of a pyramid that the weights lack, or remove those that the model lacks."""
    own = {prefix + n: p for n, p in model.named_parameters() if n.startswith("pyramid.")}
    levels = [name for name in state_dict if name.startswith(prefix + "pyramid.")]
    if own and not levels:
        _logger.warning("the weights have no pyramid levels (pyramid.*): the model keeps its own")
        state_dict.update(own)
    elif levels and not own:
        _logger.warning("the model has no pyramid levels: ignoring pyramid.* of the weights")
        for name in levels:
            del state_dict[name]


def _resized_pos_embed(
    pos_embed: Tensor, model: nn.Module, grid: tuple[int, int] | None, bits: Tensor | None
) -> tuple[Tensor, tuple[int, int]]:
    """Resample (1, L, C) to the model's grid, from ``grid``; None is the model's, a square one, or that of ``bits``.

    Returns:
        The position embedding, (1, L', C), and the grid that it was for.

    Raises:
        ValueError: If the grid is None and ambiguous, or contradicts the number of patches.
    """
    prefix, own_grid = model.num_prefix_tokens, model.patch_embed.grid_size
    patches = pos_embed.shape[1] - prefix
    if grid is not None and grid[0] * grid[1] != patches:
        raise ValueError(
            f"pos_embed has {pos_embed.shape[1]} tokens for a patch grid of {grid}, but the model "
            f"needs {grid[0] * grid[1] + prefix}; class_token must be the same as in the checkpoint"
        )
    if grid is None:
        side = math.isqrt(max(patches, 0))
        known = {own_grid, (side, side), own_grid if bits is None else grid_of(bits)}
        known = sorted(one for one in known if one[0] * one[1] == patches)
        if not known:
            raise ValueError(
                f"pos_embed has {pos_embed.shape[1]} tokens: {prefix} for the model's class token and "
                f"{patches} patches, which form neither a square grid nor the model's {own_grid}; "
                "class_token must be the same as in the checkpoint; if it is, create the model with "
                "the checkpoint's img_size, load, then call set_input_size"
            )
        if len(known) > 1:
            raise ValueError(
                f"the grid of the {patches} patches in pos_embed is not recorded; it may be "
                f"{' or '.join(map(str, known))}; load an unchanged result of model.state_dict(), or "
                "create the model with pretrained=True and pretrained_cfg_overlay=dict(file=path, "
                "input_size=(3, height, width)), with the height and width of the checkpoint's images"
            )
        (grid,) = known
    grid = tuple(grid)
    resampled = resample_abs_pos_embed(
        pos_embed, new_size=own_grid, old_size=grid, num_prefix_tokens=prefix, verbose=True
    )
    return resampled, grid


def _grid_of_arguments(model: nn.Module, weight: Tensor | None, patches: int) -> tuple[int, int] | None:
    """Compute a checkpoint's grid from the arguments of its model; None if the number of patches differs.

    Args:
        model: Model that will load it; timm stores the arguments of the checkpoint's model in it.
        weight: Weight of the patch embedding; None if the checkpoint has none.
        patches: Number of patches of the checkpoint's position embedding.
    """
    arguments = getattr(model, "pretrained_model_args", {})
    if weight is None or arguments.get("patch_stride") is None:
        return get_pretrained_grid_size(model, weight, patches)
    sizes = arguments.get("img_size") or model.pretrained_cfg["input_size"][-2:]
    lengths = zip(to_2tuple(sizes), weight.shape[-2:], to_2tuple(arguments["patch_stride"]), strict=True)
    grid = tuple((size - patch) // stride + 1 for size, patch, stride in lengths)
    return grid if math.prod(grid) == patches else None


def is_official_vim(state_dict: Mapping[str, Tensor], prefix: str = "") -> bool:
    """Return whether a state dict has the parameter names of the official Vision Mamba."""
    return prefix + "layers.0.mixer.in_proj.weight" in state_dict


def with_own_names(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return a copy of weights with our names; the parameters of official Vision Mamba are also stacked.

    Raises:
        ValueError: Same as in ``adapt``.
    """
    if is_official_vim(state_dict, prefix):
        return _from_official(state_dict, prefix)
    return dict(state_dict)


def _from_official(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if any(name.startswith(prefix + "rope.") for name in state_dict):
        raise ValueError(
            "the checkpoint has rotary position embeddings (rope.*), which are not supported; "
            "use one of the official midclstok checkpoints"
        )
    converted: dict[str, Tensor] = {}
    mixers: dict[str, dict[str, Tensor]] = {}
    directed = {name for names in _STACKED.values() for name in names}
    for name, tensor in state_dict.items():
        own = name.removeprefix(prefix)
        layer = re.fullmatch(r"layers\.(\d+)\.(mixer\.)?(.+)", own)
        if not name.startswith(prefix):
            converted[name] = tensor
        elif layer is None:
            converted[prefix + own.replace("norm_f.", "norm.")] = tensor
        elif layer[2] and layer[3] in directed:
            mixers.setdefault(f"{prefix}blocks.{layer[1]}.mixer.", {})[layer[3]] = tensor
        else:
            own = (layer[2] or "") + layer[3].replace("out_proj.", "proj.")
            converted[f"{prefix}blocks.{layer[1]}.{own}"] = tensor
    for mixer, parameters in mixers.items():
        converted.update(_stack_directions(mixer, parameters))
    if prefix + "pos_embed" in converted and prefix + "cls_token" in converted:
        converted[prefix + "pos_embed"] = class_token_first(converted[prefix + "pos_embed"])
    return converted


def _stack_directions(mixer: str, official: dict[str, Tensor]) -> dict[str, Tensor]:
    stacked = {}
    for ours, names in _STACKED.items():
        missing = [name for name in names if name not in official]
        if len(missing) == 1:
            raise ValueError(f"the checkpoint has only one direction: {mixer}{missing[0]} is missing")
        if not missing:
            pair = torch.stack([official[name] for name in names])
            stacked[mixer + ours] = pair.squeeze(2) if ours == "conv_weight" else pair
    return stacked
