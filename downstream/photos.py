"""Read photographs as their annotations see them."""

from contextlib import suppress
from pathlib import Path

import PIL.Image
from PIL import ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as T

from vil.training.errors import DataError


def read_photo(path: Path, size: tuple[int, int]) -> Tensor:
    """Return an image uint8 (3, H, W) with the orientation that its annotations have.

    A camera held sideways stores a photograph sideways, with an EXIF orientation. Most annotations are for the upright
    photograph, some for the stored one. The size that the annotations state tells which; it is the upright one if
    both have this size.

    Args:
        path: File of the image.
        size: Height and width in pixels that the annotations state.

    Raises:
        DataError: If the image cannot be read or has another size.
    """
    try:
        with PIL.Image.open(path) as file:
            upright = stored = file.convert("RGB")
            with suppress(Exception):  # damaged EXIF data
                upright = ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    fitting = [image for image in (upright, stored) if (image.height, image.width) == size]
    if not fitting:
        raise DataError(
            f"{path} has {upright.height} x {upright.width} pixels, but its annotations are for "
            f"{size[0]} x {size[1]}"
        )
    return T.pil_to_tensor(fitting[0])
