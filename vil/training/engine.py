"""The training epoch and the evaluation."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from timm.utils import random_seed
from torch import nn
from torch.nn import functional

from vil.training.config import TrainConfig
from vil.training.data import TrainData, ValData, epoch_seed
from vil.training.errors import DataError, NonFiniteLossError
from vil.training.setup import Training


class StepReport(NamedTuple):
    """What the loop knows each time it reads the loss."""

    step: int
    """Steps done in this epoch."""
    loss: float
    """Mean since the last report."""
    lr: float
    images_per_s: float
    """Mean over the epoch so far."""


class Score(NamedTuple):
    """An evaluation."""

    loss: float
    top1: float
    """Percent."""
    top5: float
    """Percent."""
    num_images: int
    images_per_s: float


def train_one_epoch(
    training: Training,
    data: TrainData,
    config: TrainConfig,
    epoch: int,
    report: Callable[[StepReport], None],
) -> tuple[float, float]:
    """Train for one epoch.

    All random numbers follow from (seed, epoch), so that a run resumed here repeats itself.

    Args:
        training: Updated in place.
        data: The training images.
        config: The run's configuration.
        epoch: Counted from 0.
        report: Called every run.log_interval steps and at the end.

    Returns:
        Mean loss, and images per second.

    Raises:
        NonFiniteLossError: a loss is NaN or infinite.
        DataError: the data ends early, or holds a label that the model does not have.
    """
    random_seed(epoch_seed(config.run.seed, epoch))
    training.scheduler.step(max(epoch - 1, 0))  # one epoch late, as DeiT and Vim trained
    training.model.train()
    lr = training.optimizer.param_groups[0]["lr"]
    batch_size, num_steps = config.data.batch_size, data.batches_per_epoch
    unread: list[torch.Tensor] = []  # reading a loss waits for the device, so it is done in groups
    total, step, start = 0.0, 0, time.perf_counter()
    for step, (images, targets) in enumerate(data.batches(epoch), 1):
        _check_targets(targets, config.model.num_classes)
        unread.append(train_step(training, images, targets, config))
        if step % config.run.log_interval == 0 or step == num_steps:
            losses = torch.stack(unread).tolist()
            _check_losses(losses, step - len(losses) + 1, epoch)
            total += sum(losses)
            speed = step * batch_size / (time.perf_counter() - start)
            report(StepReport(step, sum(losses) / len(losses), lr, speed))
            unread.clear()
    if step < num_steps:
        raise DataError(f"the training data ended after {step} of {num_steps} batches")
    return total / num_steps, num_steps * batch_size / (time.perf_counter() - start)


def train_step(
    training: Training, images: torch.Tensor, targets: torch.Tensor, config: TrainConfig
) -> torch.Tensor:
    """Make one optimiser step.

    Args:
        training: Updated in place.
        images: (B, C, H, W), on any device.
        targets: Class indices, (B,).
        config: The run's configuration.

    Returns:
        The loss, a scalar on the device.
    """
    device = training.device
    images = images.to(device, non_blocking=True)
    targets = targets.to(device, non_blocking=True)
    if training.mixup is not None:
        images, targets = training.mixup(images, targets)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.run.amp):
        loss = training.criterion(training.forward(images), targets)
    training.optimizer.zero_grad()
    loss.backward()
    if config.optim.clip_grad is not None:
        nn.utils.clip_grad_norm_(training.model.parameters(), config.optim.clip_grad)
    training.optimizer.step()
    if training.ema is not None:
        training.ema.update(training.model)
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, data: ValData, device: torch.device, amp: bool) -> Score:
    """Score every validation image once.

    Hits are counted, not averaged, so the accuracy does not depend on the batch size.

    Args:
        model: Returns logits, (B, classes).
        data: The validation images.
        device: Where the model is.
        amp: Autocast to bfloat16.

    Raises:
        DataError: the loader gave fewer or more images than the data holds.
    """
    model.eval()
    # Loss, hits at 1, hits at 5: kept on the device, because reading one waits for it.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    num_classes = data.config.model.num_classes
    count, start = 0, time.perf_counter()
    for images, targets in data.batches():
        _check_targets(targets, num_classes)
        images, targets = images.to(device, non_blocking=True), targets.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = model(images)
        logits = logits.float()
        hits = logits.topk(min(5, num_classes)).indices == targets[:, None]
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        sums += torch.stack([loss.double(), hits[:, 0].sum(), hits.sum()])
        count += len(targets)
    if count != data.num_images:
        raise DataError(
            f"the validation data holds {data.num_images} images, {count} could be scored"
        )
    loss, top1, top5 = sums.tolist()
    seconds = time.perf_counter() - start
    return Score(loss / count, 100 * top1 / count, 100 * top5 / count, count, count / seconds)


def check_score(score: Score, epoch: int) -> None:
    """Check that the weights an epoch ended with are usable.

    Raises:
        NonFiniteLossError: the validation loss is NaN or infinite.
    """
    if not math.isfinite(score.loss):
        raise NonFiniteLossError(
            f"the validation loss is {score.loss} after epoch {epoch + 1}; "
            f"checkpoints of earlier epochs are intact"
        )


def _check_losses(losses: list[float], first_step: int, epoch: int) -> None:
    """Stop at the first loss that is not finite."""
    for step, loss in enumerate(losses, first_step):
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss is {loss} at step {step} of epoch {epoch + 1}; "
                f"checkpoints of earlier epochs are intact"
            )


def _check_targets(targets: torch.Tensor, num_classes: int) -> None:
    """Stop at a label that the model has no output for."""
    low, high = targets.aminmax()
    if low < 0 or high >= num_classes:
        wrong = int(low if low < 0 else high)
        raise DataError(f"the data holds label {wrong}, model.num_classes is {num_classes}")
