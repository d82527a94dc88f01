"""The training and validation images in batches, and what becomes of an image that is no good."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from vil.training.config import TrainConfig
from vil.training.data.augment import Transform, ValTransform, train_transform
from vil.training.data.base import Source
from vil.training.data.draws import Draw, MicroBatches, epoch_order, key, seed_image, step_size
from vil.training.data.loader_processes import (
    batches_ahead,
    outliving_deaths,
    start,
    worker_arguments,
)
from vil.training.data.reading import PatientReader
from vil.training.data.sources import decode, image_mode, open_source, orientation
from vil.training.distributed import World
from vil.training.errors import DataError

_MOST_TRIES = 8  # unreadable images in a row are no accident
_MOST_NAMED = 100  # bad validation images; of a disk that is gone all are


class Step(NamedTuple):
    """The images that one process trains on in one step."""

    number: int
    """Step of the run."""
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]]
    """uint8 (B, C, H, W) and class indices (B,), in turn."""
    bad_images: dict[int, str]
    """Unreadable images that were replaced, and why."""


class TrainData:
    """The training images, step by step; all randomness follows from the seed and the step."""

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        world: World,
        source: Source | None = None,
    ) -> None:
        """Take the data, or open it, and check that an epoch has at least one step.

        Args:
            config: The settings, all of them filled in.
            device: What this process computes on.
            world: The processes.
            source: The images, if they are open already.

        Raises:
            ConfigError: the batch cannot be divided among the processes.
            DataError: there are fewer images than a batch holds.
        """
        self.micro_batch = config.micro_batch(world.size)
        self.source = source or open_source(config.data, config.model, training=True)
        self.config = config
        self.world = world
        self.pin_memory = device.type == "cuda"
        self.transforms = {size: train_transform(config, size) for size in config.train_sizes}
        stream = self._stream(range(0))
        self.steps_per_epoch = stream.steps_per_epoch
        self.num_steps = self.steps_per_epoch * config.schedule.epochs
        if self.steps_per_epoch == 0:
            raise DataError(
                f"an epoch has {stream.length} training images, fewer than "
                f"data.batch_size {config.data.batch_size}"
            )

    @property
    def num_images(self) -> int:
        """Distinct training images."""
        return self.source.num_images

    @property
    def shared_bytes(self) -> int:
        """What the images of a process take in shared memory at most, the two steps at hand included."""
        data = self.config.data
        ahead = batches_ahead(data.num_workers)
        at_hand = 2 * self.config.run.grad_accum_steps if ahead else 0
        largest = _image_bytes(self.config, max(self.transforms))
        return (ahead + at_hand) * self.micro_batch * largest

    def steps(self, first: int) -> Iterator[Step]:
        """Yield all steps from the given one to the end of the run.

        Raises:
            DataError: too many images in a row are unreadable, or too many loader processes died.
        """
        return outliving_deaths(self._load, first, self.num_steps)

    def names(self, step: int) -> list[str]:
        """Name the images of a step, over all processes."""
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

    def _load(self, first: int) -> Iterator[Step]:
        """Load steps by one loader for all epochs, so that none waits for its first."""
        loader = DataLoader(
            _TrainImages(self.source, self.transforms, self.config),
            batch_sampler=self._stream(range(first, self.num_steps)),
            collate_fn=_collate,
            pin_memory=self.pin_memory,
            **worker_arguments(self.config.data.num_workers),
        )
        batches = start(loader)
        for number in range(first, self.num_steps):
            loaded = list(islice(batches, self.config.run.grad_accum_steps))
            bad = {index: reason for _, _, images in loaded for index, reason in images.items()}
            yield Step(number, [(images, targets) for images, targets, _ in loaded], bad)


class ValData:
    """The validation images, each exactly once over all processes."""

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        world: World,
        source: Source | None = None,
    ) -> None:
        """Take the data, or open it; arguments as of TrainData."""
        self.source = source or open_source(config.data, config.model, training=False)
        self.config = config
        self.world = world
        self.pin_memory = device.type == "cuda"
        share = config.data.batch_size // (world.size * config.run.grad_accum_steps)
        self.batch_size = config.data.validation_batch_size or max(share, 1)
        self.num_rotated = 0
        """Images that EXIF rotates and data.exif_rotation does not, over all processes; by check()."""

    @property
    def num_images(self) -> int:
        """Images to be scored, over all processes."""
        return self.source.num_images

    @property
    def num_batches(self) -> int:
        """Batches of the process that has the most."""
        share = -(-self.num_images // self.world.size)
        return -(-share // self.batch_size)

    @property
    def shared_bytes(self) -> int:
        """What the images of a process take in shared memory at most, the batch at hand included."""
        ahead, size = batches_ahead(self.config.data.num_workers), self.config.model.img_size
        return (ahead + 1 if ahead else 0) * self.batch_size * _image_bytes(self.config, size)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this process's images, uint8 (B, C, H, W), and their classes, (B,).

        Raises:
            DataError: an image cannot be read, or too many loader processes died.
        """
        return self._load(_ValImages(self.source, self.config))

    def check(self) -> None:
        """Decode every image once, so that a bad one is not found after the first epoch.

        It also counts those that are rotated. All processes must call it.

        Raises:
            DataError: images cannot be read, or too many loader processes died.
        """
        num_rotated, bad = 0, []
        for rotated, problems in self._load(_ValChecks(self.source, self.config)):
            num_rotated += int(rotated.sum())
            bad += filter(None, problems)
        everywhere = self.world.gather((num_rotated, bad))
        self.num_rotated = sum(number for number, _ in everywhere)
        bad = [problem for _, problems in everywhere for problem in problems]
        if bad:
            several = f"{len(bad)} validation images are no good: " if len(bad) > 1 else ""
            more = f"; and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
            raise DataError(several + "; ".join(bad[:_MOST_NAMED]) + more)

    def _load(self, images: Dataset) -> Iterator[tuple[torch.Tensor, Any]]:
        share = range(self.world.rank, self.num_images, self.world.size)

        def load(first: int) -> Iterator[tuple[torch.Tensor, Any]]:
            loader = DataLoader(
                Subset(images, share[first * self.batch_size :]),
                batch_size=self.batch_size,
                pin_memory=self.pin_memory,
                **worker_arguments(self.config.data.num_workers),
            )
            return start(loader)

        return outliving_deaths(load, 0, -(-len(share) // self.batch_size))


class _TrainImages(Dataset):
    """Draws of the training stream, augmented; an unreadable image is replaced by another.

    Which other follows from the seed, so that a resumed run replaces it by the same one.
    """

    def __init__(
        self,
        source: Source,
        transforms: dict[int, Transform],
        config: TrainConfig,
    ) -> None:
        self.source, self.transforms, self.seed = source, transforms, config.run.seed
        self.read = PatientReader(source.read)
        self.options = _decode_options(config)
        # The last image decoded: repeated augmentation asks for it again at once.
        self.decoded: tuple[Any, ...] = (None,)

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, int, dict[int, str]]:
        if self.decoded[0] != (draw.epoch, draw.index):
            self.decoded = ((draw.epoch, draw.index), *self._decode(draw))
        _, image, label, bad = self.decoded
        seed_image(key("image", self.seed, draw.epoch, draw.position))
        size = step_size(list(self.transforms), self.seed, draw.step)
        return self.transforms[size](image), label, bad

    def _decode(self, draw: Draw) -> tuple[Any, int, dict[int, str]]:
        """Return an image, its label, and the unreadable ones tried before it, with reasons."""
        bad: dict[int, str] = {}
        index = draw.index
        for attempt in range(_MOST_TRIES):
            try:
                image = decode(self.read(index), **self.options)
            except (DataError, OSError) as error:
                bad[index] = str(error)
                place = (draw.epoch, draw.index, attempt)
                index = key("replacement", self.seed, *place) % self.source.num_images
            else:
                return image, int(self.source.labels[index]), bad
        index, why = list(bad.items())[-1]
        raise DataError(
            f"{_MOST_TRIES} training images in a row cannot be read, the last: "
            f"{self.source.name(index)}: {why}"
        )


class _ValImages(Dataset):
    """Validation images; an unreadable one is an error, for nothing can stand in for it."""

    def __init__(self, source: Source, config: TrainConfig) -> None:
        self.source, self.transform = source, ValTransform(config)
        self.read = PatientReader(source.read)
        self.options = _decode_options(config)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        try:
            return self._take(decode(self.read(index), **self.options), index)
        except (DataError, OSError) as error:
            raise DataError(f"image {self.source.name(index)} cannot be read: {error}") from error

    def __len__(self) -> int:
        return self.source.num_images

    def _take(self, image: Image.Image, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(image), int(self.source.labels[index])


class _ValChecks(_ValImages):
    """Whether EXIF still rotates an image, bool (), and what is wrong with it, or nothing."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        try:
            return super().__getitem__(index)
        except DataError as error:
            return torch.tensor(False), str(error)

    def _take(self, image: Image.Image, index: int) -> tuple[torch.Tensor, str]:
        self.transform.check(image)
        return torch.tensor(orientation(image) != 1), ""


def _collate(
    items: list[tuple[torch.Tensor, int, dict[int, str]]],
) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
    """Stack images and labels and merge what was bad."""
    images, labels = default_collate([(image, label) for image, label, _ in items])
    return images, labels, {index: why for _, _, bad in items for index, why in bad.items()}


def _image_bytes(config: TrainConfig, size: int) -> int:
    """Return the bytes of an image of a height and width as the loaders give it, uint8."""
    return config.model.in_chans * size**2


def _decode_options(config: TrainConfig) -> dict[str, Any]:
    """Return how the images of a run are decoded."""
    data, mode = config.data, image_mode(config.model.in_chans)
    return {"mode": mode, "exif_rotation": data.exif_rotation, "max_pixels": data.max_pixels}
