"""TensorBoard beside a run, with the rows of steps.csv as step/... and of log.csv as epoch/..."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vil.messages import one_line
from vil.training.errors import log
from vil.training.recipes import to_yaml
from vil.training.settings import TrainConfig


class Tracker:
    """The run's tracker, if any, until it fails."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        """Import and write nothing yet."""
        self.config, self.folder = config, folder
        self._writer: Any = None

    def start(self, done: int) -> None:
        """Start the tracker, or resume it after ``done`` steps: later steps are sent again."""
        if self.config.run.tracker is not None:
            with self._failing():
                from torch.utils.tensorboard import SummaryWriter

                # TensorBoard drops its entries of this step and later ones.
                writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=done + 1)
                writer.add_text("config", f"```yaml\n{to_yaml(self.config)}```", done + 1)
                self._writer = writer

    def add(self, group: str, step: int, values: dict[str, float]) -> None:
        """Send values of a step, named group/name; steps must not decrease."""
        with self._failing():
            for name, value in values.items() if self._writer else ():
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def finish(self) -> None:
        """Wait for the tracker and close it."""
        with self._failing():
            if self._writer:
                self._writer.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Drop the tracker if the block fails."""
        try:
            yield
        except Exception as error:  # packages and disks raise many types
            self._writer, why = None, f"{type(error).__name__}: {one_line(error)}"
            log.warning(f"run.tracker {self.config.run.tracker} failed; training continues untracked: {why}")
