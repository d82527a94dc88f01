"""Options, data order and Lightning trainer of the downstream runs."""

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Callable
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

from downstream.features import make_features
from vil.param_groups import param_groups
from vil.training.errors import ConfigError, DataError, NonFiniteLossError
from vil.training.files import lock_folder, write_text
from vil.training.program import check_workers
from vil.training.sampler import MicroBatches, SampledIndex, key, seed_image
from vil.training.settings import (
    Count,
    Number,
    Positive,
    Section,
    Seed,
    ShareAboveZero,
    Workers,
    key_values,
)

# Options that may change when a run is resumed.
_FREE = ("data", "output", "num_workers", "val_steps", "checkpoint_steps")


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Options of a run; repeat the command to resume from its last checkpoint."""

    output: Path
    """Folder for checkpoints, logs and the result."""
    data: Path | None = None
    """Folder of the data set."""
    generated: Annotated[int, Field(ge=2)] | None = None
    """Instead of --data: number of generated training images for a dry run; half as many are for validation."""
    model: str = "vil_tiny_pyramid"
    """timm model name of the backbone."""
    weights: str | None = None
    """Initial weights, as for vil.load: a checkpoint, a folder, a .safetensors or .pth file, ..."""
    model_kwargs: tuple[str, ...] = ()
    """More arguments of the backbone, as key=value."""
    img_size: Count
    """Height and width of training images in pixels."""
    steps: Count
    """Optimizer steps."""
    batch_size: Count
    """Images of a step, over all processes."""
    accumulate: Count = 1
    """Micro-batches per step and process."""
    lr: Positive | None = None
    """Learning rate; None uses the published one for the backbone's size (see the README)."""
    weight_decay: Number | None = None
    """Weight decay of AdamW; None is the same as for the learning rate."""
    layer_decay: ShareAboveZero | None = None
    """Factor from a block's learning rate to the block below; None is the same as for the learning rate."""
    precision: Literal["bf16-mixed", "32-true"]
    """Autocast to bfloat16, or float32."""
    num_workers: Workers = 8
    """Data-loading workers per process."""
    val_steps: Count
    """Steps between validations."""
    checkpoint_steps: Count = 1000
    """Steps between checkpoints."""
    seed: Seed = 0
    """Random seed."""

    def __post_init__(self) -> None:
        """Reject invalid combinations."""
        if (self.data is None) == (self.generated is None):
            raise ConfigError("pass exactly one of --data and --generated")
        parts = world_size() * self.accumulate
        if self.batch_size % parts:
            raise ConfigError(
                f"--batch-size must be divisible by {world_size()} processes x {self.accumulate} "
                f"micro-batches, got {self.batch_size}"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the backbone."""
        own = {"img_size": self.img_size, "drop_path_rate": 0.1}
        return own | key_values("--model-kwargs", self.model_kwargs)

    def with_rates(self, rates: dict[str, dict[str, float]]) -> "Options":
        """Replace None in lr, weight_decay and layer_decay by the rates for the backbone's size.

        Raises:
            ConfigError: If no rates are known for the backbone's size.
        """
        missing = [name for name in rates["tiny"] if getattr(self, name) is None]
        size = next((size for size in rates if f"_{size}" in self.model), None)
        if missing and size is None:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(f"pass {options}: there are no published rates for {self.model}")
        return dataclasses.replace(self, **{name: rates[size][name] for name in missing})

    def folder(self, make: Callable[[Path, int, int], Path]) -> Path:
        """Return the folder of the data set; ``make`` generates it for a dry run."""
        return self.data or make(self.output / "generated", self.generated, self.img_size)

    def features(self) -> nn.Module:
        """Return the backbone."""
        return make_features(self.model, self.weights, **self.arguments)


class Task(lightning.LightningModule):
    """A network, its data and its schedule; the two runs are subclasses.

    All randomness depends on the seed and the step only, so a resumed run equals an uninterrupted one.
    """

    def __init__(self, options: Options, network: nn.Module, features: nn.Module, *sets: Dataset) -> None:
        """Create a task.

        Args:
            options: Options of the run, with rates.
            network: Network to train.
            features: Backbone in the network.
            sets: Training and validation images with targets in the network's format.

        Raises:
            DataError: If there are fewer images than in a batch.
        """
        super().__init__()
        self.options, self.network = options, network
        self.train_set, self.val_set = sets
        if (count := len(self.train_set)) < options.batch_size:
            raise DataError(f"--batch-size must be at most the {count} training images, got {options.batch_size}")
        try:
            self.groups = param_groups(network, options.lr, options.weight_decay, options.layer_decay)
        except ValueError as error:
            raise ConfigError(f"--layer-decay: {error}") from error
        self.result: dict[str, float] = {}

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        raise NotImplementedError

    def training_step(self, batch: list, batch_idx: int) -> Tensor:
        """Return the loss of a batch.

        Raises:
            NonFiniteLossError: If the loss is NaN or infinite.
        """
        loss, parts = self.losses(batch)
        self.log("loss", loss, prog_bar=True)
        self.log_dict(parts)
        if not loss.isfinite():
            step = self.trainer.global_step
            raise NonFiniteLossError(f"the loss of step {step} is {loss.item()}")
        return loss

    def losses(self, batch: list) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, and the parts that are logged."""
        raise NotImplementedError

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW and its schedule per step."""
        scheduler = LambdaLR(torch.optim.AdamW(self.groups, betas=(0.9, 0.999)), self.factor)
        steps = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": scheduler.optimizer, "lr_scheduler": steps}

    def train_dataloader(self) -> DataLoader:
        """Return the batches of this process from the current step to the last."""
        batches = _WholeRun(
            lambda generator: torch.randperm(len(self.train_set), generator=generator),
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
        """Return the validation images of this process, each once, in batches of one."""
        own = range(self.global_rank, len(self.val_set), world_size())
        return self._loader(Subset(self.val_set, own), batch_size=1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the network's randomness."""
        place = (self.options.seed, batch_idx, self.global_rank)
        torch.manual_seed(key("network", *place))
        self.log("lr", max(self.lr_schedulers().get_last_lr()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the options in the checkpoint."""
        checkpoint["options"] = self._described()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume with other options.

        Raises:
            ConfigError: If an option differs; names the first one.
        """
        for name, value in self._described().items():
            if (was := checkpoint["options"].get(name)) != value:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"the run in {self.options.output} has {option} {was}, not {value}; resume it "
                    f"with its own options, or choose another --output"
                )

    def _described(self) -> dict[str, Any]:
        options = dataclasses.asdict(self.options)
        return {name: value for name, value in options.items() if name not in _FREE}

    def _loader(self, dataset: Dataset, **batches: Any) -> DataLoader:
        workers = self.options.num_workers
        check_workers(workers)
        return DataLoader(
            dataset,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            **batches,
        )


class _WholeRun(MicroBatches):
    """Batches whose length is that of the whole run, as Lightning expects, even after resuming."""

    def __len__(self) -> int:
        return self.steps.stop * (self.batch_size // self.world_size // self.micro_batch)


class _Drawn(Dataset):
    """A data set indexed by draws, which seeds the augmentation of each draw."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, draw: SampledIndex) -> Any:
        seed_image(key("image", self.seed, draw.epoch, draw.position))
        return self.dataset[draw.index]


def collate(samples: list[tuple]) -> list[list]:
    """Return a list of images and a list of targets; the network makes the batch."""
    return [list(column) for column in zip(*samples, strict=True)]


def world_size() -> int:
    """Return the number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run(task: Task) -> dict[str, float]:
    """Train from the last checkpoint, or from the start, and validate.

    Writes ``last.ckpt``, one ``log/version_*/metrics.csv`` per start, and ``result.json`` at the end.

    Returns:
        The scores of the last validation.

    Raises:
        OutputError: If another run writes to the folder.
    """
    task.options.output.mkdir(parents=True, exist_ok=True)
    is_first = os.environ.get("RANK", "0") == "0"
    with lock_folder(task.options.output) if is_first else contextlib.nullcontext():
        last, trainer = task.options.output / "last.ckpt", _trainer(task.options)
        with warnings.catch_warnings():
            # Lightning calls `train_dataloader` after loading the step, so the batches start there.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            trainer.fit(task, ckpt_path=last if last.exists() else None, weights_only=True)
        if trainer.global_step % task.options.checkpoint_steps:
            trainer.save_checkpoint(last, weights_only=False)  # with the optimizer
        if task.result.get("step") != trainer.global_step:
            trainer.validate(task)
        if is_first:
            path = task.options.output / "result.json"
            write_text(path, json.dumps(task.result, indent=1) + "\n")
    return task.result


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
        # Processes validate different numbers of images, so validation must not communicate.
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
