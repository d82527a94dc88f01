"""Generate pictures of shapes when they are read: data for the examples that needs no download.

Each picture has one to four shapes of random kind, size, place, colour and tilt. Some are partly hidden.
They lie on noise of several scales, strongest at the coarsest. Colours do not depend on the kind, and
shapes and background draw from overlapping colours.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes

# Whether a point (x, y) is inside a shape of radius 1 around the origin.
KINDS = {
    "circle": lambda x, y: np.hypot(x, y) <= 1,
    "triangle": lambda x, y: np.maximum(np.abs(x) * math.sqrt(0.75) - y / 2, y) <= 0.6,
    "cross": lambda x, y: (np.fmin(np.abs(x), np.abs(y)) <= 0.3) & (np.fmax(np.abs(x), np.abs(y)) <= 1),
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.8) <= 0.2,
}
CLASSES = ("background", *KINDS)
_RADII = (0.15, 0.3)  # fractions of the image's side
_TILT = math.radians(20)  # largest tilt, either way
_LEAST_VISIBLE = 0.8  # of a shape's area, so that its kind stays recognisable
_CONTRAST = (0.35, 0.65)  # between the mean colours of shape and background; colours are 0 to 1
_BACKGROUND_NOISE, _SHAPE_NOISE = 0.15, 0.07  # standard deviations


class Shapes(Dataset):
    """Pictures of shapes: image i depends on (seed, i, img_size) only, and seeds are independent."""

    classes = CLASSES

    def __init__(self, seed: int, length: int, img_size: int, transform: Callable = lambda *item: item) -> None:
        """Describe a set of images.

        Args:
            seed: Seed of the set, at least 0.
            length: Number of images.
            img_size: Height and width in pixels, at least 32.
            transform: torchvision v2 transform of the image and the dict.

        Raises:
            ValueError: If img_size is too small.
        """
        if img_size < 32:
            raise ValueError(f"img_size of shapes must be at least 32, got {img_size}")
        self.seed, self.length, self.img_size, self.transform = seed, length, img_size, transform

    def __len__(self) -> int:
        """Return the number of images."""
        return self.length

    def __getitem__(self, index: int) -> tuple[tv_tensors.Image, dict[str, Tensor]]:
        """Compute an image and its targets.

        Returns:
            The image, (3, img_size, img_size), uint8, and a dict. ``mask`` is the class of each pixel,
            (img_size, img_size), int64, 0 for background. ``boxes``, (N, 4), float32, are left, top,
            right and bottom of the visible part of each shape, in pixels, the last two exclusive.
            ``labels`` are (N,), int64, 1 to 4.

        Raises:
            IndexError: If there is no such image.
        """
        if not 0 <= index < self.length:
            raise IndexError(f"index must be 0 to {self.length - 1}, got {index}")
        rng = np.random.default_rng((self.seed, index))
        colour = rng.uniform(0.4, 0.6, 3).astype(np.float32)
        image = colour + _noise(rng, self.img_size, _BACKGROUND_NOISE)
        texture = _noise(rng, self.img_size, _SHAPE_NOISE)
        instances = np.zeros((self.img_size, self.img_size), np.int64)
        labels, areas = [], []
        for _ in range(rng.integers(1, 5)):
            label = int(rng.integers(1, len(CLASSES)))
            inside = _draw(rng, self.img_size, CLASSES[label])
            direction = rng.standard_normal(3, np.float32)  # of the shape's colour from the other
            distance = np.float32(rng.uniform(*_CONTRAST)) / np.linalg.norm(direction)
            shape_colour = colour + distance * direction
            whole = [*areas, inside.sum()]
            seen = np.where(inside, len(whole), instances)
            counts = np.bincount(seen.ravel(), minlength=len(whole) + 1)[1:]
            if (counts >= _LEAST_VISIBLE * np.array(whole)).all():
                areas, instances = whole, seen
                labels.append(label)
                image = np.where(inside[..., None], shape_colour + texture, image)
        return self.transform(*_tensors(image, instances, labels))


def _draw(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Return the pixels of a shape at a random place, (size, size), bool."""
    radius = size * rng.uniform(*_RADII)
    left, top = rng.uniform(0.7 * radius, size - 0.7 * radius, 2)
    turn = rng.uniform(-_TILT, _TILT)
    pixels = np.arange(size, dtype=np.float32) + 0.5
    x, y = (pixels - left)[None, :] / radius, (pixels - top)[:, None] / radius
    return KINDS[kind](x * math.cos(turn) - y * math.sin(turn), x * math.sin(turn) + y * math.cos(turn))


def _noise(rng: np.random.Generator, size: int, deviation: float) -> np.ndarray:
    """Return noise, (size, size, 3): a sum of grids of 2, 4, 8, ... cells and of pixels.

    Its mean is 0 and its standard deviation is ``deviation``.
    """
    cells = [2**k for k in range(1, int(math.log2(size - 1)) + 1)] + [size]
    scales = np.array(cells, np.float32) ** -0.5  # coarse grids are strongest, as in photographs
    scales *= deviation / np.linalg.norm(scales)
    total = torch.zeros(1, 3, 1, 1)
    for count, scale in zip(cells, scales, strict=True):  # from coarse to fine
        grid = torch.from_numpy(rng.standard_normal((1, 3, count, count), np.float32) * scale)
        total = F.interpolate(total, (count, count), mode="bilinear") + grid
    return total[0].permute(1, 2, 0).numpy()


def _tensors(image: np.ndarray, instances: np.ndarray, labels: list[int]) -> tuple:
    """Return an item, from an image, the number of the visible shape at each pixel, and the labels."""
    pixels = torch.from_numpy(np.uint8(image.clip(0, 1) * 255)).permute(2, 0, 1).contiguous()
    numbers = torch.from_numpy(instances)
    each = torch.stack([numbers == k + 1 for k in range(len(labels))])
    boxes = masks_to_boxes(each) + torch.tensor([0, 0, 1, 1])
    return tv_tensors.Image(pixels), {
        "mask": tv_tensors.Mask(torch.tensor([0, *labels])[numbers]),
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=instances.shape),
        "labels": torch.tensor(labels),
    }
