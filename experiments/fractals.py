"""Generate images of fractals: a stand-in for ImageNet without a download, in memory or as a folder.

    python -m experiments.fractals output/fractals --classes 1000 --images 1000 --size 224

writes train/<class>/<number>.png and, a twentieth as many, val/<class>/<number>.png. Repeat the command to
write missing images. --seed, class, number, split and size determine classes and images to the bit.

The method follows FractalDB (Kataoka et al., "Pre-training without Natural Images", ACCV 2020,
arXiv:2101.08515). A class is a random iterated function system that fills enough of the image. Its images
vary coefficients, mirror the system, and draw other points in other colours. Unlike FractalDB, every map
contracts under every variation, so no orbit diverges. A coefficient's factor is drawn from a range instead of
five values, and points are blended in colour instead of painted in grey.
"""

import argparse
import functools
import io
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from experiments import fractal_loops
from vil.training.draws import key
from vil.training.files import write_atomically
from vil.training.images import Source, fingerprint

VALIDATION_IMAGES = 50  # per class, as in ImageNet
FILLING_RATE = 0.2  # FractalDB's best
_POINTS_PER_PIXEL = 4


class FractalSource(Source):
    """One split of fractal images in any number of classes; each image is computed when it is read.

    An image depends only on the seed, its class, its number in the class, the split and the size.
    Index i is image i // num_classes of class i % num_classes, so any index range is balanced.
    """

    def __init__(
        self, seed: int, num_classes: int, images_per_class: int, size: int, training: bool
    ) -> None:
        """Find the classes now, so that data-loading workers forked later share them.

        Args:
            seed: Seed of the data set; class k depends only on it and on k.
            num_classes: Number of classes.
            images_per_class: Number of images of each class; a smaller number gives the first ones.
            size: Height and width in pixels, at least 16.
            training: Training split, or else validation; they have no image in common.
        """
        if size < 16:
            raise ValueError(f"size must be at least 16, got {size}")
        self._systems = find_classes(seed, num_classes)
        self._seed, self._size, self._training = seed, size, training
        self.labels = np.tile(np.arange(num_classes, dtype=np.int64), images_per_class)
        self.classes = tuple(str(number) for number in range(num_classes))
        place = (seed, num_classes, images_per_class, size, int(training))
        # One image's pixels are included, so that a change of the drawing code changes it.
        self.listing = fingerprint(str(place).encode(), self._systems, self.read(0))

    def read(self, index: int) -> bytes:
        """Compute an image, size x size, as an uncompressed colour PPM file."""
        number, label = divmod(index, len(self._systems))
        place = (self._seed, label, number, int(self._training))
        header = b"P6 %d %d 255\n" % (self._size, self._size)
        file = bytearray(len(header) + 3 * self._size**2)
        file[: len(header)] = header
        pixels = np.frombuffer(file, np.uint8, offset=len(header))
        fractal_loops.render(
            _seed("fractal", *place),
            self._systems[label],
            _POINTS_PER_PIXEL,
            pixels.reshape(self._size, self._size, 3),
        )
        return bytes(file)

    def name(self, index: int) -> str:
        """Name the image's class and its number in the class."""
        number, label = divmod(index, len(self._systems))
        return f"fractal {number} of class {label}"


@functools.lru_cache(maxsize=4)
def find_classes(seed: int, num_classes: int) -> np.ndarray:
    """Search an iterated function system for each class; both splits use the same systems.

    Args:
        seed: Seed of the data set.
        num_classes: Number of classes.

    Returns:
        Read-only float64 array (num_classes, 8, 7); fractal_loops.py explains a system.
    """
    systems = np.empty((num_classes, fractal_loops.MAPS, fractal_loops.NUMBERS))
    for label, system in enumerate(systems):
        fractal_loops.search(_seed("fractal class", seed, label), FILLING_RATE, system)
    systems.flags.writeable = False
    return systems


def _seed(purpose: str, *place: int) -> np.uint64:
    """Return a 64-bit seed: with 32 bits, two images of a thousand classes would share a seed."""
    return np.uint64(key(purpose, *place) | key(f"{purpose}, upper half", *place) << 32)


def write_image(source: FractalSource, folder: Path, index: int) -> None:
    """Write an image as PNG below a split's folder, unless it exists."""
    number, label = divmod(index, len(source.classes))
    path = folder / source.classes[label] / f"{number}.png"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.open(io.BytesIO(source.read(index)))
        write_atomically(path, lambda file: image.save(file, "png", compress_level=1))


def main() -> int:
    """Write the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--images", type=int, default=1000, help="to train on, of each class")
    parser.add_argument("--size", type=int, default=224, help="height and width in pixels")
    parser.add_argument("--seed", type=int, default=0, help="names the data set")
    parser.add_argument("--jobs", type=int, help="processes; default: one per core")
    args = parser.parse_args()
    for split, count in (("train", args.images), ("val", max(args.images // 20, 1))):
        source = FractalSource(args.seed, args.classes, count, args.size, split == "train")
        write = functools.partial(write_image, source, args.folder / split)
        with ProcessPoolExecutor(args.jobs) as pool:
            for _ in pool.map(write, range(source.num_images), chunksize=256):
                pass
        print(f"{args.folder / split}: {source.num_images:,} images of {args.classes:,} classes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
