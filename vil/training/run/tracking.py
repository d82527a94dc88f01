"""Trackers that show a run elsewhere: TensorBoard and Weights & Biases, by their own packages.

A tracker gets the rows of steps.csv as step/..., those of log.csv as epoch/..., and the configuration.
It writes below the run's folder, in a folder of its own name, and goes on in it when the run does. It is
called after checkpoints are written. One that fails or hangs is named in one warning, and left out.
"""

import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from vil.messages import one_line
from vil.training.config import TrainConfig
from vil.training.files import write_text
from vil.training.recipes import to_yaml

_LIMIT = 60.0  # seconds for a call of a tracker
_LIMIT_AT_SIGNAL = 5.0  # schedulers send SIGKILL 10 to 30 seconds after SIGTERM
Shown = tuple[int, dict[str, float]]  # a step, counted from 1, and values of it by name


class Tracker(Protocol):
    """What a tracker does; each method may raise anything."""

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        """Begin, or go on.

        Args:
            config: The run's configuration.
            folder: The run's folder.
            done: Steps that the run has done; later ones that were shown before come again.
        """

    def log(self, rows: list[Shown]) -> None:
        """Show values, and bring them to disk; steps never decrease."""

    def finish(self, failed: bool) -> None:
        """End."""


class TensorBoard:
    """Event files in <run>/tensorboard."""

    def __init__(self, config: TrainConfig, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what it has of this step and later ones.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
        self.writer.add_text("config", f"```yaml\n{to_yaml(config)}```", done + 1)

    def log(self, rows: list[Shown]) -> None:
        """Show values, and bring them to disk."""
        for step, values in rows:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
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

    def log(self, rows: list[Shown]) -> None:
        """Show values that the server lacks; another process has them then, and survives this one.

        It may have the last step of an epoch and not the epoch, which then comes at the next step.
        """
        for step, values in rows:
            new_epoch = values.get("epoch/epoch", 0) > self.epochs
            if step >= self.run.starting_step or new_epoch:
                self.run.log(values, step=max(step, self.run.starting_step))

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
    """The run's tracker, if it has one, as long as it works and answers in time."""

    def __init__(
        self, config: TrainConfig, is_stopping: Callable[[], object], warn: Callable[[str], None]
    ) -> None:
        """Prepare it; nothing is imported or written yet.

        Args:
            config: The run's configuration.
            is_stopping: Whether a signal has come, which leaves a tracker less time.
            warn: Told that the tracker fails.
        """
        self.config = config
        self.is_stopping = is_stopping
        self.warn = warn
        self.tracker: Tracker | None = None
        self.coming: list[Shown] = []

    def start(self, done: int) -> None:
        """Begin, or go on after a number of steps."""
        kind, folder = TRACKERS.get(self.config.run.tracker), Path(self.config.run.output)
        if kind is not None:
            self.tracker = self._try(lambda: kind(self.config, folder, done))

    def add(self, group: str, step: int, values: dict[str, Any]) -> None:
        """Keep values of a step to be shown as group/name; the number of the step is none of them."""
        named = {f"{group}/{name}": value for name, value in values.items() if name != "step"}
        self.coming.append((step, named))

    def show(self) -> None:
        """Show what was kept."""
        rows, self.coming = sorted(self.coming, key=lambda row: row[0]), []
        if self.tracker is not None and rows:
            self._try(lambda: self.tracker.log(rows))

    def finish(self, failed: bool) -> None:
        """Show the rest, and end."""
        self.show()
        if self.tracker is not None:
            self._try(lambda: self.tracker.finish(failed))

    def _try(self, call: Callable[[], Any]) -> Any:
        """Call the tracker in a thread, and drop it if that fails, or hangs, which nothing can end."""
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.extend((call(), None))
            except BaseException as error:  # whatever a package, its server or a disk comes up with
                outcome.extend((None, error))

        thread = threading.Thread(target=work, daemon=True)  # no reason for the process to stay
        thread.start()
        begun, limit = time.monotonic(), _LIMIT
        while thread.is_alive() and time.monotonic() - begun < limit:
            thread.join(0.1)  # and then look for a signal
            limit = _LIMIT_AT_SIGNAL if self.is_stopping() else _LIMIT
        value, error = tuple(outcome) or (None, TimeoutError(f"no answer in {limit:g} s"))
        if error is not None:
            self.tracker = None
            name, why = self.config.run.tracker, f"{type(error).__name__}: {one_line(error)}"
            self.warn(f"run.tracker {name} fails, training goes on without: {why}")
        return value
