"""Build model, optimizer, schedule, loss, augmentation, EMA and data-parallel wrapper."""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vil.backbone import VisionLonghorn
from vil.messages import one_line
from vil.timm_models import create, evaluating
from vil.training.distributed import World
from vil.training.errors import ConfigError
from vil.training.passes import ScoringPass, TrainingPass
from vil.training.settings import ModelConfig, OptimConfig, TrainConfig
from vil.training.transforms import BatchAugment
from vil.weights.build import model_with
from vil.weights.sources import Weights

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_FUSED = ("adam", "adamw")  # optimizers with a fused PyTorch version, by timm's name


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """All objects that a training step uses."""

    model: nn.Module
    """Model that holds the weights."""
    origin: str
    """Description of the source of the initial weights."""
    training_pass: nn.Module
    """Loss of a micro-batch, a ``TrainingPass``; with several processes, it averages the gradients."""
    scoring_passes: list[ScoringPass]
    """What evaluation calls: the model, and its average if one is kept."""
    ema: ModelEmaV3 | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    steps_per_epoch: int
    augment: BatchAugment
    world: World
    statistics: list[torch.Tensor]
    """Buffers of the model that training changes: BatchNorm's."""

    def set_step(self, step: int) -> None:
        """Set the learning rate of a step, counted from the start of the run; see ``ScheduleConfig.by``."""
        # Only one call has an effect: the first for a schedule by epochs, which lags by one as in DeiT and Vim, the
        # second for one by steps.
        self.scheduler.step(max(step // self.steps_per_epoch - 1, 0))
        self.scheduler.step_update(step)

    def share_statistics(self) -> None:
        """Give all ranks the statistics of rank 0, also of the average, which score and are saved."""
        for model in (self.model, *self.averages):
            for statistic in _statistics(model):
                self.world.share(statistic)

    @property
    def averages(self) -> list[nn.Module]:
        """Model with averaged weights (EMA), or an empty list if no average is kept."""
        return [] if self.ema is None else [self.ema.module]

    @property
    def lr(self) -> float:
        """Learning rate; with optim.layer_decay, the head's rate, since lower layers have smaller rates."""
        return max(group["lr"] for group in self.optimizer.param_groups)


def build(
    config: TrainConfig,
    world: World,
    steps_per_epoch: int,
    weights: Weights | None = None,
    classes: tuple[str, ...] | None = None,
) -> TrainSetup:
    """Build the model and all objects that train it.

    Args:
        config: Configuration of the run, with all defaults filled in.
        world: Process group, connected if there are several processes.
        steps_per_epoch: Optimizer steps in an epoch.
        weights: Initial weights; None initialises them at random.
        classes: Class names of the data. If the weights have other names, the head is re-initialised,
            even if the number is equal.

    Raises:
        ConfigError: If timm or the model rejects a name or value, or the weights do not fit the model.
    """
    model, origin = build_model(config.model, weights, classes)
    model = model.to(world.device)
    for size in config.data.img_sizes or ():
        _check_size(model, config.model, size)
    for size in config.train_sizes:
        _check_patch_drop(model, size)
    optimizer = build_optimizer(model, config.optim, config.peak_lr)
    decay = config.optim.model_ema_decay
    augment = config.augment
    # Compile one static program per image size; a dynamic one would depend on the size drawn first.
    dynamic = False if config.data.img_sizes else None
    compiled = torch.compile(model, dynamic=dynamic) if config.run.torchcompile else model
    # Mixup, if enabled, already smooths the labels.
    criterion = nn.CrossEntropyLoss(label_smoothing=0.0 if augment.mixes else augment.smoothing)
    training_pass = TrainingPass(compiled, criterion, config.run, world.device)
    ema = None if decay is None else ModelEmaV3(model, decay=decay)
    scored = [compiled, *([] if ema is None else [ema.module])]
    return TrainSetup(
        model=model,
        origin=origin,
        training_pass=_distribute(training_pass, model, config.model, world),
        scoring_passes=[ScoringPass(each, config.run, world.device) for each in scored],
        ema=ema,
        optimizer=optimizer,
        scheduler=_scheduler(optimizer, config, steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
        augment=BatchAugment(config, world.device),
        world=world,
        statistics=_statistics(model),
    )


def _scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig, steps_per_epoch: int) -> Scheduler:
    """Create the schedule of ``ScheduleConfig.by``, in epochs or in steps."""
    schedule = config.schedule
    arguments: dict[str, Any] = {"num_epochs": schedule.epochs, "warmup_lr": schedule.warmup_lr}
    if schedule.by == "step":
        warmup_steps = schedule.warmup_epochs * steps_per_epoch
        arguments = {
            # The cosine follows the warm-up. If no epoch is left for it, its length has no effect.
            "num_epochs": max(schedule.epochs - schedule.warmup_epochs, 1),
            "warmup_prefix": True,
            "warmup_lr": config.peak_lr / (warmup_steps + 1),
            "step_on_epochs": False,
            "updates_per_epoch": steps_per_epoch,
        }
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=schedule.sched,
        warmup_epochs=schedule.warmup_epochs,
        min_lr=schedule.min_lr,
        **arguments,
    )
    return scheduler


@torch.no_grad()
def _check_size(model: nn.Module, config: ModelConfig, size: int) -> None:
    """Raise ConfigError if the model does not support a size of data.img_sizes; runs one image of that size."""
    try:
        device = next(model.parameters()).device
        with evaluating(model):
            model(torch.zeros(1, config.in_chans, size, size, device=device))
    except (RuntimeError, ValueError, AssertionError) as error:
        cure = f"omit data.img_sizes to train at model.img_size {config.img_size}"
        if not getattr(model, "dynamic_img_size", True):
            cure = f"pass --model.args dynamic_img_size=True, or {cure}"
        raise ConfigError(
            f"data.img_sizes {size}: {config.name} does not support images of {size} px ({one_line(error)}); {cure}"
        ) from error


def _check_patch_drop(model: nn.Module, size: int) -> None:
    """Check patch dropping at a size now, not in the first step; weights bring their own grid and rate."""
    if isinstance(model, VisionLonghorn) and model.patch_drop_rate:
        grid = list(model.patch_embed.dynamic_feat_size((size, size)))
        try:
            model.check_patches_can_drop(grid)
        except ValueError as error:
            rate = model.patch_drop_rate
            raise ConfigError(f"model.args patch_drop_rate={rate} at {size} px: {error}") from error


def build_model(
    config: ModelConfig, weights: Weights | None = None, classes: tuple[str, ...] | None = None
) -> tuple[nn.Module, str]:
    """Create the model, and say where its weights come from; arguments and errors as in ``build``."""
    arguments = config.arguments
    if config.drop_path_rate:  # models without drop path would reject it
        arguments["drop_path_rate"] = config.drop_path_rate
    try:
        if weights is None:
            return create(config.name, **arguments), "drawn at random"
        others = None not in (classes, weights.label_names) and classes != weights.label_names
        return model_with(weights, config.name, keep_head=not others, **arguments)
    except ValueError as error:
        origin = "" if weights is None else "model.pretrained: "
        raise ConfigError(f"{origin}{one_line(error)}") from error


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """Create the optimizer; vectors and model.no_weight_decay() are not decayed. Raises ConfigError if invalid."""
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=config.opt,
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.opt_eps,
            layer_decay=config.layer_decay,
            **_betas(config),
            **({"fused": True} if config.opt.lower() in _FUSED else {}),
        )
    except (TypeError, ValueError, AssertionError, ImportError) as error:  # no APEX, say
        raise ConfigError(f"cannot create optimizer {config.opt}: {one_line(error)}") from error
    if getattr(optimizer, "is_second_order", False):
        raise ConfigError(f"optim.opt {config.opt} needs second derivatives, which the trainer does not compute")
    return optimizer


