"""Checkpoints: plain dictionaries, written whole or not at all, verified when read.

A checkpoint holds arch, model_args and pretrained_cfg (timm's name and arguments of the model, its
classes and preprocessing), state_dict, state_dict_ema (where an average is kept), optimizer, run (how
far it has come, see state.py), epoch (how many are finished), metric (the best top-1 so far), config
(every setting), asked (the settings as they were asked for), data (fingerprints of both splits) and
versions. The names are timm's, so timm.create_model(name, checkpoint_path=...) reads the weights; it
prefers state_dict_ema, while training and evaluation here report state_dict.

A run's folder has last.pt, previous.pt (the one before) and best.pt.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vil.messages import first_line
from vil.training.config import TrainConfig
from vil.training.errors import OutputError
from vil.training.files import link_atomically, write_atomically
from vil.training.run.resolve import model_arguments
from vil.training.run.setup import Training, versions
from vil.training.run.state import RunState
from vil.weights import check_sums

_KEYS = (
    *("arch", "model_args", "pretrained_cfg", "state_dict", "optimizer"),
    *("run", "epoch", "metric", "config", "asked", "data"),
)

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a run is, beside how far it has come."""

    config: TrainConfig
    """All settings, filled in."""
    asked: TrainConfig
    """The settings as they were asked for."""
    fingerprints: dict[str, str]
    """Of the training and validation images."""
    classes: tuple[str, ...] | None
    """Names of the classes, None where the data holds bare indices."""

    def pretrained_cfg(self) -> dict[str, Any]:
        """Describe the classes and the preprocessing of images in timm's terms."""
        model, data = self.config.model, self.config.data
        names = {} if self.classes is None else {"label_names": list(self.classes)}
        return names | {
            "num_classes": model.num_classes,
            "input_size": (model.in_chans, model.img_size, model.img_size),
            "mean": data.mean,
            "std": data.std,
            "interpolation": data.interpolation,
            "crop_pct": data.crop_pct,
        }


def save_checkpoint(folder: Path, training: Training, about: About, state: RunState) -> None:
    """Write last.pt, having kept the one before as previous.pt; best.pt, too, after its epoch.

    The new file is read back before it takes the old one's name.

    Args:
        folder: The run's folder.
        training: Model, average and optimiser.
        about: What the run is.
        state: How far it has come.

    Raises:
        OutputError: it could not be written; the earlier ones are intact.
    """
    checkpoint = {
        "arch": about.config.model.name,
        "model_args": model_arguments(about.config.model),
        "pretrained_cfg": about.pretrained_cfg(),
        "state_dict": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "run": state.as_dict(),
        "epoch": len(state.history),
        "metric": state.best_top1 if state.history else None,
        "config": dataclasses.asdict(about.config),
        "asked": dataclasses.asdict(about.asked),
        "data": about.fingerprints,
        "versions": versions(),
    }
    if training.ema is not None:
        checkpoint["state_dict_ema"] = training.ema.module.state_dict()
    last = folder / LAST
    if last.exists():
        link_atomically(last, folder / PREVIOUS)
    write_atomically(last, lambda file: torch.save(checkpoint, file), prove=_check_sums)
    link_if_best(folder, state)


def link_if_best(folder: Path, state: RunState) -> None:
    """Name last.pt best.pt, too, if it was written after the best epoch so far and before a step.

    One that was written because settings were changed may have another average than the epoch had.
    """
    if state.best_is_last and state.loss_count == 0 and not state.has_just_changed:
        link_atomically(folder / LAST, folder / BEST)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by save_checkpoint and verify it.

    Raises:
        OutputError: the file is missing, unreadable, damaged, or something else.
    """
    _check_sums(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its unpickler meets
        raise OutputError(
            f"checkpoint {path} is truncated or not a checkpoint: {first_line(error)}"
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
        raise OutputError(
            f"checkpoint {path} does not fit model {arch}: {first_line(error)}"
        ) from error


def _check_sums(path: Path) -> None:
    """Compare the file with its checksums.

    Raises:
        OutputError: it is missing, cut off, no checkpoint, or a checksum is wrong.
    """
    try:
        check_sums(path)
    except FileNotFoundError as error:
        raise OutputError(f"checkpoint {path} does not exist") from error
    except ValueError as error:
        raise OutputError(f"checkpoint {error}") from error
