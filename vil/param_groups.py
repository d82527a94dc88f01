"""Parameters of a whole model for an optimizer, grouped by learning rate and weight decay."""

from collections.abc import Iterator
from typing import Any

from timm.models._manipulate import group_with_matcher
from torch import nn


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.05, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Group the parameters of a model that may contain a backbone: a detector, a feature extractor, a LightningModule.

    timm's optimizers find the rules of a backbone only if it is the whole model.

    Args:
        model: Model of any kind. Models of timm in it, however deep, are its backbones.
        lr: Learning rate of the parameters above the blocks, such as those of a head.
        weight_decay: Weight decay of matrices. Vectors and what a backbone's ``no_weight_decay()`` names have none.
        layer_decay: Factor from a block's learning rate to the one below, above 0 and at most 1. With D blocks, block i
            has lr layer_decay^(D - i), and the embeddings have lr layer_decay^(D + 1), as in BEiT and ViTDet. None is
            1.

    Returns:
        Groups for any optimizer of PyTorch, without frozen parameters, each with ``params``, ``lr`` and
        ``weight_decay``.

    Raises:
        ValueError: If ``layer_decay`` is out of its range, or is not 1 although no backbone defines its layers.
    """
    layer_decay = 1.0 if layer_decay is None else layer_decay
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must be above 0 and at most 1, got {layer_decay}")
    undecayed, rate, backbones = set(), {}, list(_backbones(model))
    if layer_decay != 1 and not backbones:
        lacking = f"{type(model).__name__}, none of whose parts has a group_matcher()"
        raise ValueError(f"layer_decay must be 1 or None for {lacking}, got {layer_decay}")
    for backbone in backbones:
        named = dict(backbone.named_parameters())
        names = backbone.no_weight_decay() if hasattr(backbone, "no_weight_decay") else ()
        undecayed |= {id(named[name]) for name in names if name in named}
        # "" matches no layer, so it is where a head would be.
        layers = group_with_matcher([*named.items(), ("", None)], backbone.group_matcher(), reverse=True)
        rate |= {id(p): lr * layer_decay ** (layers[""] - layers[name]) for name, p in named.items()}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and id(parameter) not in undecayed
            key = rate.get(id(parameter), lr), weight_decay if decays else 0.0
            groups.setdefault(key, []).append(parameter)
    return [{"params": p, "lr": rate, "weight_decay": decay} for (rate, decay), p in groups.items()]


def _backbones(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost models of timm in a module. Wrappers that pass on attributes, such as PEFT's, are none."""
    if hasattr(type(module), "group_matcher"):
        yield module
        return
    for part in module.children():
        yield from _backbones(part)
