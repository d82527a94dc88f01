"""Augmentation of single images in data-loading workers, and of batches on the device.

The order is DeiT's: crop, flip and auto-augment each decoded image; normalise; erase; mix. Workers return
uint8 images, a quarter of the size of floats. All later transforms run on batches.
"""

from collections.abc import Callable

import torch
from PIL import Image
from timm.data import Mixup, create_transform
from timm.data.random_erasing import RandomErasing
from torchvision import transforms

from vil.preprocess import accepting_tensors
from vil.training.errors import ConfigError
from vil.training.sampler import key, seed_everything
from vil.training.settings import AugmentConfig, TrainConfig

Transform = Callable[[Image.Image | torch.Tensor], torch.Tensor]


def train_transform(config: TrainConfig, size: int | None = None) -> Transform:
    """Build the augmentation of a training image, which returns a uint8 tensor (C, size, size), by default model.img_size.

    Raises ConfigError if timm does not know the auto-augment policy.
    """
    augment, data, size = config.augment, config.data, size or config.model.img_size
    try:
        recipe = create_transform(
            (config.model.in_chans, size, size),
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=None,  # DeiT's 0.3 had no effect: auto-augment disables it
            auto_augment=augment.aa,
            interpolation=data.interpolation,
            mean=data.mean,
            use_prefetcher=True,  # BatchAugment does the rest
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ConfigError(f"augment.aa {augment.aa!r} is not a policy of timm: {error}") from error
    recipe.transforms[-1] = to_planes
    if not augment.degrees and not augment.translate and augment.zoom == (1.0, 1.0):
        return accepting_tensors(recipe)
    affine = transforms.RandomAffine(
        augment.degrees,
        translate=(augment.translate, augment.translate),
        scale=augment.zoom,
        interpolation=transforms.InterpolationMode.BILINEAR,
    )
    return accepting_tensors(transforms.Compose([affine, recipe]))


def val_transform(config: TrainConfig) -> Transform:
    """Build the validation transform: resize, crop the centre, and convert to a uint8 tensor (C, H, W).

    It raises ValueError for an image that would be enlarged to more than data.max_pixels.
    """
    size, data = config.model.img_size, config.data
    recipe = create_transform(
        (config.model.in_chans, size, size),
        interpolation=data.interpolation,
        crop_pct=data.crop_pct,
        crop_mode=data.crop_mode,
        mean=data.mean,
        use_prefetcher=True,
    )
    recipe.transforms[-1] = to_planes
    return accepting_tensors(recipe, data.max_pixels)


def to_planes(image: Image.Image) -> torch.Tensor:
    """Convert an image to a contiguous uint8 tensor (C, H, W), which makes collating faster."""
    planes = bytearray().join(image.tobytes("raw", band) for band in image.getbands())
    return torch.frombuffer(planes, dtype=torch.uint8).view(-1, image.height, image.width)


class Normalize:
    """Normalise uint8 images with the mean and standard deviation of the data set."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        shape = (1, config.model.in_chans, 1, 1)
        self.mean = torch.tensor(config.data.mean, dtype=torch.float32, device=device).view(shape)
        self.std = torch.tensor(config.data.std, dtype=torch.float32, device=device).view(shape)
        self.device = device

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise uint8 images (B, C, H, W) on any device; return float32 on the model's device."""
        floats = images.to(self.device, non_blocking=True).float()  # a copy, changed in place
        return floats.div_(255).sub_(self.mean).div_(self.std)


class BatchAugment:
    """Normalise, erase and mix batches; the result depends only on seed, step and place in the step."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        augment = config.augment
        self.normalize = Normalize(config, device)
        self.erase = RandomErasing(
            augment.reprob, mode=augment.remode, max_count=augment.recount, device=str(device)
        )
        self.mixup = _build_mixup(augment, config.model.num_classes)
        self.mix_size = augment.mix_size
        self.seed = config.run.seed

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, step: int, place: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Augment one micro-batch.

        Args:
            images: Images (B, C, H, W), uint8.
            targets: Class indices (B,).
            step: Step of the run.
            place: Index of the first image within the step, over all processes.

        Returns:
            Images, float32, and targets: class indices (B,), or probabilities (B, classes) if mixing.
        """
        images = self.normalize(images)
        targets = targets.to(images.device, non_blocking=True)
        size = self.mix_size or len(images)
        mixed = []
        for start in range(0, len(images), size):
            seed_everything(key("augment", self.seed, step, place + start))
            group, labels = images[start : start + size], targets[start : start + size]
            self.erase(group)  # in place, like mixing
            mixed.append(labels if self.mixup is None else self.mixup(group, labels)[1])
        return images, torch.cat(mixed)


def _build_mixup(config: AugmentConfig, num_classes: int) -> Mixup | None:
    """Create mixup and cutmix; return None if both are disabled."""
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
