"""What is trained: model, optimiser, schedule, loss, augmentation, average, and their processes."""

from dataclasses import dataclass

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vil.backbone import VisionLonghorn
from vil.messages import one_line
from vil.training.distributed import World
from vil.training.errors import ConfigError
from vil.training.resolve import model_arguments
from vil.training.settings import ModelConfig, OptimConfig, TrainConfig
from vil.training.transforms import BatchAugment
from vil.weights.build import create, model_with
from vil.weights.files import Weights

_FUSED = ("adam", "adamw")  # of PyTorch's optimisers, as timm spells them


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """Everything that one training step touches."""

    model: nn.Module
    """Holds the weights."""
    origin: str
    """Where the weights that it began with come from, in words."""
    compiled: nn.Module
    """The model, compiled where asked for."""
    forward: nn.Module
    """What training calls: the above, its gradients averaged over the processes."""
    ema: ModelEmaV3 | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    criterion: nn.Module
    augment: BatchAugment
    world: World

    def set_epoch(self, epoch: int) -> None:
        """Begin to train an epoch, at the rate of the epoch before, as DeiT and Vim did."""
        self.scheduler.step(max(epoch - 1, 0))
        self.model.train()

    @property
    def averages(self) -> list[nn.Module]:
        """The model with averaged weights, if an average is kept."""
        return [] if self.ema is None else [self.ema.module]

    @property
    def lr(self) -> float:
        """The learning rate; of the head, where optim.layer_decay gives those below it a part of it."""
        return max(group["lr"] for group in self.optimizer.param_groups)


def build(
    config: TrainConfig,
    world: World,
    weights: Weights | None = None,
    classes: tuple[str, ...] | None = None,
) -> Trainee:
    """Build the model and everything that trains it.

    Args:
        config: The run's configuration, all of it filled in.
        world: The processes, connected if there are several.
        weights: What the model starts from; None draws its weights.
        classes: Names of the data's classes; weights of as many others get a new head.

    Raises:
        ConfigError: a name or a value is not one that timm or the model accepts, or the weights do not
            fit the model.
    """
    if weights is None:
        model, origin = build_model(config.model), "drawn at random"
    else:
        model, origin = _model_from(weights, config.model, classes)
    model = model.to(world.device)
    for size in config.data.img_sizes or ():
        _check_size(model, config.model, size)
    for size in config.train_sizes:
        _check_patch_drop(model, size)
    optimizer = build_optimizer(model, config.optim, config.peak_lr)
    schedule = config.schedule
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=schedule.sched,
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
    )
    decay = config.optim.model_ema_decay
    augment = config.augment
    # A program for each of several sizes: one for all would depend on which is drawn first.
    dynamic = False if config.data.img_sizes else None
    compiled = torch.compile(model, dynamic=dynamic) if config.run.torchcompile else model
    return Trainee(
        model=model,
        origin=origin,
        compiled=compiled,
        forward=_distribute(compiled, config.model, world),
        ema=None if decay is None else ModelEmaV3(model, decay=decay),
        optimizer=optimizer,
        scheduler=scheduler,
        # Mixup has smoothed the labels already where it is on.
        criterion=nn.CrossEntropyLoss(label_smoothing=0.0 if augment.mixes else augment.smoothing),
        augment=BatchAugment(config, world.device),
        world=world,
    )


@torch.no_grad()
def _check_size(model: nn.Module, config: ModelConfig, size: int) -> None:
    """Refuse a size of data.img_sizes that the model does not take, by trying one image."""
    try:
        device = next(model.parameters()).device
        model.eval()(torch.zeros(1, config.in_chans, size, size, device=device))
    except (RuntimeError, ValueError, AssertionError) as error:
        cure = f"without data.img_sizes it trains at model.img_size {config.img_size}"
        if not getattr(model, "dynamic_img_size", True):
            cure = f"pass --model.args dynamic_img_size=True; {cure}"
        raise ConfigError(
            f"data.img_sizes {size}: {config.name} takes no image of {size} px ({one_line(error)}); {cure}"
        ) from error
    model.train()


def _check_patch_drop(model: nn.Module, size: int) -> None:
    """Refuse what the first step at a size would, since weights bring a grid and a rate of their own."""
    if isinstance(model, VisionLonghorn) and model.patch_drop_rate:
        grid = list(model.patch_embed.dynamic_feat_size((size, size)))
        try:
            model.check_patches_can_drop(grid)
        except ValueError as error:
            rate = model.patch_drop_rate
            raise ConfigError(f"model.args patch_drop_rate={rate} at {size} px: {error}") from error


def build_model(config: ModelConfig) -> nn.Module:
    """Create the model with weights drawn at random."""
    try:
        return create(config.name, **model_arguments(config), **_drop_path(config))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _model_from(
    weights: Weights, config: ModelConfig, classes: tuple[str, ...] | None
) -> tuple[nn.Module, str]:
    """Create the model with given weights, and say what was taken of them."""
    others = None not in (classes, weights.label_names) and classes != weights.label_names
    try:
        arguments = model_arguments(config) | _drop_path(config)
        return model_with(weights, config.name, keep_head=not others, **arguments)
    except ValueError as error:
        raise ConfigError(f"model.pretrained: {one_line(error)}") from error


def _drop_path(config: ModelConfig) -> dict[str, float]:
    """Return the argument of models that have drop path; others are asked only if it is set."""
    return {"drop_path_rate": config.drop_path_rate} if config.drop_path_rate else {}


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """Create the optimiser; vectors and model.no_weight_decay() are not decayed."""
    try:
        return create_optimizer_v2(
            model,
            opt=config.opt,
            lr=lr,
            weight_decay=config.weight_decay,
            betas=config.opt_betas,
            eps=config.opt_eps,
            layer_decay=config.layer_decay,
            **({"fused": True} if config.opt.lower() in _FUSED else {}),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot create optimizer {config.opt}: {one_line(error)}") from error


def _distribute(model: nn.Module, config: ModelConfig, world: World) -> nn.Module:
    """Average the gradients over the processes, if there are several.

    After its first backward pass DistributedDataParallel lays its buffers out anew, in the order in
    which the gradients came. Of more than two numbers the sum depends on the order of adding, which
    in a ring of processes depends on the place in the buffer. A pass ahead of the run makes all its
    steps alike, also the first one after resuming.
    """
    if world.size == 1:
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    averaging = DistributedDataParallel(model, devices, gradient_as_bucket_view=True)
    averaging.eval()  # leaves the statistics of batch normalisation alone
    size = (1, config.in_chans, config.img_size, config.img_size)
    with torch.compiler.set_stance("force_eager"):  # or batches would be compiled for any size
        averaging(torch.zeros(size, device=world.device)).sum().backward()
    averaging.zero_grad()
    return averaging
