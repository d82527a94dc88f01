"""The run from its first or resumed step to its last epoch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vil.training.config import TrainConfig
from vil.training.data.batches import Step, TrainData, ValData
from vil.training.errors import DataError, NonFiniteLossError, OutputError, UserError, message_of
from vil.training.run.checkpoint import About, kept_checkpoints, save_checkpoint
from vil.training.run.engine import SpoiledError, StepResult, evaluate, train_step
from vil.training.run.report import Pace, Report
from vil.training.run.setup import Training
from vil.training.run.skipped import write_skipped
from vil.training.run.state import RunState
from vil.training.run.step_log import StepRow
from vil.training.run.stopping import Agreement

_MOST_FAILED_SAVES = 5  # in a row; a full disk may be cleared meanwhile


@dataclass
class Run:
    """A run in progress, in one of its processes."""

    training: Training
    train_data: TrainData
    val_data: ValData
    about: About
    folder: Path
    state: RunState
    agreement: Agreement
    report: Report
    steps: Iterator[Step] = field(init=False)
    """The rest of them; it ends early where a step's images cannot be had."""
    coming: Step | None = None
    """The next one, loaded a step ahead, so that all processes know in time if one lacks it."""
    pace: Pace = field(init=False)
    """Of the current epoch."""
    unread: list[tuple[Step, StepResult]] = field(default_factory=list)
    """Steps whose loss was not read yet, without their images: reading waits for the device."""
    failed_saves: int = 0
    written: tuple[int, int] = field(init=False)
    """Steps and epochs done when the run began, or a checkpoint was last written."""

    def __post_init__(self) -> None:
        self.written = self.done

    @property
    def config(self) -> TrainConfig:
        """All settings."""
        return self.about.config

    @property
    def done(self) -> tuple[int, int]:
        """Steps and epochs."""
        return self.state.step, len(self.state.history)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return self.training.world.is_main


def fit(run: Run) -> None:
    """Train the remaining steps; after each epoch score the model, write a checkpoint and log it.

    A checkpoint is written, too, where a signal or an error ends the run between two steps.

    Raises:
        StoppedError: a signal came.
        NonFiniteLossError: more steps than optim.max_bad_steps were skipped, or the model is useless.
        DataError: images cannot be read. If they are more than data.max_bad_images, no checkpoint is
            written: what was trained on in their place would stay, once they can be read again.
        ConfigError: a step needs more memory than there is.
        LostProcessError: another process cannot go on.
        OutputError: checkpoints cannot be written.
    """
    agreement = run.agreement
    run.steps = agreement.shield(run.train_data.steps(run.state.step))
    _name_skipped(run)  # in line with the checkpoint, whatever ended the last start
    try:
        while len(run.state.history) < run.config.schedule.epochs:
            train_epoch(run)
            finish_epoch(run)
    except Exception as error:
        if agreement.stops:
            _save_at_last(run, error)
        raise


def train_epoch(run: Run) -> None:
    """Train to the end of the current epoch.

    Args:
        run: Updated in place.
    """
    state, training = run.state, run.training
    epoch, length = len(state.history), run.train_data.steps_per_epoch
    training.set_epoch(epoch)
    training.model.train()
    run.pace = Pace(run.config.data.batch_size, state.seconds, state.step - epoch * length)
    if run.coming is None and state.step < (epoch + 1) * length:
        _fetch(run)
    while state.step < (epoch + 1) * length:
        if run.agreement.check():
            save(run)
        step = run.coming
        _fetch(run)
        try:
            result = train_step(training, step, run.config)
        except UserError as error:
            # Of several processes, the others wait for this one in the midst of the step.
            if training.world.size > 1 or isinstance(error, SpoiledError):
                raise
            run.agreement.error = error
            continue
        run.unread.append((step._replace(micro_batches=[]), result))
        state.step += 1
        run.pace.steps += 1
        done = state.step - epoch * length
        if done % run.config.run.log_interval == 0 or done == length:
            loss, norm = read_results(run)
            run.report.step(done, loss, norm, training.lr, run.pace)


def _fetch(run: Run) -> None:
    """Load the step after the one at hand, and ask the other processes if they have theirs."""
    with run.pace.waiting():
        run.coming = next(run.steps, None)
    run.agreement.ask()


def finish_epoch(run: Run) -> None:
    """Score the model after an epoch, write a checkpoint, and log both."""
    state, training, config = run.state, run.training, run.config
    epoch = len(state.history)

    models = [training.compiled] + ([] if training.ema is None else [training.ema.module])
    raw, *averaged = evaluate(
        models,
        run.val_data,
        training.augment.normalize,
        config.run.amp,
        run.agreement,
    )
    if not math.isfinite(raw.loss):
        kept = training.world.broadcast(kept_checkpoints(run.folder) if run.is_main else None)
        raise NonFiniteLossError(
            f"the validation loss is {raw.loss} after epoch {epoch + 1}; {kept}"
        )
    row = {
        "epoch": epoch + 1,
        "lr": training.lr,
        "train_loss": state.loss_sum / state.loss_count if state.loss_count else math.nan,
        "val_loss": raw.loss,
        "top1": raw.top1,
        "top5": raw.top5,
    }
    for score in averaged:
        row |= {"ema_loss": score.loss, "ema_top1": score.top1, "ema_top5": score.top5}
    row |= {
        "skipped_images": len(state.bad_images) + len(run.train_data.source.excluded),
        "skipped_steps": len(state.bad_steps),
        "images_per_s": run.pace.images_per_s,
        "seconds": run.pace.seconds,
    }
    state.end_epoch(row)
    # Ahead of all that can hang; a run that is killed in between records the epoch when it goes on.
    save(run, must=len(state.history) == config.schedule.epochs)
    run.report.record(row)


