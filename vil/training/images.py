"""A split of images that are read by number: digits and folders here, shards in shards.py.

Reading by number, at random, is what lets any process be given any image: equal steps in every process, each
validation image exactly once, and exact resuming.
"""

import errno
import hashlib
import io
import os
import re
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from vil.messages import one_line, printable
from vil.training.draws import key
from vil.training.errors import DataError
from vil.training.settings import DataConfig

IMAGE_EXTENSIONS = frozenset(
    (
        *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "avif", "bmp", "dib", "gif"),
        *("tif", "tiff", "ppm", "pgm", "pbm", "pnm", "jp2", "tga"),
    )
)
"""Extensions of files that count as images, in small letters, without the dot."""
# Others would start programs, as EPS does, or hold no pixels. What has no signature comes last.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "AVIF", "BMP", "DIB"),
    *("GIF", "TIFF", "PPM", "JPEG2000", "TGA"),
)
_MODES = {1: "L", 3: "RGB"}
_DIGITS_HELD_OUT = 360
_CONTENTS = 256  # images that are read for a fingerprint, evenly spread
_THREADS = 16  # they mostly wait for the disk
_NUMBERS = re.compile(r"(\d+)")
# Errors of a disk that may come back, and of a file that a network disk does not show yet.
_PASSING = {errno.EIO: 9, errno.ESTALE: 9, errno.ETIMEDOUT: 9, errno.ENOTCONN: 9, errno.ENOENT: 3}


class Source(ABC):
    """One split of a data set, opened and checked; its images are read by index, in any order."""

    labels: np.ndarray
    """Class indices, int64, (num_images,)."""
    classes: tuple[str, ...] | None
    """Names of the classes, None where the data holds bare indices."""
    listing: str
    """Equal for equal names, labels and, in shards, places of images."""
    excluded: Sequence[str] = ()
    """Images left out for want of a label, a line each."""

    @property
    def num_images(self) -> int:
        """Images of the split, excluded ones left out."""
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal data, wherever it lies: the listing, and the content of some images."""
        count = min(self.num_images, _CONTENTS)
        chosen = np.linspace(0, self.num_images - 1, count).round().astype(np.int64).tolist()
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(self._checksum, chosen))
        if None in found:
            return self.listing
        return f"{self.listing}-{fingerprint(np.array(found, dtype=np.int64))}"

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return an image's file.

        Raises:
            OSError: it cannot be read, or is not what was written.
        """

    def checksum(self, index: int) -> int | None:
        """Return the CRC32 of an image's file, in any thread; None here, where the listing tells all."""
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """Name an image as a user would look for it."""

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Draw an epoch's order, every index once, int64, (num_images,); here all are shuffled."""
        return torch.randperm(self.num_images, generator=generator)

    def _checksum(self, index: int) -> int | None:
        try:
            return self.checksum(index)
        except OSError as error:
            raise DataError(f"image {self.name(index)} cannot be read: {error}") from error


def fingerprint(*parts: bytes | np.ndarray) -> str:
    """Hash bytes, and arrays bit for bit, into a short name for them."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.tobytes())
    return digest.hexdigest()


class DigitSource(Source):
    """The 1,797 handwritten digits that scikit-learn ships, a fixed 360 of them held out."""

    def __init__(self, training: bool) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        parts = train_test_split(
            digits.images,
            digits.target,
            test_size=_DIGITS_HELD_OUT,
            stratify=digits.target,
            random_state=0,
        )
        pixels, labels = (parts[0], parts[2]) if training else (parts[1], parts[3])
        self.files = [_enlarged_png(image) for image in pixels]
        self.labels = labels.astype(np.int64)
        self.classes = tuple(str(name) for name in digits.target_names)
        self.listing = fingerprint(pixels, self.labels)

    def read(self, index: int) -> bytes:
        """Return a digit as PNG."""
        return self.files[index]

    def name(self, index: int) -> str:
        """Number the digit."""
        return f"digit {index}"


class FolderSource(Source):
    """A folder per class below data.path/<split>, numbered in timm's order of their names."""

    def __init__(self, data: DataConfig, training: bool) -> None:
        """List the images, which lie at data.path/<split>/<class>/<image>."""
        self.folder = _find_split(data, training)
        paths, self.classes, labels = list_images(self.folder)
        # Arrays, because a million Python strings would be copied into every loader process.
        self.paths = np.array([path.encode("utf-8", "surrogateescape") for path in paths])
        self.labels = np.array(labels, dtype=np.int64)
        self.listing = fingerprint(self.paths, self.labels)

    def read(self, index: int) -> bytes:
        """Return an image's file."""
        return self.path(index).read_bytes()

    def checksum(self, index: int) -> int:
        """Read an image."""
        return zlib.crc32(self.read(index))

    def name(self, index: int) -> str:
        """Return an image's path, printable."""
        return printable(str(self.path(index)))

    def path(self, index: int) -> Path:
        """Return where an image lies."""
        return self.folder / self.paths[index].decode("utf-8", "surrogateescape")


