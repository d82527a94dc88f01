"""Output and logs of a run: banner, progress, steps.csv, log.csv, curve.png, skipped.txt, summary."""

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from vil.messages import counted, one_line
from vil.preprocess import ImageSpec
from vil.profile import count_macs, count_parameters
from vil.training.checkpoint import Run
from vil.training.distributed import versions
from vil.training.engine import interval
from vil.training.errors import is_dead_loader, log
from vil.training.files import csv_text, sync, write_atomically, write_text
from vil.training.loader import TrainData, ValData
from vil.training.passes import describe
from vil.training.pulse import Pulse
from vil.training.recipes import to_yaml
from vil.training.trackers import Tracker

_FILES = ("best.pt", "last.pt", "config.yaml", "log.csv", "steps.csv", "curve.png", "skipped.txt")
_COLUMNS = ("step", "epoch", "loss", "grad_norm", "lr", "images_per_s", "data_wait")  # of steps.csv
_CURVE_EVERY = 30.0  # minimum seconds between updates of the curve
# A narrow terminal cuts the end off, so what matters most comes first.
_BAR = "{percentage:3.0f}%|{bar:8}| {n_fmt}/{total_fmt}, {remaining} left  {desc}"


def model_size(model: nn.Module, images: ImageSpec) -> dict[str, float]:
    """Return the number of parameters, params, and the GMACs of one image with scans, gmacs."""
    size = (images.in_chans, *images.img_size)
    return {"params": count_parameters(model), "gmacs": count_macs(model, size) / 1e9}


