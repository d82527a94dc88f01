"""What a split of a data set is, wherever its images come from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch

from vil.training.errors import DataError

_CONTENTS = 256  # images that are read for a fingerprint, evenly spread
_THREADS = 16  # they mostly wait for the disk


class Source(ABC):
    """One split of a data set, opened and checked; its images are read by index, in any order."""

    labels: np.ndarray
    """Class indices, int64, (num_images,)."""
    classes: tuple[str, ...] | None
    """Names of the classes, None where the data holds bare indices."""
    listing: str
    """Equal for equal names, labels and, in shards, places of images."""
    excluded: Sequence[str] = ()
    """Images left out for want of a label, a line each."""
    ignored: str = ""
    """A line about the files in a folder that are no images; empty where there are none."""

    @property
    def num_images(self) -> int:
        """Images of the split, excluded ones left out."""
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal data, wherever it lies: the listing, and the content of some images.

        Raises:
            DataError: one of these cannot be read.
        """
        count = min(self.num_images, _CONTENTS)
        chosen = np.linspace(0, self.num_images - 1, count).round().astype(np.int64).tolist()
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(self._checksum, chosen))
        if None in found:
            return self.listing
        return f"{self.listing}-{fingerprint(np.array(found, dtype=np.int64))}"

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return an image's file.

        Raises:
            OSError: it cannot be read, or is not what was written.
        """

    def checksum(self, index: int) -> int | None:
        """Return the CRC32 of an image's file, in any thread; None here, where the listing tells all.

        Raises:
            OSError: it cannot be read.
        """
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """Name an image as a user would look for it."""

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Draw an epoch's order, every index once, int64, (num_images,); here all are shuffled."""
        return torch.randperm(self.num_images, generator=generator)

    def _checksum(self, index: int) -> int | None:
        try:
            return self.checksum(index)
        except OSError as error:
            raise DataError(f"image {self.name(index)} cannot be read: {error}") from error


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """Hash bytes, and arrays bit for bit, into a short name for them."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.tobytes())
    return digest.hexdigest()
