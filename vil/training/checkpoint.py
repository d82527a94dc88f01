"""What a run keeps, and going on from it.

A checkpoint holds arch, model_args and pretrained_cfg (timm's name and arguments of the model, its classes and
preprocessing), state_dict, state_dict_ema (where an average is kept), optimizer, run (how far it has come), epoch
(how many are finished), metric (the best top-1 so far), config (every setting), asked (the settings as they were
asked for), data (fingerprints of both splits) and versions. The names are timm's, so timm.create_model(name,
checkpoint_path=...) reads the weights; it prefers state_dict_ema, while training and evaluation here report
state_dict.

A run's folder has last.pt, previous.pt (the one before) and best.pt. last.pt is the first file that a run writes, so
that a folder is a run's exactly if it has a checkpoint. Running the same command again is all there is to resuming.
"""

import dataclasses
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from vil.messages import first_line, one_line
from vil.training.distributed import versions
from vil.training.errors import (
    ConfigError,
    DamagedError,
    DataError,
    NonFiniteLossError,
    OutputError,
    log,
)
from vil.training.files import is_there, link_atomically, write_atomically
from vil.training.images import Source
from vil.training.model import Trainee
from vil.training.recipes import flat, from_dict
from vil.training.resolve import model_arguments
from vil.training.settings import TrainConfig, marked
from vil.weights.archive import check_finite, check_plain, check_sums, load_archive

LAST, PREVIOUS, BEST = CHECKPOINTS = ("last.pt", "previous.pt", "best.pt")


