"""What a run shows and records: banner, progress, steps.csv, log.csv, curve.png, tracker, summary."""

import math
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import nn

from vil.complexity import count_macs, count_parameters
from vil.messages import one_line
from vil.training.config import TrainConfig
from vil.training.data.batches import TrainData, ValData
from vil.training.errors import OutputError
from vil.training.files import csv_text, write_atomically, write_text
from vil.training.run.setup import Training, versions
from vil.training.run.state import RunState
from vil.training.run.step_log import STEPS, StepLog, StepRow
from vil.training.run.stopping import Agreement
from vil.training.run.tracking import Tracking

_FILES = ("best.pt", "last.pt", "config.yaml", "log.csv", "steps.csv", "curve.png")
_CURVE_EVERY = 30.0  # seconds between two drawings of the curve


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
    state: RunState,
) -> None:
    """Print what is about to run."""
    size = model_size(training.model, config)
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    precision = "bfloat16 autocast" if config.run.amp else "float32"
    path = f" in {config.data.path}" if config.data.path else ""
    sizes = ", ".join(map(str, config.data.img_sizes or ()))
    trained = f", trained at {sizes} px" if sizes else ""
    world, parts = training.world, config.run.grad_accum_steps
    spread = f" = {world.size} processes x {parts} x {train_data.micro_batch}"
    excluded = len(train_data.source.excluded)
    console.print(
        f"model    {config.model.name}, {size['params']:,} parameters, "
        f"{size['gmacs']:.4g} GMACs with scans at {config.model.img_size} px{trained}\n"
        f"data     {config.data.dataset}{path}: {train_data.num_images:,} images to train on, "
        f"{val_data.num_images:,} held out, {config.model.num_classes} classes"
        + (f"; {excluded} without a usable label left out" if excluded else "")
        + _notes(train_data, val_data)
        + f"\nweights  {training.origin if state.step == 0 else 'of the run that is continued'}"
        + f"\nepochs   {config.schedule.epochs} of {train_data.steps_per_epoch:,} batches "
        f"of {config.data.batch_size}{spread if world.size * parts > 1 else ''}, "
        f"peak lr {config.peak_lr:g} for that batch\n"
        f"device   {training.device}, {precision}\n"
        f"versions {installed}\n"
        f"output   {config.run.output}"
    )
    for change in state.changes:
        console.print(
            f"changed  after step {change['step']}: {change['setting']} "
            f"({change['before']} -> {change['after']})"
        )
    if len(state.history) == config.schedule.epochs:
        console.print("resumed  finished before; nothing is left to train")
    elif state.step:
        epoch = len(state.history)  # whose steps may all be done, and the model not scored
        step = state.step - epoch * train_data.steps_per_epoch
        console.print(f"resumed  after step {step} of epoch {epoch + 1}")


