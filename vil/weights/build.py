"""Build models from weights, as their source or the caller describes, or load weights into given modules."""

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_pretrained
from timm.models._input import get_model_input_config
from torch import Tensor, nn

from vil.backbone import only_backbone
from vil.block import BidirectionalMixer
from vil.convert import has_levels, with_own_names
from vil.messages import first_line, printable
from vil.registry import RECURRENCES
from vil.timm_models import (
    FEATURES,
    OTHER_WEIGHTS,
    create,
    is_known,
    is_own,
    similar_model,
    state_images,
)
from vil.weights.archive import check_finite
from vil.weights.sources import Weights, read_weights

_logger = logging.getLogger("vil")
_UNNAMED = "; the source does not say whether it has the diagonal or the exact form, taken for "


def load(
    source: str | Path,
    model: str | nn.Module | None = None,
    *,
    ema: bool = False,
    **timm_arguments: Any,
) -> nn.Module:
    """Build a model with the weights of a source, or load them into a module that another package built.

    Your arguments override the source's description of its model (name, sizes, classes, preprocessing).
    The head is new if the number of classes differs. Position and patch embeddings of other sizes are
    resampled, and the patch embedding is adapted to other channels; everything else must fit. The logger
    "vil" reports taken, resampled and new tensors in one line, as a warning if any are new.

    Args:
        source: A checkpoint of train_imagenet.py, a folder from release.py (also as ``local-dir:FOLDER``) or a
            ``.safetensors`` file. Or a file with a state dict (possibly as "state_dict" or "model"), such as
            official Vision Mamba's. It can also be ``hf-hub:NAME``, or the name of a timm model.
        model: timm's name of the model, if the source does not name it. Or a module that contains one of
            this package's backbones, such as a detector. The backbone takes the weights, except for parts
            that timm removed from it to return features.
        ema: Take the averaged weights of a training run instead of the last ones.
        **timm_arguments: Arguments of ``timm.create_model``: num_classes, img_size, features_only, ...

    Returns:
        The model, in training mode like timm's; or the given module. If the source names its classes and
        the head is not new, ``model.pretrained_cfg["label_names"]`` has the names.

    Raises:
        FileNotFoundError: If there is no such source.
        OSError, MemoryError, LookupError: Same as in ``vil.weights.sources.read_weights``.
        ValueError: Same as in ``read_weights``. If no model is named or timm cannot create it. If a weight does
            not fit the model by name, shape, kind of number (float, int, bool, complex) or range of the
            dtype; the message names the first such weight. If a module does not contain exactly one backbone
            of this package, or is given with arguments of timm.
    """
    if isinstance(model, nn.Module):
        if timm_arguments:
            raise ValueError(
                f"model is already built, so it takes no arguments, got {', '.join(timm_arguments)}"
            )
        weights, backbone = read_weights(source, ema), only_backbone(model)
        if weights.architecture is not None:
            recurrence = backbone.blocks[0].mixer.recurrence
            _check_recurrence(weights, type(model).__name__, recurrence)
        # What timm removed from a backbone to return features takes no weights.
        modules = backbone.named_modules()
        removed = [name for name, module in modules if isinstance(module, nn.Identity)]
        removed += [f"blocks.{i}" for i in range(len(backbone.blocks), backbone.depth)]
        built, line = model, _load(backbone, weights, True, tuple(f"{n}." for n in removed))
    else:
        built, line = model_with(read_weights(source, ema), model, **timm_arguments)
    warns = "; new " in line or _UNNAMED in line
    _logger.log(logging.WARNING if warns else logging.INFO, "weights %s", line)
    return built


