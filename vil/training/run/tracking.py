"""Trackers that show a run elsewhere: TensorBoard and Weights & Biases, by their own packages.

A tracker gets the rows of steps.csv as step/..., those of log.csv as epoch/..., and the configuration.
It writes below the run's folder, in a folder of its own name, and goes on in it when the run does. One
that fails is said to, once, and the run goes on without.
"""

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from vil.messages import one_line
from vil.training.config import TrainConfig
from vil.training.files import write_text
from vil.training.recipes import to_yaml
from vil.training.run.step_log import StepRow


class Tracker(Protocol):
    """What a tracker does; each method may raise anything."""

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        """Begin, or go on.

        Args:
            config: The run's configuration.
            folder: The run's folder.
            done: Steps that the run has done; later ones that were shown before come again.
        """

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show values, by name, of a step counted from 1; steps never decrease."""

    def flush(self) -> None:
        """Bring what was shown to disk."""

    def finish(self, failed: bool) -> None:
        """End."""


class TensorBoard:
    """Event files in <run>/tensorboard."""

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what it has of this step and later ones.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        self.writer.add_text("config", f"```yaml\n{to_yaml(config)}```", done + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show values of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Bring them to disk."""
        self.writer.flush()

    def finish(self, failed: bool) -> None:
        """Close the event file."""
        self.writer.close()


class WandB:
    """A run of Weights & Biases, its files in <run>/wandb, its name in <run>/wandb/id.txt.

    Its server never takes a step twice. Of a run that goes on, what the server has is kept, and what it
    lacks is added; without a server (WANDB_MODE=offline) `wandb sync` does so later.
    """

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        import wandb

        name = folder / "wandb" / "id.txt"
        if not name.exists():
            name.parent.mkdir(exist_ok=True)
            write_text(name, uuid.uuid4().hex)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vision-longhorn"),
            name=folder.name,
            id=name.read_text(),
            resume="allow",
            dir=str(folder),
            config=dataclasses.asdict(config),
            allow_val_change=True,  # of what may change when a run goes on
            settings=wandb.Settings(console="off"),  # leaves the progress bar alone
        )
        self.epochs = self.run.summary.get("epoch/epoch", 0)  # that the server has

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show values of a step, unless the server has them.

        It may have the last step of an epoch and not the epoch, which then comes at the next step.
        """
        new_epoch = values.get("epoch/epoch", 0) > self.epochs
        if step >= self.run.starting_step or new_epoch:
            self.run.log(values, step=max(step, self.run.starting_step))

    def flush(self) -> None:
        """Do nothing: another process has the values already, and survives this one."""

    def finish(self, failed: bool) -> None:
        """Wait for the upload."""
        self.run.finish(exit_code=int(failed))


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def missing_package(name: str | None) -> Iterator[str]:
    """Check that a tracker's package, which has its name, is there, and say so if it is not."""
    package = None if name is None else find_spec(name)
    # A mere folder of that name, such as wandb leaves behind, is found, too, without an origin.
    if name is not None and (package is None or package.origin is None):
        yield f"run.tracker {name} needs its package, pip install {name}"


class Tracking:
    """The run's tracker, if it has one, as long as it works."""

    def __init__(
        self, config: TrainConfig, folder: Path, done: int, warn: Callable[[str], None]
    ) -> None:
        """Prepare it; nothing is imported or written yet.

        Args:
            config: The run's configuration.
            folder: The run's folder.
            done: Steps that the run has done.
            warn: Told that the tracker fails.
        """
        self.config = config
        self.folder = folder
        self.done = done
        self.warn = warn
        self.tracker: Tracker | None = None

    def start(self) -> None:
        """Begin, or go on."""

        def begin() -> None:
            kind = TRACKERS[self.config.run.tracker]
            self.tracker = kind(self.config, self.folder, self.done)

        if self.config.run.tracker is not None:
            self._try(begin)

    def log_steps(self, rows: Sequence[StepRow]) -> None:
        """Show steps."""

        def log() -> None:
            for row in rows:
                values = row._asdict()
                self.tracker.log(values.pop("step"), _named("step", values))

        if self.tracker is not None:
            self._try(log)

    def log_epoch(self, step: int, row: dict[str, Any]) -> None:
        """Show an epoch that ended with a step."""
        if self.tracker is not None:
            self._try(lambda: self.tracker.log(step, _named("epoch", row)))

    def flush(self) -> None:
        """Bring what was shown to disk."""
        if self.tracker is not None:
            self._try(self.tracker.flush)

    def finish(self, failed: bool) -> None:
        """End."""
        if self.tracker is not None:
            self._try(lambda: self.tracker.finish(failed))

    def _try(self, call: Callable[[], object]) -> None:
        """Call the tracker, and drop it if that fails."""
        try:
            call()
        except Exception as error:  # whatever a package, its server or a disk comes up with
            self.tracker = None
            self.warn(
                f"run.tracker {self.config.run.tracker} fails, training goes on without: "
                f"{type(error).__name__}: {one_line(error)}"
            )


def _named(group: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in values.items()}
