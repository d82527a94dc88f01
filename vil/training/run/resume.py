"""Opening a run's folder: a new run, or the one in it, which continues where it was.

Running the same command again is all there is to resuming: a folder that holds a run of the same
configuration is continued, any other is refused, unless --run.allow-changes says to go on with what may
be changed. A change is a checkpoint of its own, so that it is made or not, whatever kills the run.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from vil.messages import one_line
from vil.training.config import TrainConfig
from vil.training.distributed import World
from vil.training.errors import DamagedError, DataError, OutputError
from vil.training.files import (
    LOCK_NAME,
    csv_text,
    is_temporary,
    is_there,
    lock_folder,
    remove_temporaries,
    write_text,
)
from vil.training.recipes import config_from_dict, to_yaml, wrote_yaml
from vil.training.run.changes import Change, change_rows, changes, check_changes, continued
from vil.training.run.checkpoint import (
    BEST,
    LAST,
    PREVIOUS,
    About,
    link_if_best,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from vil.training.run.optimizer_state import load_optimizer
from vil.training.run.setup import Training, build_optimizer
from vil.training.run.state import RunState
from vil.training.run.step_log import STEPS
from vil.training.run.tracking import TRACKERS

CONFIG, SKIPPED, CHANGES, LOG, CURVE = (
    *("config.yaml", "skipped.txt", "changes.csv"),
    *("log.csv", "curve.png"),
)
_CHECKPOINTS = (LAST, PREVIOUS, BEST)
_WRITTEN = {CONFIG, SKIPPED, CHANGES, LOG, CURVE, STEPS, *_CHECKPOINTS}
_BEGINNINGS = {
    SKIPPED: rb"\d+ images without a usable label, left out\n",
    STEPS: rb"step,epoch,loss,grad_norm,",
    LOG: rb"epoch,lr,train_loss,val_loss,",
}
_DAMAGED = re.compile(r"(last|previous|best)\.damaged(-\d+)?\.pt")


@dataclasses.dataclass(kw_only=True)
class RunFolder:
    """A run's folder and the checkpoint found in it."""

    path: Path
    asked: TrainConfig
    """The settings as asked for."""
    config: TrainConfig
    """The settings to go on with: of the run to continue all of them, of a new one those asked for."""
    checkpoint: dict[str, Any] | None = None
    """Of the run to continue, None if it is new."""
    origin: Path | None = None
    """That checkpoint's file."""
    changed: list[Change] = dataclasses.field(default_factory=list)
    """What is another setting now than the run has had."""


@contextmanager
def open_for_all(
    config: TrainConfig, world: World, warn: Callable[[str], None]
) -> Iterator[RunFolder]:
    """Open the run's folder in the main process, lock it, and tell the others what is in it.

    Args:
        config: The configuration asked for.
        world: The processes; they need not share a disk.
        warn: Told of a damaged checkpoint.

    Raises:
        ConfigError: the folder holds a run of another configuration.
        OutputError: the folder holds something else, is in use, or none of its checkpoints is whole.
    """
    with ExitStack() as stack:
        folder = None
        if world.is_main:
            path = _create(config)
            _refuse_others(path)  # before anything is written there
            stack.enter_context(lock_folder(path, warn))
            _refuse_others(path)  # that came meanwhile
            remove_temporaries(path, _WRITTEN)
            folder = _open(path, config, warn)
        yield world.broadcast(folder)


def restore_or_start(training: Training, folder: RunFolder, about: About, world: World) -> RunState:
    """Put a run back to where its checkpoint was written, and note its settings.

    Args:
        training: Receives weights, average and optimiser state.
        folder: The run's folder.
        about: What the run is, the data that is there now among it.
        world: The processes; the main one writes.

    Raises:
        DataError: it is not the data that the run began with.
        OutputError: the checkpoint does not fit the model, or the settings cannot be written.
        ConfigError: the optimiser refuses the settings that it had.
    """
    checkpoint, origin, state = folder.checkpoint, folder.origin, RunState()
    if checkpoint is not None:
        for split, fingerprint in about.fingerprints.items():
            if checkpoint["data"][split] != fingerprint:
                raise DataError(
                    f"the {split} images are not those that the run in {origin} began with"
                )
        _restore(training, checkpoint, origin, about.config.model.name)
        state = RunState.from_dict(checkpoint["run"])
        state.changes += change_rows(folder.changed, about.config, state)
    state.best_key = "ema_top1" if about.config.optim.best == "ema" else "top1"
    if world.is_main:
        if folder.changed:
            save_checkpoint(folder.path, training, about, state)
        _write_settings(folder.path, about.config, state.changes)
    return state


