"""What a trained model needs beside its weights: ``model.json``, from which --predict builds it and prepares images."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from vil.messages import short_repr
from vil.timm_models import OTHER_WEIGHTS
from vil.training.files import write_text

DESCRIPTION = "model.json"
# Entries, what each may be, and how to tell.
_ENTRIES = {
    "example": ("a string", lambda v: isinstance(v, str)),
    "backbone": ("a string", lambda v: isinstance(v, str)),
    "model_kwargs": ("an object without arguments that fetch weights", lambda v: _is_free(v)),
    "img_size": ("a whole number above 0", lambda v: type(v) is int and v > 0),
    "mean": ("three numbers", lambda v: _is_list(v, (int, float)) and len(v) == 3),
    "std": ("three numbers above 0", lambda v: _is_list(v, (int, float)) and len(v) == 3 and min(v) > 0),
    "classes": ("a list of names", lambda v: _is_list(v, (str,)) and len(v) > 0),
}


def write_description(args: argparse.Namespace, classes: Sequence[str]) -> None:
    """Save the options of ``training.parse`` that make the model, and its class names, in --output."""
    content = {key: getattr(args, key, None) for key in _ENTRIES} | {"classes": [*classes]}
    content["model_kwargs"] = {k: v for k, v in args.model_kwargs.items() if k not in OTHER_WEIGHTS}
    write_text(args.output / DESCRIPTION, json.dumps(content, indent=2) + "\n")


def read_description(folder: Path, example: str) -> dict[str, object]:
    """Return what ``write_description`` saved of a run.

    Args:
        folder: --output of the run.
        example: Name of the example that reads it.

    Raises:
        FileNotFoundError: If the description or the weights are missing.
        ValueError: If the description cannot be read, or is of another example.
    """
    path = folder / DESCRIPTION
    for needed in (path, folder / "weights.pt"):
        if not needed.is_file():
            raise FileNotFoundError(f"{needed} is missing; train with --output {folder} first")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.keys() != _ENTRIES.keys():
        found = ", ".join(content) or "an empty one" if isinstance(content, dict) else short_repr(content)
        raise ValueError(f"{path} must be an object with {', '.join(_ENTRIES)}, got {found}")
    for key, (allowed, holds) in _ENTRIES.items():
        if not holds(content[key]):
            raise ValueError(f"{key} of {path} must be {allowed}, got {short_repr(content[key])}")
    if content["example"] != example:
        raise ValueError(f"{path} must be of example {example}, got {content['example']}; use that script")
    # Python's tuples are lists in JSON.
    kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in content["model_kwargs"].items()}
    return content | {"model_kwargs": kwargs, "weights": None}


def _is_list(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(type(one) in kinds for one in value)


def _is_free(value: object) -> bool:
    """Return whether a value is a dict without arguments with which timm would fetch or open weights."""
    return isinstance(value, dict) and not value.keys() & {*OTHER_WEIGHTS}
