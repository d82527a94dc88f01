"""Models from weights: built as their source describes, or as asked for, with the weights put in."""

import logging
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_pretrained
from torch import Tensor, nn

from vil.backbone import VisionLonghorn
from vil.weights import Weights, read_weights

_FEATURES = ("features_only", "out_indices", "feature_cls")
_logger = logging.getLogger("vil")


def load(
    source: str | Path, model: str | None = None, *, ema: bool = False, **timm_arguments: Any
) -> nn.Module:
    """Build a model with the weights of a source.

    What the source says about its model (name, sizes, classes, preprocessing) holds where no argument
    says otherwise. A head for another number of classes is new, position and patch embeddings of other
    sizes are resampled, images of other channels adapted; everything else must fit. The logger "vil"
    tells in one line what was taken, resampled and new, as a warning if anything is new.

    Args:
        source: A checkpoint of train_imagenet.py; a folder of release.py, also as ``local-dir:FOLDER``;
            a ``.safetensors`` file; a file with a state dict, or with one as "state_dict" or "model",
            the official Vision Mamba's among them; ``hf-hub:NAME``; the name of a timm model.
        model: timm's name of the model, where the source does not say it.
        ema: Take the averaged weights of a training run instead of the last ones.
        **timm_arguments: Of ``timm.create_model``: num_classes, img_size, features_only, ...

    Returns:
        The model, in training mode as timm's are.

    Raises:
        FileNotFoundError: there is no such source.
        LookupError: it has no averaged weights.
        ValueError: the source holds no weights, does not say which model they are of, or they do not
            fit the model; names the first key that does not.
    """
    built, line = model_with(read_weights(source, ema), model, **timm_arguments)
    _logger.log(logging.WARNING if "; new " in line else logging.INFO, "weights %s", line)
    return built


def model_with(
    weights: Weights, name: str | None = None, *, keep_head: bool = True, **arguments: Any
) -> tuple[nn.Module, str]:
    """Build a model with given weights.

    Args:
        weights: The weights.
        name: timm's name of the model; that of the source if None.
        keep_head: Take the head, too, if it has as many classes.
        **arguments: Of ``timm.create_model``; those of the source where they are left out.

    Returns:
        The model, and a line that says what was taken, resampled and new.

    Raises:
        ValueError: no name is given or known, or the weights do not fit the model.
    """
    name = name or weights.architecture
    if name is None:
        raise ValueError(f"{weights.origin} does not say which model its weights are of; name it")
    if weights.architecture is not None:
        _check_recurrence(weights, name)
        arguments = weights.model_args | arguments
    features = {key: arguments.pop(key) for key in _FEATURES if key in arguments}
    described = {
        key: value for key, value in weights.pretrained_cfg.items() if key != "label_names"
    }
    model = create(
        name,
        pretrained_cfg_overlay=described,
        pretrained_model_args=weights.model_args,
        **arguments,
    )
    source = _put_in(model, weights, keep_head)
    line = _account(model, source, weights)
    if features:
        overlay = {**described, "num_classes": model.num_classes, "state_dict": model.state_dict()}
        model = create(
            name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments, **features
        )
    return model, line


def create(name: str, **arguments: Any) -> nn.Module:
    """Create a timm model; ``img_size`` is passed to models that take one, as fixed sizes need it.

    Raises:
        RuntimeError, TypeError, ValueError, AssertionError: as timm and the model do.
    """
    try:
        return timm.create_model(name, **arguments)
    except TypeError as error:
        if "img_size" not in arguments or "'img_size'" not in str(error):
            raise
    return timm.create_model(name, **{k: v for k, v in arguments.items() if k != "img_size"})


def _check_recurrence(weights: Weights, name: str) -> None:
    """Refuse weights of one recurrence for another, whose names and shapes may all agree."""
    mine, theirs = (_recurrence(each) for each in (name, weights.architecture))
    if mine != theirs:
        first = next((key for key in weights.state_dict if ".mixer." in key), "its first")
        raise ValueError(
            f"{weights.origin} has weights of {weights.architecture} ({theirs or 'no scan'}), and "
            f"{name} is another function ({mine or 'no scan'}) from {first} on"
        )


