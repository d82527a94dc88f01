"""Checkpoints: plain dictionaries, written whole or not at all, verified when read.

A checkpoint holds arch, state_dict, state_dict_ema (where an average is kept), optimizer, epoch
(how many are finished), metric (the best top-1 so far), history (a row per epoch), config and
versions. The names are timm's, so timm.create_model(name, checkpoint_path=...) reads the weights;
it prefers state_dict_ema, while training and evaluation here report state_dict.
"""

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vil.training.config import TrainConfig
from vil.training.errors import ConfigError, OutputError
from vil.training.files import write_atomically, write_text
from vil.training.recipes import changed_keys, config_from_dict, to_yaml
from vil.training.setup import Training, versions

_KEYS = ("arch", "state_dict", "optimizer", "epoch", "metric", "history", "config")


def save_checkpoint(
    path: Path,
    training: Training,
    config: TrainConfig,
    history: list[dict[str, Any]],
    best: float,
) -> None:
    """Write everything that evaluation and resuming need.

    Args:
        path: Destination; replaced atomically.
        training: Model, average and optimiser.
        config: The run's configuration.
        history: One row per epoch so far.
        best: Best top-1 so far, in percent.
    """
    checkpoint = {
        "arch": config.model.name,
        "state_dict": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "epoch": len(history),
        "metric": best,
        "history": history,
        "config": dataclasses.asdict(config),
        "versions": versions(),
    }
    if training.ema is not None:
        checkpoint["state_dict_ema"] = training.ema.module.state_dict()
    write_atomically(path, lambda file: torch.save(checkpoint, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by save_checkpoint and verify it.

    Raises:
        OutputError: the file is missing, unreadable, damaged, or something else.
    """
    try:
        # torch.load does not check the checksums of what it reads, zipfile does.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise OutputError(f"checkpoint {path} is damaged: wrong checksum in {damaged}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise OutputError(f"checkpoint {path} does not exist") from error
    except OutputError:
        raise
    except Exception as error:  # torch.load raises whatever its unpickler meets
        reason = str(error).split("\n", 1)[0]
        raise OutputError(
            f"checkpoint {path} is truncated or not a checkpoint: {reason}"
        ) from error
    missing = [key for key in _KEYS if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise OutputError(
            f"checkpoint {path} was not written by train_imagenet.py: it lacks {', '.join(missing)}"
        )
    return checkpoint


def load_weights(model: nn.Module, state_dict: dict[str, Any], path: Path, arch: str) -> None:
    """Load weights strictly.

    Args:
        model: Receives them.
        state_dict: The weights.
        path: Their file, for the error message.
        arch: The model's name, for the error message.

    Raises:
        OutputError: names or shapes differ from the model's.
    """
    try:
        model.load_state_dict(state_dict)
    except (RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = lines[1] if len(lines) > 1 else lines[0]
        raise OutputError(f"checkpoint {path} does not fit model {arch}: {reason[:200]}") from error


def start_or_resume(
    folder: Path, training: Training, config: TrainConfig
) -> tuple[TrainConfig, list[dict[str, Any]]]:
    """Record a new run's configuration in its folder, or restore the run that is there.

    Args:
        folder: The run's folder.
        training: On resuming, receives weights, average and optimiser state of last.pt.
        config: The configuration asked for now.

    Returns:
        The configuration with the folder filled in, and a row per finished epoch.

    Raises:
        ConfigError: the run to resume has another configuration.
        OutputError: its checkpoint cannot be read.
    """
    run = dataclasses.replace(config.run, output=str(folder))
    config = dataclasses.replace(config, run=run)
    if not config.run.resume:
        write_text(folder / "config.yaml", to_yaml(config))
        return config, []
    path = folder / "last.pt"
    checkpoint = load_checkpoint(path)
    changed = changed_keys(config_from_dict(checkpoint["config"], str(path)), config)
    if changed:
        raise ConfigError(f"--run.resume: {path} was trained with other {', '.join(changed)}")
    load_weights(training.model, checkpoint["state_dict"], path, config.model.name)
    if training.ema is not None:
        load_weights(training.ema.module, checkpoint["state_dict_ema"], path, config.model.name)
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    return config, checkpoint["history"]