def read_results(run: Run) -> tuple[float, float]:
    """Read the losses since the last reading and account for what was skipped; in all processes.

    Returns:
        Mean loss and mean norm of the gradient of the steps that were not skipped.

    Raises:
        NonFiniteLossError: more steps than optim.max_bad_steps were skipped.
        DataError: more images than data.max_bad_images cannot be read.
    """
    if not run.unread:
        return math.nan, math.nan
    state, world = run.state, run.training.world
    losses, norms = torch.stack([torch.stack(result) for _, result in run.unread]).T.tolist()
    bad = {index: why for step, _ in run.unread for index, why in step.bad_images.items()}
    told = world.gather((losses, bad))
    losses = [
        sum(values) / world.size for values in zip(*(losses for losses, _ in told), strict=True)
    ]
    skipped = len(state.bad_images) + len(state.bad_steps)
    state.bad_images = dict(sorted((state.bad_images | _merged(told)).items()))
    rows = _rows(run, losses, norms)
    run.unread.clear()
    run.report.log_steps(rows)
    good = [row for row in rows if row.is_finite]
    for row in good:
        state.loss_sum += row.loss
        state.loss_count += 1
    state.bad_steps |= {row.step - 1: row.loss for row in rows if not row.is_finite}
    if len(state.bad_images) + len(state.bad_steps) > skipped:
        _account_for_skipped(run)
    if not good:
        return math.nan, math.nan
    return (
        sum(row.loss for row in good) / len(good),
        sum(row.grad_norm for row in good) / len(good),
    )


def save(run: Run, must: bool = False) -> None:
    """Write a checkpoint, unless there is nothing new; in all processes.

    Args:
        run: The run.
        must: Stop the run if that fails. Otherwise it goes on, and stops at the fifth failure in a
            row.

    Raises:
        OutputError: the checkpoint could not be written; earlier ones are intact.
    """
    read_results(run)
    within_an_epoch = run.state.step > len(run.state.history) * run.train_data.steps_per_epoch
    run.state.seconds = run.pace.seconds if within_an_epoch else 0.0
    run.report.sync()
    run.agreement.has_saved()
    if not run.is_main or run.written == run.done:
        return
    try:
        save_checkpoint(run.folder, run.training, run.about, run.state)
        run.failed_saves, run.written = 0, run.done
    except OutputError as error:
        run.failed_saves += 1
        if must or run.failed_saves == _MOST_FAILED_SAVES:
            raise
        run.report.warn(f"{error}; training goes on without")


def _save_at_last(run: Run, why: Exception) -> None:
    """Write a checkpoint when the run ends early; in all processes.

    Raises:
        OutputError: it could not be written; says what ended the run, too.
    """
    try:
        save(run, must=True)
    except OutputError as error:
        raise OutputError(f"{error}; the run was ending already: {message_of(why)}") from why
    finally:
        # As soon as one process is gone a launcher ends the others, which gives the main one seconds.
        run.training.world.gather(None)


def _rows(run: Run, losses: list[float], norms: list[float]) -> list[StepRow]:
    """Describe the unread steps, all of the current epoch."""
    images_per_s, data_wait = run.pace.lap()
    epoch, lr = len(run.state.history) + 1, run.training.lr
    return [
        StepRow(step.number + 1, epoch, loss, norm, lr, images_per_s, data_wait)
        for (step, _), loss, norm in zip(run.unread, losses, norms, strict=True)
    ]


def _merged(told: list[tuple[list[float], dict[int, str]]]) -> dict[int, str]:
    """Merge what all processes could not read."""
    return {index: why for _, bad in told for index, why in bad.items()}


def _account_for_skipped(run: Run) -> None:
    """Name what was skipped in skipped.txt, and stop if it is too much."""
    state, data, config = run.state, run.train_data, run.config
    _name_skipped(run)
    if len(state.bad_steps) > config.optim.max_bad_steps:
        step, loss = list(state.bad_steps.items())[-1]
        raise NonFiniteLossError(
            f"{len(state.bad_steps)} steps were skipped because loss or gradient was not finite, "
            f"optim.max_bad_steps is {config.optim.max_bad_steps}; the last was step "
            f"{step % data.steps_per_epoch + 1} of epoch {step // data.steps_per_epoch + 1}, "
            f"loss {loss}; their images are in {run.folder / 'skipped.txt'}"
        )
    bad = len(state.bad_images) + len(data.source.excluded)
    if bad > config.data.max_bad_images * (data.num_images + len(data.source.excluded)):
        index, why = list(state.bad_images.items())[-1]
        raise DataError(
            f"{bad} of {data.num_images} training images are no good, more than "
            f"data.max_bad_images {config.data.max_bad_images:g}, as {data.source.name(index)}: "
            f"{why}; all are in {run.folder / 'skipped.txt'}"
        )


def _name_skipped(run: Run) -> None:
    """Bring skipped.txt up to date; that it cannot be written is said, and no reason to stop."""
    if run.is_main:
        run.report.tolerate(lambda: write_skipped(run.folder, run.state, run.train_data))
