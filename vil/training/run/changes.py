"""What may be another setting when a run goes on, and what makes it another run."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vil.training.config import TrainConfig
from vil.training.errors import ConfigError
from vil.training.recipes import flat_dict
from vil.training.run.state import RunState

# What may differ between a run and its continuation: where it is, how it is watched, and what at
# most rounds differently. Whether data.path still holds the same images is checked by itself.
_FREE_ON_RESUME = (
    "data.path",
    "data.num_workers",
    "data.validation_batch_size",
    "data.max_bad_images",
    "optim.max_bad_steps",
    "run.output",
    "run.device",
    "run.grad_accum_steps",
    "run.num_threads",
    "run.log_interval",
    "run.save_minutes",
    "run.tracker",
)
# What run.allow_changes lets differ besides: how a run goes on training, not what it trains on what.
_CHANGEABLE = re.compile(
    r"schedule\..*|augment\..*|optim\.(?!opt$).*|model\.drop_path_rate|run\.(amp|torchcompile)"
)


class Change(NamedTuple):
    """A setting that is another one than a run has had so far."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} ({self.before} -> {self.after})"

    @property
    def allowed(self) -> bool:
        """Whether run.allow_changes lets a run go on with it."""
        return _CHANGEABLE.fullmatch(self.key) is not None


def changes(asked: TrainConfig, resolved: TrainConfig, new: TrainConfig) -> list[Change]:
    """List what would make a resumed run another run.

    Args:
        asked: The run's settings as they were asked for.
        resolved: The same with everything filled in; to ask for that is no change either.
        new: What is asked for now.
    """
    before, filled, after = flat_dict(asked), flat_dict(resolved), flat_dict(new)
    return [
        Change(key, filled[key], after[key])
        for key in before
        if key not in _FREE_ON_RESUME and after[key] not in (before[key], filled[key])
    ]


def continued(resolved: TrainConfig, new: TrainConfig, changed: list[Change]) -> TrainConfig:
    """Return the settings that a run goes on with.

    Args:
        resolved: What it has had so far.
        new: What is asked for now; of it hold the settings that are free, and those that are changed.
        changed: What is another one now and may be.
    """
    after = flat_dict(new)
    for key in (*_FREE_ON_RESUME, *(change.key for change in changed)):
        section, name = key.split(".")
        values = replace(getattr(resolved, section), **{name: after[key]})
        resolved = replace(resolved, **{section: values})
    return resolved


def check_changes(
    changed: list[Change], allowed: bool, folder: Path, done: int, epochs: int
) -> None:
    """Refuse to continue a run as another one, or one that has nothing left to train as a changed one.

    Args:
        changed: What is another setting now.
        allowed: Whether run.allow_changes was given.
        folder: The run's folder.
        done: Epochs that it has finished.
        epochs: That it shall have.

    Raises:
        ConfigError: it is another run, or nothing is left to train.
    """
    keys = [change.key for change in changed]
    refused = [change for change in changed if not (allowed and change.allowed)]
    if changed and epochs <= done and (not refused or "schedule.epochs" in keys):
        raise ConfigError(
            f"schedule.epochs must be more than the {done} epochs that the run in {folder} has done "
            f"for it to go on with other {', '.join(map(str, changed))}; got {epochs}"
        )
    if not refused:
        return
    can = [change.key for change in refused if change.allowed]
    which = ", which --run.allow-changes does not allow" if allowed else ""
    switch = ""
    if can:
        only = "" if len(can) == len(refused) else f" {', '.join(can)}, and nothing else of these"
        switch = f"; --run.allow-changes lets it go on with{only or ' these settings'}"
    raise ConfigError(
        f"output folder {folder} holds a run with other {', '.join(map(str, refused))}{which}; choose "
        f"another --run.output, or the same settings to continue it{switch}"
    )


def change_rows(
    changed: list[Change], config: TrainConfig, state: RunState
) -> list[dict[str, Any]]:
    """Describe what is another setting from now on, all of it filled in."""
    after = flat_dict(config)
    place = {"step": state.step, "epoch": len(state.history) + 1}
    return [
        place | {"setting": change.key, "before": change.before, "after": after[change.key]}
        for change in changed
        if after[change.key] != change.before
    ]
