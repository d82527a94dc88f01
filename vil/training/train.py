"""The main training loop."""

import math
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from vil.messages import counted, named, printable
from vil.training.checkpoint import Run, kept_checkpoints, load_newest, merged, restore, save
from vil.training.distributed import connect
from vil.training.engine import Score, StepResult, evaluate, train_step
from vil.training.errors import DataError, NonFiniteLossError, OutputError, StoppedError, log
from vil.training.files import lock_folder
from vil.training.images import Source
from vil.training.listing import choose_exceptions
from vil.training.loader import Step, TrainData, ValData
from vil.training.pulse import Pulse
from vil.training.recipes import flat
from vil.training.report import Report
from vil.training.resolve import complete, read_source
from vil.training.sampler import seed_everything
from vil.training.settings import TrainConfig
from vil.training.setup import build
from vil.training.signals import Signals
from vil.training.splits import check_same, described, open_splits

MAX_NAMED = 5  # unreadable images in a line; skipped.txt has all
MAX_FAILED_SAVES = 5  # consecutive failures; a full disk may be cleared in the meantime


def train(asked: TrainConfig) -> None:
    """Train with the settings of the user; resume the run in the output folder if there is one.

    A checkpoint is written at the start of a run, after each epoch, at time intervals and on a
    signal, but never after an error: a UserError of errors.py, if the run cannot start or continue.
    """
    with connect(asked.run) as world, ExitStack() as stack:
        folder, saved = Path(asked.run.output), None
        if world.is_main:  # ranks need not share a disk
            stack.enter_context(lock_folder(folder))
            saved = load_newest(folder)
        saved = world.broadcast(saved)

        # Take what the user or the resumed run states, and complete it from weights and data.
        stated, asked = merged(saved, asked)
        weights, data, model = None, stated.data, stated.model
        if saved is not None:
            exceptions = saved["run"].get("val_exceptions", ())
        else:
            if model.pretrained is not None:
                weights = read_source(model.pretrained, model.pretrained_ema)
            exceptions = choose_exceptions(data, weights)
        train_source, val_source = open_splits(data, model.num_classes, world, exceptions)
        config = complete(stated, weights, train_source, val_source, world.size)
        splits = {"training": train_source, "validation": val_source}
        check_same(world, described(flat(config), splits))
        train_data = TrainData(config, train_source, world)
        val_data = ValData(val_source, config.images, config.data, world)

        # Build the model with the same seed on all ranks.
        seed_everything(config.run.seed)
        setup = build(config, world, train_data.steps_per_epoch, weights, train_source.classes)
        run = Run(config, asked, setup, train_source, val_source)
        run.state.val_exceptions = list(exceptions)
        pulse = Pulse()
        if saved is not None:
            restore(run, saved)
            val_data.left_out = run.state.unreadable
        else:
            val_data.verify(pulse)  # find bad images now, not after an epoch
            run.state.unreadable = val_data.left_out
            if world.is_main:
                save(folder, run)  # from now on the folder belongs to this run
        state = run.state
        del saved, weights

        report, saver = Report(folder, run, train_data, val_data, pulse), Saver(folder, run)
        unread: list[tuple[Step, StepResult]] = []  # reading a loss waits for the device
        with Signals(world) as signals, report:
            steps = train_data.steps(state.step)  # a resumed run goes on within an epoch
            for epoch in range(len(state.history), config.schedule.epochs):
                setup.model.train()
                report.begin_epoch()
                while state.step < (epoch + 1) * train_data.steps_per_epoch:
                    with report.waiting():
                        step = next(steps)
                    setup.set_step(state.step)
                    result = train_step(setup, step, config)  # does not wait for the device
                    unread.append((step._replace(micro_batches=[]), result))
                    state.step += 1
                    report.took()
                    number, due = signals.agree(saver.is_due)
                    if number or due or report.is_due:
                        read_losses(run, report, train_data, unread)
                    if number or due:
                        saver.write(report.seconds if report.done else 0.0, must=bool(number))
                    if number:
                        world.gather(None)  # launchers kill all ranks when one exits
                        raise StoppedError(number)
                    report.progress()
                read_losses(run, report, train_data, unread)
                setup.share_statistics()
                scores = evaluate(setup.scoring_passes, val_data, pulse=pulse)
                end_epoch(run, report, saver, scores)
            report.summary()


