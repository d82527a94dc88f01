"""What both runs share: their options, the stream of images, and Lightning's trainer."""

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from pydantic import Field
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Subset

from downstream.features import parameter_groups
from vil.training.draws import Draw, MicroBatches, key, seed_image
from vil.training.errors import ConfigError, DataError, NonFiniteLossError
from vil.training.files import lock_folder, write_text
from vil.training.settings import (
    Count,
    CountFromZero,
    Number,
    Positive,
    Section,
    Seed,
    ShareAboveZero,
    ShareBelowOne,
    Workers,
    key_values,
)

_TIMED = 20  # batches that tell the time of a step
# What another start of the same run may have otherwise.
_FREE = ("data", "output", "num_workers", "grad_checkpointing", "val_steps", "checkpoint_steps")


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of a run; the same command again goes on from its last checkpoint."""

    output: Path
    """Folder for checkpoints, figures and the result."""
    data: Path | None = None
    """Folder of the data set."""
    generated: Annotated[int, Field(ge=2)] | None = None
    """Instead of --data: a dry run on so many generated training images, and half as many to validate."""
    model: str = "vil_tiny_pyramid"
    """timm's name of the backbone."""
    weights: str | None = None
    """Weights to begin with, as of vil.load: a checkpoint, a folder, a .safetensors or .pth file, ..."""
    model_kwargs: tuple[str, ...] = ()
    """More arguments of the backbone, as key=value."""
    img_size: Count
    """Height and width in pixels of what is trained on."""
    steps: Count
    """Steps of the optimizer."""
    batch_size: Count
    """Images of a step, of all processes together."""
    accumulate: Count = 1
    """Parts that each process computes its images of a step in."""
    lr: Positive | None = None
    """Learning rate; None takes that of the backbone's size, which the README lists."""
    weight_decay: Number | None = None
    """Of AdamW; None as for the learning rate."""
    layer_decay: ShareAboveZero | None = None
    """From a block to the one below; None as for the learning rate."""
    drop_path: ShareBelowOne = 0.1
    """Stochastic depth of the last block."""
    warmup_steps: CountFromZero
    """Steps of linear warm-up."""
    grad_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping its activations."""
    precision: Literal["bf16-mixed", "32-true"]
    """Autocast to bfloat16, or float32."""
    num_workers: Workers = 8
    """Loader processes of each process."""
    val_steps: Count
    """Steps between validations."""
    checkpoint_steps: Count = 1000
    """Steps between checkpoints."""
    seed: Seed = 0
    """Of everything random."""

    def __post_init__(self) -> None:
        """Refuse what no run can be made of."""
        if (self.data is None) == (self.generated is None):
            raise ConfigError("give one of --data and --generated")
        parts = world_size() * self.accumulate
        if self.batch_size % parts:
            raise ConfigError(
                f"--batch-size must be divisible by {world_size()} processes x {self.accumulate} parts, "
                f"got {self.batch_size}"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the backbone."""
        own = {"img_size": self.img_size, "drop_path_rate": self.drop_path}
        return own | key_values("--model-kwargs", self.model_kwargs)

    def with_rates(self, rates: dict[str, dict[str, float]]) -> "Options":
        """Fill in what is None of lr, weight_decay and layer_decay from those of each size.

        Raises:
            ConfigError: there are none for the backbone's size.
        """
        missing = [name for name in ("lr", "weight_decay", "layer_decay") if not self._has(name)]
        size = next((size for size in rates if f"_{size}" in self.model), None)
        if missing and size is None:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(f"no published run is of {self.model}: give {options}")
        return dataclasses.replace(self, **{name: rates[size][name] for name in missing})

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None