def _betas(config: OptimConfig) -> dict[str, tuple[float, ...]]:
    """Return the betas for the optimizer, unless our default has another number of them than it takes."""
    count = get_optimizer_info(config.opt.lower()).num_betas
    if len(config.opt_betas) == count:
        return {"betas": config.opt_betas}
    if config.opt_betas == OptimConfig.opt_betas:
        return {}
    raise ValueError(f"optim.opt_betas must be {count} numbers, got {config.opt_betas}")


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    """Return the running statistics of BatchNorm and its like, the only buffers that training changes."""
    named = model.named_buffers()
    return [value for name, value in named if name.rpartition(".")[2] in _STATISTICS]


def _distribute(training_pass: TrainingPass, model: nn.Module, config: ModelConfig, world: World) -> nn.Module:
    """Wrap the training pass in DistributedDataParallel if there are several processes.

    After its first backward pass, DistributedDataParallel rebuilds its buckets in the order in which
    gradients arrived. A sum of more than two numbers depends on the order of addition, which in a ring
    all-reduce depends on the position in the bucket. One backward pass before the run therefore makes
    all its steps equal, including the first step after resuming.
    """
    if world.size == 1:
        return training_pass
    devices = [world.device] if world.device.type == "cuda" else None
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    sync = {"forward_sync_buffers" if renamed else "broadcast_buffers": bool(_statistics(model))}
    averaging = DistributedDataParallel(training_pass, devices, gradient_as_bucket_view=True, **sync)
    averaging.eval()  # keeps batch-norm statistics unchanged, and records nothing
    images = torch.zeros(1, config.in_chans, config.img_size, config.img_size, device=world.device)
    targets = torch.zeros(1, dtype=torch.long, device=world.device)
    with torch.compiler.set_stance("force_eager"):  # avoids compiling a dynamic batch size
        averaging(images, targets).backward()
    averaging.zero_grad()
    return averaging.train()