class Report:
    """Progress of a run on one process; rank 0 prints it and writes it to the run's folder.

    Failures to print or write never stop the run.
    """

    def __init__(self, folder: Path, run: Run, train_data: TrainData, val_data: ValData, pulse: Pulse) -> None:
        """Start from the current state of a run, without output yet."""
        self.folder, self.run, self.config, self.state = folder, run, run.config, run.state
        self.train_data, self.val_data = train_data, val_data
        self.length, self.epochs = train_data.steps_per_epoch, run.config.schedule.epochs
        self.is_main = run.setup.world.is_main
        self.tracker = Tracker(run.config, folder)
        self.drawn = time.monotonic()
        self.paced: tuple[float, int] | None = None
        """When this start had done its first step, which compiles, and how many steps the run had then."""
        self.mean: list[float] = []
        """Loss and gradient norm when they were read last."""
        self.pulse, self.stack = pulse, ExitStack()

    def __enter__(self) -> "Report":
        """Print the banner, and bring the log files in line with the checkpoint."""
        if self.is_main:
            self._banner()
            self._try(write_text, self.folder / "config.yaml", to_yaml(self.config))
            if self.state.step < self.train_data.num_steps:
                self._try(self._catch_up)
        self.bar = tqdm(
            total=self.train_data.num_steps,
            initial=self.state.step,
            disable=not (self.is_main and sys.stdout.isatty()),
            file=sys.stdout,
            leave=False,
            dynamic_ncols=True,
            bar_format=_BAR,
        )
        self.bar.set_description_str("loading data and compiling for the first step")
        if not self.bar.disable:
            self.stack.enter_context(logging_redirect_tqdm([log]))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.bar.close()
        self.stack.close()
        self.tracker.finish()

    def begin_epoch(self) -> None:
        """Start the clock of an epoch; time before and after resuming is added."""
        self.seconds_before, self.began = self.state.seconds, time.monotonic()
        self.first_of_start, self.waited = self.state.step, 0.0
        self.lap = (self.began, self.state.step, 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the ``with`` block as waiting for data."""
        start = time.monotonic()
        yield
        self.waited += time.monotonic() - start

    def took(self) -> None:
        """Show that a step was done."""
        if self.paced is None:
            self.paced = time.monotonic(), self.state.step
            self.bar.unpause()
            self.bar.set_description_str(f"epoch {len(self.state.history) + 1}/{self.epochs}")
        self.bar.update()

    @property
    def done(self) -> int:
        """Steps done in the current epoch."""
        return self.state.step - len(self.state.history) * self.length

    @property
    def seconds(self) -> float:
        """Seconds spent on the current epoch."""
        return self.seconds_before + time.monotonic() - self.began

    @property
    def images_per_s(self) -> float:
        """Images per second in the current epoch, over all processes."""
        return self.done * self.config.data.batch_size / self.seconds

    @property
    def is_due(self) -> bool:
        """Whether to read the losses now, at least once an epoch; the same on all ranks."""
        is_alone = self.run.setup.world.size == 1
        regular = self.done % min(self.config.run.log_interval, self.length) == 0
        return regular or (is_alone and self.pulse.is_due)

    def losses(self, steps: list[int], losses: list[float], norms: list[float]) -> None:
        """Record steps by number, given losses over all images and gradient norms before clipping."""
        start, step, waited = self.lap
        self.lap = now, _, _ = time.monotonic(), self.state.step, self.waited
        speed = (self.state.step - step) * self.config.data.batch_size / (now - start)
        wait = 100 * (self.waited - waited) / (now - start)
        epoch, lr = len(self.state.history) + 1, self.run.setup.lr
        rows = [
            (step + 1, epoch, loss, norm, lr, speed, wait)
            for step, loss, norm in zip(steps, losses, norms, strict=True)
        ]
        good = [row[2:4] for row in rows if all(map(math.isfinite, row[2:4]))]
        means = [sum(values) / len(good) for values in zip(*good, strict=True)]
        self.mean = means or [math.nan, math.nan]
        if self.is_main:
            self._try(self._append_steps, rows)
            for row in rows:
                self.tracker.add("step", row[0], dict(zip(_COLUMNS[1:], row[1:], strict=True)))

    def progress(self) -> None:
        """Print the progress of the epoch if it is due."""
        if not self.is_main or not (self.is_due or self.pulse.is_due):
            return
        history = self.state.history
        top1 = f"top-1 {history[-1]['top1']:.2f}  " if history else ""
        wait = 100 * self.waited / (time.monotonic() - self.began)
        memory = ""
        if torch.cuda.is_available():
            memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB  "
        title = f"epoch {len(history) + 1}/{self.epochs}"
        loss = f"loss {self.mean[0]:.4f}  " if self.mean else ""
        norm = f"grad {self.mean[1]:.2g}  " if self.mean else ""
        status = (
            f"{loss}{top1}{self.images_per_s:,.0f} images/s  data wait {wait:.0f}%  {norm}"
            f"lr {self.run.setup.lr:.2e}  {memory}{self._rest()}"
        )
        if not self.bar.disable:
            self.bar.set_description_str(f"{title}  {status.removesuffix(self._rest())}")
            self.pulse.restart()
        elif self.done < self.length:
            self.pulse.say(f"{title} step {self.done}/{self.length}  {status}")

    def epoch(self) -> None:
        """Print a finished epoch, and write the log and the curve."""
        if not self.is_main:
            return
        row, best = self.state.history[-1], self.state.best[self.state.best_key]
        ema = f", EMA {row['ema_top1']:.2f}" if "ema_top1" in row else ""
        self.pulse.say(
            f"epoch {row['epoch']}/{self.epochs}  loss {row['train_loss']:.4f}, held out {row['val_loss']:.4f}  "
            f"top-1 {row['top1']:.2f}{ema}, best {best:.2f}  {row['images_per_s']:,.0f} images/s  {self._rest()}"
        )
        self._try(self._write_log)
        if time.monotonic() - self.drawn > _CURVE_EVERY:
            self._draw()
        self.tracker.add("epoch", self.state.step, row)

    def skipped(self) -> None:
        """List skipped images and steps in skipped.txt."""
        if self.is_main:
            self._try(self._write_skipped)

    def summary(self) -> None:
        """Write the final log and curve, and print the results and their files."""
        if not self.is_main:
            return
        self._try(self._write_log)
        self._draw()
        state, best, last = self.state, self.state.best, self.state.history[-1]
        ema = f", EMA {last['ema_top1']:.2f}%" if "ema_top1" in last else ""
        averaged = state.best_key == "ema_top1"
        seconds = round(sum(row["seconds"] for row in state.history))
        present = [name for name in _FILES if os.path.exists(self.folder / name)]
        path = self.folder / ("best.pt" if "best.pt" in present else "last.pt")
        low, high = interval(best[state.best_key], best["val_images"])
        log.info(
            f"\n{self.config.model.name} reached top-1 {best[state.best_key]:.2f}% (best{', EMA' * averaged}, "
            f"epoch {best['epoch']}) and {last['top1']:.2f}% (last{ema}) on {self.val_data.num_images:,} held-out "
            f"images, in {timedelta(seconds=seconds)}\n"
            f"interval {low:.1f} to {high:.1f}% (95%) for the best"
            + f", chosen among {len(state.history)} epochs on these images" * (len(state.history) > 1)
            + f"\nskipped  {counted(last['skipped_images'], 'image')}, {counted(last['skipped_steps'], 'step')}"
            + (", listed in skipped.txt" if "skipped.txt" in present else "")
            + "\n"
            f"files    {self.folder}: {', '.join(present)}\n"
            f"evaluate python eval.py {shlex.quote(str(path))}{' --ema' * averaged}"
        )

    def _banner(self) -> None:
        config, state, setup = self.config, self.state, self.run.setup
        size, world = model_size(setup.model, config.images), setup.world
        parts = config.run.grad_accum_steps
        excluded, done = len(self.run.train_source.excluded), len(state.history)
        sizes = ", ".join(map(str, config.data.img_sizes or ()))
        spread = f" = {world.size} processes x {parts} x {self.train_data.micro_batch}"
        log.info(
            f"model    {config.model.name}, {size['params']:,} parameters, "
            f"{size['gmacs']:.4g} GMACs with scans at {config.model.img_size} px"
            + (f", trained at {sizes} px" if sizes else "")
            + f"\ndata     {config.data.dataset}{f' in {config.data.path}' if config.data.path else ''}: "
            f"{self.train_data.num_images:,} images to train on, {self.val_data.num_images:,} held out, "
            f"{config.model.num_classes} classes"
            + (f"; {excluded} left out" if excluded else "")
            + f"\nweights  {setup.origin if state.step == 0 else 'of the resumed run'}"
            f"\nepochs   {self.epochs} of {self.length:,} batches of {config.data.batch_size}"
            + (spread if world.size * parts > 1 else "")
            + f", peak lr {config.peak_lr:g} for that batch\n"
            f"device   {describe(config.run, world.device)}\n"
            f"versions {', '.join(f'{name} {version}' for name, version in versions().items())}\n"
            f"output   {config.run.output}"
        )
        if done == self.epochs:
            log.info("resumed  finished before; nothing is left to train")
        elif state.step:  # even after all steps of an epoch, if not yet evaluated
            log.info(f"resumed  after step {self.done} of epoch {done + 1}")

    def _catch_up(self) -> None:
        """Bring the files in line with the checkpoint, and send the last finished epoch to the tracker again."""
        history = self.state.history
        done = max(len(history) - 1, 0) * self.length
        self.tracker.start(done)
        for row in self._cut_steps():
            if row["step"] > done:
                self.tracker.add("step", int(row.pop("step")), row)
        if history:
            self._write_log()
            self.tracker.add("epoch", len(history) * self.length, history[-1])
        self._write_skipped()

    def _cut_steps(self) -> list[dict[str, float]]:
        """Truncate steps.csv to complete rows of steps in the checkpoint, and return these rows."""
        path, rows = self.folder / "steps.csv", []
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        header = ",".join(_COLUMNS) + "\n"
        for line in lines[1:] if lines[:1] == [header] else []:
            try:
                row = dict(zip(_COLUMNS, map(float, line.split(",")), strict=True))
            except ValueError:
                break
            if not line.endswith("\n") or not len(rows) < row["step"] <= self.state.step:
                break
            rows.append(row)
        write_text(path, header + "".join(lines[1 : len(rows) + 1]))
        return rows

    def _append_steps(self, rows: list[tuple[float, ...]]) -> None:
        with (self.folder / "steps.csv").open("a") as file:
            for step, epoch, *numbers, speed, wait in rows:
                # Nine digits represent a float32 exactly.
                values = ",".join(f"{number:.9g}" for number in numbers)
                file.write(f"{step},{epoch},{values},{speed:.1f},{wait:.1f}\n")
        sync(self.folder / "steps.csv")

    def _write_log(self) -> None:
        write_text(self.folder / "log.csv", csv_text(self.state.history))

    def _write_skipped(self) -> None:
        """Rewrite skipped.txt, or remove an old one if nothing is skipped."""
        state, source, path = self.state, self.train_data.source, self.folder / "skipped.txt"
        held_out = self.val_data.source
        if not (source.excluded or state.bad_images or state.unreadable or state.bad_steps):
            path.unlink(missing_ok=True)
            return
        lines = [
            f"{counted(len(source.excluded), 'image')} left out, without a usable label",
            *(f"  {line}" for line in source.excluded),
            f"{counted(len(state.bad_images), 'image')} that could not be read so far, each replaced by another",
            *(f"  {source.name(index)}: {why}" for index, why in state.bad_images.items()),
            f"{counted(len(state.unreadable), 'held-out image')} left out, because they cannot be read",
            *(f"  {held_out.name(index)}: {why}" for index, why in state.unreadable.items()),
            f"{counted(len(state.bad_steps), 'step')} whose loss or gradient was not finite, without effect",
        ]
        for step, loss in state.bad_steps.items():
            epoch, step_in_epoch = divmod(step, self.length)
            lines.append(f"  step {step_in_epoch + 1} of epoch {epoch + 1}, loss {loss}, its images:")
            lines += [f"    {name}" for name in self.train_data.names(step)]
        write_text(path, "\n".join(lines) + "\n")

    def _draw(self) -> None:
        history, best = self.state.history, self.state.best_epoch
        self._try(draw_curve, self.folder / "curve.png", history, best)
        self.drawn = time.monotonic()

    def _try(self, write: Callable[..., object], *arguments: Any) -> None:
        """Try to write a file that can be rewritten later; log a warning on failure."""
        try:
            write(*arguments)
        except Exception as error:  # disks and matplotlib raise many types
            if is_dead_loader(error):
                raise
            reason = f"{type(error).__name__}: {one_line(error)}"
            log.warning(f"{reason}; training continues without this file")

    @property
    def _pace(self) -> float:
        """Mean seconds per step after the first step of this start; if there is no other, since the epoch began."""
        since, step = self.paced
        steps = self.state.step - step
        return (time.monotonic() - since) / steps if steps else time.monotonic() - self.began

    def _rest(self) -> str:
        """Return the number of skipped steps, if any, and the time left at the mean pace since the first step."""
        steps = len(self.state.bad_steps)
        skipped = f"skipped {counted(steps, 'step')}  " if steps else ""
        if self.paced is None:  # an epoch was evaluated after resuming, and no step was done
            return skipped
        left = timedelta(seconds=round(self._pace * (self.train_data.num_steps - self.state.step)))
        return f"{skipped}{left} left"


def draw_curve(path: Path, history: list[dict[str, float]], best: int) -> None:
    """Plot loss and top-1 per epoch as a PNG file, given one log row per epoch and the epoch of best.pt."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    curves = (
        ("train_loss", "training"),
        ("val_loss", "held out"),
        ("top1", "held out"),
        ("ema_top1", "EMA"),
    )
    for axes, chosen in zip(figure.subplots(1, 2), (curves[:2], curves[2:]), strict=True):
        axes.axvline(best, color="grey", linestyle=":", label=f"best.pt, epoch {best}")
        for key, label in chosen:
            if key in history[-1]:
                values = [row.get(key, math.nan) for row in history]
                axes.plot([row["epoch"] for row in history], values, label=label)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    figure.axes[0].set(ylabel="loss", yscale="log")
    low, high = figure.axes[0].get_ylim()
    few = high < 10 * low  # then equal distances are readable, and powers of 10 too rare
    locator = MaxNLocator(6) if few else LogLocator(subs=(1.0, 2.0, 5.0))
    figure.axes[0].yaxis.set_major_locator(locator)
    figure.axes[0].yaxis.set_major_formatter("{x:g}")  # 0.5 instead of 5 x 10^-1
    figure.axes[0].yaxis.set_minor_locator(NullLocator())
    figure.axes[1].set(ylabel="top-1 (%)")
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
