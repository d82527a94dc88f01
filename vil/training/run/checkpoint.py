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
from typing import Any, NoReturn, TypedDict

import torch
from torch import Tensor, nn

from vil.forms import misfit
from vil.messages import first_line, one_line
from vil.training.config import TrainConfig
from vil.training.errors import DamagedError, NonFiniteLossError, OutputError
from vil.training.files import is_there, link_atomically, write_atomically
from vil.training.run.resolve import model_arguments
from vil.training.run.setup import Training, versions
from vil.training.run.state import RunState
from vil.weights import Described, check_finite, check_plain, check_sums, load_archive

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"


class _ParamGroup(TypedDict):
    params: list[int]


class _Optimizer(TypedDict):
    state: dict[int, dict[str, Any]]
    param_groups: list[_ParamGroup]


class _Fingerprints(TypedDict):
    training: str
    validation: str


class _Averages(TypedDict, total=False):
    state_dict_ema: dict[str, Tensor]


class _Checkpoint(Described, _Averages):
    """What a run needs of a checkpoint to go on."""

    state_dict: dict[str, Tensor]
    optimizer: _Optimizer
    metric: float | None
    data: _Fingerprints


class _Parts(TypedDict):
    """The same, those parts of it that are described by the classes that they become."""

    run: RunState
    config: TrainConfig
    asked: TrainConfig


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
        NonFiniteLossError: a weight is NaN or infinite, which is not kept.
    """
    for model in (training.model, *([] if training.ema is None else [training.ema.module])):
        try:
            check_finite(model.state_dict(), f"the weights after step {state.step}")
        except ValueError as error:
            kept = kept_checkpoints(folder)
            raise NonFiniteLossError(f"{error}; {kept}") from error
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
    if is_there(last):
        link_atomically(last, folder / PREVIOUS)
    write_atomically(last, lambda file: torch.save(checkpoint, file), prove=_check_sums)
    link_if_best(folder, state)


def link_if_best(folder: Path, state: RunState) -> None:
    """Name last.pt best.pt, too, if it was written after the best epoch so far and before a step.

    One that was written because settings were changed may have another average than the epoch had.
    """
    if state.best_is_last and state.loss_count == 0 and not state.has_just_changed:
        link_atomically(folder / LAST, folder / BEST)


def kept_checkpoints(folder: Path) -> str:
    """Say which checkpoints a run that cannot go on has, all written before that."""
    try:
        names = [name for name in (BEST, LAST, PREVIOUS) if is_there(folder / name)]
    except OutputError as error:
        return f"whether a checkpoint was written before is not known, {error}"
    if not names:
        return "no checkpoint was written before"
    return f"{', '.join(names)} in {folder} {'is' if len(names) == 1 else 'are'} from before and intact"


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by save_checkpoint and verify it.

    Raises:
        OutputError: the file is missing or cannot be read.
        DamagedError: it was read, and is damaged or something else.
    """
    try:
        checkpoint = load_archive(path)
    except (OSError, MemoryError, ValueError) as error:
        _explain(path, error)
    wrong = (
        misfit(checkpoint, _Checkpoint, "it")
        or misfit(checkpoint, _Parts, "it")
        or _contradiction(checkpoint)
    )
    if wrong is not None:
        raise DamagedError(f"checkpoint {path} was not written by train_imagenet.py: {wrong}")
    try:
        for key in ("state_dict", "state_dict_ema"):
            check_plain(checkpoint.get(key, {}), path)
            check_finite(checkpoint.get(key, {}), path)
        for values in checkpoint["optimizer"]["state"].values():
            check_plain({k: v for k, v in values.items() if isinstance(v, Tensor)}, path)
    except ValueError as error:
        raise DamagedError(f"checkpoint {error}") from error
    return checkpoint


def _contradiction(checkpoint: dict[str, Any]) -> str | None:
    """Say what of a checkpoint, each part of which has its form, cannot be of one run."""
    run = checkpoint["run"]
    missing = [item.name for item in dataclasses.fields(RunState) if item.name not in run]
    if missing:
        return f"its run lacks {', '.join(missing)}"
    epochs = len(run["history"])
    if checkpoint["epoch"] != epochs:
        return f"it is of epoch {checkpoint['epoch']} and its log of {epochs} epochs"
    if not min(epochs, 1) <= run["best_epoch"] <= epochs:
        return f"its best epoch is {run['best_epoch']} of {epochs}"
    if run["step"] < 0 or run["loss_count"] < 0:
        return "it has done fewer steps than none"
    return None


def load_weights(model: nn.Module, state_dict: dict[str, Any], path: Path, arch: str) -> None:
    """Load weights strictly.

    Args:
        model: Receives them.
        state_dict: The weights.
        path: Their file, for the error message.
        arch: The model's name, for the error message.

    Raises:
        OutputError: names, shapes or kinds of numbers differ from the model's.
    """
    for name, value in model.state_dict().items():
        found = state_dict.get(name, value).dtype
        if found != value.dtype:
            raise OutputError(
                f"checkpoint {path} does not fit model {arch}: {name} is {found} in the checkpoint "
                f"and {value.dtype} in the model"
            )
    try:
        model.load_state_dict(state_dict)
    except (RuntimeError, ValueError) as error:
        raise OutputError(
            f"checkpoint {path} does not fit model {arch}: {first_line(error)}"
        ) from error


def _check_sums(path: Path) -> None:
    """Compare the file with its checksums.

    Raises:
        OutputError: it cannot be read, or a checksum is wrong.
    """
    try:
        check_sums(path)
    except (OSError, MemoryError, ValueError) as error:
        _explain(path, error)


def _explain(path: Path, error: Exception) -> NoReturn:
    """Raise what reading a checkpoint raised as an error of a run.

    Raises:
        OutputError: it is missing or cannot be read.
        DamagedError: it was read, and is not whole.
    """
    if isinstance(error, ValueError):
        raise DamagedError(f"checkpoint {error}") from error
    if isinstance(error, FileNotFoundError):
        raise OutputError(f"checkpoint {path} does not exist") from error
    said = error.strerror if isinstance(error, OSError) else one_line(error)
    raise OutputError(f"checkpoint {path} cannot be read: {said}") from error