def _recurrence(name: str) -> str | None:
    """Name the recurrence of a model of ours, None for another model."""
    function = timm.model_entrypoint(name) if timm.is_model(name) else None
    if getattr(function, "__module__", None) != VisionLonghorn.__module__:
        return None
    return timm.create_model(name, depth=1, embed_dim=16, num_classes=0).blocks[0].mixer.recurrence


def _put_in(model: nn.Module, weights: Weights, keep_head: bool) -> dict[str, Tensor]:
    """Load the weights, adapted by timm; return them as they were."""
    source = dict(weights.state_dict)
    result: list[Any] = []
    hook = model.register_load_state_dict_post_hook(lambda _, keys: result.append(keys))
    try:
        load_pretrained(
            model,
            _source_cfg(model, source, keep_head) | {"state_dict": dict(source)},
            num_classes=model.num_classes,
            in_chans=getattr(model, "in_chans", model.pretrained_cfg["input_size"][0]),
            filter_fn=getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None),
            strict=False,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise _misfit(weights, model, lines[min(1, len(lines) - 1)]) from error
    finally:
        hook.remove()
    missing, unexpected = result[0]
    missing = [key for key in missing if not key.startswith(tuple(_heads(model)))]
    if missing or unexpected:
        key, where = (missing[0], "weights") if missing else (unexpected[0], "model")
        raise _misfit(weights, model, f"{key} is missing in the {where}")
    return source


def _source_cfg(model: nn.Module, source: dict[str, Tensor], keep_head: bool) -> dict[str, Any]:
    """Describe the source to timm by its tensors, which cannot be wrong about it."""
    cfg = dict(model.pretrained_cfg)
    outputs = [len(source[f"{head}weight"]) for head in _heads(model) if f"{head}weight" in source]
    stem = source.get(f"{cfg.get('first_conv')}.weight")
    channels = cfg["input_size"][0] if stem is None else stem.shape[1]
    return cfg | {
        "num_classes": outputs[0] if outputs and keep_head else -1,
        "input_size": (channels, *cfg["input_size"][1:]),
        "custom_load": False,
        **dict.fromkeys(("source", "file", "url", "hf_hub_id"), ""),
    }


def _misfit(weights: Weights, model: nn.Module, why: str) -> ValueError:
    name = model.pretrained_cfg["architecture"]
    return ValueError(f"{weights.origin} does not fit model {name}: {why[:300]}")


def _account(model: nn.Module, source: dict[str, Tensor], weights: Weights) -> str:
    """Say what became of the weights."""
    taken, resampled, new = 0, [], []
    for key, value in model.state_dict().items():
        if key not in source:
            new.append(f"{key} {tuple(value.shape)}")
        elif source[key].shape == value.shape and torch.equal(source[key].to(value), value):
            taken += 1
        elif key.startswith(tuple(_heads(model))):
            new.append(f"{key} {tuple(value.shape)}")
        else:
            resampled.append(f"{key} {tuple(source[key].shape)} -> {tuple(value.shape)}")
    kind = ", averaged" if weights.averaged else ""
    epoch = "" if weights.epoch is None else f", epoch {weights.epoch}"
    parts = [f"{taken} tensors taken"]
    parts += [f"resampled {', '.join(resampled)}"] if resampled else []
    parts += [f"new {', '.join(new)}"] if new else []
    return f"from {weights.origin}{kind}{epoch}: {'; '.join(parts)}"


def _heads(model: nn.Module) -> list[str]:
    """Return what the names of the head's parameters begin with."""
    heads = model.pretrained_cfg.get("classifier") or ()
    return [f"{head}." for head in ((heads,) if isinstance(heads, str) else heads)]
