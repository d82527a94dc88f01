"""Draw scenes of letters on photographs, with the class and the object of every pixel.

A scene is a square photograph with many letters of a few classes, from small to large. Training and
validation scenes share neither fonts nor photographs. All scenes are drawn once and cached as a file.
"""

import dataclasses
import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy.spatial import ConvexHull

from experiments.glyph_sources import about_sources, draw_letter, fonts, photographs
from vil.training.files import write_atomically

MARGIN = 4  # pixels around the box of a letter that no other letter's margin enters
Fonts = Sequence[Sequence[Path]]
_FONT_SIZE = 64  # at which letters are drawn before they are resized
_LARGEST = 1024  # pixels of the longer side of photographs that are cut
_TRIALS = 40  # places tried for a letter before it is left out


@dataclass(frozen=True)
class Scenes:
    """What the scenes of both splits share."""

    side: int = 384
    """Height and width in pixels."""
    letters: str = "ACHMST"
    """One class each, from 1 on; class 0 is the background."""
    sizes: tuple[int, int] = (10, 48)
    """Least and largest height of a letter in pixels; drawn uniformly in the logarithm."""
    number: int = 80
    """Letters drawn in each scene; those that find no place are left out."""
    contrast: float = 0.4
    """Least distance between the colour of a letter and the mean colour below it; colours are 0 to 1."""
    plainness: float = 0.65
    """Least correlation of every letter of a font with the mean of that letter over training fonts."""
    train: int = 200
    """Scenes to train on."""
    val: int = 12
    """Scenes to evaluate on."""

    @property
    def classes(self) -> int:
        """Number of classes, the background among them."""
        return 1 + len(self.letters)


class Split(NamedTuple):
    """The scenes of a split; S scenes of side N."""

    images: np.ndarray
    """uint8 (S, N, N, 3)."""
    classes: np.ndarray
    """Class of each pixel, uint8 (S, N, N)."""
    objects: np.ndarray
    """Number of the letter that each pixel shows, from 1 on, 0 for none, uint8 (S, N, N)."""
    heights: np.ndarray
    """Height of each letter as drawn, by scene and number, 0 where there is none, uint8 (S, 256)."""


class Glyph(NamedTuple):
    """A letter before it is placed."""

    label: int
    cover: np.ndarray
    """Share of each pixel that the letter covers, float32 (height, width), without empty borders."""

    @property
    def inside(self) -> np.ndarray:
        """Pixels of the letter's class, bool (height, width): the convex hull of what it covers.

        Strokes of small letters are thinner than what a decoder with maps of stride 4 can outline.
        """
        return hull(self.cover > 0.5)


# ------------------------------------------------------------------------------------------- fonts


def shapes(font: Path, letters: str) -> np.ndarray:
    """Return letters scaled to squares, each with mean 0 and norm 1, float64 (letters, pixels)."""
    drawn = [draw_letter(_opened(font), letter) for letter in letters]
    squares = np.stack([np.asarray(one.resize((24, 24), Image.Resampling.BOX)) for one in drawn])
    flat = squares.reshape(len(letters), -1) / 255
    flat = flat - flat.mean(1, keepdims=True)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True)


def plain(files: dict[str, Sequence[Path]], settings: Scenes) -> dict[str, list[list[Path]]]:
    """Leave out decorative fonts, and return the others by family, for each split.

    Args:
        files: Fonts of each split, in a folder per family; "train" is one of them.
        settings: Letters and least correlation.
    """
    found = {path: shapes(path, settings.letters) for one in files.values() for path in one}
    mean = sum(found[path] for path in files["train"])
    mean = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    families: dict[str, dict[Path, list[Path]]] = {name: defaultdict(list) for name in files}
    for name, paths in files.items():
        for path in paths:
            if (found[path] * mean).sum(1).min() >= settings.plainness:
                families[name][path.parent].append(path)
    return {name: list(one.values()) for name, one in families.items()}