class Subset(Source):
    """Some images of each class of another source: the same in every run, and nested by number."""

    def __init__(self, source: Source, per_class: int, num_classes: int | None) -> None:
        """Choose the images."""
        counts = np.bincount(source.labels, minlength=num_classes or len(source.classes or ()))
        least = int(counts.argmin())
        if counts[least] < per_class:
            name = least if source.classes is None else source.classes[least]
            raise DataError(
                f"data.images_per_class must be at most the {counts[least]} training images that class {name} has, "
                f"got {per_class}"
            )
        generator = torch.Generator().manual_seed(key("images of a class"))
        drawn = torch.randperm(source.num_images, generator=generator).numpy()
        by_class = drawn[np.argsort(source.labels[drawn], kind="stable")]
        place = np.arange(len(drawn)) - (np.cumsum(counts) - counts).repeat(counts)
        self.kept = np.sort(by_class[place < per_class])
        self.source = source
        self.labels = source.labels[self.kept]
        self.classes = source.classes
        # What is excluded was counted against the whole split, when it was opened.
        self.listing = fingerprint(source.listing.encode(), self.kept)

    def read(self, index: int) -> bytes:
        """Return an image's file."""
        return self.source.read(int(self.kept[index]))

    def checksum(self, index: int) -> int | None:
        """Do as the whole split does."""
        return self.source.checksum(int(self.kept[index]))

    def name(self, index: int) -> str:
        """Name an image as the whole split does."""
        return self.source.name(int(self.kept[index]))

    def order(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the whole split's order, which keeps shards together, and leave out the others."""
        places = torch.full((self.source.num_images,), -1)
        places[torch.from_numpy(self.kept)] = torch.arange(self.num_images)
        drawn = places[self.source.order(generator)]
        return drawn[drawn >= 0]


def decode(
    content: bytes, mode: str, exif_rotation: bool = False, max_pixels: int = DataConfig.max_pixels
) -> Image.Image:
    """Decode an image file, whatever its name says it is; of a film or a stack, the first image.

    Where an image is transparent its colours are those below. 16-bit pixels keep their upper byte.

    Args:
        content: The file.
        mode: Pillow's name of the colours wanted, RGB or L.
        exif_rotation: Turn the image as its EXIF orientation says; damaged EXIF data turn nothing.
        max_pixels: Most that are decoded; a few kilobytes can claim any number.

    Raises:
        DataError: it is no image, not a whole one, has too many pixels, or pixels that are 32-bit
            numbers of no defined range.
    """
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # checked here instead
    try:
        image = Image.open(io.BytesIO(content), formats=_formats())
        pixels = image.width * image.height
        if pixels > max_pixels:
            raise DataError(
                f"it has {pixels:,} pixels, which exceeds data.max_pixels {max_pixels:,}"
            )
        image.load()
        if exif_rotation:
            with suppress(Exception):
                ImageOps.exif_transpose(image, in_place=True)
        if image.mode[0] in "IF":
            image = _to_eight_bits(image)
        # It changes nothing in RGB or L, and leads Pillow to a warning.
        image.info.pop("transparency", None)
        return image if image.mode == mode else image.convert(mode)
    except Exception as error:  # the decoders raise whatever a broken file leads them to
        reason = one_line(error) if content else "the file is empty"
        raise DataError(reason.split(" <_io", 1)[0]) from error
    finally:
        Image.MAX_IMAGE_PIXELS = usual


@cache
def _formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]  # AVIF is optional