def model_with(
    weights: Weights, name: str | None = None, *, keep_head: bool = True, **arguments: Any
) -> tuple[nn.Module, str]:
    """Build a model with given weights.

    Args:
        weights: The weights.
        name: timm's name of the model; the source's name if None.
        keep_head: Also take the head, if it has the same number of classes.
        **arguments: Arguments of ``timm.create_model``; by default the source's.

    Returns:
        The model, and one line that lists taken, resampled and new tensors.

    Raises:
        ValueError: If no name is given or known, or timm cannot create the model. Also if an argument of timm
            names other weights, or the weights do not fit the model.
    """
    name = name or weights.architecture
    arguments = {key: value for key, value in arguments.items() if value is not None}  # as in timm
    if name is None:
        raise ValueError(
            f"{weights.origin} does not name the model of its weights; pass it, for example "
            f'vil.load(source, "vil_tiny")'
        )
    if not is_known(name):
        raise ValueError(
            f"{weights.origin}: model must be the name of a timm model, got {printable(name[:50])}"
            f"{similar_model(name)}"
        )
    if weights.architecture is not None:
        arguments = weights.model_args | arguments
        _check_recurrence(weights, name, _recurrence(name, arguments))
    arguments = _classes_of_the_head(weights, name) | arguments
    for key in OTHER_WEIGHTS:
        if key in arguments:
            raise ValueError(f"{key} must not be given: the weights come from {weights.origin}")
    features = {key: arguments.pop(key) for key in FEATURES if key in arguments}
    if features.get("features_only"):
        arguments["num_classes"] = 0  # only then a pyramid has its levels
    model = _created(
        weights,
        name,
        pretrained_cfg_overlay=weights.pretrained_cfg,
        pretrained_model_args=weights.model_args,
        **arguments,
    )
    line = _load(model, weights, keep_head)
    state_images(model)
    if features:  # timm loads these weights unchanged into a new model, and takes it apart
        own = {"num_classes": model.num_classes, "label_offset": None}
        overlay = model.pretrained_cfg | own | {"state_dict": model.state_dict()}
        features |= {"pretrained": True, "pretrained_cfg_overlay": overlay}
        model = _created(weights, name, **arguments, **features)
        for module in model.modules():  # timm keeps the weights a second time there
            getattr(module, "pretrained_cfg", {}).pop("state_dict", None)
        state_images(model)
    return model, line


def _created(weights: Weights, name: str, **arguments: Any) -> nn.Module:
    """Create a model; raise a one-line ValueError that names the source if timm or the model refuses."""
    try:
        return create(name, **arguments)
    except ValueError as error:
        raise ValueError(f"{weights.origin}: {error}") from error


def _classes_of_the_head(weights: Weights, name: str) -> dict[str, int]:
    """Return num_classes by the rows of the head, or nothing if the source states it."""
    if "num_classes" in weights.model_args or "num_classes" in weights.pretrained_cfg:
        return {}
    cfg = timm.get_pretrained_cfg(name)
    heads = [] if cfg is None else _heads(cfg.to_dict())
    rows = [
        len(weights.state_dict[f"{h}weight"]) for h in heads if f"{h}weight" in weights.state_dict
    ]
    offset = weights.pretrained_cfg.get("label_offset", 0)  # rows that timm drops
    return {"num_classes": rows[0] - offset} if rows else {}


def _check_recurrence(weights: Weights, name: str, mine: str | None) -> None:
    """Raise ValueError for weights of another recurrence, whose names and shapes may all agree."""
    theirs = _recurrence(weights.architecture, weights.model_args)
    if mine != theirs:
        first = next((key for key in weights.state_dict if ".mixer." in key), "the first block")
        raise ValueError(
            f"{weights.origin} has weights of {weights.architecture} ({theirs or 'no scan'}), but "
            f"{name} has another recurrence ({mine or 'no scan'}) from {first} on"
        )


def _recurrence(name: str, arguments: dict[str, Any]) -> str | None:
    """Return the recurrence of one of our models, or None for other models."""
    if not is_own(name):
        return None
    return str(arguments.get("recurrence", RECURRENCES[name.partition(".")[0]]))


def _load(
    model: nn.Module, weights: Weights, keep_head: bool, removed: tuple[str, ...] = ()
) -> str:
    """Load the weights into a model, adapted as timm does; return the line of ``_load_report``.

    Weights whose names begin with one of ``removed`` are left out.
    """
    # The copy keeps the record of grid and recurrence that PyTorch adds to a state dict.
    adapted = copy.copy(weights.state_dict)
    # timm names a model's filter of weights to nobody but the model's own file.
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    result: list[Any] = []
    hook = model.register_load_state_dict_post_hook(lambda _, keys: result.append(keys))
    try:
        if adapt is not None:
            adapted = adapt(adapted, model)
        left_out = [key for key in adapted if key.startswith(removed)]
        for key in left_out:
            del adapted[key]
        _check_dtypes(model, adapted)
        load_pretrained(
            model,
            _cfg_of_weights(model, adapted, weights, keep_head) | {"state_dict": adapted},
            num_classes=model.num_classes,
            in_chans=get_model_input_config(model)["input_size"][0],
            strict=False,
        )
    except Exception as error:  # filters of other models raise various errors
        raise _misfit(weights, model, first_line(error)) from error
    finally:
        hook.remove()
    missing, unexpected = result[0]
    heads = tuple(_heads(model.pretrained_cfg))
    lacking = [key for key in missing if not key.startswith(heads)]
    if lacking or unexpected:
        key, where = (lacking[0], "weights") if lacking else (unexpected[0], "model")
        raise _misfit(weights, model, f"{key} is missing in the {where}")
    if missing:
        model.pretrained_cfg.pop("label_names", None)  # they belong to the old head
    if not has_levels(weights.state_dict):
        missing += [name for name, _ in model.named_parameters() if name.startswith("pyramid.")]
    return _load_report(model, weights, missing, left_out)