def _create(config: TrainConfig) -> Path:
    """Create the folder unless it is there."""
    folder = Path(config.run.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create output folder {folder}: {error.strerror}") from error
    return folder


def _refuse_others(path: Path) -> None:
    """Check that a folder has a run in it, or nothing but what one leaves that ends before it trains.

    Raises:
        OutputError: it holds something else, which is somebody's.
    """
    try:
        found = sorted(path.iterdir())
        if any(file.name in _CHECKPOINTS or _DAMAGED.fullmatch(file.name) for file in found):
            return
        other = next((file for file in found if not _is_untrained(file)), None)
    except OSError as error:
        raise OutputError(f"output folder {path} cannot be read: {error.strerror}") from error
    if other is not None:
        raise OutputError(
            f"output folder {path} holds {other.name} and no run to continue; "
            f"choose another --run.output"
        )


def _is_untrained(file: Path) -> bool:
    """Tell whether a file is what a run left that ended before its first checkpoint."""
    if file.name == LOCK_NAME or is_temporary(file, _WRITTEN):
        return True
    if file.name in TRACKERS:
        return file.is_dir()
    if file.name == CURVE:
        return _is_untrained(file.with_name(LOG))
    if not file.is_file() or file.name not in (CONFIG, *_BEGINNINGS):
        return False
    content = file.read_bytes()
    if file.name == CONFIG:  # somebody's own recipe is not spelt so
        return wrote_yaml(content)
    return re.match(_BEGINNINGS[file.name], content) is not None


def _open(path: Path, config: TrainConfig, warn: Callable[[str], None]) -> RunFolder:
    """Find the run to continue, or begin a new one."""
    # The permission to change is for this start: config.yaml does not hand it on.
    new = dataclasses.replace(config, run=dataclasses.replace(config.run, allow_changes=False))
    checkpoint, origin, damaged = _newest_checkpoint(path)
    if checkpoint is None:
        return RunFolder(path=path, asked=new, config=new)
    asked, resolved = (
        config_from_dict(checkpoint[key], str(origin)) for key in ("asked", "config")
    )
    changed = changes(asked, resolved, new)
    done = len(checkpoint["run"]["history"])
    check_changes(changed, config.run.allow_changes, path, done, new.schedule.epochs)
    state = RunState.from_dict(checkpoint["run"])
    for file, error in damaged.items():
        warn(f"{error}; it is now {_put_aside(file).name}")
    if origin.name == LAST:  # what a run killed right after writing it had still to do
        link_if_best(path, state)
    if state.best_epoch and not is_there(path / BEST):
        warn(
            f"{path / BEST} of epoch {state.best_epoch} is gone; only a better epoch will write it"
        )
    return RunFolder(
        path=path,
        asked=continued(asked, new, changed),
        config=continued(resolved, new, changed),
        checkpoint=checkpoint,
        origin=origin,
        changed=changed,
    )


def _restore(training: Training, checkpoint: dict[str, Any], origin: Path, name: str) -> None:
    """Load weights, average and optimiser state."""
    weights = checkpoint["state_dict"]
    load_weights(training.model, weights, origin, name)
    if training.ema is not None:
        # A run that began without an average starts it here.
        averaged = checkpoint.get("state_dict_ema", weights)
        load_weights(training.ema.module, averaged, origin, name)
    had = config_from_dict(checkpoint["config"], str(origin))
    as_saved = build_optimizer(training.model, had.optim, had.peak_lr)
    try:
        load_optimizer(training.optimizer, checkpoint["optimizer"], as_saved)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise OutputError(
            f"checkpoint {origin} does not fit optimizer {had.optim.opt}: {one_line(error)}"
        ) from error


def _write_settings(folder: Path, config: TrainConfig, rows: list[dict[str, Any]]) -> None:
    """Bring config.yaml and changes.csv in line with the checkpoint, whatever ended the last start."""
    told = [{key: str(value) for key, value in row.items()} for row in rows]
    for name, text in ((CONFIG, to_yaml(config)), (CHANGES, csv_text(told) if told else "")):
        path = folder / name
        try:
            if not text:
                path.unlink(missing_ok=True)
                continue
            is_new = not path.is_file() or path.read_bytes() != text.encode()
        except OSError as error:
            raise OutputError(f"cannot replace {path}: {error.strerror}") from error
        if is_new:
            write_text(path, text)


def _newest_checkpoint(
    folder: Path,
) -> tuple[dict[str, Any] | None, Path | None, dict[Path, DamagedError]]:
    """Load last.pt or, if it is damaged, previous.pt, or best.pt.

    Returns:
        The checkpoint and its file, None in a folder without any; and what is wrong with others.

    Raises:
        OutputError: one cannot be read, which does not mean that it is damaged; or none is whole.
    """
    damaged: dict[Path, DamagedError] = {}
    for path in (folder / name for name in _CHECKPOINTS if is_there(folder / name)):
        try:
            return load_checkpoint(path), path, damaged
        except DamagedError as error:
            damaged[path] = error
    try:
        aside = sorted(path.name for path in folder.iterdir() if _DAMAGED.fullmatch(path.name))
    except OSError as error:
        raise OutputError(f"output folder {folder} cannot be read: {error.strerror}") from error
    if not damaged and not aside:
        return None, None, {}
    reason = f": {'; '.join(map(str, damaged.values()))}" if damaged else ""
    back = f"; put aside by earlier starts: {', '.join(aside)}" if aside else ""
    raise OutputError(
        f"no checkpoint in {folder} is whole{reason}{back}; if the disk was at fault, give one its name "
        f"last.pt back and run again; to start over, choose another --run.output"
    )


def _put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, and none that was put aside before."""
    names = (f"{path.stem}.damaged{f'-{i}' if i > 1 else ''}.pt" for i in count(1))
    aside = next(path.with_name(name) for name in names if not is_there(path.with_name(name)))
    try:
        return path.rename(aside)
    except OSError as error:
        raise OutputError(f"cannot rename {path} to {aside.name}: {error.strerror}") from error
