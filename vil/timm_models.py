"""timm's models by name: created with errors in one line, and their arguments by what they mean."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import isclass, signature
from typing import Any

import timm
from timm.models._input import get_model_input_config
from torch import nn

from vil.messages import did_you_mean, one_line

OTHER_WEIGHTS = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args"),
    *("pretrained_strict", "checkpoint_path", "cache_dir"),
)
"""Arguments that fetch weights or describe fetched weights."""
FEATURES = ("features_only", "out_indices", "feature_cls")
"""Arguments that make a model return features instead of logits."""
NOT_OF_A_MODEL = (
    *(*OTHER_WEIGHTS, *FEATURES),
    *("feature_cfg", "scriptable", "exportable", "no_jit", "device", "dtype"),
)
"""Arguments that do not identify a model; neither model.args nor a weights file may contain them."""


def create(name: str, **arguments: Any) -> nn.Module:
    """Create a timm model, and state its images; same arguments as ``timm.create_model``.

    Models without ``img_size`` do not get it.

    Raises:
        ValueError: If timm or the model refuses; the message gives the reason in one line.
    """
    try:
        model = timm.create_model(name, **arguments)
    except Exception as error:  # models raise various errors
        if "img_size" in arguments and "'img_size'" in str(error):
            return create(name, **{k: v for k, v in arguments.items() if k != "img_size"})
        hint = _meant(name, str(error))
        raise ValueError(f"cannot create model {name}: {one_line(error)}{hint}") from error
    state_images(model)
    return model


def state_images(model: nn.Module) -> None:
    """State the images that a model takes in its ``pretrained_cfg``: size, mean and std.

    timm saves and prepares images by it, but keeps the images of the weights there, even if the
    model was created with another ``img_size`` or ``in_chans``. The size for which the weights were
    made is kept with their arguments, where timm looks for it first.
    """
    cfg, args = model.pretrained_cfg, getattr(model, "pretrained_model_args", {})
    model.pretrained_model_args = {"img_size": tuple(cfg["input_size"][1:])} | args
    cfg["input_size"] = size = get_model_input_config(model)["input_size"]
    cfg.update({key: by_channel(cfg[key], size[0]) for key in ("mean", "std") if cfg.get(key)})


def by_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a value for each channel: timm's rule, their mean, if there are values for other channels."""
    own = len(values) == channels
    return tuple(values) if own else (sum(values) / len(values),) * channels


def _meant(name: str, message: str) -> str:
    """Return a suggestion if the error of ``timm.create_model`` is about a misspelt model or argument, else ""."""
    if not timm.is_model(name):
        return similar_model(name)
    wrong = re.search(r"unexpected keyword argument '(\w+)'(?!.*Did you mean)", message)
    if wrong is None:
        return ""
    module = sys.modules[timm.model_entrypoint(name).__module__]
    classes = [c for c in vars(module).values() if isclass(c) and issubclass(c, nn.Module)]
    return did_you_mean(wrong[1], {key for c in classes for key in signature(c).parameters})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def similar_model(name: str) -> str:
    """Return "; did you mean ...?" with the most similar name of a timm model, or "" if none is similar."""
    return did_you_mean(name, {*timm.list_models(), *timm.list_pretrained()})


def is_own(name: str) -> bool:
    """Return whether a timm model is registered by this package."""
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("vil.")