class Pace:
    """The speed of an epoch, the parts of it before and after resuming together."""

    def __init__(self, batch_size: int, seconds_before: float = 0.0, steps_before: int = 0) -> None:
        """Start the clock.

        Args:
            batch_size: Images of a step, over all processes.
            seconds_before: Spent on the epoch by earlier starts of the run.
            steps_before: Of the epoch, done by them.
        """
        self.batch_size = batch_size
        self.seconds_before = seconds_before
        self.steps_before = steps_before
        self.start = time.perf_counter()
        self.steps = 0
        self.waited = 0.0
        self.lap_began = (self.start, 0, 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within as spent waiting for data."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Spent on the epoch."""
        return self.seconds_before + time.perf_counter() - self.start

    @property
    def images_per_s(self) -> float:
        """Over all processes."""
        return (self.steps_before + self.steps) * self.batch_size / self.seconds

    @property
    def wait_percent(self) -> float:
        """Share of the time since the start that was spent waiting for data."""
        return 100 * self.waited / (time.perf_counter() - self.start)

    def lap(self) -> tuple[float, float]:
        """Return images per second, and percent of waiting, since the last call or the start."""
        start, steps, waited = self.lap_began
        self.lap_began = now, _, _ = time.perf_counter(), self.steps, self.waited
        seconds = now - start
        images = (self.steps - steps) * self.batch_size
        return images / seconds, 100 * (self.waited - waited) / seconds


class Report:
    """The progress of a run: a bar on a terminal, plain lines elsewhere, and its files.

    With a quiet console it writes nothing anywhere.
    """

    def __init__(
        self,
        console: Console,
        folder: Path,
        config: TrainConfig,
        steps_per_epoch: int,
        state: RunState,
        agreement: Agreement,
    ) -> None:
        """Take up a run.

        Args:
            console: Where to print.
            folder: Receives steps.csv, log.csv, curve.png and what the tracker writes.
            config: The run's configuration.
            steps_per_epoch: Steps of an epoch.
            state: How far it has come; read, never written.
            agreement: Knows of signals.
        """
        self.console = console
        self.folder = folder
        self.state = state
        self.epochs = config.schedule.epochs
        self.steps_per_epoch = steps_per_epoch
        self.first_step = state.step
        self.step_log = StepLog(folder / STEPS, state.step)
        self.tracking = Tracking(config, lambda: agreement.received, self.warn)
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
            "starting", total=self.epochs * steps_per_epoch, completed=self.first_step, status=""
        )

    def __enter__(self) -> "Report":
        if not self.console.quiet and self.first_step < self.epochs * self.steps_per_epoch:
            self.tolerate(self.step_log.open)
            self.tolerate(self._catch_up)
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.bar.stop()
        self.tracking.finish(failed=kind is not None)

    def log_steps(self, rows: list[StepRow]) -> None:
        """Record steps whose loss was read."""
        if not self.console.quiet:
            self.tolerate(lambda: self.step_log.append(rows))
            for row in rows:
                self.tracking.add("step", row.step, row._asdict())

    def sync(self) -> None:
        """Bring the steps to disk, ahead of a checkpoint that they are to agree with."""
        if not self.console.quiet:
            self.tolerate(self.step_log.sync)

    def step(self, done: int, loss: float, grad_norm: float, lr: float, pace: Pace) -> None:
        """Show the state within an epoch.

        Args:
            done: Steps done in the epoch.
            loss: Mean since the last call.
            grad_norm: Likewise.
            lr: Learning rate.
            pace: Speed of the epoch.
        """
        self.tracking.show()
        history = self.state.history
        top1 = f"top-1 {history[-1]['top1']:.2f}  " if history else ""
        status = (
            f"loss {loss:.4f}  {top1}{pace.images_per_s:,.0f} images/s  "
            f"data wait {pace.wait_percent:.0f}%  grad {grad_norm:.2g}  lr {lr:.2e}  "
            f"{_memory()}{self._skipped()}{self._time_left()} left"
        )
        title = f"epoch {len(history) + 1}/{self.epochs}"
        self.bar.update(self.task, description=title, completed=self.state.step, status=status)
        if not self.console.is_terminal and done < self.steps_per_epoch:
            self.console.print(f"{title} step {done}/{self.steps_per_epoch}  {status}")

    def record(self, row: dict[str, Any]) -> None:
        """Show a finished epoch, and write the log and the curve."""
        ema = f"  EMA {row['ema_top1']:.2f}" if "ema_top1" in row else ""
        self.console.print(
            f"epoch {row['epoch']}/{self.epochs}  loss {row['train_loss']:.4f}  "
            f"held-out loss {row['val_loss']:.4f}  top-1 {row['top1']:.2f}{ema}  "
            f"best {self.state.best_top1:.2f}  {row['images_per_s']:,.0f} images/s  "
            f"lr {row['lr']:.2e}  {self._skipped()}{self._time_left()} left"
        )
        if not self.console.quiet:
            self.tolerate(self._write_log)
            self.tracking.add("epoch", self.state.step, row)
            self.tracking.show()
        now = time.perf_counter()
        if now - self.drawn > _CURVE_EVERY:
            self._draw()

    def warn(self, message: str) -> None:
        """Say what went wrong and did not stop the run."""
        self.console.print(f"warning: {message}")

    def tolerate(self, write: Callable[[], object]) -> None:
        """Write a file that can be written again later; say so if it fails."""
        try:
            write()
        except OutputError as error:
            self.warn(f"{error}; training goes on without")
        except Exception as error:  # whatever matplotlib, say, comes up with
            reason = f"{type(error).__name__}: {one_line(error)}"
            self.warn(f"cannot write into {self.folder}: {reason}; training goes on without")

    def summarize(self, name: str, num_images: int) -> None:
        """Write the log and the curve once more, and print what was reached and where it is."""
        if not self.console.quiet:
            self._write_log()
            self._draw()
        best, last = self.state.best, self.state.history[-1]
        ema = f", EMA {last['ema_top1']:.2f}%" if "ema_top1" in last else ""
        seconds = round(sum(row["seconds"] for row in self.state.history))
        skipped = last["skipped_images"] + last["skipped_steps"]
        named = f", named in {self.folder / 'skipped.txt'}" if skipped else ""
        averaged = ", EMA" if self.state.best_key == "ema_top1" else ""
        listed = set()
        with suppress(OSError):  # of a disk that is gone, now that all is done
            listed = set(os.listdir(self.folder))
        present = [name for name in _FILES if name in listed]
        best_path = self.folder / ("best.pt" if "best.pt" in present else "last.pt")
        self.console.print(
            f"\n{name} reached top-1 {self.state.best_top1:.2f}% (best{averaged}, epoch {best['epoch']}) and "
            f"{last['top1']:.2f}% (last{ema}) on {num_images:,} held-out images, "
            f"in {timedelta(seconds=seconds)}\n"
            f"skipped  {last['skipped_images']} images, {last['skipped_steps']} steps{named}\n"
            f"files    {self.folder}: {', '.join(present)}\n"
            f"evaluate python eval.py {shlex.quote(str(best_path))}{' --ema' if averaged else ''}"
        )

    def _catch_up(self) -> None:
        """Record the last finished epoch again; the start before may have been killed ahead of that."""
        history, length = self.state.history, self.steps_per_epoch
        done = max(len(history) - 1, 0) * length
        self.tracking.start(done)
        for row in self.step_log.rows_after(done):
            self.tracking.add("step", row.step, row._asdict())
        for row in history[-1:]:
            self.tracking.add("epoch", len(history) * length, row)
            self._write_log()
        self.tracking.show()

    def _write_log(self) -> None:
        write_text(self.folder / "log.csv", csv_text(self.state.history))

    def _draw(self) -> None:
        if not self.console.quiet:
            self.tolerate(lambda: draw_curve(self.folder / "curve.png", self.state))
            self.drawn = time.perf_counter()

    def _skipped(self) -> str:
        """Count what was skipped, if anything was."""
        images, steps = len(self.state.bad_images), len(self.state.bad_steps)
        return f"skipped {images} images, {steps} steps  " if images or steps else ""

    def _time_left(self) -> timedelta:
        """Estimate the rest of the run from its mean pace since it started or resumed."""
        done = self.state.step - self.first_step
        left = self.epochs * self.steps_per_epoch - self.state.step
        pace = (time.perf_counter() - self.start) / max(done, 1)
        return timedelta(seconds=round(pace * left))