class Task(lightning.LightningModule):
    """A network, its data and its schedule; the two runs are subclasses.

    Everything random follows from the seed and the step, so that a run that was stopped goes on as if it
    had not been.
    """

    def __init__(
        self,
        options: Options,
        network: nn.Module,
        features: nn.Module,
        train: Dataset,
        val: Dataset,
    ) -> None:
        """Keep what is to be trained.

        Args:
            options: Options of the run, with rates.
            network: What is trained.
            features: The backbone in it.
            train: Images and targets as the network takes them, by their number.
            val: The same to validate.

        Raises:
            DataError: there are not enough images for a step.
        """
        super().__init__()
        if len(train) < options.batch_size:
            raise DataError(
                f"{len(train)} training images are less than a batch of {options.batch_size}"
            )
        self.options = options
        self.network = network
        self.groups = parameter_groups(
            network, features, options.lr, options.weight_decay, options.layer_decay
        )
        self.train_set, self.val_set = train, val
        self.result: dict[str, float] = {}
        self.began: list[float] = []  # when each batch was, of this start, in seconds

    def factor(self, step: int) -> float:
        """Return the part of the learning rate that a step has."""
        raise NotImplementedError

    def finite(self, loss: Tensor) -> Tensor:
        """Return a loss.

        Raises:
            NonFiniteLossError: it is NaN or infinite.
        """
        if not loss.isfinite():
            raise NonFiniteLossError(
                f"the loss of step {self.trainer.global_step} is {loss.item()}"
            )
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW and its schedule by steps."""
        scheduler = LambdaLR(torch.optim.AdamW(self.groups, betas=(0.9, 0.999)), self.factor)
        steps = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": scheduler.optimizer, "lr_scheduler": steps}

    def train_dataloader(self) -> DataLoader:
        """Return the batches of this process from the current step to the last."""
        batches = _WholeRun(
            torch_order(len(self.train_set)),
            len(self.train_set),
            repeats=0,
            batch_size=self.options.batch_size,
            micro_batch=self.options.batch_size // world_size() // self.options.accumulate,
            rank=self.global_rank,
            world_size=world_size(),
            seed=self.options.seed,
            steps=range(self.trainer.global_step, self.options.steps),
        )
        return self._loader(_Drawn(self.train_set, self.options.seed), batch_sampler=batches)

    def val_dataloader(self) -> DataLoader:
        """Return the validation images of this process, each once, one at a time."""
        own = range(self.global_rank, len(self.val_set), world_size())
        return self._loader(Subset(self.val_set, own), batch_size=1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed what the network draws."""
        self.began.append(time.perf_counter())
        place = (self.options.seed, batch_idx, self.global_rank)
        torch.manual_seed(key("network", *place))
        self.log("lr", max(self.lr_schedulers().get_last_lr()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the options beside the weights."""
        checkpoint["options"] = self._described()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with other options.

        Raises:
            ConfigError: names the first option that differs.
        """
        for name, value in self._described().items():
            if (was := checkpoint["options"].get(name)) != value:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"the run in {self.options.output} has {option} {was}, not {value}"
                )

    def _described(self) -> dict[str, Any]:
        options = dataclasses.asdict(self.options)
        return {name: value for name, value in options.items() if name not in _FREE}

    def _loader(self, dataset: Dataset, **batches: Any) -> DataLoader:
        workers = self.options.num_workers
        return DataLoader(
            dataset,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            **batches,
        )


class _WholeRun(MicroBatches):
    """Lightning counts the batches of the whole run, those that an earlier start took, too."""

    def __len__(self) -> int:
        return self.steps.stop * (self.batch_size // self.world_size // self.micro_batch)


class _Drawn(Dataset):
    """A data set that is read by draws, each with random numbers of its own."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, draw: Draw) -> Any:
        seed_image(key("image", self.seed, draw.epoch, draw.position))
        return self.dataset[draw.index]


def torch_order(num_images: int) -> Any:
    """Return what draws an epoch's order of so many images."""
    return lambda generator: torch.randperm(num_images, generator=generator)


def collate(samples: list[tuple]) -> list[list]:
    """Return images and targets in a list each; only the network knows how to batch them."""
    return [list(column) for column in zip(*samples, strict=True)]


def world_size() -> int:
    """Return how many processes torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run(task: Task) -> dict[str, float]:
    """Train from the last checkpoint, or from the start, and validate.

    Writes ``last.ckpt``, ``log/version_*/metrics.csv`` of each start and, at the end, ``result.json`` and, where
    there were steps enough to tell, ``speed.json``.

    Returns:
        The figures of the last validation.

    Raises:
        OutputError: another run writes to the folder.
    """
    task.options.output.mkdir(parents=True, exist_ok=True)
    is_first = os.environ.get("RANK", "0") == "0"
    with lock_folder(task.options.output) if is_first else contextlib.nullcontext():
        trainer = _trained(task)
        if task.result.get("step") != trainer.global_step:
            trainer.validate(task)
        if is_first:
            path = task.options.output / "result.json"
            write_text(path, json.dumps(task.result, indent=1) + "\n")
            if len(task.began) > _TIMED:
                path = task.options.output / "speed.json"
                write_text(path, json.dumps(_speed(task), indent=1) + "\n")
    return task.result


def _speed(task: Task) -> dict[str, Any]:
    """Tell how long a step took, waiting for images included, and how long the published run would.

    The median, which neither the first steps nor validations between steps change.
    """
    batches = [after - before for before, after in itertools.pairwise(task.began)]
    step = statistics.median(batches) * task.options.accumulate
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "processes": world_size(),
        "seconds_per_step": step,
        "hours": step * type(task.options).steps * world_size() / 3600,  # of all devices together
    }


def _trained(task: Task) -> lightning.Trainer:
    """Train to the last step."""
    options = task.options
    last = options.output / "last.ckpt"
    trainer = _trainer(options)
    with warnings.catch_warnings():
        # The stream is taken up at its step: `train_dataloader` is asked when that is known.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        trainer.fit(task, ckpt_path=last if last.exists() else None, weights_only=True)
    if trainer.global_step % options.checkpoint_steps:
        trainer.save_checkpoint(last, weights_only=False)  # the optimizer, too
    return trainer


def _trainer(options: Options) -> lightning.Trainer:
    """Return Lightning's trainer; the whole run is one of its epochs."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    distributed = world_size() > 1
    checkpoint = ModelCheckpoint(
        options.output,
        save_last=True,
        save_top_k=0,
        every_n_train_steps=options.checkpoint_steps,
        enable_version_counter=False,
    )
    return lightning.Trainer(
        devices=devices,
        num_nodes=world_size() // devices,
        # Processes validate different numbers of images, so nothing may be exchanged between them then.
        strategy=DDPStrategy(broadcast_buffers=False) if distributed else "auto",
        sync_batchnorm=distributed and torch.cuda.is_available(),  # it has no CPU version
        precision=options.precision,
        max_epochs=1,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=min(options.val_steps, options.steps) * options.accumulate,
        num_sanity_val_steps=0,
        log_every_n_steps=min(50, options.steps),
        use_distributed_sampler=False,
        logger=CSVLogger(options.output, name="log"),
        callbacks=[checkpoint],
        enable_model_summary=False,
    )
