"""Opening a run's folder: a new run, or the one in it, which continues where it was.

Running the same command again is all there is to resuming: a folder that holds a run of the same
configuration is continued, any other is refused.
"""

import csv
import dataclasses
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vil.training.checkpoint import (
    BEST,
    LAST,
    PREVIOUS,
    About,
    link_if_best,
    load_checkpoint,
    load_weights,
)
from vil.training.config import TrainConfig
from vil.training.distributed import World
from vil.training.errors import ConfigError, DataError, OutputError
from vil.training.files import LOCK_NAME, lock_folder, remove_temporaries, write_text
from vil.training.recipes import Change, changes, config_from_dict, continued, to_yaml
from vil.training.setup import Training
from vil.training.state import RunState
from vil.training.step_log import STEPS
from vil.training.tracking import TRACKERS

CONFIG, SKIPPED, CHANGES = "config.yaml", "skipped.txt", "changes.csv"
# What a run may leave that ends before its first checkpoint.
_UNTRAINED = {CONFIG, SKIPPED, STEPS, LOCK_NAME, *TRACKERS}


@dataclasses.dataclass(kw_only=True)
class RunFolder:
    """A run's folder and the checkpoint found in it."""

    path: Path
    asked: TrainConfig
    """The settings as asked for, with the folder filled in."""
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


def restore_or_start(training: Training, folder: RunFolder, about: About, world: World) -> RunState:
    """Put a run back to where its checkpoint was written; of a new one, note the settings.

    Args:
        training: Receives weights, average and optimiser state.
        folder: The run's folder.
        about: What the run is, the data that is there now among it.
        world: The processes; the main one writes.

    Raises:
        DataError: it is not the data that the run began with.
        OutputError: the checkpoint does not fit the model, or the settings cannot be written.
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
        epoch = len(state.history) + 1
        state.changes += [
            {"step": state.step, "epoch": epoch, "setting": key, "before": old, "after": new}
            for key, old, new in folder.changed
        ]
    state.best_key = "ema_top1" if about.config.optim.best == "ema" else "top1"
    if world.is_main and (checkpoint is None or folder.changed):
        write_text(folder.path / CONFIG, to_yaml(about.config))
        if state.changes:
            _write_changes(folder.path / CHANGES, state.changes)
    return state


def with_output(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the configuration with its output folder filled in."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, output=str(folder)))


def _create(config: TrainConfig, recipe: str) -> Path:
    """Create the folder unless it is there."""
    folder = Path(config.run.output or Path("output", recipe))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create output folder {folder}: {error.strerror}") from error
    return folder


def _open(path: Path, config: TrainConfig, warn: Callable[[str], None]) -> RunFolder:
    """Find the run to continue, or check that a new one writes over nothing."""
    remove_temporaries(path)
    new = with_output(config, path)
    checkpoint, origin = _newest_checkpoint(path, warn)
    if checkpoint is None:
        others = {file.name for file in path.iterdir()} - _UNTRAINED
        if others:
            raise OutputError(
                f"output folder {path} holds {sorted(others)[0]} and no run to continue; "
                f"choose another --run.output"
            )
        return RunFolder(path=path, asked=new, config=new)
    asked, resolved = (
        config_from_dict(checkpoint[key], str(origin)) for key in ("asked", "config")
    )
    changed = changes(asked, resolved, new)
    _check_changes(changed, new.run.allow_changes, path)
    if origin.name == LAST:  # what a run killed right after writing it had still to do
        link_if_best(path, RunState.from_dict(checkpoint["run"]))
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
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in training.optimizer.param_groups
    ]
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    for group, settings in zip(training.optimizer.param_groups, groups, strict=True):
        group.update(settings)  # those of the configuration, which may have changed


def _check_changes(changed: list[Change], allowed: bool, folder: Path) -> None:
    """Refuse to continue a run as another one."""
    if not changed:
        return
    refused = [change for change in changed if not (allowed and change.allowed)]
    if refused:
        others = ", ".join(map(str, refused))
        switch = "" if allowed or not all(c.allowed for c in refused) else "--run.allow-changes, "
        raise ConfigError(
            f"output folder {folder} holds a run with other {others}; choose another --run.output, "
            f"{switch}or the same settings to continue it"
        )


def _write_changes(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write what was changed on the way, a row per setting."""
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, table.getvalue())


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