@dataclass
class RunState:
    """Everything that the next step of a run depends on and that is no tensor."""

    step: int = 0
    """Steps done, skipped ones included."""
    loss_sum: float = 0.0
    """Of the epoch so far."""
    loss_count: int = 0
    """Steps in that sum."""
    seconds: float = 0.0
    """Spent on the epoch so far, by all starts of the run."""
    history: list[dict[str, int | float]] = field(default_factory=list)
    """A row of the log per finished epoch."""
    bad_images: dict[int, str] = field(default_factory=dict)
    """Training images that could not be read so far, and why."""
    bad_steps: dict[int, float] = field(default_factory=dict)
    """Steps skipped because loss or gradient was not finite, and their loss."""
    best_key: str = "top1"
    """What makes an epoch the best: top1, or ema_top1."""
    best_epoch: int = 0
    """Number of the epoch that best.pt is of, the first of equals; 0 if none is finished."""

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Account for a finished epoch, given its row of the log."""
        if not self.history or row[self.best_key] > self.best.get(self.best_key, -1.0):
            self.best_epoch = len(self.history) + 1
        self.history.append(row)
        self.loss_sum, self.loss_count, self.seconds = 0.0, 0, 0.0

    @property
    def best(self) -> dict[str, Any]:
        """The row of the epoch that best.pt is of."""
        return self.history[self.best_epoch - 1]

    @property
    def best_is_last(self) -> bool:
        """Whether the epoch finished last is the best so far, and no step was made since."""
        return 0 < self.best_epoch == len(self.history) and self.loss_count == 0


_STATE = TypeAdapter(RunState)


@dataclass
class Run:
    """A run: its settings, its data, what is trained, and how far it has come."""

    config: TrainConfig
    """All settings, filled in."""
    asked: TrainConfig
    """The settings as they were asked for."""
    trainee: Trainee
    train_source: Source
    val_source: Source
    state: RunState = field(init=False)

    def __post_init__(self) -> None:
        """Begin."""
        self.state = RunState(best_key="ema_top1" if self.config.optim.best == "ema" else "top1")

    def pretrained_cfg(self) -> dict[str, Any]:
        """Describe the classes and the preprocessing of images in timm's terms."""
        model, data, classes = self.config.model, self.config.data, self.train_source.classes
        names = {} if classes is None else {"label_names": list(classes)}
        return names | {
            "num_classes": model.num_classes,
            "input_size": (model.in_chans, model.img_size, model.img_size),
            "mean": data.mean,
            "std": data.std,
            "interpolation": data.interpolation,
            "crop_pct": data.crop_pct,
        }

    @property
    def fingerprints(self) -> dict[str, str]:
        """What tells other images from these, of both splits."""
        sources = {"training": self.train_source, "validation": self.val_source}
        return {split: source.fingerprint for split, source in sources.items()}

    def content(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        state, trainee = self.state, self.trainee
        ema = {} if trainee.ema is None else {"state_dict_ema": trainee.ema.module.state_dict()}
        return ema | {
            "arch": self.config.model.name,
            "model_args": model_arguments(self.config.model),
            "pretrained_cfg": self.pretrained_cfg(),
            "state_dict": trainee.model.state_dict(),
            "optimizer": trainee.optimizer.state_dict(),
            "run": dataclasses.asdict(state),
            "epoch": len(state.history),
            "metric": state.best[state.best_key] if state.history else None,
            "config": dataclasses.asdict(self.config),
            "asked": dataclasses.asdict(self.asked),
            "data": self.fingerprints,
            "versions": versions(),
        }


def save(folder: Path, run: Run) -> None:
    """Write last.pt, having kept the one before as previous.pt; best.pt, too, after its epoch.

    The new file is read back before it takes the old one's name.

    Raises:
        OutputError: it could not be written; the earlier ones are intact.
        NonFiniteLossError: a weight is NaN or infinite, which is not kept.
    """
    for model in (run.trainee.model, *run.trainee.averages):
        try:
            check_finite(model.state_dict(), f"the weights after step {run.state.step}")
        except ValueError as error:
            raise NonFiniteLossError(f"{error}; {kept_checkpoints(folder)}") from error
    last, content = folder / LAST, run.content()
    if is_there(last):
        link_atomically(last, folder / PREVIOUS)
    write_atomically(last, lambda file: torch.save(content, file), prove=_check_sums)
    if run.state.best_is_last:
        link_atomically(last, folder / BEST)


def kept_checkpoints(folder: Path) -> str:
    """Say which checkpoints a run that cannot go on has, all written before that."""
    names = [name for name in CHECKPOINTS if is_there(folder / name)]
    verb = "are" if len(names) > 1 else "is"
    return f"{', '.join(names) or 'no checkpoint'} in {folder} {verb} from before and intact"


def load_newest(folder: Path) -> dict[str, Any] | None:
    """Load last.pt or, if it is damaged, previous.pt, or best.pt; damaged ones get another name.

    Returns:
        The checkpoint, with "origin" the path of its file; None in a folder that is empty but for hidden files.

    Raises:
        OutputError: one cannot be read, which does not mean that it is damaged; or none is whole; or the folder holds
            something else, which is somebody's.
    """
    damaged: dict[Path, DamagedError] = {}
    for path in (folder / name for name in CHECKPOINTS if is_there(folder / name)):
        try:
            saved = load_checkpoint(path) | {"origin": str(path)}
        except DamagedError as error:
            damaged[path] = error
            continue
        for bad, error in damaged.items():
            aside = bad.replace(bad.with_name(f"{bad.stem}.damaged.pt"))
            log.warning(f"{error}; it is now {aside.name}")
        state = _STATE.validate_python(saved["run"])
        if path.name == LAST and state.best_is_last:  # what a killed run had still to do
            link_atomically(path, folder / BEST)
        if state.best_epoch and not is_there(folder / BEST):
            log.warning(
                f"{folder / BEST} of epoch {state.best_epoch} is gone; only a better epoch writes it"
            )
        return saved
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    aside = [name for name in names if name.endswith(".damaged.pt")]
    if damaged or aside:
        raise OutputError(
            f"no checkpoint in {folder} is whole: {'; '.join(map(str, damaged.values())) or ', '.join(aside)}; if the "
            f"disk was at fault, give one its name last.pt back and run again; to start over, choose another "
            f"--run.output"
        )
    if names:
        raise OutputError(
            f"output folder {folder} holds {names[0]} and no run to continue; choose another --run.output"
        )
    return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by ``save`` and verify it.

    Raises:
        OutputError: the file is missing or cannot be read.
        DamagedError: it was read, and is damaged or something else.
    """
    try:
        saved = load_archive(path)
        if not saved.keys() >= {"state_dict", "epoch", "config", "asked"}:
            raise KeyError("parts are missing")
        for key in ("state_dict", "state_dict_ema"):
            check_plain(saved.get(key, {}), path)
            check_finite(saved.get(key, {}), path)
        for values in saved["optimizer"]["state"].values():
            check_plain({k: v for k, v in values.items() if isinstance(v, Tensor)}, path)
        known = [item.name for item in fields(RunState) if item.name in saved["run"]]
        saved["run"] = {key: saved["run"][key] for key in known}
        _STATE.validate_python(saved["run"])
        saved["data"].keys()
    except FileNotFoundError as error:
        raise OutputError(f"checkpoint {path} does not exist") from error
    except (OSError, MemoryError) as error:
        raise OutputError(f"checkpoint {path} cannot be read: {_said(error)}") from error
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        told = f"checkpoint {path} was not written by train_imagenet.py: {one_line(error)}"
        raise DamagedError(told) from error
    except ValueError as error:  # of vil.weights, which names the file
        raise DamagedError(f"checkpoint {error}") from error
    return saved


def continued(saved: dict[str, Any] | None, new: TrainConfig) -> tuple[TrainConfig, TrainConfig]:
    """Return the settings that a run goes on with, or begins with: as it had them, and as they are asked for.

    run.allow_changes is for this start, and no setting of the run.

    Raises:
        ConfigError: the settings that are asked for now make another run.
    """
    once = {"run.allow_changes": False}
    if saved is None:
        return _with(new, once), _with(new, once)
    config, asked = (from_dict(saved[key], f"{saved['origin']}: ") for key in ("config", "asked"))
    before, filled, after = flat(asked), flat(config), flat(new)
    free, allowed = marked("free"), marked("changeable") if new.run.allow_changes else set()
    # To ask for what was filled in is no change.
    changed = {
        key for key in before if key not in free and after[key] not in (before[key], filled[key])
    }
    refused = sorted(changed - allowed)
    if refused:
        told = ", ".join(f"{key} ({filled[key]} -> {after[key]})" for key in refused)
        how = "choose another --run.output, or the same settings to continue it"
        if set(refused) <= marked("changeable"):
            how += "; --run.allow-changes lets it go on with these"
        raise ConfigError(
            f"{saved['origin']} is of a run with other {told}; {how}", everywhere=True
        )
    chosen = {key: after[key] for key in free | changed} | once
    return _with(config, chosen), _with(asked, chosen)


def restore(run: Run, saved: dict[str, Any]) -> None:
    """Put a run back to where its checkpoint was written.

    Raises:
        DataError: the images are not those that the run began with.
        OutputError: the checkpoint does not fit the model or the optimiser.
    """
    origin = saved["origin"]
    for split, fingerprint in run.fingerprints.items():
        if saved["data"].get(split) != fingerprint:
            told = f"the {split} images are not those that the run in {origin} began with"
            raise DataError(told, everywhere=True)
    try:
        _load(run.trainee.model, saved["state_dict"])
        for model in run.trainee.averages:
            _load(model, saved["state_dict_ema"])
        run.trainee.optimizer.load_state_dict(saved["optimizer"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        told = (
            f"checkpoint {origin} does not fit {run.config.model.name} and {run.config.optim.opt}"
        )
        raise OutputError(f"{told}: {first_line(error)}", everywhere=True) from error
    state = _STATE.validate_python(saved["run"])
    run.state = dataclasses.replace(state, best_key=run.state.best_key)


def _load(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Load weights strictly: their names, shapes and kinds of numbers must be the model's."""
    for name, value in model.state_dict().items():
        found = state_dict.get(name, value).dtype
        if found != value.dtype:
            raise ValueError(f"{name} is {found} in the checkpoint and {value.dtype} in the model")
    model.load_state_dict(state_dict)


def _with(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """Return settings of which some, as section.key, are others."""
    for name, value in values.items():
        section, key = name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def _check_sums(path: Path) -> None:
    """Compare a new file with its checksums."""
    try:
        check_sums(path)
    except (OSError, MemoryError, ValueError) as error:
        raise OutputError(f"checkpoint {path} cannot be read back: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or one_line(error)
