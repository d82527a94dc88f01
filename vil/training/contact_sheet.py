"""Draw a sheet of images with a title under each."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from torch import Tensor

from vil.preprocess import open_image
from vil.training.files import write_atomically
from vil.training.pulse import Pulse

MOST = 64  # images of a sheet
_COLUMNS, _CELL, _GAP, _LINE = 5, 192, 8, 16  # 1,000 px wide
_MARK = "predictions of Vision Longhorn"  # in the file, so that the program replaces nothing else
_FONT = Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")  # Pillow's has no accents
_LETTERS = set(FT2Font(str(_FONT)).get_charmap())


def write_sheet(
    path: Path,
    images: Sequence[Tensor],
    titles: Sequence[str],
    names: Sequence[str],
) -> None:
    """Write a PNG file of 1,000 px width, five images in a row.

    Args:
        path: File to write.
        images: At most 64 images uint8 (C, H, W) of one size.
        titles: First line under each image.
        names: Second line under each image.

    Raises:
        OutputError: If the file cannot be written.
    """
    rows = -(-len(images) // _COLUMNS)
    height = rows * (_CELL + 2 * _LINE + _GAP) + _GAP
    sheet = Image.new("RGB", (_COLUMNS * (_CELL + _GAP), height), "white")
    pulse = Pulse()
    draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(_FONT, 13)
    for number, (image, title, name) in enumerate(zip(images, titles, names, strict=True)):
        row, column = divmod(number, _COLUMNS)
        left = column * (_CELL + _GAP) + _GAP // 2
        top = row * (_CELL + 2 * _LINE + _GAP) + _GAP
        pixels = image.expand(3, -1, -1).permute(1, 2, 0).numpy()
        tile = Image.fromarray(np.ascontiguousarray(pixels)).resize((_CELL, _CELL))
        sheet.paste(tile, (left, top))
        pulse.beat(f"drew {number + 1} of {len(images)} images of the sheet")
        for place, (text, colour) in enumerate(((title, "black"), (name, "grey"))):
            line = _shortened("".join(c if shows(c) else ascii(c)[1:-1] for c in text), font)
            draw.text((left, top + _CELL + place * _LINE), line, colour, font)
    about = PngImagePlugin.PngInfo()
    about.add_text("Software", _MARK)
    write_atomically(path, lambda file: sheet.save(file, "png", pnginfo=about))


def shows(text: str) -> bool:
    """Return whether the sheet's font has all letters of a text; else each would look like the same box."""
    return text.isprintable() and _LETTERS.issuperset(map(ord, text))


def is_sheet(path: Path) -> bool:
    """Return whether a file is a sheet."""
    try:
        with path.open("rb") as file:
            return open_image(file).info.get("Software") == _MARK
    except Exception:  # decoders raise many types for broken files
        return False


def _shortened(text: str, font: ImageFont.FreeTypeFont) -> str:
    if font.getlength(text) <= _CELL:
        return text
    while text and font.getlength(f"{text} ...") > _CELL:
        text = text[:-1]
    return f"{text} ..."
