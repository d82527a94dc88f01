"""TensorBoard or Weights & Biases beside a run, with the rows of steps.csv as step/... and of log.csv as epoch/..."""

import dataclasses
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vil.messages import one_line
from vil.training.errors import log
from vil.training.files import write_text
from vil.training.recipes import to_yaml
from vil.training.settings import TrainConfig


class Tracker:
    """The run's tracker, if any, until it fails."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        """Import and write nothing yet."""
        self.config, self.folder = config, folder
        self._log: Callable[[dict[str, float], int], object] | None = None
        self._close: Callable[[bool], object] | None = None

    def start(self, done: int) -> None:
        """Start the tracker, or resume it after ``done`` steps: later steps are sent again."""
        kind = {"tensorboard": self._tensorboard, "wandb": self._wandb}
        self._try(kind.get(self.config.run.tracker), done)

    def add(self, group: str, step: int, values: dict[str, float]) -> None:
        """Send values of a step, named group/name; steps must not decrease."""
        self._try(self._log, {f"{group}/{name}": value for name, value in values.items()}, step)

    def finish(self, failed: bool) -> None:
        """Wait for the tracker and close it."""
        self._try(self._close, failed)

    def _tensorboard(self, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops its entries of this step and later ones.
        writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=done + 1)
        writer.add_text("config", f"```yaml\n{to_yaml(self.config)}```", done + 1)

        def send(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._log, self._close = send, lambda failed: writer.close()

    def _wandb(self, done: int) -> None:
        import wandb

        name = self.folder / "wandb" / "id.txt"
        if not name.exists():
            name.parent.mkdir(exist_ok=True)
            write_text(name, uuid.uuid4().hex)
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vision-longhorn"),
            name=self.folder.name,
            id=name.read_text(),
            resume="allow",
            dir=str(self.folder),
            config=dataclasses.asdict(self.config),
            allow_val_change=True,  # for options that may change on resume
            settings=wandb.Settings(console="off"),  # does not disturb the progress bar
        )
        first = run.starting_step  # the server takes each step once, and has those before

        def send(values: dict[str, float], step: int) -> None:
            if step >= first:
                run.log(values, step=step)

        self._log, self._close = send, lambda failed: run.finish(exit_code=int(failed))

    def _try(self, function: Callable[..., Any] | None, *arguments: Any) -> None:
        """Call the tracker, if there is one; drop it if the call fails."""
        try:
            if function is not None:
                function(*arguments)
        except Exception as error:  # packages, servers and disks raise many types
            self._log = self._close = None
            why = f"{type(error).__name__}: {one_line(error)}"
            log.warning(
                f"run.tracker {self.config.run.tracker} failed; training continues untracked: {why}"
            )