def _check_dtypes(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Check that the model can represent the weights.

    Raises:
        ValueError: If a weight has another kind of number or is too large, or if the model is on device meta.
    """
    rounded = {}
    for name, own in model.state_dict().items():
        value = state_dict.get(name, own)
        if own.is_meta:
            raise ValueError("the model is on device meta, which stores no values")
        if _kind(value) != _kind(own):
            raise ValueError(f"{name} is {value.dtype} in the weights and {own.dtype} in the model")
        if _kind(own) == "float" and torch.finfo(value.dtype).max > torch.finfo(own.dtype).max:
            rounded[name] = value.to(own.dtype)
    check_finite(rounded, "converted to the model's dtype")


def _kind(value: Tensor) -> str:
    if value.is_floating_point() or value.is_complex():
        return "complex" if value.is_complex() else "float"
    return "bool" if value.dtype == torch.bool else "int"


def _cfg_of_weights(
    model: nn.Module, source: dict[str, Tensor], weights: Weights, keep_head: bool
) -> dict[str, Any]:
    """Return a pretrained_cfg that describes the weights by their tensors, which are always right."""
    cfg = model.pretrained_cfg
    rows = [len(source[f"{h}weight"]) for h in _heads(cfg) if f"{h}weight" in source]
    offset = weights.pretrained_cfg.get("label_offset", 0)
    if rows and offset >= rows[0]:
        raise ValueError(f"label_offset must be below the {rows[0]} rows of the head, got {offset}")
    stem = source.get(f"{cfg.get('first_conv')}.weight")
    channels = cfg["input_size"][0] if stem is None or stem.ndim != 4 else stem.shape[1]
    return cfg | {
        "num_classes": rows[0] - offset if rows and keep_head else -1,
        "label_offset": offset,
        "input_size": (channels, *cfg["input_size"][1:]),
        "custom_load": False,
        **dict.fromkeys(("source", "file", "url", "hf_hub_id"), ""),
    }


def _misfit(weights: Weights, model: nn.Module, why: str) -> ValueError:
    name = model.pretrained_cfg["architecture"]
    return ValueError(f"{weights.origin} does not fit model {name}: {printable(why)}")


def _load_report(
    model: nn.Module, weights: Weights, missing: list[str], left_out: list[str]
) -> str:
    """Return one line that lists taken, resampled, new and left-out tensors."""
    source = with_own_names(weights.state_dict)
    taken, resampled, new = 0, [], []
    levels = [key for key in missing if key.startswith("pyramid.")]
    for key, value in model.state_dict().items():
        if key in levels or key == "ref_feat_bits":  # no weight
            continue
        given = source.get(key, value)  # the model's filter may have renamed it
        if key in missing:
            new.append(f"{key} {tuple(value.shape)}")
        elif given.shape == value.shape and torch.equal(given.to(value), value):
            taken += 1
        else:
            resampled.append(f"{key} {tuple(given.shape)} -> {tuple(value.shape)}")
    new += [f"pyramid, {len(levels)} tensors"] if levels else []
    kind = ", averaged" if weights.averaged else ""
    epoch = f", {weights.age}" if weights.age else ""
    parts = [f"{taken} tensors taken"]
    parts += [f"resampled {', '.join(resampled)}"] if resampled else []
    parts += [f"new {', '.join(new)}"] if new else []
    parts += [f"left out {', '.join(left_out)}"] if left_out else []
    line = f"from {weights.origin}{kind}{epoch}: {'; '.join(parts)}"
    # Both forms have the same names and shapes.
    recorded = getattr(weights.state_dict, "_metadata", {}).values()
    if weights.architecture is None and not any("recurrence" in module for module in recorded):
        mixer = next((m for m in model.modules() if isinstance(m, BidirectionalMixer)), None)
        if mixer is not None and mixer.recurrence != "mamba":
            line += f"{_UNNAMED}{mixer.recurrence}"
    return line


def _heads(cfg: dict[str, Any]) -> list[str]:
    """Return prefixes of the names of the head's parameters."""
    heads = cfg.get("classifier") or ()
    return [f"{head}." for head in ((heads,) if isinstance(heads, str) else heads)]
