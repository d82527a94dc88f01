"""The run from its first or resumed epoch to its last."""

import time
from pathlib import Path
from typing import Any

from vil.training.checkpoint import save_checkpoint
from vil.training.config import TrainConfig
from vil.training.data import TrainData, ValData
from vil.training.engine import check_score, evaluate, train_one_epoch
from vil.training.report import Report
from vil.training.setup import Training


def fit(
    training: Training,
    train_data: TrainData,
    val_data: ValData,
    config: TrainConfig,
    folder: Path,
    report: Report,
) -> None:
    """Train the remaining epochs; after each, log it and write last.pt and, if better, best.pt.

    Args:
        training: Updated in place.
        train_data: The training images.
        val_data: The held-out images.
        config: The run's configuration.
        folder: Receives the checkpoints.
        report: Holds the epochs done so far.
    """
    for epoch in range(len(report.history), config.schedule.epochs):
        best_before = report.best["top1"] if report.history else -1.0
        row = run_epoch(training, train_data, val_data, config, epoch, report)
        report.record(row)
        best = max(best_before, row["top1"])
        state = (training, config, report.history, best)
        if row["top1"] > best_before:
            save_checkpoint(folder / "best.pt", *state)
        save_checkpoint(folder / "last.pt", *state)


def run_epoch(
    training: Training,
    train_data: TrainData,
    val_data: ValData,
    config: TrainConfig,
    epoch: int,
    report: Report,
) -> dict[str, Any]:
    """Train one epoch and score it.

    Returns:
        The epoch's row of the log.
    """
    start = time.perf_counter()
    loss, images_per_s = train_one_epoch(training, train_data, config, epoch, report.step)
    score = evaluate(training.forward, val_data, training.device, config.run.amp)
    check_score(score, epoch)
    row = {
        "epoch": epoch + 1,
        "lr": training.optimizer.param_groups[0]["lr"],
        "train_loss": loss,
        "val_loss": score.loss,
        "top1": score.top1,
        "top5": score.top5,
    }
    if training.ema is not None:
        averaged = evaluate(training.ema.module, val_data, training.device, config.run.amp)
        row |= {"ema_loss": averaged.loss, "ema_top1": averaged.top1, "ema_top5": averaged.top5}
    return row | {"images_per_s": images_per_s, "seconds": time.perf_counter() - start}
