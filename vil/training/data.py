"""Transforms, order and batches of the training and validation images."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchvision import transforms

from vil.training.config import TrainConfig
from vil.training.errors import ConfigError, DataError
from vil.training.sources import Source, Transform, open_source

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

_REPEAT_ROUND = 256  # DeiT rounds the length of an epoch down to this many images


class TrainData:
    """The training images, batch by batch; all randomness follows from (seed, epoch)."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        """Open the data and check that an epoch has at least one batch.

        Raises:
            DataError: there are fewer images than a batch holds.
        """
        self.source = open_source(config.data, config.model, training=True)
        self.config = config
        self.pin_memory = device.type == "cuda"
        self.transform = train_transform(config)
        length = epoch_length(self.source.num_images, config.data.aug_repeats)
        self.batches_per_epoch = length // config.data.batch_size
        if self.batches_per_epoch == 0:
            raise DataError(
                f"an epoch has {length} training images, fewer than "
                f"data.batch_size {config.data.batch_size}"
            )

    @property
    def num_images(self) -> int:
        """Distinct training images."""
        return self.source.num_images

    def batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch, every one of them full."""
        data = self.config.data
        seed = epoch_seed(self.config.run.seed, epoch)
        dataset = self.source.dataset(self.transform, seed)
        streamed = isinstance(dataset, IterableDataset)
        loader = DataLoader(
            dataset,
            batch_size=data.batch_size,
            sampler=None if streamed else RepeatSampler(len(dataset), data.aug_repeats, seed),
            num_workers=_num_workers(self.config, self.source),
            pin_memory=self.pin_memory,
            drop_last=True,
        )
        return islice(loader, self.batches_per_epoch)


class ValData:
    """The validation images, each exactly once."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.source = open_source(config.data, config.model, training=False)
        self.config = config
        self.pin_memory = device.type == "cuda"
        self.transform = val_transform(config)

    @property
    def num_images(self) -> int:
        """Images to be scored."""
        return self.source.num_images

    def batches(self) -> Batches:
        """Return all images in batches; the last may be smaller."""
        data = self.config.data
        dataset: Dataset = self.source.dataset(self.transform, 0)
        return iter(
            DataLoader(
                dataset,
                batch_size=data.validation_batch_size or data.batch_size,
                num_workers=_num_workers(self.config, self.source),
                pin_memory=self.pin_memory,
            )
        )


class RepeatSampler(Sampler[int]):
    """Shuffled indices, each drawn several times in a row: repeated augmentation as in DeiT."""

    def __init__(self, num_images: int, repeats: int, seed: int) -> None:
        """Prepare the order of one epoch.

        Args:
            num_images: Images in the data set.
            repeats: Draws of each image in a row; 0 and 1 draw each once.
            seed: Seed of the order.
        """
        self.num_images = num_images
        self.repeats = max(repeats, 1)
        self.length = epoch_length(num_images, repeats)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(self.num_images, generator=generator)
        yield from order.repeat_interleave(self.repeats)[: self.length].tolist()

    def __len__(self) -> int:
        return self.length


def epoch_length(num_images: int, repeats: int) -> int:
    """Return how many images an epoch draws; repeats change which, hardly how many."""
    if repeats <= 1 or num_images < _REPEAT_ROUND:
        return num_images
    return num_images // _REPEAT_ROUND * _REPEAT_ROUND


def epoch_seed(seed: int, epoch: int) -> int:
    """Mix a run's seed and an epoch into one 32-bit seed."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def train_transform(config: TrainConfig) -> Transform:
    """Build the augmentation of a training image, up to the normalised and erased tensor.

    Raises:
        ConfigError: timm does not know the auto-augment policy.
    """
    augment, data = config.augment, config.data
    try:
        recipe = create_transform(
            (config.model.in_chans, config.model.img_size, config.model.img_size),
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=None,  # DeiT's 0.3 never acted: auto-augment switches it off
            auto_augment=augment.aa,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
            re_prob=augment.reprob,
            re_mode=augment.remode,
            re_count=augment.recount,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ConfigError(f"augment.aa {augment.aa!r} is not a policy of timm: {error}") from error
    if not augment.degrees and not augment.translate and augment.zoom == (1.0, 1.0):
        return recipe
    affine = transforms.RandomAffine(
        augment.degrees,
        translate=(augment.translate, augment.translate),
        scale=augment.zoom,
        interpolation=transforms.InterpolationMode.BILINEAR,
    )
    return transforms.Compose([affine, recipe])


def val_transform(config: TrainConfig) -> Transform:
    """Build the resize, centre crop and normalisation of a validation image."""
    return create_transform(
        (config.model.in_chans, config.model.img_size, config.model.img_size),
        interpolation=config.data.interpolation,
        mean=config.data.mean,
        std=config.data.std,
        crop_pct=config.data.crop_pct,
    )


def check_same_classes(train: TrainData, val: ValData) -> None:
    """Check that both splits number the same classes.

    Raises:
        DataError: a class is in one split only.
    """
    if train.source.classes is None or val.source.classes is None:
        return
    differing = set(train.source.classes) ^ set(val.source.classes)
    if differing:
        name = sorted(differing)[0]
        where = "training" if name in train.source.classes else "validation"
        raise DataError(
            f"class {name} is in the {where} data only ({len(differing)} classes differ)"
        )


def _num_workers(config: TrainConfig, source: Source) -> int:
    """Return the loader processes to start, no more than the source can feed."""
    wanted = config.data.num_workers
    return wanted if source.max_workers is None else min(wanted, source.max_workers)