def read_losses(run: Run, report: Report, data: TrainData, unread: list[tuple[Step, StepResult]]) -> None:
    """Read losses, clear their list, and record skipped images and steps; all ranks call this.

    Raises NonFiniteLossError or DataError if more than optim.max_bad_steps or data.max_bad_images
    were skipped.
    """
    if not unread:
        return
    state, world, config = run.state, run.setup.world, run.config
    losses, norms = torch.stack([torch.stack(result) for _, result in unread]).T.tolist()
    bad = {index: why for step, _ in unread for index, why in step.bad_images.items()}
    numbers = [step.number for step, _ in unread]
    unread.clear()
    ranks = world.gather((losses, bad))
    means = [sum(values) / world.size for values in zip(*(own for own, _ in ranks), strict=True)]
    skipped, known = len(state.bad_images) + len(state.bad_steps), {*state.bad_images}
    for _, images in ranks:
        state.bad_images |= images
    state.bad_images = dict(sorted(state.bad_images.items()))
    new = [f"{data.source.name(i)}: {why}" for i, why in state.bad_images.items() if i not in known]
    if new:
        count = counted(len(new), "training image")
        log.warning(f"{count} cannot be read, replaced by others: {named(new, MAX_NAMED)}")
    for number, loss, norm in zip(numbers, means, norms, strict=True):
        if math.isfinite(loss) and math.isfinite(norm):
            state.loss_sum += loss
            state.loss_count += 1
        else:
            state.bad_steps[number] = loss
    report.losses(numbers, means, norms)
    if len(state.bad_images) + len(state.bad_steps) == skipped:
        return
    report.skipped()
    if len(state.bad_steps) > config.optim.max_bad_steps:
        step, loss = list(state.bad_steps.items())[-1]
        epoch, step_in_epoch = divmod(step, data.steps_per_epoch)
        raise NonFiniteLossError(
            f"{len(state.bad_steps)} steps were skipped because the loss or gradient was not "
            f"finite, more than optim.max_bad_steps {config.optim.max_bad_steps}; the last was "
            f"step {step_in_epoch + 1} of epoch {epoch + 1}, loss {loss}; "
            f"{report.folder / 'skipped.txt'} lists their images",
            everywhere=True,
        )
    if new:
        _check_classes_are_left(data.source, state.bad_images)
    count = len(state.bad_images) + len(data.source.excluded)
    if count > config.data.max_bad_images * (data.num_images + len(data.source.excluded)):
        index, why = list(state.bad_images.items())[-1]
        raise DataError(
            f"{count} of {data.num_images + len(data.source.excluded)} training images are "
            f"unusable, more than data.max_bad_images {config.data.max_bad_images:g}, for example "
            f"{data.source.name(index)}: {why}; {report.folder / 'skipped.txt'} lists all",
            everywhere=True,
        )


def _check_classes_are_left(source: Source, bad: dict[int, str]) -> None:
    """Raise DataError if no image of a class can be read."""
    rest = np.bincount(np.delete(source.labels, [*bad]), minlength=int(source.labels.max()) + 1)
    for index, why in bad.items():
        if not rest[label := source.labels[index]]:
            name = label if source.classes is None else printable(source.classes[label])
            raise DataError(
                f"no training image of class {name} can be read, for example {source.name(index)}: {why}",
                everywhere=True,
            )


def end_epoch(run: Run, report: Report, saver: "Saver", scores: list[Score]) -> None:
    """Record, save and report a finished epoch; raise NonFiniteLossError for a bad loss."""
    state, world = run.state, run.setup.world
    raw, *averaged = scores
    if not math.isfinite(raw.loss):
        kept = world.broadcast(kept_checkpoints(report.folder) if world.is_main else None)
        raise NonFiniteLossError(
            f"the validation loss is {raw.loss} after epoch {len(state.history) + 1}; {kept}",
            everywhere=True,
        )
    row = {
        "epoch": len(state.history) + 1,
        "lr": run.setup.lr,
        "train_loss": state.loss_sum / state.loss_count if state.loss_count else math.nan,
        "val_loss": raw.loss,
        "top1": raw.top1,
        "top5": raw.top5,
        "val_images": raw.num_images,
    }
    for score in averaged:
        row |= {"ema_loss": score.loss, "ema_top1": score.top1, "ema_top5": score.top5}
    row |= {
        "skipped_images": len(state.bad_images) + len(run.train_source.excluded),
        "skipped_steps": len(state.bad_steps),
        "images_per_s": report.images_per_s,
        "seconds": report.seconds,
    }
    state.end_epoch(row)
    # Save before anything that can hang. A run killed before logging writes the log on resume.
    saver.write(0.0, must=len(state.history) == run.config.schedule.epochs)
    report.epoch()


class Saver:
    """Writes checkpoints on rank 0."""

    def __init__(self, folder: Path, run: Run) -> None:
        """Start the clock of the next checkpoint."""
        self.folder, self.run = folder, run
        self.is_main, self.saved, self.failed = run.setup.world.is_main, time.monotonic(), 0

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due by the clock of rank 0."""
        passed = time.monotonic() - self.saved
        return self.is_main and passed >= 60 * self.run.config.run.save_minutes

    def write(self, seconds: float, must: bool) -> None:
        """Write a checkpoint, given the time spent on the current epoch.

        Raises OutputError if writing fails and ``must`` is set, or for the fifth time in a row.
        """
        self.saved, self.run.state.seconds = time.monotonic(), seconds
        if not self.is_main:
            return
        try:
            save(self.folder, self.run)
            self.failed = 0
        except OutputError as error:
            self.failed += 1
            if must or self.failed == MAX_FAILED_SAVES:
                raise
            log.warning(f"{error}; training continues without this checkpoint")
