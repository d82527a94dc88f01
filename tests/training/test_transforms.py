"""Augmentation on the device has DeiT's order and does not depend on how a batch is divided."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from tests.strategies import encoded
from vil.preprocess import ImageSpec
from vil.training.sampler import seed_image
from vil.training.transforms import BatchAugment, train_transform

CPU = torch.device("cpu")


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, 3, 16, 16), dtype=torch.uint8, generator=generator)
    return images, torch.arange(size) % 4


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_result_does_not_depend_on_how_a_step_is_divided(config, mode) -> None:
    augment = BatchAugment(config.changed("augment", mix_size=4, mixup_mode=mode), CPU)
    images, targets = batch(16)
    whole_images, whole_targets = augment(images, targets, 3, 0)
    for size in (4, 8):
        for start in range(0, 16, size):
            part = slice(start, start + size)
            mixed, labels = augment(images[part], targets[part], 3, start)
            assert torch.equal(mixed, whole_images[part])
            assert torch.equal(labels, whole_targets[part])


def test_steps_and_groups_are_augmented_differently(config) -> None:
    augment = BatchAugment(config.changed("augment", mix_size=4, reprob=0.0, mixup_prob=1.0), CPU)
    images, targets = batch(4)
    results = [augment(images, targets, step, place)[1] for step, place in ((0, 0), (1, 0), (0, 4))]
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_images_are_erased_before_they_are_mixed(config) -> None:
    """Noise from erasing one image shows through in its partner, scaled by mixup."""
    settings = {"reprob": 1.0, "mixup": 1.0, "cutmix": 0.0}
    images = torch.full((2, 3, 16, 16), 128, dtype=torch.uint8)
    augment = BatchAugment(config.changed("augment", **settings), CPU)
    mixed, targets = augment(images, torch.tensor([0, 1]), 0, 0)
    lam = ((targets[0, 0] - targets[0, 2]) / 0.9).item()
    alone = config.changed("augment", **settings | {"mixup": 0.0})
    erased, _ = BatchAugment(alone, CPU)(images, torch.tensor([0, 1]), 0, 0)
    assert torch.allclose(mixed[0], lam * erased[0] + (1 - lam) * erased[1], atol=1e-5)
    assert not torch.equal(erased[0], erased[1])


def test_without_anything_random_images_are_only_normalised(config) -> None:
    plain = config.changed("augment", reprob=0.0, mixup=0.0, cutmix=0.0)
    images, targets = batch(6)
    result, labels = BatchAugment(plain, CPU)(images, targets, 0, 0)
    assert torch.equal(result, plain.images.normalizer(CPU)(images))
    assert torch.equal(labels, targets)


PLAIN = {"aa": None, "hflip": 0.0, "scale": (1.0, 1.0), "ratio": (1.0, 1.0), "reprob": 0.0}
PLAIN |= {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0}
MIXED = {"mixup": 1.0, "cutmix": 1.0}


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({}, {"degrees": 90.0}),
        ({}, {"translate": 0.5}),
        ({}, {"zoom": (0.5, 0.5)}),
        ({}, {"scale": (0.25, 0.25)}),
        ({}, {"ratio": (0.5, 0.5)}),
        ({}, {"hflip": 1.0}),
        ({}, {"aa": "rand-m9"}),
        ({}, {"mixup": 1.0}),
        ({}, {"cutmix": 1.0}),
        ({"reprob": 1.0}, {"remode": "const"}),
        ({"reprob": 1.0}, {"recount": 9}),
        (MIXED, {"mixup_prob": 0.0}),
        (MIXED, {"mixup_switch_prob": 1.0}),
        (MIXED, {"mixup_mode": "elem"}),
        (MIXED, {"mix_size": 2}),
        (MIXED, {"smoothing": 0.5}),
    ],
    ids=str,
)
def test_each_setting_has_an_effect(config, before, change) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8))
    found = []
    for setting in (before, before | change):
        chosen, images = config.changed("augment", **PLAIN | setting), []
        for seed in range(8):
            seed_image(seed)
            images.append(train_transform(chosen.augment, chosen.images)(image))
        found.append(BatchAugment(chosen, CPU)(torch.stack(images), torch.arange(8) % 4, 0, 0))
    (images, targets), (others, other_targets) = found
    same = targets.shape == other_targets.shape and torch.equal(targets, other_targets)
    assert not (torch.equal(images, others) and same)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_validation_crops_as_timm_does(config, crop_mode) -> None:
    """Weights of timm say how; an image that is not square shows the difference."""
    images = dataclasses.replace(config.images, crop_mode=crop_mode, crop_pct=0.9)
    image = Image.fromarray(np.arange(30 * 60 * 3, dtype=np.uint8).reshape(30, 60, 3))
    own = images.transform()(image)
    timms = create_transform((3, 16, 16), interpolation="bicubic", crop_pct=0.9, crop_mode=crop_mode, normalize=False)(
        image
    )
    assert torch.equal(own, timms)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border", None], ids=str)
def test_torchvision_resizes_like_pillow(config, crop_mode, channels) -> None:
    """Of a JPEG, all that differs is how values are rounded. ``crop_mode`` None is training."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((200, 150), Image.Resampling.BICUBIC)
    content = encoded(image if channels == 3 else image.convert("L"), "JPEG")
    values = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    values |= {"in_chans": channels, "img_size": (64, 64), "crop_mode": crop_mode or "center"}
    found = {}
    for decoder in ("torchvision", "pillow"):
        images = ImageSpec(decoder=decoder, **values)
        decoded = images.decode(content)
        assert isinstance(decoded, torch.Tensor) == (decoder == "torchvision")
        transform = images.transform()
        if crop_mode is None:
            transform = train_transform(config.augment, images)
        found[decoder] = []
        for seed in range(8 if crop_mode is None else 1):
            seed_image(seed)
            found[decoder].append(transform(decoded))
    one, other = (torch.stack(images).int() for images in found.values())
    assert one.shape[1:] == (channels, 64, 64)
    if crop_mode is None:  # RandAugment may enlarge a difference
        assert (one != other).float().mean() < 0.05
    else:
        assert (one - other).abs().max() <= 2
        assert (one != other).float().mean() < 0.02
