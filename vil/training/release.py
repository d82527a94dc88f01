"""Turn a checkpoint into a folder that timm loads: safetensors and the model's configuration."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from timm.models import save_for_hf
from tyro.conf import Positional

from vil.training.checkpoint import load_checkpoint, load_weights
from vil.training.config import TrainConfig
from vil.training.errors import ConfigError, OutputError
from vil.training.files import sync
from vil.training.recipes import config_from_dict
from vil.training.setup import build_model


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig:
    """Write the weights of a checkpoint as safetensors, for timm to load by local-dir:FOLDER."""

    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint that train_imagenet.py wrote."""
    folder: Annotated[Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """Folder to write, which must not exist."""
    ema: bool = False
    """Release the averaged weights instead of the last ones."""


def release(options: ReleaseConfig) -> dict[str, Any]:
    """Write model.safetensors and config.json; the folder is there whole or not at all.

    Returns:
        Model name, which weights, epoch and the folder's path.

    Raises:
        ConfigError: the checkpoint has no averaged weights.
        OutputError: the checkpoint cannot be read, or the folder exists or cannot be written.
    """
    path, folder = Path(options.checkpoint), Path(options.folder)
    if folder.exists():
        raise OutputError(f"{folder} exists; choose another folder")
    checkpoint = load_checkpoint(path)
    config = config_from_dict(checkpoint["config"], str(path))
    key = "state_dict_ema" if options.ema else "state_dict"
    if key not in checkpoint:
        raise ConfigError(f"--ema: checkpoint {path} has no averaged weights")
    model = build_model(config.model).eval()
    load_weights(model, checkpoint[key], path, config.model.name)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        save_for_hf(model, temporary, safe_serialization=True, data_config=_preprocessing(config))
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {
        "model": config.model.name,
        "weights": "averaged weights" if options.ema else "weights",
        "epoch": checkpoint["epoch"],
        "folder": str(folder.resolve()),
    }


def _preprocessing(config: TrainConfig) -> dict[str, Any]:
    """Return how images are prepared for the model, in timm's terms."""
    size = config.model.img_size
    return {
        "input_size": (config.model.in_chans, size, size),
        "mean": config.data.mean,
        "std": config.data.std,
        "interpolation": config.data.interpolation,
        "crop_pct": config.data.crop_pct,
    }
