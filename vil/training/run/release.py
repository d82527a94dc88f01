"""Turn a checkpoint into a folder that timm, transformers and the hub take: weights, config, card."""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from timm.models import save_for_hf
from torch import nn

from vil.loading import model_with
from vil.training.errors import ConfigError, OutputError
from vil.training.files import sync
from vil.training.options import ReleaseConfig
from vil.training.recipes import config_from_dict
from vil.training.run.model_card import model_card
from vil.training.run.setup import read_source
from vil.weights import Weights

_FILES = {"model.safetensors", "config.json", "README.md"}
# What timm says of the weights that it has of a model by that name.
_OF_OTHER_WEIGHTS = ("tag", "description", "origin_url", "paper_name", "paper_ids", "notes")


def release(options: ReleaseConfig) -> dict[str, Any]:
    """Write model.safetensors, config.json and README.md; the folder is there whole or not at all.

    Returns:
        Model name, which weights, epoch and the folder's path.

    Raises:
        ConfigError: there is no such file, it has no averaged weights, or train_imagenet.py did not
            write it.
        OutputError: the checkpoint cannot be read, or the folder exists or cannot be written.
    """
    path, folder = Path(options.checkpoint), Path(options.folder)
    if os.path.lexists(folder):
        raise OutputError(f"{folder} exists; choose another folder")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", options.license):
        raise ConfigError(
            f"--license must be a name of the hub's, as apache-2.0 or other, got {options.license!r}"
        )
    weights = read_source(options.checkpoint, options.ema)
    if weights.config is None:
        raise ConfigError(f"{path} was not written by train_imagenet.py, whose runs are released")
    config = config_from_dict(weights.config, str(path))
    try:
        model, _ = model_with(weights)
    except ValueError as error:
        raise OutputError(f"cannot release {path}: {error}") from error
    card = model_card(folder.name, weights, config, options.license)
    _remove_leftovers(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)  # and if it is there, it is somebody else's
    except OSError as error:
        raise OutputError(f"cannot create {temporary}: {error.strerror}") from error
    try:
        _write(temporary, model.eval(), weights, card, options.license)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {
        "model": config.model.name,
        "weights": "averaged weights" if options.ema else "weights",
        "epoch": weights.epoch,
        "folder": str(folder.resolve()),
    }


def _remove_leftovers(folder: Path) -> None:
    """Remove what releases of the same name that were killed had written, if that can be."""
    with suppress(OSError):
        for path in folder.parent.iterdir():
            number = re.fullmatch(rf"\.{re.escape(folder.name)}\.(\d+)\.tmp", path.name)
            if number is None or path.is_symlink():
                continue
            if {file.name for file in path.iterdir()} - _FILES:  # somebody else's
                continue
            try:
                os.kill(int(number[1]), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)


def _write(folder: Path, model: nn.Module, weights: Weights, card: str, license: str) -> None:
    """Write the files."""
    names, cfg = weights.label_names, weights.pretrained_cfg
    for key in _OF_OTHER_WEIGHTS:
        model.pretrained_cfg.pop(key, None)
    preprocessing = {
        key: cfg[key] for key in ("input_size", "mean", "std", "interpolation", "crop_pct")
    }
    save_for_hf(
        model,
        folder,
        safe_serialization=True,
        data_config=preprocessing | {"crop_mode": "center"},
        model_config={"pretrained_cfg": {"license": license}}
        | ({} if names is None else {"label_names": list(names)}),
    )
    path = folder / "config.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    # The number of classes stands above, and transformers hands it over itself.
    described["model_args"].pop("num_classes", None)
    path.write_text(json.dumps(described, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
