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

from vil.preprocess import ImageSpec, accepting_tensors, to_planes
from vil.training.errors import ConfigError
from vil.training.sampler import key, seed_everything
from vil.training.settings import AugmentConfig, TrainConfig

Transform = Callable[[Image.Image | torch.Tensor], torch.Tensor]


def train_transform(augment: AugmentConfig, images: ImageSpec) -> Transform:
    """Return the augmentation of one decoded training image, which makes it uint8 (C, H, W).

    Raises ConfigError if timm does not know the auto-augment policy.
    """
    try:
        recipe = create_transform(
            (images.in_chans, *images.img_size),
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=None,  # DeiT's 0.3 had no effect: auto-augment disables it
            auto_augment=augment.aa,
            interpolation=images.interpolation,
            mean=images.mean,
            use_prefetcher=True,  # BatchAugment does the rest
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ConfigError(f"augment.aa {augment.aa!r} is not a policy of timm: {error}") from error
    recipe.transforms[-1] = to_planes
    if augment.degrees or augment.translate or augment.zoom != (1.0, 1.0):
        affine = transforms.RandomAffine(
            augment.degrees,
            translate=(augment.translate, augment.translate),
            scale=augment.zoom,
            interpolation=transforms.InterpolationMode.BILINEAR,
        )
        recipe = transforms.Compose([affine, recipe])
    return accepting_tensors(recipe, images.max_pixels)


class BatchAugment:
    """Normalise, erase and mix batches; the result depends only on seed, step and place in the step."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        augment = config.augment
        self.normalize = config.images.normalizer(device)
        self.erase = RandomErasing(augment.reprob, mode=augment.remode, max_count=augment.recount, device=str(device))
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
