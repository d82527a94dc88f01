"""Write clip art of Debian's package as folders of colour images, 10 classes.

    apt-get install openclipart-png && python -m lab.experiments.clip_art

``output/clip_art_images`` gets up to 250 images of each class: a fifth in val/, the others in train/.
``output/clip_art_tuning`` divides these training images again, to choose learning rates. A hash of the
file's name decides the part of an image, so that no version of the package moves it. Images of more pixels than
Pillow allows are left out.
"""

import hashlib
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

PACKAGE = Path("/usr/share/openclipart/png")
OUTPUT = Path(__file__).resolve().parents[2] / "output"
NAMES = (
    *("animals", "buildings", "computer", "food", "office"),
    *("people", "plants", "recreation", "tools", "transportation"),
)
MOST = 250  # images of a class
PIXELS = 96  # of the shorter side


def digest(path: Path) -> bytes:
    """Return a hash of a file's name."""
    return hashlib.sha256(path.name.encode()).digest()


def read(path: Path) -> Image.Image:
    """Read an image, shrink it, and put it on white."""
    with Image.open(path) as file:
        image = file.convert("RGBA")
    scale = PIXELS / min(image.size)
    size = [max(round(side * scale), PIXELS) for side in image.size]
    image = image.resize(size, Image.Resampling.BICUBIC)
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def parts(place: bytes) -> Sequence[str]:
    """Return the folders that an image belongs to."""
    if place[-1] % 5 == 0:
        return ["clip_art_images/val"]
    return ["clip_art_images/train", f"clip_art_tuning/{'val' if place[-2] % 5 == 0 else 'train'}"]


def write(path: Path, whole: Path, name: str) -> None:
    """Write an image of a class to its folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = read(path)
    for part in parts(digest(path)):
        target = whole / part / name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        image.save(target)


def unpack() -> None:
    """Write the images unless they exist.

    Raises:
        SystemExit: If the package is not installed.
    """
    if (OUTPUT / "clip_art_images").is_dir():
        return
    if not PACKAGE.is_dir():
        raise SystemExit(f"error: no {PACKAGE}; run apt-get install openclipart-png")
    whole = OUTPUT / "clip_art.part"  # its folders are renamed once all images are written
    for name in NAMES:
        for path in sorted((PACKAGE / name).rglob("*.png"), key=digest)[:MOST]:
            with suppress(Image.DecompressionBombError, Image.DecompressionBombWarning):
                write(path, whole, name)
    for folder in ("clip_art_tuning", "clip_art_images"):
        (whole / folder).rename(OUTPUT / folder)
    whole.rmdir()


if __name__ == "__main__":
    unpack()
