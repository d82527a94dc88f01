"""Photographs held sideways, read where boxes and masks are drawn on them."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from downstream.photos import read_photo
from vil.training.errors import DataError


def photograph(path: Path, orientation: int) -> Path:
    """Write an image of 16 x 24 px as stored, black but for its upper left corner, with an orientation."""
    image, exif = Image.new("L", (24, 16)), Image.Exif()
    image.paste(255, (0, 0, 8, 8))
    exif[274] = orientation
    image.save(path, exif=exif)
    return path


def corner(image: Tensor) -> tuple[int, int]:
    """Return the row and the column of the first bright pixel."""
    row, column = (image[0] > 128).nonzero()[0].tolist()
    return row, column


@pytest.mark.parametrize("form", ["jpg", "png"])
def test_the_size_of_the_annotations_decides(form: str, tmp_path: Path) -> None:
    path = photograph(tmp_path / f"photo.{form}", 6)  # turned by 90 degrees to be upright
    upright, stored = read_photo(path, (24, 16)), read_photo(path, (16, 24))
    assert (upright.shape, stored.shape) == ((3, 24, 16), (3, 16, 24))
    assert upright.dtype == torch.uint8
    assert (corner(upright), corner(stored)) == ((0, 8), (0, 0))
    for size in ((24, 24), (8, 12)):
        with pytest.raises(DataError, match=rf"{path} has 24 x 16 pixels, .* for {size[0]} x"):
            read_photo(path, size)


def test_upright_if_both_have_the_size(tmp_path: Path) -> None:
    assert corner(read_photo(photograph(tmp_path / "photo.png", 3), (16, 24))) == (8, 16)


def test_a_damaged_orientation_is_none(tmp_path: Path) -> None:
    Image.new("L", (24, 16)).save(tmp_path / "photo.jpg", exif=b"Exif\0\0nothing")
    assert read_photo(tmp_path / "photo.jpg", (16, 24)).shape == (3, 16, 24)