def _notes(train_data: TrainData, val_data: ValData) -> str:
    """Say in lines of their own what of the data goes unused."""
    notes = [data.source.ignored for data in (train_data, val_data) if data.source.ignored]
    if val_data.num_rotated:
        notes.append(
            f"{val_data.num_rotated:,} of {val_data.num_images:,} validation images are rotated by "
            f"their EXIF tag, which data.exif_rotation is to apply"
        )
    return "".join(f"\n         {note}" for note in notes)


def _memory() -> str:
    """Return the most memory that was in use on the GPU, if there is one."""
    if not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB  "


def draw_curve(path: Path, state: RunState) -> None:
    """Draw loss and top-1 by epoch.

    Args:
        path: Destination, PNG.
        state: Holds a row per epoch.
    """
    from matplotlib.figure import Figure

    history = state.history
    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    loss_axes, top1_axes = figure.subplots(1, 2)
    loss_axes.plot(epochs, [row["train_loss"] for row in history], label="training")
    loss_axes.plot(epochs, [row["val_loss"] for row in history], label="held out")
    loss_axes.set(xlabel="epoch", ylabel="loss", yscale="log")
    top1_axes.plot(epochs, [row["top1"] for row in history], color="C1", label="held out")
    if any("ema_top1" in row for row in history):
        top1_axes.plot(
            epochs, [row.get("ema_top1", math.nan) for row in history], color="C2", label="EMA"
        )
    top1_axes.set(xlabel="epoch", ylabel="top-1 (%)", title=f"best {state.best_top1:.2f}%")
    for axes in (loss_axes, top1_axes):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
