"""Images of fractals, computed as they are read: a stand-in for ImageNet that needs no download.

After FractalDB (Kataoka et al., "Pre-training without Natural Images", ACCV 2020, arXiv:2101.08515): a
class is an iterated function system, found at random by the share of the image that it fills; its
instances vary coefficients, mirror it, and draw other points in other colours. Other than there, every
map contracts, whatever the variation, so that no orbit diverges; a coefficient's factor is drawn from
a range instead of five values; and points are blended in colour instead of painted in grey.
"""

import functools
from types import ModuleType

import numpy as np

from vil.training.data.base import Source, fingerprint
from vil.training.data.draws import key
from vil.training.errors import ConfigError

TRAINING_IMAGES, VALIDATION_IMAGES = 1000, 50  # of a class; as ImageNet has, in round numbers
FILLING_RATE = 0.2  # FractalDB's best
LEAST_SIZE = 16
_POINTS_PER_PIXEL = 4


class FractalSource(Source):
    """One split of as many classes of fractals as wanted, each image computed when it is read.

    An image follows from the seed, its class, its number in the class, the split and the size alone.
    Index i is image i // num_classes of class i % num_classes, so that any stretch is balanced.
    """

    def __init__(
        self, seed: int, num_classes: int, images_per_class: int, size: int, training: bool
    ) -> None:
        """Find the classes, before loader processes are forked, which then share them.

        Args:
            seed: Names the data set; class k follows from it and from k.
            num_classes: Number of classes.
            images_per_class: Images of each; those of a smaller number are the first of them.
            size: Height and width in pixels, at least 16.
            training: Training split, or validation; they have no image in common.

        Raises:
            ConfigError: size is too small, or numba is not installed.
        """
        if size < LEAST_SIZE:
            raise ConfigError(
                f"model.img_size must be at least {LEAST_SIZE} for data.dataset fractals, and so must "
                f"the largest of data.img_sizes, got {size}"
            )
        self._systems = find_classes(seed, num_classes)
        self._seed, self._size, self._training = seed, size, training
        self.labels = np.tile(np.arange(num_classes, dtype=np.int64), images_per_class)
        self.classes = tuple(str(number) for number in range(num_classes))
        place = (seed, num_classes, images_per_class, size, int(training))
        # The pixels stand for how images are drawn, should that ever change.
        self.listing = fingerprint(str(place).encode(), self._systems, self.read(0))

    def read(self, index: int) -> bytes:
        """Compute an image, size x size, as an uncompressed colour PPM file."""
        number, label = divmod(index, len(self._systems))
        place = (self._seed, label, number, int(self._training))
        header = b"P6 %d %d 255\n" % (self._size, self._size)
        file = bytearray(len(header) + 3 * self._size**2)
        file[: len(header)] = header
        pixels = np.frombuffer(file, np.uint8, offset=len(header))
        _loops().render(
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
    """Search an iterated function system for each class; both splits share the outcome.

    Args:
        seed: Names the data set.
        num_classes: Number of classes.

    Returns:
        (num_classes, 8, 7), float64, read-only; fractal_loops.py says what a system is.

    Raises:
        ConfigError: numba is not installed.
    """
    loops = _loops()
    systems = np.empty((num_classes, loops.MAPS, loops.NUMBERS))
    for label, system in enumerate(systems):
        loops.search(_seed("fractal class", seed, label), FILLING_RATE, system)
    systems.flags.writeable = False
    return systems


def _loops() -> ModuleType:
    """Import the compiled part."""
    try:
        from vil.training.data import fractal_loops
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        raise ConfigError(
            "data.dataset fractals needs numba, which is not installed: "
            "pip install 'vision-longhorn[cpu]'"
        ) from error
    return fractal_loops


def _seed(purpose: str, *place: int) -> np.uint64:
    """Mix 64 bits: of 32, two images among those of a thousand classes would draw the same."""
    return np.uint64(key(purpose, *place) | key(f"{purpose}, upper half", *place) << 32)
