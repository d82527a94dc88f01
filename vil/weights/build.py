"""Build models from weights, as their source or the caller describes, or load weights into given modules."""

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import adapt_input_conv
from timm.models._input import get_model_input_config
from torch import nn

from vil.backbone import only_backbone
from vil.block import BidirectionalMixer
from vil.messages import first_line, printable
from vil.registry import RECURRENCES
from vil.timm_models import FEATURES, OTHER_WEIGHTS, create, similar_model
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
    built, line = model_with(read_weights(source, ema), model, **timm_arguments)
    warns = "; new " in line or _UNNAMED in line
    _logger.log(logging.WARNING if warns else logging.INFO, "weights %s", line)
    return built


def model_with(
    weights: Weights,
    model: str | nn.Module | None = None,
    *,
    keep_head: bool = True,
    **arguments: Any,
) -> tuple[nn.Module, str]:
    """Build a model with given weights, or load them into a given module.

    Args:
        weights: The weights.
        model: Same as in ``load``.
        keep_head: Also take the head, if it has the same number of classes.
        **arguments: Arguments of ``timm.create_model``; by default the source's.

    Returns:
        The model, and one line that lists taken, resampled and new tensors.

    Raises:
        ValueError: Same as in ``load``, except for errors of the source.
    """
    arguments = {key: value for key, value in arguments.items() if value is not None}  # as in timm
    is_built = isinstance(model, nn.Module)
    name = type(model).__name__ if is_built else model or weights.architecture
    refused = [key for key in arguments if is_built or key in OTHER_WEIGHTS]
    if refused:
        why = "the model is already built" if is_built else f"weights come from {weights.origin}"
        raise ValueError(f"{', '.join(refused)} must not be given: {why}")
    if not is_built and (name is None or not timm.is_model(name)):
        hint = ", and the source does not name it" if name is None else similar_model(name)
        raise ValueError(
            f"{weights.origin}: model must be the name of a timm model, such as vil_tiny, got "
            f"{printable(str(name)[:50])}{hint}"
        )
    try:
        if is_built:
            backbone = only_backbone(model)
            # What timm removed from a backbone to return features takes no weights.
            removed = [n for n, m in backbone.named_modules() if isinstance(m, nn.Identity)]
            removed += [f"blocks.{i}" for i in range(len(backbone.blocks), backbone.depth)]
            return model, _load(backbone, weights, keep_head, tuple(f"{n}." for n in removed))

        if weights.architecture is not None:
            arguments = weights.model_args | arguments
        heads = _heads(getattr(timm.get_pretrained_cfg(name), "classifier", None))
        weight = weights.state_dict.get(f"{heads[0]}weight") if heads else None
        if weight is not None and "num_classes" not in weights.pretrained_cfg:
            offset = weights.pretrained_cfg.get("label_offset", 0)
            arguments = {"num_classes": len(weight) - offset} | arguments
        features = {key: arguments.pop(key) for key in FEATURES if key in arguments}
        if features.get("features_only"):
            arguments["num_classes"] = 0  # only then a pyramid has its levels
        model = create(
            name,
            pretrained_cfg_overlay=weights.pretrained_cfg,
            pretrained_model_args=weights.model_args,
            **arguments,
        )
        line = _load(model, weights, keep_head)
        if features:
            # timm loads weights before it takes a model apart, and its strict mode tolerates gaps if
            # the head differs. So a second model takes the weights as the first has checked them.
            cfg = model.pretrained_cfg | {"num_classes": model.num_classes, "label_offset": None}
            cfg["state_dict"] = model.state_dict()
            arguments |= features | {"pretrained": True, "pretrained_cfg_overlay": cfg}
            model = create(name, **arguments)
            for module in model.modules():  # timm keeps the weights a second time there
                getattr(module, "pretrained_cfg", {}).pop("state_dict", None)
    except Exception as error:  # models and their filters of weights raise various errors
        message = f"cannot load {weights.origin} into {name}: {printable(first_line(error))}"
        raise ValueError(message) from error
    return model, line