def image_mode(in_chans: int) -> str:
    """Return Pillow's name of the colours that a model of 1 or 3 channels takes."""
    return _MODES[in_chans]


def read_patiently(read: Callable[[int], bytes], index: int) -> bytes:
    """Read an image's file, again for a minute where the disk may come back."""
    for attempt in range(max(_PASSING.values()) + 1):
        try:
            return read(index)
        except OSError as error:
            if attempt >= _PASSING.get(error.errno, 0):
                raise
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def list_images(folder: Path) -> tuple[list[str], tuple[str, ...], list[int]]:
    """List the images of a split, which lie at folder/<class>/<image>; hidden ones are passed over.

    The order is that of timm's reader: of numbers by value, of letters whatever their case.

    Returns:
        Paths <class>/<image>, names of the classes, and the place of each image's class among them.

    Raises:
        DataError: a folder cannot be read, a class has no images, or an image lies elsewhere.
    """
    names, stray = _look_into(folder)
    classes = tuple(sorted(names, key=natural_key))
    places = {name: place for place, name in enumerate(classes)}
    paths, labels, empty = [], [], []
    for name in sorted(classes, key=lambda name: natural_key(f"{name}/")):  # as part of a path
        inner, images = _look_into(folder / name)
        stray += [
            f"{name}/{deeper}/{image}"
            for deeper in inner
            for image in _below(folder / name / deeper)
        ]
        paths += [f"{name}/{image}" for image in sorted(images, key=natural_key)]
        labels += [places[name]] * len(images)
        empty += [] if images else [name]
    if stray:
        raise DataError(
            printable(f"image {folder / min(stray)} must lie at {folder}/<class>/<image>")
        )
    if not paths:
        raise DataError(f"there are no images in the sub-folders of {folder}")
    if empty:
        raise DataError(
            f"class folder {printable(str(folder / empty[0]))} has no images ({len(empty)} such, of {len(classes)})"
        )
    return paths, classes, labels


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Order names as timm does, those that are alike to it as they are spelt."""
    parts: list[str | int] = list(_NUMBERS.split(name.lower()))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def is_folder(path: Path) -> bool:
    """Tell whether a path leads to a folder; a disk that does not say is a DataError."""
    try:
        return path.is_dir()
    except OSError as error:
        raise DataError(f"{printable(str(path))} cannot be read: {error.strerror}") from error


def _look_into(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of a folder's folders and of its images; links count as what they lead to."""
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(".") or name == "__MACOSX":
                    continue
                if entry.is_dir():
                    folders.append(name)
                elif name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS and "." in name:
                    images.append(name)
    except OSError as error:
        raise DataError(
            f"folder {printable(str(folder))} cannot be read: {error.strerror}"
        ) from error
    return folders, images


def _below(folder: Path) -> list[str]:
    """Return an image of a folder in which none must lie, or of one below, or nothing."""
    inner, images = _look_into(folder)
    return (
        images[:1] or [f"{name}/{image}" for name in inner for image in _below(folder / name)][:1]
    )


def _find_split(data: DataConfig, training: bool) -> Path:
    """Return the folder of a split; validation also goes by its usual short name."""
    split = data.train_split if training else data.val_split
    names = [split, "val"] if split == "validation" else [split]
    for name in names:
        if is_folder(Path(data.path, name)):
            return Path(data.path, name)
    raise DataError(
        f"data.path {data.path} has no folder {' or '.join(names)}; images must lie at "
        f"{Path(data.path, names[-1])}/<class>/<image>"
    )


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey as L by its upper byte, as OpenCV and libpng do; Pillow's conversion would clip."""
    # Pillow reads 16 bits of PPM into 32, and once read those of PNG so.
    if not (
        image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    ):
        raise DataError(
            f"{image.format} with pixels of mode {image.mode}, whose range is not defined; "
            f"they must have 8 or 16 bits"
        )
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _enlarged_png(pixels: np.ndarray) -> bytes:
    """Turn 8 x 8 values in 0 ... 16 into a grey image of 32 x 32, so that shifts are smooth."""
    image = Image.fromarray((pixels * (255 / 16)).round().astype("uint8"))
    file = io.BytesIO()
    image.resize((32, 32), Image.Resampling.BICUBIC).save(file, format="png")
    return file.getvalue()
