"""Where images come from: digits or a folder per class here, webdataset shards in shards.py, fractals
in fractals.py.

All are read at random by index, so that any process can be given any image: that is what makes equal
steps in every process, each validation image exactly once, and exact resuming possible.
"""

import io
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin

from vil.messages import one_line, printable
from vil.training.config import (
    DataConfig,
    ModelConfig,
    data_contradictions,
    other_classes,
    too_few_images,
)
from vil.training.data.base import Source, fingerprint
from vil.training.data.draws import key
from vil.training.data.fractals import TRAINING_IMAGES, VALIDATION_IMAGES, FractalSource
from vil.training.data.image_files import IMAGE_FORMATS, ImageList, find_split, list_images
from vil.training.data.reading import is_folder, read_file
from vil.training.data.shards import ShardSource
from vil.training.errors import ConfigError, DataError

_MODES = {1: "L", 3: "RGB"}
_DIGITS_HELD_OUT = 360


def open_source(
    data: DataConfig, model: ModelConfig, training: bool, listed: ImageList | None = None
) -> Source:
    """Open one split of the configured data and check it against the model.

    Args:
        data: Names the data.
        model: Gives the number of classes, if it is set, and of fractals and their size, which must be.
        training: Training split, or validation.
        listed: The images in the split's folder, if they are listed already.

    Raises:
        ConfigError: data.path is missing or has no meaning, or fractals cannot be computed or lack
            their number of classes.
        DataError: the data is missing, damaged, or has another number of classes, or a class has
            fewer training images than data.images_per_class.
    """
    source = _open(data, model, training, listed)
    split = "training" if training else "validation"
    _check_excluded(source, split, data.max_bad_images if training else 0.0)
    if source.num_images == 0:
        raise DataError(f"the {split} data in {data.path} holds no images")
    if source.classes is not None:
        for problem in other_classes(split, len(source.classes), model):
            raise DataError(problem)
    if training and data.images_per_class is not None and data.dataset != "fractals":
        return ClassSubset(source, data, model.num_classes)
    return source


def decode(
    content: bytes, mode: str, exif_rotation: bool = False, max_pixels: int = DataConfig.max_pixels
) -> Image.Image:
    """Decode an image file, whatever its name says it is; of a film or a stack, the first image.

    Where an image is transparent its colours are those below. 16-bit pixels keep their upper byte.

    Args:
        content: The file.
        mode: Pillow's name of the colours wanted, RGB or L.
        exif_rotation: Turn the image as orientation() says.
        max_pixels: Most that are decoded; a few kilobytes can claim any number.

    Raises:
        DataError: it is no image, not a whole one, has too many pixels, or pixels that are 32-bit
            numbers of no defined range.
    """
    try:
        with _limited(content, max_pixels):
            image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
            _check_size(image, max_pixels)
            image.load()
        if exif_rotation and orientation(image) != 1:
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode[0] in "IF":
            image = _to_eight_bits(image)
        # It changes nothing in RGB or L, and leads Pillow to a warning.
        image.info.pop("transparency", None)
        return image if image.mode == mode else image.convert(mode)
    except Exception as error:  # the decoders raise whatever a broken file leads them to
        reason = one_line(error) if content else "the file is empty"
        raise DataError(reason.split(" <_io", 1)[0]) from error


def orientation(image: Image.Image) -> int:
    """Return how a decoded image has still to be turned, 2 ... 8 as EXIF numbers it, or 1 if not.

    A TIFF never has to be: Pillow turns it when it loads it. Damaged EXIF data turn nothing.
    """
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # of any kind, as in decoding
        return 1
    return value if value in range(2, 9) else 1


def image_mode(in_chans: int) -> str:
    """Return Pillow's name of the colours that a model of 1 or 3 channels takes."""
    return _MODES[in_chans]


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

    def __init__(self, data: DataConfig, training: bool, listed: ImageList | None = None) -> None:
        """List the images, unless that was done already."""
        self.folder = find_split(data, training)
        found = listed or list_images(self.folder)
        # Arrays, because a million Python strings would be copied into every loader process.
        self.paths = np.array([path.encode("utf-8", "surrogateescape") for path in found.paths])
        self.labels = np.array(found.labels, dtype=np.int64)
        self.classes = found.classes
        self.ignored = found.ignored
        self.listing = fingerprint(self.paths, self.labels)

    def read(self, index: int) -> bytes:
        """Return an image's file."""
        return read_file(self.path(index))

    def checksum(self, index: int) -> int:
        """Read an image."""
        return zlib.crc32(self.read(index))

    def name(self, index: int) -> str:
        """Return an image's path, printable."""
        return printable(str(self.path(index)))

    def path(self, index: int) -> Path:
        """Return where an image lies."""
        return self.folder / self.paths[index].decode("utf-8", "surrogateescape")


