"""Map-style image sources with random access: digits and folders here, shards in shards.py.

With random access, any process can read any image. This allows equal steps on every rank,
evaluating each validation image exactly once, and exact resuming.
"""

import errno
import hashlib
import io
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image

from vil.messages import one_line, printable
from vil.training.errors import LIMITS, DataError
from vil.training.listing import list_split
from vil.training.sampler import key
from vil.training.settings import DataConfig

_DIGITS_HELD_OUT = 360
T = TypeVar("T")
_CONTENTS = 256  # images whose content enters the fingerprint, evenly spaced
_THREADS = 16  # more than cores, since they mostly wait for the disk
# Number of retries after transient disk errors, and for a file that a network disk hides for now.
_PASSING = {errno.EIO: 9, errno.ESTALE: 9, errno.ETIMEDOUT: 9, errno.ENOTCONN: 9, errno.ENOENT: 3}


class Source(ABC):
    """One validated split of a data set, with random access to its images by index."""

    labels: np.ndarray
    """Class indices, int64, (num_images,)."""
    classes: tuple[str, ...] | None
    """Class names; None if the data only has class indices."""
    listing: str
    """Hash of image names and labels, and in shards also of offsets and sizes."""
    excluded: Sequence[str] = ()
    """Images left out because they have no usable label, one message each."""

    @property
    def num_images(self) -> int:
        """Number of images in the split, without excluded ones."""
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the listing and the content of up to 256 images, not of their location.

        Raises DataError if an image cannot be read.
        """
        count = min(self.num_images, _CONTENTS)
        chosen = np.linspace(0, self.num_images - 1, count).round().astype(np.int64).tolist()
        with ThreadPoolExecutor(_THREADS) as pool:
            checksums = list(pool.map(self._checksum, chosen))
        if None in checksums:
            return self.listing
        return f"{self.listing}-{fingerprint(np.array(checksums, dtype=np.int64))}"

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the bytes of an image file; raise OSError if it cannot be read or is corrupted."""

    def checksum(self, index: int) -> int | None:
        """Return the CRC32 of an image file; None if the listing covers it. Thread-safe."""
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name by which a user can find an image."""

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the order of an epoch: each index once, int64 (num_images,); here a full shuffle."""
        return torch.randperm(self.num_images, generator=generator)

    def _checksum(self, index: int) -> int | None:
        try:
            return self.checksum(index)
        except OSError as error:
            raise DataError(f"image {self.name(index)} cannot be read: {error}") from error


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """Hash bytes and the raw bytes of arrays into a short hex digest."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.tobytes())
    return digest.hexdigest()


class DigitSource(Source):
    """scikit-learn's 1,797 handwritten digits, with a fixed held-out split of 360."""

    def __init__(self, training: bool) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        parts = train_test_split(
            digits.images,
            digits.target,
            test_size=_DIGITS_HELD_OUT,
            stratify=digits.target,
            random_state=0,
        )
        pixels, labels = (parts[0], parts[2]) if training else (parts[1], parts[3])
        self.files = [_enlarged_png(image) for image in pixels]
        self.labels = labels.astype(np.int64)
        self.classes = tuple(str(name) for name in digits.target_names)
        self.listing = fingerprint(pixels, self.labels)

    def read(self, index: int) -> bytes:
        """Return a digit as a PNG file."""
        return self.files[index]

    def name(self, index: int) -> str:
        """Return the number of a digit in its split."""
        return f"digit {index}"


class FolderSource(Source):
    """One folder per class, indexed in timm's order of the class names."""

    def __init__(self, data: DataConfig, training: bool, exceptions: Collection[str] = ()) -> None:
        """List the images; arguments and errors as in ``list_split``."""
        self.folder, paths, self.classes, labels = list_split(data, training, exceptions)
        # An array: a million Python strings would be copied into every data-loading worker.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.labels = np.array(labels, dtype=np.int64)
        self.listing = fingerprint(self.paths, self.labels)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        path = self.path(index)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if path.is_symlink():  # other files may only not be shown by a disk yet
                raise OSError("the link leads to no file") from None
            raise

    def checksum(self, index: int) -> int:
        """Return the CRC32 of an image file."""
        return zlib.crc32(self.read(index))

    def name(self, index: int) -> str:
        """Return the path of an image, with unprintable characters escaped."""
        return printable(str(self.path(index)))

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.folder / os.fsdecode(self.paths[index])


class Subset(Source):
    """The same number of images per class of another source, equal in all runs.

    Smaller subsets are contained in larger ones.
    """

    def __init__(self, source: Source, per_class: int, num_classes: int | None) -> None:
        """Select the images; raise DataError if a class has fewer than ``per_class``."""
        counts = np.bincount(source.labels, minlength=num_classes or len(source.classes or ()))
        least = int(counts.argmin())
        if counts[least] < per_class:
            name = least if source.classes is None else source.classes[least]
            raise DataError(
                f"data.images_per_class must be at most the {counts[least]} training images that "
                f"class {name} has, got {per_class}"
            )
        generator = torch.Generator().manual_seed(key("images of a class"))
        drawn = torch.randperm(source.num_images, generator=generator).numpy()
        by_class = drawn[np.argsort(source.labels[drawn], kind="stable")]
        place = np.arange(len(drawn)) - (np.cumsum(counts) - counts).repeat(counts)
        # No excluded images here: they were checked for the whole split when it was opened.
        self.source, self.kept = source, np.sort(by_class[place < per_class])
        self.labels, self.classes = source.labels[self.kept], source.classes
        self.listing = fingerprint(source.listing.encode(), self.kept)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        return self.source.read(int(self.kept[index]))

    def checksum(self, index: int) -> int | None:
        """Return the checksum from the whole split."""
        return self.source.checksum(int(self.kept[index]))

    def name(self, index: int) -> str:
        """Return the name from the whole split."""
        return self.source.name(int(self.kept[index]))

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the order of the whole split, which keeps shards together, and drop the others."""
        places = torch.full((self.source.num_images,), -1)
        places[torch.from_numpy(self.kept)] = torch.arange(self.num_images)
        drawn = places[self.source.order(generator)]
        return drawn[drawn >= 0]


def reason(error: Exception) -> str:
    """Return why an image cannot be read; raise an error that is about the process instead."""
    if getattr(error, "errno", None) in LIMITS:
        raise error
    return getattr(error, "strerror", None) or one_line(error)


def read_patiently(read: Callable[[int], T], index: int) -> T:
    """Read an image file; retry transient disk errors for a minute, then raise the OSError."""
    for attempt in range(max(_PASSING.values()) + 1):
        try:
            return read(index)
        except OSError as error:
            if attempt >= _PASSING.get(error.errno, 0):
                raise
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _enlarged_png(pixels: np.ndarray) -> bytes:
    """Convert 8 x 8 values in [0, 16] to a 32 x 32 grey PNG file, so that shifts are smooth."""
    image = Image.fromarray((pixels * (255 / 16)).round().astype("uint8"))
    file = io.BytesIO()
    image.resize((32, 32), Image.Resampling.BICUBIC).save(file, format="png")
    return file.getvalue()
