"""What a run shows and records: banner, progress, log.csv, curve.png, summary."""

import csv
import io
import shlex
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import nn

from vil.complexity import count_macs, count_parameters
from vil.training.config import TrainConfig
from vil.training.data import TrainData, ValData
from vil.training.engine import StepReport
from vil.training.files import write_atomically, write_text
from vil.training.setup import Training, versions

_CURVE_EVERY = 30.0  # seconds between two drawings of the curve


def new_console() -> Console:
    """Return a console that neither colours numbers nor wraps lines in logs."""
    return Console(highlight=False, soft_wrap=True, markup=False)


def model_size(model: nn.Module, config: TrainConfig) -> dict[str, float]:
    """Return the parameters and the GMACs of one image, the scans counted."""
    size = config.model.img_size
    return {
        "params": count_parameters(model),
        "gmacs": count_macs(model, (config.model.in_chans, size, size)) / 1e9,
    }


def print_banner(
    console: Console,
    training: Training,
    train_data: TrainData,
    val_data: ValData,
    config: TrainConfig,
    folder: Path,
) -> None:
    """Print what is about to run."""
    size = model_size(training.model, config)
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    precision = "bfloat16 autocast" if config.run.amp else "float32"
    path = f" in {config.data.path}" if config.data.path else ""
    batch = config.data.batch_size
    console.print(
        f"model    {config.model.name}, {size['params']:,} parameters, "
        f"{size['gmacs']:.4g} GMACs with scans at {config.model.img_size} px\n"
        f"data     {config.data.dataset}{path}: {train_data.num_images:,} images to train on, "
        f"{val_data.num_images:,} held out, {config.model.num_classes} classes\n"
        f"epochs   {config.schedule.epochs} of {train_data.batches_per_epoch:,} batches "
        f"of {batch}, peak lr {config.optim.lr:g} for that batch\n"
        f"device   {training.device}, {precision}\n"
        f"versions {installed}\n"
        f"output   {folder}"
    )


class Report:
    """The progress of a run: a bar on a terminal, plain lines elsewhere, and its files."""

    def __init__(
        self,
        console: Console,
        folder: Path,
        config: TrainConfig,
        batches_per_epoch: int,
        history: list[dict[str, Any]],
    ) -> None:
        """Take up a run after the epochs in its history.

        Args:
            console: Where to print.
            folder: Receives log.csv and curve.png.
            config: The run's configuration.
            batches_per_epoch: Steps of an epoch.
            history: A row per finished epoch; record() appends to it.
        """
        self.console = console
        self.folder = folder
        self.history = history
        self.epochs = config.schedule.epochs
        self.batches_per_epoch = batches_per_epoch
        self.first_step = len(history) * batches_per_epoch
        self.start = self.drawn = time.perf_counter()
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task(
            "starting", total=self.epochs * batches_per_epoch, completed=self.first_step, status=""
        )

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    @property
    def best(self) -> dict[str, Any]:
        """The row of the epoch with the best top-1, the first of equals."""
        return max(self.history, key=lambda row: row["top1"])

    def step(self, progress: StepReport) -> None:
        """Show the state within an epoch."""
        epoch = len(self.history)
        done = epoch * self.batches_per_epoch + progress.step
        top1 = f"top-1 {self.history[-1]['top1']:.2f}  " if self.history else ""
        status = (
            f"loss {progress.loss:.4f}  {top1}{progress.images_per_s:,.0f} images/s  "
            f"lr {progress.lr:.2e}  {self._time_left(done)} left"
        )
        title = f"epoch {epoch + 1}/{self.epochs}"
        self.bar.update(self.task, description=title, completed=done, status=status)
        if not self.console.is_terminal and progress.step < self.batches_per_epoch:
            self.console.print(f"{title} step {progress.step}/{self.batches_per_epoch}  {status}")

    def record(self, row: dict[str, Any]) -> None:
        """Add a finished epoch to the log, the curve and the screen."""
        self.history.append(row)
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.history)
        write_text(self.folder / "log.csv", table.getvalue())
        ema = f"  EMA {row['ema_top1']:.2f}" if "ema_top1" in row else ""
        left = self._time_left(len(self.history) * self.batches_per_epoch)
        self.console.print(
            f"epoch {len(self.history)}/{self.epochs}  loss {row['train_loss']:.4f}  "
            f"held-out loss {row['val_loss']:.4f}  top-1 {row['top1']:.2f}{ema}  "
            f"best {self.best['top1']:.2f}  {row['images_per_s']:,.0f} images/s  "
            f"lr {row['lr']:.2e}  {left} left"
        )
        now = time.perf_counter()
        if now - self.drawn > _CURVE_EVERY or len(self.history) == self.epochs:
            draw_curve(self.folder / "curve.png", self.history)
            self.drawn = now

    def summarize(self, name: str, num_images: int) -> None:
        """Print what was reached and where it is."""
        best, last = self.best, self.history[-1]
        ema = f", EMA {last['ema_top1']:.2f}%" if "ema_top1" in last else ""
        seconds = round(sum(row["seconds"] for row in self.history))
        best_path = self.folder / "best.pt"
        self.console.print(
            f"\n{name} reached top-1 {best['top1']:.2f}% (best, epoch {best['epoch']}) and "
            f"{last['top1']:.2f}% (last{ema}) on {num_images:,} held-out images, "
            f"in {timedelta(seconds=seconds)}\n"
            f"files    {self.folder}: best.pt, last.pt, config.yaml, log.csv, curve.png\n"
            f"evaluate python eval.py {shlex.quote(str(best_path))}"
        )

    def _time_left(self, done: int) -> timedelta:
        """Estimate the rest of the run from its mean pace since it started or resumed."""
        pace = (time.perf_counter() - self.start) / (done - self.first_step)
        return timedelta(seconds=round(pace * (self.epochs * self.batches_per_epoch - done)))


def draw_curve(path: Path, history: list[dict[str, Any]]) -> None:
    """Draw loss and top-1 by epoch.

    Args:
        path: Destination, PNG.
        history: A row per epoch.
    """
    from matplotlib.figure import Figure

    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    loss_axes, top1_axes = figure.subplots(1, 2)
    loss_axes.plot(epochs, [row["train_loss"] for row in history], label="training")
    loss_axes.plot(epochs, [row["val_loss"] for row in history], label="held out")
    loss_axes.set(xlabel="epoch", ylabel="loss", yscale="log")
    top1_axes.plot(epochs, [row["top1"] for row in history], color="C1", label="held out")
    if "ema_top1" in history[-1]:
        top1_axes.plot(epochs, [row["ema_top1"] for row in history], color="C2", label="EMA")
    best = max(history, key=lambda row: row["top1"])
    top1_axes.set(xlabel="epoch", ylabel="top-1 (%)", title=f"best {best['top1']:.2f}%")
    for axes in (loss_axes, top1_axes):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
