"""What a split of a data set is, wherever its images come from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch


class Source(ABC):
    """One split of a data set, opened and checked; its images are read by index, in any order."""

    labels: np.ndarray
    """Class indices, int64, (num_images,)."""
    classes: tuple[str, ...] | None
    """Names of the classes, None where the data holds bare indices."""
    fingerprint: str
    """Equal for equal data, wherever it lies."""
    excluded: Sequence[str] = ()
    """Images left out for want of a label, a line each."""
    ignored: str = ""
    """A line about the files in a folder that are no images; empty where there are none."""

    @property
    def num_images(self) -> int:
        """Images of the split, excluded ones left out."""
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return an image's file.

        Raises:
            OSError: it cannot be read, or is not what was written.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Name an image as a user would look for it."""

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Draw an epoch's order, every index once, int64, (num_images,); here all are shuffled."""
        return torch.randperm(self.num_images, generator=generator)


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """Hash bytes, and arrays bit for bit, into a short name for them."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.tobytes())
    return digest.hexdigest()
