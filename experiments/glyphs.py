"""Make a data set of letters: 16 capitals in some 290 font families, drawn on photographs.

    python -m experiments.glyphs

It downloads fonts and photographs on first use: ``glyph_sources.py`` says what that needs. Read the
images with `--data.dataset folder --data.path output/glyphs/images`. Training and validation share no
font family and no photograph. The images are bit-identical wherever Pillow has the same version.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageFont, ImageStat

from experiments.glyph_sources import (
    CACHE,
    LETTERS,
    about_sources,
    draw_letter,
    fonts,
    is_made,
    photographs,
    whole,
)

SIDE = 48
"""Height and width of an image, in pixels."""
COUNTS = {"train": 256, "val": 64}
"""Images of each class in each split."""
SEED = 0

_CONTRAST = 130  # least difference in brightness, of 255, between a letter and its photograph


def make_images(
    folder: Path,
    font_files: dict[str, Sequence[Path]],
    pictures: dict[str, Sequence[Path]],
    counts: dict[str, int],
    seed: int = SEED,
) -> None:
    """Draw a data set as folder/<split>/<letter>/<number>.png.

    Args:
        folder: New folder, in a folder that exists.
        font_files: Fonts of each split, in a folder per family; families are drawn equally often.
        pictures: Photographs of each split.
        counts: Images of each class in each split.
        seed: Of all random choices.
    """
    with whole(folder, _about_images(counts, seed)) as part:
        for split, count in counts.items():
            families = defaultdict(list)
            for path in font_files[split]:
                families[path.parent.name].append(path)
            files = list(families.values())
            backgrounds = [_open_photograph(path) for path in pictures[split]]
            for letter in LETTERS:
                (part / split / letter).mkdir(parents=True)
                for number in range(count):
                    rng = random.Random(f"{seed} {split} {letter} {number}")
                    font = rng.choice(rng.choice(files))
                    image = draw_image(rng, letter, font, rng.choice(backgrounds))
                    image.save(part / split / letter / f"{number:04d}.png")


def draw_image(rng: random.Random, letter: str, font: Path, photograph: Image.Image) -> Image.Image:
    """Draw a bright letter of random size, rotation, colour and place on a darkened photograph."""
    side = rng.randint(SIDE, min(photograph.size) * 2 // 3)
    x, y = (rng.randint(0, length - side) for length in photograph.size)
    box = (x, y, x + side, y + side)
    image = photograph.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
    image = image.point([value // 4 for value in range(256)] * 3)
    mask = draw_letter(_open_font(font), letter)
    mask = mask.rotate(rng.uniform(-8, 8), Image.Resampling.BICUBIC, expand=True)
    scale = rng.uniform(36, 44) / max(mask.size)
    size = [max(round(length * scale), 1) for length in mask.size]
    mask = mask.resize(size, Image.Resampling.BOX)
    place = tuple(
        min(max((SIDE - length) // 2 + rng.randint(-3, 3), 0), SIDE - length) for length in size
    )
    image.paste(_bright_colour(rng, image), place, mask)
    return image


def _bright_colour(rng: random.Random, image: Image.Image) -> tuple[int, ...]:
    """Draw random colours until one is much brighter than the image."""
    least = ImageStat.Stat(image.convert("L")).mean[0] + _CONTRAST
    while True:
        colour = tuple(rng.randint(0, 255) for _ in range(3))
        if Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0)) >= least:
            return colour


@cache
def _open_font(path: Path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, 64, layout_engine=ImageFont.Layout.BASIC)


def _open_photograph(path: Path) -> Image.Image:
    """Open a photograph at about 640 x 400 pixels, where a crop of 48 shows something."""
    image = Image.open(path).convert("RGB")
    image.thumbnail((640, 640), Image.Resampling.BOX)
    return image


def _about_images(counts: dict[str, int], seed: int) -> dict[str, Any]:
    return {**about_sources(), "counts": counts, "seed": seed}


def main() -> None:
    """Make the data set, unless it is there."""
    folder = CACHE / "images"
    if not is_made(folder, _about_images(COUNTS, SEED)):
        splits = {"train": True, "val": False}
        font_files = {split: fonts(training) for split, training in splits.items()}
        pictures = {split: photographs(training) for split, training in splits.items()}
        make_images(folder, font_files, pictures, COUNTS)
    print(f"{folder}: {COUNTS} images of each of {len(LETTERS)} classes")


if __name__ == "__main__":
    main()