@functools.lru_cache(None)
def _opened(font: Path) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font, _FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)


# ----------------------------------------------------------------------------------------- drawing


def glyph(rng: np.random.Generator, settings: Scenes, fonts: Fonts) -> Glyph:
    """Draw a random letter of a random font at a random size.

    Args:
        rng: Source of randomness.
        settings: Letters and sizes.
        fonts: Font files of each family; families are drawn equally often.
    """
    label = int(rng.integers(len(settings.letters)))
    height = np.exp(rng.uniform(*np.log(settings.sizes)))
    family = fonts[rng.integers(len(fonts))]
    font = family[rng.integers(len(family))]
    return Glyph(label + 1, rendered(font, settings.letters[label], height))


def rendered(font: Path, letter: str, height: float) -> np.ndarray:
    """Return the cover of a letter, float32 (height, width).

    Args:
        font: Font file.
        letter: A character.
        height: Of the letter's own box, in pixels.
    """
    drawn = draw_letter(_opened(font), letter)
    size = (max(round(drawn.width * height / drawn.height), 1), round(height))
    return np.asarray(drawn.resize(size, Image.Resampling.BOX), np.float32) / 255


def hull(points: np.ndarray) -> np.ndarray:
    """Return the convex hull of the pixels of a mask, bool (height, width)."""
    places = np.argwhere(points)[:, ::-1]
    if len(places) < 3 or min(np.ptp(places, axis=0)) == 0:
        return points
    corners = places[ConvexHull(places, qhull_options="QJ").vertices]
    canvas = Image.new("1", points.shape[::-1])
    ImageDraw.Draw(canvas).polygon([tuple(map(int, c)) for c in corners], fill=1, outline=1)
    return np.asarray(canvas) | points


def place(
    rng: np.random.Generator, taken: np.ndarray, shape: tuple[int, int]
) -> tuple[slice, slice] | None:
    """Find a place for a letter and its margin, and mark it as taken.

    Args:
        rng: Source of randomness.
        taken: Pixels of letters and their margins, bool (N, N); changed in place.
        shape: Height and width of the letter.

    Returns:
        Rows and columns of the letter, or None if no free place was found.
    """
    (height, width), side = shape, len(taken)
    if max(shape) > side - 2 * MARGIN:
        return None
    for _ in range(_TRIALS):
        y, x = (int(rng.integers(MARGIN, side - MARGIN - size + 1)) for size in shape)
        around = np.s_[y - MARGIN : y + height + MARGIN, x - MARGIN : x + width + MARGIN]
        if not taken[around].any():
            taken[around] = True
            return np.s_[y : y + height, x : x + width]
    return None


def colour_for(rng: np.random.Generator, below: np.ndarray, contrast: float) -> np.ndarray:
    """Return a random colour, float32 (3,), at least ``contrast`` from the mean colour below a letter."""
    mean = below.reshape(-1, 3).mean(0)
    while True:
        colour = rng.uniform(0, 1, 3).astype(np.float32)
        if np.linalg.norm(colour - mean) / np.sqrt(3) >= contrast:
            return colour


