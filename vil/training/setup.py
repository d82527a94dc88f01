"""Build what a run trains with: model, optimiser, schedule, loss, mixing, average."""

import platform
from dataclasses import dataclass
from importlib import metadata

import timm
import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn

import vil
from vil.training.config import AugmentConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from vil.training.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that one training step touches."""

    model: nn.Module
    forward: nn.Module
    """The model, compiled where asked for; it shares the weights."""
    ema: ModelEmaV3 | None
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    criterion: nn.Module
    mixup: Mixup | None
    device: torch.device


def build_training(config: TrainConfig) -> Training:
    """Build the model and everything that trains it.

    Raises:
        ConfigError: a name or a value is not one that timm or the model accepts.
    """
    device = resolve_device(config.run)
    model = build_model(config.model).to(device)
    optimizer = build_optimizer(model, config.optim)
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
    return Training(
        model=model,
        forward=torch.compile(model) if config.run.torchcompile else model,
        ema=None if decay is None else ModelEmaV3(model, decay=decay),
        optimizer=optimizer,
        scheduler=scheduler,
        # Mixup has smoothed the labels already where it is on.
        criterion=nn.CrossEntropyLoss(label_smoothing=0.0 if augment.mixes else augment.smoothing),
        mixup=_build_mixup(augment, config.model.num_classes),
        device=device,
    )


def build_model(config: ModelConfig) -> nn.Module:
    """Create the model.

    Raises:
        ConfigError: timm does not know the name, or the model refuses an argument.
    """
    sizes = {name: getattr(config, name) for name in ("patch_size", "embed_dim", "depth")}
    try:
        return timm.create_model(
            config.name,
            num_classes=config.num_classes,
            in_chans=config.in_chans,
            img_size=config.img_size,
            drop_path_rate=config.drop_path_rate,
            **{name: value for name, value in sizes.items() if value is not None},
        )
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"cannot create model {config.name}: {error}") from error


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Create the optimiser; vectors and model.no_weight_decay() are not decayed.

    Raises:
        ConfigError: timm does not know the optimiser, or it refuses an argument.
    """
    try:
        return create_optimizer_v2(
            model,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=config.opt_betas,
            eps=config.opt_eps,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot create optimizer {config.opt}: {error}") from error


def resolve_device(run: RunConfig) -> torch.device:
    """Return the device to compute on and set the number of threads.

    "auto" takes CUDA where there is one.

    Raises:
        ConfigError: there is no such device here.
    """
    if run.num_threads is not None:
        torch.set_num_threads(run.num_threads)
    name = run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(f"device {name} is not available: {reason}") from error
    return device


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    packages = ("torch", "timm", "pillow")
    return {
        "vil": vil.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def _build_mixup(config: AugmentConfig, num_classes: int) -> Mixup | None:
    """Create mixup and cutmix, or None where both are off."""
    if not config.mixes:
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        prob=config.mixup_prob,
        switch_prob=config.mixup_switch_prob,
        mode=config.mixup_mode,
        label_smoothing=config.smoothing,
        num_classes=num_classes,
    )
