"""State dicts that are not quite a backbone's own: of official Vision Mamba, of another image or patch size.

The model is a ``VisionLonghorn`` throughout, whose file imports this one.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed, to_2tuple
from timm.models._input import get_pretrained_grid_size
from torch import Tensor, nn

from vil.convert import convert_official_vim, is_official_vim


def refuse_another_architecture(
    state_dict: Mapping[str, Any], model: nn.Module, strict: bool
) -> None:
    """Raise one line for weights of another width, patch size or depth, not torch's hundreds."""
    name = "patch_embed.proj.weight"
    own = tuple(model.patch_embed.proj.weight.shape)
    shape = tuple(state_dict[name].shape) if name in state_dict else own
    depth = len({name.split(".")[1] for name in state_dict if name.startswith("blocks.")})
    if (shape[0], *shape[2:]) != (own[0], *own[2:]):  # shape[1], in_chans, has torch's message
        difference = f"{name} is {shape} in the state dict and {own} in the model"
    elif strict and depth not in (0, len(model.blocks)):
        difference = f"blocks are {depth} in the state dict and {len(model.blocks)} in the model"
    else:
        return
    raise RuntimeError(f"{difference}; vil.load(path) builds the model that a checkpoint is of")


def sizes_of(state_dict: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes that the shapes of a backbone's weights tell, by the names of its arguments."""
    blocks = {name.split(".")[1] for name in state_dict if name.startswith("blocks.")}
    sizes = {"depth": len(blocks)} if blocks else {}
    proj, conv, steps, states, head = (
        state_dict[name].shape if name in state_dict else ()
        for name in (
            "patch_embed.proj.weight",
            *(f"blocks.0.mixer.{part}_weight" for part in ("conv", "dt", "x_proj")),
            "head.weight",
        )
    )
    if len(proj) == 4:
        sizes |= {"embed_dim": proj[0], "in_chans": proj[1]}
        if proj[2] == proj[3]:
            sizes["patch_size"] = proj[2]
        if len(conv) == 3 and proj[0]:
            sizes |= {"d_conv": conv[2], "expand": conv[1] // proj[0]}
    if len(steps) == len(states) == 3:
        sizes |= {"dt_rank": steps[2], "d_state": (states[1] - steps[2]) // 2}
    return sizes | {"num_classes": head[0]} if head else sizes


def resized_pos_embed(
    pos_embed: Tensor, model: nn.Module, grid: tuple[int, int] | None
) -> tuple[Tensor, tuple[int, int]]:
    """Resample (1, L, C) from its grid, or from a square one where that is None, to the model's.

    Returns:
        The position embedding, and the grid that it was of.

    Raises:
        ValueError: The grid is None and not to be told from the number of patches, or not that of
            so many tokens.
    """
    patches = pos_embed.shape[1] - model.num_prefix_tokens
    own_grid = model.patch_embed.grid_size
    if grid is not None and grid[0] * grid[1] != patches:
        raise ValueError(
            f"pos_embed has {pos_embed.shape[1]} tokens of a grid of {grid}, and the model expects "
            f"{model.num_prefix_tokens} beside the grid; class_token must be the checkpoint's"
        )
    side = math.isqrt(patches)
    square = side * side == patches
    if grid is None and patches == own_grid[0] * own_grid[1]:
        if square and own_grid != (side, side):
            raise ValueError(
                f"pos_embed has {patches} patches and no record of their grid, which may be "
                f"{(side, side)} or the model's {own_grid}; load a state dict as model.state_dict() "
                "made it, or create the model with pretrained=True and pretrained_cfg_overlay="
                "dict(file=path, input_size=(3, height, width)) of the checkpoint's images"
            )
        grid = own_grid
    if grid is None and not square:
        raise ValueError(
            f"pos_embed has {pos_embed.shape[1]} tokens, of which {model.num_prefix_tokens} are for "
            f"the class in the model, and {patches} patches are no square grid, and not the model's "
            f"of {own_grid}; class_token must be the checkpoint's; where it is, build the model with "
            "its img_size, load, then call set_input_size"
        )
    grid = tuple(grid or (side, side))
    resampled = resample_abs_pos_embed(
        pos_embed,
        new_size=own_grid,
        old_size=grid,
        num_prefix_tokens=model.num_prefix_tokens,
        verbose=True,
    )
    return resampled, grid


def trained_grid_of(recorded: Tensor) -> tuple[int, int]:
    """Return the ``trained_grid`` that a state dict has beside its weights.

    Raises:
        ValueError: It is no pair of positive integers.
    """
    sizes = recorded.tolist() if recorded.shape == (2,) and not recorded.is_floating_point() else []
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"trained_grid must be two positive integers, got {recorded}")
    return (sizes[0], sizes[1])


def _grid_of_arguments(
    model: nn.Module, weight: Tensor | None, patches: int
) -> tuple[int, int] | None:
    """Tell a checkpoint's grid from the arguments of its model, None where it has another size.

    Args:
        model: That is to load it; timm has left the arguments of the checkpoint's there.
        weight: Of the patch embedding, None if the checkpoint has none.
        patches: Of the checkpoint's position embedding.
    """
    arguments = getattr(model, "pretrained_model_args", {})
    if weight is None or arguments.get("patch_stride") is None:
        return get_pretrained_grid_size(model, weight, patches)
    sizes = arguments.get("img_size") or model.pretrained_cfg["input_size"][-2:]
    lengths = zip(
        to_2tuple(sizes), weight.shape[-2:], to_2tuple(arguments["patch_stride"]), strict=True
    )
    grid = tuple((size - patch) // stride + 1 for size, patch, stride in lengths)
    return grid if math.prod(grid) == patches else None


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Adapt a checkpoint to a model: official Vision Mamba names, another image or patch size.

    Args:
        state_dict: Of a model, or a checkpoint that holds it as "model" or "state_dict".
        model: That is to load it.

    Returns:
        A state dict with the names, shapes and grid of the model, and the grid of the checkpoint as
        ``trained_grid``, unless that has one.

    Raises:
        ValueError: The position embedding is of a grid that cannot be told, or the checkpoint is of
            an official Vision Mamba with rotary position embeddings or a missing direction.
    """
    state_dict = state_dict.get("model", state_dict)
    state_dict = state_dict.get("state_dict", state_dict)
    if is_official_vim(state_dict):
        state_dict = convert_official_vim(state_dict)
    adapted = OrderedDict(state_dict)
    adapted._metadata = OrderedDict(getattr(state_dict, "_metadata", {}))
    weight = state_dict.get("patch_embed.proj.weight")
    patch_size = model.patch_embed.proj.weight.shape[-2:]
    if weight is not None and weight.shape[-2:] != patch_size:
        adapted["patch_embed.proj.weight"] = resample_patch_embed(
            weight, list(patch_size), verbose=True
        )
    pos_embed = state_dict.get("pos_embed")
    if pos_embed is not None:
        own = adapted._metadata.get("", {})
        patches = pos_embed.shape[1] - model.num_prefix_tokens
        grid = own.get("grid_size") or _grid_of_arguments(model, weight, patches)
        adapted["pos_embed"], grid = resized_pos_embed(pos_embed, model, grid)
        adapted.setdefault("trained_grid", torch.tensor(grid))
        adapted._metadata[""] = own | {"grid_size": model.patch_embed.grid_size}
    return adapted