def _load(model: nn.Module, weights: Weights, keep_head: bool, removed: tuple[str, ...] = ()) -> str:
    """Adapt the weights to a model and load them; return the line of ``_report``.

    Weights whose names begin with one of ``removed`` are left out.
    """
    cfg, source = model.pretrained_cfg, weights.state_dict
    mixer = next((m for m in model.modules() if isinstance(m, BidirectionalMixer)), None)
    recurrence = None if mixer is None else mixer.recurrence
    trained = RECURRENCES.get((weights.architecture or "").partition(".")[0])
    trained = trained and weights.model_args.get("recurrence", trained)
    if trained and trained != recurrence:  # names and shapes may all agree
        raise ValueError(
            f"the weights are of {weights.architecture} ({trained}), but {cfg['architecture']} has "
            f"another recurrence ({recurrence or 'no scan'})"
        )

    # The copy keeps the record of grid and recurrence that PyTorch adds to a state dict.
    adapted = copy.copy(source)
    # timm keeps no reference to a model's filter of weights. By its convention, the file of the
    # model's class has it, under this name.
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if adapt is not None:
        adapted = adapt(adapted, model)
    left_out = [key for key in adapted if key.startswith(removed)]
    for key in left_out:
        del adapted[key]
    stems, channels = cfg.get("first_conv") or (), get_model_input_config(model)["input_size"][0]
    for stem in (stems,) if isinstance(stems, str) else stems:
        weight = adapted.get(f"{stem}.weight")
        if weight is not None and weight.ndim == 4:
            own = model.get_submodule(stem).weight
            base = weight.shape[1] * channels // own.shape[1]  # some stems fold pixels into channels
            adapted[f"{stem}.weight"] = adapt_input_conv(channels, weight, base)
    heads = _heads(cfg.get("classifier"))
    offset = weights.pretrained_cfg.get("label_offset", 0)  # rows before the first class
    for head in heads:
        keys = [key for key in adapted if key.startswith(head)]
        rows = len(adapted.get(f"{head}weight", ()))
        if keys and offset >= rows:
            raise ValueError(f"label_offset must be below the {rows} rows of the head, got {offset}")
        for key in keys:
            if keep_head and rows - offset == model.num_classes:
                adapted[key] = adapted[key][offset:]
            else:
                del adapted[key]
    for key, own in model.state_dict().items():
        if own.is_meta:
            raise ValueError("the model is on device meta, which stores no values")
        value = adapted.get(key, own)
        dtypes = value.dtype, own.dtype
        if not (torch.can_cast(*dtypes) and torch.can_cast(*reversed(dtypes))):
            raise ValueError(f"{key} is {value.dtype} in the weights and {own.dtype} in the model")
        if key in adapted:
            adapted[key] = value.to(own.dtype)
    check_finite(adapted, "converted to the model's dtype")

    missing, unexpected = model.load_state_dict(adapted, strict=False)
    new = [key for key in missing if key.startswith(heads)]
    wrong = [f"{key} is missing in the weights" for key in missing if key not in new]
    wrong += [f"{key} is missing in the model" for key in unexpected]
    if wrong:
        raise ValueError(wrong[0])
    if new:
        cfg.pop("label_names", None)  # they belong to the old head
    # Both forms have the same names and shapes; PyTorch's files record the form.
    recorded = getattr(source, "_metadata", {}).values()
    is_unnamed = weights.architecture is None and not any("recurrence" in m for m in recorded)
    end = f"{_UNNAMED}{recurrence}" if is_unnamed and recurrence not in (None, "mamba") else ""
    return _report(model, weights, new, left_out) + end


def _report(model: nn.Module, weights: Weights, new: list[str], left_out: list[str]) -> str:
    """Return one line that lists taken, resampled, new and left-out tensors."""
    taken, resampled, levels, fresh = 0, [], 0, []
    for key, value in model.state_dict().items():
        read = weights.state_dict.get(key, value)  # the model's filter may have renamed it
        if key in new:
            fresh.append(f"{key} {tuple(value.shape)}")
        elif key.startswith("pyramid.") and key not in weights.state_dict:
            levels += 1
        elif key == "ref_feat_bits":  # no weight
            continue
        elif read.shape == value.shape and torch.equal(read.to(value), value):
            taken += 1
        else:
            resampled.append(f"{key} {tuple(read.shape)} -> {tuple(value.shape)}")
    fresh += [f"pyramid, {levels} tensors"] if levels else []
    parts = [f"{taken} tensors taken"]
    lists = {"resampled": resampled, "new": fresh, "left out": left_out}
    parts += [f"{words} {', '.join(names)}" for words, names in lists.items() if names]
    kind = ", averaged" if weights.averaged else ""
    epoch = f", {weights.age}" if weights.age else ""
    return f"from {weights.origin}{kind}{epoch}: {'; '.join(parts)}"


def _heads(classifier: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return prefixes of the names of the head's parameters, from timm's name of its module or modules."""
    heads = (classifier,) if isinstance(classifier, str) else classifier or ()
    return tuple(f"{head}." for head in heads)
