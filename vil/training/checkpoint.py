"""Save checkpoints, and resume runs from them.

A checkpoint is a dict with these keys:

- arch, model_args, pretrained_cfg: timm's model name and arguments, classes and preprocessing
- state_dict, state_dict_ema, optimizer: weights, averaged weights if an average is kept, optimizer state
- run, epoch, metric: progress of the run, number of finished epochs, best top-1 so far
- config, asked: all settings, settings as the user gave them
- data, versions: fingerprints of both splits, package versions

The keys follow timm, so timm.create_model(name, checkpoint_path=...) loads the weights. timm prefers
state_dict_ema, while training and evaluation in this package report state_dict.

A run's folder contains last.pt, previous.pt (the checkpoint before it) and best.pt. A run writes last.pt
first, so a folder belongs to a run exactly if it has a checkpoint. Repeat the same command to resume.
"""

import dataclasses
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from vil.messages import first_line, named, one_line
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
from vil.training.recipes import flat, from_dict
from vil.training.settings import TrainConfig, marked
from vil.training.setup import TrainSetup
from vil.weights.archive import check_finite, check_plain, load_archive

LAST, PREVIOUS, BEST = CHECKPOINTS = ("last.pt", "previous.pt", "best.pt")


@dataclass
class RunState:
    """Progress of a run: everything except tensors that its next step depends on."""

    step: int = 0
    """Number of steps done, including skipped ones."""
    loss_sum: float = 0.0
    """Sum of the losses in the current epoch."""
    loss_count: int = 0
    """Number of steps in ``loss_sum``."""
    seconds: float = 0.0
    """Time spent on the current epoch, summed over all starts of the run."""
    history: list[dict[str, int | float]] = field(default_factory=list)
    """One log row per finished epoch."""
    bad_images: dict[int, str] = field(default_factory=dict)
    """Unreadable training images found so far, by index, with the reason."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Unreadable held-out images, by index, with the reason. They were found before the first step, and are left out.
    """
    val_exceptions: list[str] = field(default_factory=list)
    """Images, as <class>/<name>, that are on the other side of data.val_fraction than their hash says."""
    bad_steps: dict[int, float] = field(default_factory=dict)
    """Loss of each step that was skipped because of a non-finite loss or gradient."""
    best_key: str = "top1"
    """Log column that selects the best epoch: top1 or ema_top1."""
    best_epoch: int = 0
    """Epoch of best.pt: the highest top-1, then the lowest held-out loss, then the first; 0 if none is finished."""

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Record a finished epoch, given its log row."""
        if not self.history or self._merit(row) > self._merit(self.best):
            self.best_epoch = len(self.history) + 1
        self.history.append(row)
        self.loss_sum, self.loss_count, self.seconds = 0.0, 0, 0.0

    def _merit(self, row: dict[str, Any]) -> tuple[float, float]:
        loss = "ema_loss" if self.best_key == "ema_top1" else "val_loss"
        return row.get(self.best_key, -1.0), -row.get(loss, math.inf)

    @property
    def best(self) -> dict[str, Any]:
        """Log row of the epoch of best.pt."""
        return self.history[self.best_epoch - 1]

    @property
    def best_is_last(self) -> bool:
        """Whether the last finished epoch is the best so far and no step has followed it."""
        return 0 < self.best_epoch == len(self.history) and self.loss_count == 0


_STATE = TypeAdapter(RunState)


@dataclass
class Run:
    """A run: its settings, data, model and progress."""

    config: TrainConfig
    """All settings, with defaults filled in."""
    asked: TrainConfig
    """Settings as the user gave them."""
    setup: TrainSetup
    train_source: Source
    val_source: Source
    state: RunState = field(init=False)

    def __post_init__(self) -> None:
        """Create the state of a new run."""
        self.state = RunState(best_key="ema_top1" if self.config.optim.best == "ema" else "top1")

    def pretrained_cfg(self) -> dict[str, Any]:
        """Return classes and preprocessing as timm's ``pretrained_cfg``."""
        config, classes = self.config, self.train_source.classes
        cfg = config.images.pretrained_cfg(val_fraction=config.data.val_fraction)
        cfg["num_classes"] = config.model.num_classes
        return cfg if classes is None else cfg | {"label_names": list(classes)}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of each split, which differs for different images."""
        sources = {"training": self.train_source, "validation": self.val_source}
        return {split: source.fingerprint for split, source in sources.items()}

    def content(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        state, setup = self.state, self.setup
        ema = {} if setup.ema is None else {"state_dict_ema": setup.ema.module.state_dict()}
        return ema | {
            "arch": self.config.model.name,
            "model_args": self.config.model.arguments,
            "pretrained_cfg": self.pretrained_cfg(),
            "state_dict": setup.model.state_dict(),
            "optimizer": setup.optimizer.state_dict(),
            "run": dataclasses.asdict(state),
            "epoch": len(state.history),
            "metric": state.best[state.best_key] if state.history else None,
            "config": dataclasses.asdict(self.config),
            "asked": dataclasses.asdict(self.asked),
            "data": self.fingerprints,
            "versions": versions(),
        }


def save(folder: Path, run: Run) -> None:
    """Write last.pt, keep its predecessor as previous.pt, and update best.pt after a best epoch.

    Raises OutputError if that fails, and NonFiniteLossError, without saving, if a weight is NaN or infinite. Earlier
    checkpoints are intact.
    """
    for model in (run.setup.model, *run.setup.averages):
        try:
            check_finite(model.state_dict(), f"the weights after step {run.state.step}")
        except ValueError as error:
            raise NonFiniteLossError(f"{error}; {kept_checkpoints(folder)}") from error
    last, content = folder / LAST, run.content()
    if is_there(last):
        link_atomically(last, folder / PREVIOUS)
    write_atomically(last, lambda file: torch.save(content, file))
    if run.state.best_is_last:
        link_atomically(last, folder / BEST)


def kept_checkpoints(folder: Path) -> str:
    """Return a message that lists the checkpoints of a run that failed."""
    names = [name for name in CHECKPOINTS if is_there(folder / name)]
    return f"checkpoints from before this error in {folder}: {', '.join(names) or 'none'}"


def load_newest(folder: Path) -> dict[str, Any] | None:
    """Load last.pt; if it is damaged, load previous.pt or best.pt and rename damaged ones to *.damaged.pt.

    Returns the checkpoint, with its path as "origin"; None if the folder is empty except for hidden files. Raises
    OutputError if a checkpoint cannot be read (it may be intact), all are damaged, or there are only files of others.
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
            log.warning(f"{error}; renamed it to {aside.name}")
        state = _STATE.validate_python(saved["run"])
        if path.name == LAST and state.best_is_last:  # the run was killed before it linked best.pt
            link_atomically(path, folder / BEST)
        if state.best_epoch and not is_there(folder / BEST):
            log.warning(f"{folder / BEST} of epoch {state.best_epoch} is missing; only a better epoch writes it again")
        return saved
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if damaged:
        raise OutputError(
            f"all checkpoints in {folder} are damaged: {'; '.join(map(str, damaged.values()))}; to start over, "
            f"choose another --run.output"
        )
    if names:
        raise OutputError(
            f"output folder {folder} contains {names[0]}, but no run to resume; choose another --run.output"
        )
    return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by ``save`` and verify it.

    Raises OutputError if it is missing or cannot be read, DamagedError if it is damaged or not a checkpoint.
    """
    try:
        saved = load_archive(path)
        if lacking := {"state_dict", "epoch", "config", "asked"} - saved.keys():
            raise KeyError(min(lacking))
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
        message = getattr(error, "strerror", None) or one_line(error)
        raise OutputError(f"checkpoint {path} cannot be read: {message}") from error
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        message = f"checkpoint {path} was not written by train_imagenet.py: {one_line(error)}"
        raise DamagedError(message) from error
    except ValueError as error:  # from vil.weights; the message names the file
        raise DamagedError(f"checkpoint {error}") from error
    return saved


def merged(saved: dict[str, Any] | None, new: TrainConfig) -> tuple[TrainConfig, TrainConfig]:
    """Merge what the user states now with what the run to resume, if any, has.

    run.allow_changes applies to this start only and is not saved with the run.

    Returns:
        The settings to complete, and the settings as the user gave them.

    Raises:
        ConfigError: If the new settings are incompatible with the run being resumed.
    """
    once = {"run.allow_changes": False}
    if saved is None:
        return _with(new, once), _with(new, once)
    config = from_dict(saved["config"], f"{saved['origin']}: ")
    asked = from_dict(saved["asked"], f"{saved['origin']}: ")
    before, filled, after = flat(asked), flat(config), flat(new)
    free, allowed = marked("free"), marked("changeable") if new.run.allow_changes else set()
    # Stating a value that was filled in before is not a change.
    changed = {key for key in before if key not in free and after[key] not in (before[key], filled[key])}
    refused = sorted(changed - allowed)
    if refused:
        changes = ", ".join(f"{key} ({filled[key]} -> {after[key]})" for key in refused)
        how = "choose another --run.output, or repeat the run's options to resume it"
        if set(refused) <= marked("changeable"):
            how += "; --run.allow-changes resumes it with these changes"
        raise ConfigError(
            f"options differ from those of the run in {saved['origin']}: {changes}; {how}",
            everywhere=True,
        )
    if new.schedule.epochs < saved["epoch"]:
        raise ConfigError(
            f"schedule.epochs must be at least {saved['epoch']}, which the run in {saved['origin']} has finished, got "
            f"{new.schedule.epochs}",
            everywhere=True,
        )
    chosen = {key: after[key] for key in free | changed} | once
    return _with(config, chosen), _with(asked, chosen)


def restore(run: Run, saved: dict[str, Any]) -> None:
    """Restore weights, optimizer and progress of a run from its checkpoint, in place.

    Raises DataError if the images differ from the run's, OutputError if the model or the optimizer does.
    """
    origin = saved["origin"]
    for split, fingerprint in run.fingerprints.items():
        if saved["data"].get(split) != fingerprint:
            message = f"the {split} images differ from those that the run in {origin} started with"
            before = saved["pretrained_cfg"].get("label_names") or ()
            now = run.train_source.classes or ()
            for which, names in (("missing", {*before} - {*now}), ("new", {*now} - {*before})):
                message += f"; {which} classes: {named(sorted(names))}" if names else ""
            message += "; restore them to resume the run, or choose another --run.output to start another"
            raise DataError(message, everywhere=True)
    try:
        _load(run.setup.model, saved["state_dict"])
        for model in run.setup.averages:
            _load(model, saved["state_dict_ema"])
        run.setup.optimizer.load_state_dict(saved["optimizer"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        message = f"checkpoint {origin} does not fit {run.config.model.name} and {run.config.optim.opt}"
        raise OutputError(f"{message}: {first_line(error)}", everywhere=True) from error
    state = _STATE.validate_python(saved["run"])
    run.state = dataclasses.replace(state, best_key=run.state.best_key)


def _load(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Load weights strictly: names, shapes and dtypes must match the model."""
    for name, value in model.state_dict().items():
        dtype = state_dict.get(name, value).dtype
        if dtype != value.dtype:
            raise ValueError(f"{name} is {dtype} in the checkpoint and {value.dtype} in the model")
    model.load_state_dict(state_dict)


def _with(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """Return the settings with some values replaced, given as {"section.key": value}."""
    for name, value in values.items():
        section, key = name.split(".")
        config = config.changed(section, **{key: value})
    return config
