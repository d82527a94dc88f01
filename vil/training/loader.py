"""Load batches of images in worker processes, and replace or leave out unreadable images."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from vil.messages import counted, named
from vil.preprocess import ImageSpec
from vil.training.distributed import World
from vil.training.errors import SIGNALS, DataError, log
from vil.training.images import Source, read_patiently, reason
from vil.training.program import check_workers, end_loaders
from vil.training.pulse import Pulse
from vil.training.sampler import (
    MicroBatches,
    SampledIndex,
    epoch_order,
    image_size_of_step,
    key,
    seed_image,
)
from vil.training.settings import DataConfig, TrainConfig, suitable_batch
from vil.training.transforms import train_transform

MAX_TRIES = 8  # consecutive unreadable images before training stops
MAX_WORKERS = 8  # default limit
TIMEOUT = 600  # seconds to wait for a batch from a hung disk or a worker that never started


class Step(NamedTuple):
    """Training images of one process for one step."""

    number: int
    """Step of the run."""
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]]
    """Pairs of images, uint8 (B, C, H, W), and class indices (B,)."""
    bad_images: dict[int, str]
    """Unreadable images that were replaced, by index, with the reason."""


class TrainData:
    """Training images, step by step; all randomness depends only on the seed and the step."""

    def __init__(self, config: TrainConfig, source: Source, world: World) -> None:
        """Raise DataError if an epoch has no full step, ConfigError for invalid options."""
        self.micro_batch = config.micro_batch(world.size)
        self.source, self.config, self.world = source, config, world
        self._images = _TrainImages(source, config)
        stream = self._stream(range(0))
        self.steps_per_epoch = stream.steps_per_epoch
        self.num_steps = self.steps_per_epoch * config.schedule.epochs
        if self.steps_per_epoch == 0:
            raise DataError(
                f"an epoch has {stream.length} training images, fewer than data.batch_size "
                f"{config.data.batch_size}; try --data.batch-size {suitable_batch(stream.length)}",
                everywhere=True,
            )

    @property
    def num_images(self) -> int:
        """Number of distinct training images."""
        return self.source.num_images

    def steps(self, first: int) -> Iterator[Step]:
        """Yield the steps from ``first`` on; DataError after 8 bad images in a row."""
        loader = DataLoader(
            self._images,
            batch_sampler=self._stream(range(first, self.num_steps)),
            collate_fn=collate,
            **loader_arguments(self.config.data.num_workers, self.world),
        )
        batches = _loaded(loader)
        for number in range(first, self.num_steps):
            loaded = list(islice(batches, self.config.run.grad_accum_steps))
            bad = {index: reason for _, _, images in loaded for index, reason in images.items()}
            yield Step(number, [(images, targets) for images, targets, _ in loaded], bad)

    def names(self, step: int) -> list[str]:
        """Return the names of the images of a step, over all processes."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        data = self.config.data
        order = epoch_order(self.source.order, data.aug_repeats, self.config.run.seed, epoch)
        first = step_in_epoch * data.batch_size
        return [self.source.name(i) for i in order[first : first + data.batch_size].tolist()]

    def _stream(self, steps: range) -> MicroBatches:
        data = self.config.data
        return MicroBatches(
            self.source.order,
            self.source.num_images,
            repeats=data.aug_repeats,
            batch_size=data.batch_size,
            micro_batch=self.micro_batch,
            rank=self.world.rank,
            world_size=self.world.size,
            seed=self.config.run.seed,
            steps=steps,
        )


