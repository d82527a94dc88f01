"""One optimizer step and one evaluation pass."""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from vil.training.loader import Step, ValData
from vil.training.passes import ScoringPass
from vil.training.pulse import Pulse
from vil.training.sampler import key, seed_everything
from vil.training.settings import TrainConfig
from vil.training.setup import TrainSetup

FEW_CLASSES = 5
"""With as many classes or fewer, top-5 says nothing."""


class StepResult(NamedTuple):
    """Result of a step, kept on the device because reading it waits for the device."""

    loss: torch.Tensor
    """Mean loss over the images of this process."""
    grad_norm: torch.Tensor
    """Total gradient norm before clipping; not finite if the step was skipped."""


class Score(NamedTuple):
    """Evaluation result of one model."""

    loss: float
    top1: float
    """Top-1 accuracy in percent."""
    top5: float
    """Top-5 accuracy in percent."""
    num_images: int
    images_per_s: float
    """Images per second after the first batch of each process, which waits for workers and compilers; of the whole
    pass if there is no second batch. With several models, the pass scores each image once per model."""


def interval(percent: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval (Wilson) of an accuracy in percent that was measured on ``count`` images."""
    share, z = percent / 100, 1.96
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return 100 * max(middle - half, 0.0) / scale, 100 * min(middle + half, scale) / scale


def train_step(setup: TrainSetup, step: Step, config: TrainConfig) -> StepResult:
    """Run one optimizer step on a ``TrainSetup``, in place; if the gradient is not finite, change nothing.

    All processes have the same gradient, so they make the same decision. The decision stays on the
    device if the optimizer can read it there and the model has no BatchNorm.
    """
    before = [statistic.clone() for statistic in setup.statistics]
    loss = _accumulate(setup, step, config)
    parameters = [p for p in setup.model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters])
    if config.optim.clip_grad is not None:
        clip_grads_with_norm_(parameters, config.optim.clip_grad, norm)
    bad = ~norm.isfinite()
    _update(setup.optimizer, bad)
    if before and bad:
        for statistic, value in zip(setup.statistics, before, strict=True):
            statistic.copy_(value)
    if setup.ema is not None and bad.device.type == "cpu":
        if not bad:
            setup.ema.update(setup.model)
    elif setup.ema is not None:
        _average_unless(bad, setup.ema, setup.model)
    return StepResult(loss, norm)


@torch.no_grad()
def evaluate(
    models: Sequence[ScoringPass],
    data: ValData,
    judged: list[torch.Tensor] | None = None,
    pulse: Pulse | None = None,
) -> list[Score]:
    """Evaluate models on all validation images, distributed over all processes.

    Each image is decoded once and scored once by each model. Hits are counted, not averaged, so the
    accuracy does not depend on the batch size. A score does not depend on the other models.

    Args:
        models: Models to evaluate; they stay in evaluation mode. The result has a score for each.
        data: Validation images.
        judged: Empty list. Receives a tensor (2, B) for each batch of this process, on the model's device: the
            images' classes, and the first model's predictions.
        pulse: Prints a line if none was printed for long; None counts from now.

    Raises:
        DataError: As in ``ValData.settle``.
    """
    for model in models:
        model.eval()
    device = data.world.device
    normalize = data.images.normalizer(device)
    # Loss, top-1 hits, top-5 hits, images. They stay on the device because reading waits for it.
    sums = [torch.zeros(4, dtype=torch.float64, device=device) for _ in models]
    pulse = pulse or Pulse()
    first, start = torch.zeros_like(sums[0]), time.perf_counter()
    begun = start
    for images, targets in data.batches():
        targets = targets.to(device, non_blocking=True)
        _score(models, sums, normalize(images), targets, judged)
        if begun == start:
            first = sums[0].clone()
            first.tolist()  # waits for the device
            begun = time.perf_counter()
        if pulse.is_due:
            scored = min(int(sums[0][3]) * data.world.size, data.num_images)
            pulse.say(f"scored {scored:,} of {data.num_images:,} validation images")
    data.settle()
    # Reduce the sums one by one. The partitioning of a larger tensor in all_reduce, and with it the
    # rounding, would depend on the number of models.
    totals = [data.world.sum(total).tolist() for total in sums]
    done = time.perf_counter()
    num_images, unmeasured = totals[0][3], data.world.sum(first).tolist()[3]
    images_per_s = (num_images - unmeasured) / (done - begun) or num_images / (done - start)
    return [
        Score(loss / count, 100 * top1 / count, 100 * top5 / count, int(count), images_per_s)
        for loss, top1, top5, count in totals
    ]


def _accumulate(setup: TrainSetup, step: Step, config: TrainConfig) -> torch.Tensor:
    """Accumulate the gradient of a step and return its loss, a scalar tensor."""
    world, parts = setup.world, len(step.micro_batches)
    size = len(step.micro_batches[0][1])
    losses = []
    setup.optimizer.zero_grad()
    for part, (images, targets) in enumerate(step.micro_batches):
        place = (world.rank * parts + part) * size
        images, targets = setup.augment(images, targets, step.number, place)
        seed_everything(key("model", config.run.seed, step.number, place))
        waits = world.size > 1 and part < parts - 1
        with setup.training_pass.no_sync() if waits else nullcontext():
            loss = setup.training_pass(images, targets)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _score(
    models: Sequence[ScoringPass],
    sums: Sequence[torch.Tensor],
    images: torch.Tensor,
    targets: torch.Tensor,
    judged: list[torch.Tensor] | None,
) -> None:
    """Add a batch to the sums of each model, and to ``judged``; see ``evaluate``."""
    for model, total in zip(models, sums, strict=True):
        logits = model(images).float()
        hits = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
        loss = functional.cross_entropy(logits, targets, reduction="sum").double()
        total[:3] += torch.stack([loss, hits[:, 0].sum(), hits.sum()])
        total[3] += len(targets)
        if judged is not None and model is models[0]:
            judged.append(torch.stack([targets, logits.argmax(1)]))


@torch.no_grad()
def _average_unless(bad: torch.Tensor, ema: ModelEmaV3, model: nn.Module) -> None:
    """Update the average, unless ``bad``, whose value stays on the device."""
    pairs = zip(ema.module.state_dict().values(), model.state_dict().values(), strict=True)
    own, new = zip(*((a, b) for a, b in pairs if a.is_floating_point()), strict=True)
    for a, b in zip(ema.module.buffers(), model.buffers(), strict=True):
        if not a.is_floating_point():  # of a bad step, the former value
            a.copy_(b)
    towards = torch._foreach_sub(new, own)
    torch._foreach_mul_(towards, (1 - ema.decay) * ~bad)
    torch._foreach_add_(own, towards)


def _update(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """Step the optimizer unless the gradient is bad.

    PyTorch's fused optimizers take the condition as a tensor, in the way GradScaler passes it. Other
    optimizers have to wait for it.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad.float()
        optimizer.grad_scale = None
        optimizer.step()
    elif not bad:
        optimizer.step()
