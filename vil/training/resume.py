"""Opening a run's folder: a new run, or the one in it, which continues where it was.

Running the same command again is all there is to resuming: a folder that holds a run of the same
configuration is continued, any other is refused.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from vil.training.checkpoint import (
    BEST,
    LAST,
    PREVIOUS,
    link_if_best,
    load_checkpoint,
    load_weights,
)
from vil.training.config import TrainConfig
from vil.training.distributed import World
from vil.training.errors import ConfigError, DataError, OutputError
from vil.training.files import LOCK_NAME, lock_folder, remove_temporaries, write_text
from vil.training.launcher import is_launched
from vil.training.recipes import changed_keys, config_from_dict, to_yaml
from vil.training.setup import Training
from vil.training.state import RunState
from vil.training.step_log import STEPS
from vil.training.tracking import TRACKERS

CONFIG, SKIPPED = "config.yaml", "skipped.txt"
# What a run may leave that ends before its first checkpoint.
_UNTRAINED = {CONFIG, SKIPPED, STEPS, LOCK_NAME, *TRACKERS}


@dataclasses.dataclass
class RunFolder:
    """A run's folder and the checkpoint found in it."""

    path: Path
    checkpoint: dict[str, Any] | None
    """Of the run to continue, None if it is new."""
    origin: Path | None
    """That checkpoint's file."""


@contextmanager
def open_for_all(
    config: TrainConfig, recipe: str, world: World, warn: Callable[[str], None]
) -> Iterator[RunFolder]:
    """Open the run's folder in the main process, lock it, and tell the others what is in it.

    Args:
        config: The configuration asked for.
        recipe: Name of the recipe, for the default folder.
        world: The processes; they need not share a disk.
        warn: Told of a damaged checkpoint.

    Raises:
        ConfigError: the folder holds a run of another configuration.
        OutputError: the folder holds something else, is in use, or none of its checkpoints is whole.
    """
    with ExitStack() as stack:
        folder = None
        if world.is_main:
            path = _create(config, recipe)
            stack.enter_context(lock_folder(path))
            folder = _open(path, config, warn)
        yield world.broadcast(folder)


def restore_or_start(
    training: Training, folder: RunFolder, config: TrainConfig, data: dict[str, str]
) -> RunState:
    """Put a run back to where its checkpoint was written, or a new one to its start.

    Args:
        training: Receives weights, average and optimiser state.
        folder: The run's folder.
        config: The run's configuration.
        data: Fingerprints of the data that is there now.

    Raises:
        DataError: it is not the data that the run began with.
        OutputError: the checkpoint does not fit the model.
    """
    checkpoint, origin, name = folder.checkpoint, folder.origin, config.model.name
    if checkpoint is None:
        if config.model.init_checkpoint is not None:
            origin = Path(config.model.init_checkpoint)
            weights = load_checkpoint(origin)["state_dict"]
            _load(training, weights, weights, origin, name)
        return RunState()
    for split, fingerprint in data.items():
        if checkpoint["data"][split] != fingerprint:
            raise DataError(f"the {split} images are not those that the run in {origin} began with")
    _load(training, checkpoint["state_dict"], checkpoint.get("state_dict_ema"), origin, name)
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    return RunState.from_dict(checkpoint["run"])


def with_output(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the configuration with its output folder filled in."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, output=str(folder)))


def _create(config: TrainConfig, recipe: str) -> Path:
    """Create the folder unless it is there."""
    # A restart by torchrun must find the folder again.
    time = "" if is_launched() else f"-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(config.run.output or Path("output", recipe + time))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create output folder {folder}: {error.strerror}") from error
    return folder


def _open(folder: Path, config: TrainConfig, warn: Callable[[str], None]) -> RunFolder:
    """Find the run to continue, or check that a new one writes over nothing."""
    remove_temporaries(folder)
    config = with_output(config, folder)
    checkpoint, origin = _newest_checkpoint(folder, warn)
    if checkpoint is None:
        others = {path.name for path in folder.iterdir()} - _UNTRAINED
        if others:
            raise OutputError(
                f"output folder {folder} holds {sorted(others)[0]} and no run to continue; "
                f"choose another --run.output"
            )
        write_text(folder / CONFIG, to_yaml(config))
    else:
        _check_same(config_from_dict(checkpoint["config"], str(origin)), config, folder)
        if origin.name == LAST:  # what a run killed right after writing it had still to do
            link_if_best(folder, RunState.from_dict(checkpoint["run"]))
    return RunFolder(folder, checkpoint, origin)


def _load(
    training: Training,
    weights: dict[str, Any],
    averaged: dict[str, Any] | None,
    origin: Path,
    name: str,
) -> None:
    """Load the weights of the model and of its average."""
    load_weights(training.model, weights, origin, name)
    if training.ema is not None:
        load_weights(training.ema.module, averaged, origin, name)


def _check_same(old: TrainConfig, new: TrainConfig, folder: Path) -> None:
    """Refuse to continue a run as another one."""
    changed = changed_keys(old, new)
    if changed:
        raise ConfigError(
            f"output folder {folder} holds a run with other {', '.join(changed)}; "
            f"choose another --run.output, or the same settings to continue it"
        )


def _newest_checkpoint(
    folder: Path, warn: Callable[[str], None]
) -> tuple[dict[str, Any] | None, Path | None]:
    """Load last.pt or, if it is damaged, previous.pt, or best.pt."""
    present = [folder / name for name in (LAST, PREVIOUS, BEST) if (folder / name).exists()]
    for path in present:
        try:
            return load_checkpoint(path), path
        except OutputError as error:
            damaged = path.with_name(f"{path.stem}.damaged.pt")
            path.rename(damaged)
            warn(f"{error}; it is now {damaged.name}")
    if present or any(folder.glob("*.damaged.pt")):
        raise OutputError(
            f"no checkpoint in {folder} is whole; to start over, choose another --run.output"
        )
    return None, None