class ValData:
    """Validation images, each exactly once over all processes."""

    def __init__(self, source: Source, images: ImageSpec, data: DataConfig, world: World) -> None:
        """Take batch size, workers and the limit of unreadable images from the data options."""
        self.source, self.images, self.data, self.world = source, images, data, world
        self.left_out: Mapping[int, str] | None = None
        """Unreadable images to go on without, by index, with the reason; None before a pass."""
        self._loader: DataLoader | None = None
        self._bad: dict[int, str] = {}

    @property
    def num_images(self) -> int:
        """Number of validation images, over all processes, without those that are left out."""
        return self.source.num_images - len(self.left_out or ())

    @property
    def indices(self) -> list[int]:
        """Indices of the images of this process."""
        share = range(self.world.rank, self.source.num_images, self.world.size)
        return [index for index in share if index not in (self.left_out or ())]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield images of this process, uint8 (B, C, H, W), and class indices (B,).

        ``settle`` must follow.
        """
        if self._loader is None:  # keep the workers, so none is forked later in the run
            self._loader = DataLoader(
                torch.utils.data.Subset(EvaluationImages(self.source, self.images), self.indices),
                batch_size=self.data.validation_batch_size,
                collate_fn=collate,
                **loader_arguments(self.data.num_workers, self.world),
            )
        for images, targets, bad in _loaded(self._loader):
            self._bad |= bad
            if len(targets):
                yield images, targets

    def verify(self, pulse: Pulse | None = None) -> None:
        """Decode every image once, and ``settle``; the pulse prints a line now and then."""
        pulse, read = pulse or Pulse(), 0
        for _, targets in self.batches():
            read += len(targets) * self.world.size
            count = min(read, self.num_images)
            pulse.beat(f"read {count:,} of {self.num_images:,} held-out images to find damaged ones")
        self.settle()

    def settle(self) -> None:
        """Raise DataError if too many images were unreadable, or others than before.

        Otherwise, a later score would be of other images than the scores it is compared with. Every
        rank must call this.
        """
        bad = {index: why for rank in self.world.gather(self._bad) for index, why in rank.items()}
        known, share = self.left_out, self.data.max_bad_images
        new = sorted(bad.keys() - (known or {}).keys())
        self.left_out = (known or {}) | bad
        if not new:
            return
        listed = named([f"{self.source.name(i)}: {bad[i]}" for i in new])
        message = f"{len(new)} of {counted(self.source.num_images, 'image')} cannot be read"
        if known is not None:
            raise DataError(f"{message} any more: {listed}", everywhere=True)
        if len(new) > share * self.source.num_images:
            cure = "repair or delete them, or raise data.max_bad_images"
            message = f"{message}, more than data.max_bad_images {share:g}: {listed}; {cure}"
            raise DataError(message, everywhere=True)
        if self.world.is_main:
            log.warning(f"{message}, left out: {listed}")


def loader_arguments(num_workers: int | None, world: World) -> dict[str, Any]:
    """Return the DataLoader arguments for worker processes.

    ``num_workers=None`` uses one worker per core of this process's share, at most 8. Workers are
    forked on Linux, PyTorch's traditional default; the default of Python 3.14 would re-import
    PyTorch in each worker. Raises ConfigError as in ``check_workers``.
    """
    if num_workers is None:
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        cores = len(usable(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_workers = max(min(cores, MAX_WORKERS), 1)
    arguments: dict[str, Any] = {"pin_memory": world.device.type == "cuda"}
    if num_workers == 0:
        return arguments
    check_workers(num_workers)
    _end_loaders_at_exit()
    return arguments | {
        "num_workers": num_workers,
        "persistent_workers": True,
        "multiprocessing_context": "fork" if sys.platform == "linux" else None,
        "worker_init_fn": _leave_signals_to_parent,
        "timeout": TIMEOUT,
    }


def _loaded(loader: DataLoader) -> Iterator[Any]:
    """Yield batches; report a worker that dies while it sends a batch like any dead worker."""
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(f"DataLoader worker died: {type(error).__name__}") from error


@cache
def _end_loaders_at_exit() -> None:
    """Kill remaining workers at exit; they ignore SIGTERM, so Python would wait for them."""
    atexit.register(end_loaders)


def _leave_signals_to_parent(worker: int) -> None:
    """Ignore signals that schedulers send to all processes: a checkpoint needs the workers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _TrainImages(Dataset):
    """Augmented training images; an unreadable image is replaced by another one.

    The replacement depends only on the seed, so a resumed run uses the same one.
    """

    def __init__(self, source: Source, config: TrainConfig) -> None:
        self.source, self.seed, self.images = source, config.run.seed, config.images
        self.transforms = {
            size: train_transform(config.augment, replace(self.images, img_size=(size, size)))
            for size in config.train_sizes
        }
        # Cache the last decoded image, because repeated augmentation requests it again at once.
        self.last: tuple[Any, ...] = (None,)

    def __getitem__(self, draw: SampledIndex) -> tuple[torch.Tensor, int, dict[int, str]]:
        if self.last[0] != (draw.epoch, draw.index):
            self.last = ((draw.epoch, draw.index), *self._decode(draw))
        _, image, label, bad = self.last
        seed_image(key("image", self.seed, draw.epoch, draw.position))
        size = image_size_of_step(list(self.transforms), self.seed, draw.step)
        return self.transforms[size](image), label, bad

    def _decode(self, draw: SampledIndex) -> tuple[Any, int, dict[int, str]]:
        """Return an image, its label, and the unreadable images tried before it with reasons."""
        bad: dict[int, str] = {}
        index = draw.index
        for attempt in range(MAX_TRIES):
            try:
                content = read_patiently(self.source.read, index)
                return self.images.decode(content), int(self.source.labels[index]), bad
            except (ValueError, OSError) as error:
                bad[index] = reason(error)
            place = (self.seed, draw.epoch, draw.index, attempt)
            index = key("replacement", *place) % self.source.num_images
        last, why = list(bad.items())[-1]
        raise DataError(
            f"{MAX_TRIES} training images in a row cannot be read, the last: {self.source.name(last)}: {why}"
        )


class EvaluationImages(Dataset):
    """Images, uint8 (C, H, W), with labels; if one cannot be read, None and why, by its index."""

    def __init__(self, source: Source, images: ImageSpec) -> None:
        self.source, self.images, self.transform = source, images, images.transform()

    def __len__(self) -> int:
        return self.source.num_images

    def __getitem__(self, index: int) -> tuple[torch.Tensor | None, int, dict[int, str]]:
        label = int(self.source.labels[index])
        try:
            content = read_patiently(self.source.read, index)
            return self.transform(self.images.decode(content)), label, {}
        except (ValueError, OSError) as error:
            return None, label, {index: reason(error)}


def collate(
    items: list[tuple[torch.Tensor | None, int, dict[int, str]]],
) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
    """Stack the images that could be read, and their labels; merge the reports of bad images."""
    read = [(image, label) for image, label, _ in items if image is not None]
    images, labels = default_collate(read) if read else (torch.empty(0), torch.empty(0))
    return images, labels, {index: why for _, _, bad in items for index, why in bad.items()}