def draw(
    rng: np.random.Generator, settings: Scenes, fonts: Fonts, photograph: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw a scene: the arrays of ``Split`` for one scene.

    Args:
        rng: Source of randomness.
        settings: What to draw.
        fonts: Font files of each family.
        photograph: Background, uint8 (N, N, 3).
    """
    image = photograph.astype(np.float32) / 255
    classes, objects = (np.zeros(image.shape[:2], np.uint8) for _ in range(2))
    heights, taken, count = np.zeros(256, np.uint8), np.zeros(image.shape[:2], bool), 0
    drawn = [glyph(rng, settings, fonts) for _ in range(settings.number)]
    for one in sorted(drawn, key=lambda g: -g.cover.size):  # large letters need the most room
        inside = one.inside
        where = place(rng, taken, one.cover.shape) if inside.any() else None
        if where is None:
            continue
        count += 1
        colour = colour_for(rng, image[where], settings.contrast)
        cover = one.cover[..., None]
        image[where] = cover * colour + (1 - cover) * image[where]
        classes[where][inside], objects[where][inside] = one.label, count
        heights[count] = one.cover.shape[0]
    return np.uint8(np.rint(image * 255)), classes, objects, heights


def split(
    seed: int,
    number: int,
    settings: Scenes,
    fonts: Fonts,
    photograph: Callable[[np.random.Generator, int], np.ndarray],
) -> Split:
    """Draw the scenes of a split.

    Args:
        seed: Scene i follows from (seed, i) and the other arguments alone.
        number: Scenes S.
        settings: What to draw.
        fonts: Font files of each family.
        photograph: Returns a random background, uint8 (N, N, 3), given randomness and N.
    """

    def scenes() -> Iterator[tuple[np.ndarray, ...]]:
        for index in range(number):
            rng = np.random.default_rng((seed, index))
            yield draw(rng, settings, fonts, photograph(rng, settings.side))

    return Split(*map(np.stack, zip(*scenes(), strict=True)))


@functools.lru_cache(None)
def _photograph(path: Path) -> Image.Image:
    image = Image.open(path).convert("RGB")
    image.thumbnail((_LARGEST, _LARGEST), Image.Resampling.BOX, reducing_gap=None)
    return image


def background(rng: np.random.Generator, paths: Sequence[Path], side: int) -> np.ndarray:
    """Return a random square of a random photograph, mirrored or not, uint8 (side, side, 3).

    Args:
        rng: Source of randomness.
        paths: Photographs.
        side: Height and width of the result, at most those of the squares that are resized to it.
    """
    image = _photograph(paths[rng.integers(len(paths))])
    length = int(rng.integers(side, min(image.size) + 1))
    x, y = (int(rng.integers(0, extent - length + 1)) for extent in image.size)
    box = (x, y, x + length, y + length)
    pixels = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR, box))
    return pixels[:, ::-1] if rng.integers(2) else pixels


# ----------------------------------------------------------------------------------------- caching


def make(settings: Scenes) -> dict[str, Split]:
    """Draw both splits; download fonts and photographs on first use."""
    training = {"train": True, "val": False}
    families = plain({name: fonts(value) for name, value in training.items()}, settings)
    counts = {"train": settings.train, "val": settings.val}
    found = {}
    for seed, (name, value) in enumerate(training.items()):
        paths = photographs(value)

        def photograph(
            rng: np.random.Generator, side: int, paths: list[Path] = paths
        ) -> np.ndarray:
            return background(rng, paths, side)

        found[name] = split(seed, counts[name], settings, families[name], photograph)
    return found


def cached(
    folder: Path, settings: Scenes, make: Callable[[Scenes], dict[str, Split]] = make
) -> Path:
    """Return the file of both splits; draw the scenes and write it if it is not there.

    Args:
        folder: Of the file, whose name depends on the settings and the fonts.
        settings: What is drawn.
        make: Draws the splits.
    """
    told = json.dumps([dataclasses.asdict(settings), about_sources()], sort_keys=True)
    path = folder / f"scenes-{hashlib.sha256(told.encode()).hexdigest()[:12]}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"{name}_{part}": array
            for name, one in make(settings).items()
            for part, array in one._asdict().items()
        }
        write_atomically(path, lambda file: np.savez(file, **arrays))
    return path


def load(path: Path, name: str) -> Split:
    """Return a split of a file that ``cached`` wrote."""
    with np.load(path) as arrays:
        return Split(*(arrays[f"{name}_{part}"] for part in Split._fields))


def fingerprint(path: Path) -> str:
    """Return a hash of all pixels in a file that ``cached`` wrote."""
    digest = hashlib.sha256()
    with np.load(path) as arrays:
        for name in sorted(arrays.files):
            digest.update(name.encode() + arrays[name].tobytes())
    return digest.hexdigest()[:16]
