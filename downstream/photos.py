"""Read photographs as their annotations see them."""

from pathlib import Path

from torch import Tensor

from examples.folders import read_image
from vil.training.errors import DataError


def read_photo(path: Path, size: tuple[int, int]) -> Tensor:
    """Return an image uint8 (3, H, W) with the orientation in which it has the size of its annotations.

    Raises:
        DataError: If the image cannot be read or has another size.
    """
    try:
        return read_image(path, size).as_subclass(Tensor)
    except (OSError, ValueError) as error:
        raise DataError(str(error)) from error
