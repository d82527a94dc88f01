"""Read and augment ADE20K's scenes, and predict them by sliding windows.

The folder of the scene parsing challenge has ``images/{training,validation}/*.jpg`` and
``annotations/{training,validation}/*.png``. Labels are 1 to 150, and 0 for pixels without a label.

Letters: B images, K classes, H, W height and width of an image.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as T

from downstream.photos import read_photo
from examples.folders import read_mask
from vil.training.errors import DataError

CLASSES = 150
IGNORED = 255
_CROPS = 11  # attempts to find a crop that is not mostly one class
_MAX_RATIO = 0.75
_LONGEST = 4  # maximum longer side of a resized image, in shorter sides


class Scenes(Dataset):
    """Images uint8 (3, H, W) and labels uint8 (H, W), 0 to 149; pixels without a label are 255."""

    def __init__(self, root: Path, split: str, transform: Callable[[Tensor, Tensor], tuple]) -> None:
        """List a split.

        Args:
            root: Folder of the challenge.
            split: "training" or "validation".
            transform: Function from an image and its labels to a sample.

        Raises:
            DataError: If there are no images, or an image has no labels.
        """
        self.images = sorted((root / "images" / split).glob("*.jpg"))
        self.labels = [root / "annotations" / split / f"{path.stem}.png" for path in self.images]
        self.transform = transform
        if not self.images:
            raise DataError(f"no images {root / 'images' / split}/*.jpg")
        if missing := [path for path in self.labels if not path.is_file()]:
            raise DataError(f"{len(missing)} images have no labels, the first {missing[0]}")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple:
        try:
            values = read_mask(self.labels[index], CLASSES)
        except (OSError, ValueError) as error:
            raise DataError(str(error)) from error
        pixels = read_photo(self.images[index], tuple(values.shape))
        return self.transform(pixels, values - 1)  # uint8 wraps around from 0 to 255


class Distort(v2.RandomPhotometricDistort):
    """torchvision's change of brightness, contrast, saturation and hue, without permuting the channels."""

    def make_params(self, flat_inputs: list) -> dict:
        """Draw the parameters of the changes."""
        return super().make_params(flat_inputs) | {"channel_permutation": None}


class Augment:
    """mmsegmentation's training pipeline: scale by 0.5 to 2, crop, mirror, distort, normalise, pad."""

    def __init__(self, size: int) -> None:
        """Create the pipeline.

        Args:
            size: Height and width of the result, and shorter side of an image at scale 1, in pixels.
        """
        self.size = size
        # mmsegmentation: 32 of 255 in brightness, 18 of OpenCV's 180 in hue
        self.distort = Distort((0.875, 1.125), (0.5, 1.5), (0.5, 1.5), (-0.1, 0.1))

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return an image float32 (3, size, size) and its labels int64 (size, size)."""
        scale = 0.5 + 1.5 * torch.rand(()).item()
        image, labels = resized(image, self.size * scale), tv_tensors.Mask(labels)
        labels = T.resize(labels, list(image.shape[1:]), v2.InterpolationMode.NEAREST)
        image, labels = v2.RandomHorizontalFlip()(*self.crop(image, labels))
        image = normalised(self.distort(image))
        below, beside = (self.size - length for length in labels.shape)
        image = F.pad(image, (0, beside, 0, below))  # with the mean colour
        labels = F.pad(labels, (0, beside, 0, below), value=IGNORED)
        return image.as_subclass(Tensor), labels.as_subclass(Tensor).long()

    def crop(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return a crop in which no class has three quarters of the pixels, if 11 attempts find one."""
        image, labels = tv_tensors.Image(image), tv_tensors.Mask(labels)
        crop = v2.RandomCrop([min(self.size, length) for length in labels.shape])
        for _ in range(_CROPS):
            pixels, part = crop(image, labels)
            counts = torch.bincount(part.flatten().long(), minlength=IGNORED + 1)[:IGNORED]
            if (counts > 0).sum() > 1 and counts.max() < _MAX_RATIO * counts.sum():
                break
        return pixels, part


def whole(image: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Apply mmsegmentation's test pipeline: the image at scale 1, its labels unchanged.

    Returns:
        An image float32 (3, height, width), whose shorter side is ``size``, and its labels int64 (H, W).
    """
    return normalised(resized(image, size)), labels.long()


def resized(image: Tensor, shorter: float) -> Tensor:
    """Resize an image (3, H, W) to a shorter side in pixels; limit the longer side to four times that."""
    height, width = image.shape[1:]
    factor = min(shorter / min(height, width), _LONGEST * shorter / max(height, width))
    size = [max(1, int(length * factor + 0.5)) for length in (height, width)]
    return T.resize(image, size, antialias=False)


def normalised(image: Tensor) -> Tensor:
    """Convert an image uint8 (3, H, W) to float32, and normalise it by ImageNet's mean and std."""
    return T.normalize(
        T.to_dtype(image, torch.float32, scale=True),
        list(IMAGENET_DEFAULT_MEAN),
        list(IMAGENET_DEFAULT_STD),
    )


def by_windows(predict: Callable[[Tensor], Tensor], images: Tensor, size: int, stride: int) -> Tensor:
    """Predict images of any size by sliding windows; average the logits where windows overlap.

    Args:
        predict: Function from images (B, 3, h, w) to logits (B, K, h, w).
        images: (B, 3, H, W).
        size: Height and width of a window; smaller if the image is smaller.
        stride: Distance between windows; the last window of a row ends at the image's border.

    Returns:
        Logits (B, K, H, W), float32.
    """
    total, count = None, images.new_zeros(images.shape[-2:])
    for rows in _spans(images.shape[-2], size, stride):
        for columns in _spans(images.shape[-1], size, stride):
            logits = predict(images[..., rows, columns]).float()
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *images.shape[-2:])
            total[..., rows, columns] += logits
            count[rows, columns] += 1
    return total / count


def _spans(length: int, size: int, stride: int) -> Iterator[slice]:
    """Return the ranges of windows along one side."""
    for start in range(0, max(length - size + stride, 1), stride):
        first = max(min(start, length - size), 0)
        yield slice(first, min(first + size, length))