class ClassSubset(Source):
    """Some images of each class of another source: the same in every run, and nested by number."""

    def __init__(self, source: Source, data: DataConfig, num_classes: int | None) -> None:
        """Choose the images.

        Args:
            source: The whole split.
            data: Says how many images to keep of each class.
            num_classes: Number of classes; None is that of the source's names.

        Raises:
            DataError: a class has fewer images.
        """
        counts = np.bincount(source.labels, minlength=num_classes or len(source.classes or ()))
        least = int(counts.argmin())
        name = least if source.classes is None else source.classes[least]
        for problem in too_few_images(data, name, counts[least]):
            raise DataError(problem)
        generator = torch.Generator().manual_seed(key("images of a class"))
        drawn = torch.randperm(source.num_images, generator=generator).numpy()
        by_class = drawn[np.argsort(source.labels[drawn], kind="stable")]
        place = np.arange(len(drawn)) - (np.cumsum(counts) - counts).repeat(counts)
        self.kept = np.sort(by_class[place < data.images_per_class])
        self.source = source
        self.labels = source.labels[self.kept]
        self.classes = source.classes
        # What is excluded was counted against the whole split, when it was opened.
        self.ignored = source.ignored
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


def _open(data: DataConfig, model: ModelConfig, training: bool, listed: ImageList | None) -> Source:
    """Open one split of the configured data, whole."""
    for problem in data_contradictions(data, model):
        raise ConfigError(problem)
    if data.dataset == "digits":
        return DigitSource(training)
    if data.dataset == "fractals":
        count = data.images_per_class or TRAINING_IMAGES if training else VALIDATION_IMAGES
        size = max(data.img_sizes or (model.img_size,)) if training else model.img_size
        return FractalSource(data.fractal_seed, model.num_classes, count, size, training)
    if not is_folder(Path(data.path)):
        raise DataError(f"data.path {data.path} is not a folder")
    if data.dataset == "folder":
        return FolderSource(data, training, listed)
    return ShardSource(data, training, model.num_classes)


def _check_excluded(source: Source, split: str, share: float) -> None:
    """Stop if more images are without a label than may be bad."""
    count = len(source.excluded)
    if count > share * (source.num_images + count):
        raise DataError(
            f"{count} of {source.num_images + count} {split} images have no usable label, "
            f"the first: {source.excluded[0]}"
        )


def _check_size(image: Image.Image, max_pixels: int) -> None:
    """Refuse an opened image, of which only the header is read, that would take too much memory."""
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise DataError(f"it has {pixels:,} pixels, which exceeds data.max_pixels {max_pixels:,}")


@contextmanager
def _limited(content: bytes, max_pixels: int) -> Iterator[None]:
    """Give Pillow the limit, which it warns of, and refuses twice as many pixels.

    Where the header tells no size, since the file holds whole images, it refuses what it would warn of.
    """
    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        if content.startswith((b"\0\0\1\0", b"\0\0\2\0", b"icns", b"BLP")):
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                yield
        else:
            yield
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        found = str(error).partition(" exceeds")[0]  # Image size (9 pixels)
        raise DataError(f"{found} exceeds data.max_pixels {max_pixels:,}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = usual


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey as L, which Pillow's conversion would clip.

    The upper byte is what Pillow itself takes of 16-bit colours, as do OpenCV and libpng.
    """
    # Pillow reads 16 bits of PPM into 32, and once read those of PNG so.
    in_32 = image.mode == "I" and image.format in ("PNG", "PPM")
    if not image.mode.startswith("I;16") and not in_32:
        raise DataError(
            f"{image.format} with pixels of mode {image.mode}, whose range is not defined; "
            f"they must have 8 or 16 bits"
        )
    bits = image.tag_v2[TiffImagePlugin.BITSPERSAMPLE][0] if image.format == "TIFF" else 16
    grey = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    grey.info = image.info  # the EXIF data among it
    return grey


def _enlarged_png(pixels: np.ndarray) -> bytes:
    """Turn 8 x 8 values in 0 ... 16 into a grey image of 32 x 32, so that shifts are smooth."""
    image = Image.fromarray((pixels * (255 / 16)).round().astype("uint8"))
    file = io.BytesIO()
    image.resize((32, 32), Image.Resampling.BICUBIC).save(file, format="png")
    return file.getvalue()
