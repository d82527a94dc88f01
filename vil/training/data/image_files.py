"""Which files are images, and the images in a folder per class."""

import os
import re
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageFile

from vil.messages import printable
from vil.training.config import DataConfig
from vil.training.data.reading import is_folder
from vil.training.errors import DataError

_LITTER = {"__macosx", "thumbs.db"}  # hidden where it was made, and nowhere else
_DIGITS = re.compile(r"(\d+)")
_MOST_KINDS = 6  # of ignored files in a line


class ImageList(NamedTuple):
    """The images of a split."""

    paths: list[str]
    """<class>/<image>, in timm's order."""
    labels: list[int]
    """Places of their classes in classes."""
    classes: tuple[str, ...]
    """Names of the class folders, in timm's order."""
    ignored: str
    """A line about what is no image; empty where all is."""


def find_split(data: DataConfig, training: bool) -> Path:
    """Return the folder of a split; validation also goes by its usual short name.

    Raises:
        DataError: there is none.
    """
    split = data.train_split if training else data.val_split
    names = [split, "val"] if split == "validation" else [split]
    for name in names:
        folder = Path(data.path, name)
        if is_folder(folder):
            return folder
    raise DataError(
        f"data.path {data.path} has no folder {' or '.join(names)}; images must lie at "
        f"{Path(data.path, names[-1])}/<class>/<image>"
    )


def list_images(folder: Path) -> ImageList:
    """List the images of a split, which lie at folder/<class>/<image>.

    Hidden files and folders are passed over, and counted as are files of other kinds. The order is that
    of timm's reader: of numbers by value, of letters whatever their case, then as the disk has them.

    Args:
        folder: A folder per class.

    Raises:
        DataError: a folder cannot be read, a class has no images, or an image lies elsewhere.
    """
    ignored: Counter[str] = Counter()
    classes, stray = _look_into(str(folder), ignored)
    if stray:
        _refuse(os.path.join(folder, min(stray)), folder)
    classes.sort(key=lambda name: (_natural_key(name), name))
    found = {name: _images_of(folder, name, ignored) for name in classes}
    line = _tell(folder, ignored)
    hint = f"; {line}" if line else ""
    empty = [name for name, images in found.items() if not images]
    if len(empty) == len(classes):
        raise DataError(f"there are no images in the sub-folders of {folder}{hint}")
    if empty:
        raise DataError(
            f"class folder {printable(str(folder / empty[0]))} has no images "
            f"({len(empty)} such, of {len(classes)}){hint}"
        )
    return ImageList(*_in_order(found), tuple(classes), line)


def _in_order(found: dict[str, list[str]]) -> tuple[list[str], list[int]]:
    """Return the paths of all images in the natural order of the paths, and their labels.

    Args:
        found: Names of the images of each class, the classes by label.
    """
    labels = {name: label for label, name in enumerate(found)}

    def place(name: str) -> list[str | int]:
        return _natural_key(f"{name}/")  # cat-1/ is before cat/, as class it is after

    # Class by class, for a million keys at a time are slow to sort, mostly by the memory they take.
    paths, path_labels = [], []
    for _, alike in groupby(sorted(found, key=place), place):  # more than one, as 1 and 01
        images = [(image, name) for name in alike for image in found[name]]
        images.sort(key=lambda item: _natural_key(item[0]))
        paths += [f"{name}/{image}" for image, name in images]
        path_labels += [labels[name] for _, name in images]
    return paths, path_labels


def _images_of(folder: Path, name: str, ignored: Counter[str]) -> list[str]:
    """Return the names of a class's images, having checked that no deeper folder holds any."""
    nested, images = _look_into(os.path.join(folder, name), ignored)
    places = [os.path.join(folder, name, inner) for inner in sorted(nested)]
    seen = set()
    while places:
        place = places.pop()
        real = os.path.realpath(place)
        if real in seen:  # by a link; some that lead upwards would make a great many paths
            continue
        seen.add(real)
        inner, misplaced = _look_into(place, ignored)
        if misplaced:
            _refuse(os.path.join(place, min(misplaced)), folder)
        places += [os.path.join(place, deeper) for deeper in sorted(inner)]
    return images


def _look_into(folder: str, ignored: Counter[str]) -> tuple[list[str], list[str]]:
    """Return the names of a folder's folders and of its images, and count all else.

    Links count as what they lead to; no file is opened or asked for more than its name.
    """
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name[0] == "." or name.lower() in _LITTER:
                    ignored["hidden folder" if entry.is_dir() else "hidden file"] += 1
                elif entry.is_dir():
                    folders.append(name)
                else:
                    _, dot, extension = name.rpartition(".")
                    extension = extension.lower()
                    if dot and extension in IMAGE_EXTENSIONS:
                        images.append(name)
                    else:
                        ignored[f".{extension}" if dot else "extensionless file"] += 1
    except OSError as error:
        raise DataError(f"folder {printable(folder)} cannot be read: {error.strerror}") from error
    return folders, images


def _refuse(image: str, folder: Path) -> None:
    raise DataError(printable(f"image {image} must lie at {folder}/<class>/<image>"))


def _tell(folder: Path, ignored: Counter[str]) -> str:
    """Say in a line what was ignored, by kind; nothing if nothing was."""
    if not ignored:
        return ""
    kinds = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
    told = [_amount(count, kind) for kind, count in kinds[:_MOST_KINDS]]
    rest = sum(count for _, count in kinds[_MOST_KINDS:])
    if rest:
        told.append(f"{rest:,} of {len(kinds) - _MOST_KINDS} other kinds")
    return f"ignored in {folder}: {', '.join(told)}"


def _amount(count: int, kind: str) -> str:
    """Put a number before a kind of files: an extension, or words for one such file."""
    if kind.startswith("."):  # of any characters that a name may have
        return f"{count:,} {printable(kind)}"
    return f"{count:,} {kind}{'s' if count > 1 else ''}"


def _natural_key(name: str) -> list[str | int]:
    """Order names as timm does, also those on which timm fails: its digits include a superscript's."""
    parts: list[str | int] = list(_DIGITS.split(name.lower()))
    parts[1::2] = map(int, parts[1::2])
    return parts


def _find_formats() -> tuple[str, ...]:
    """Name the formats whose pixels Pillow reads, those without a signature last.

    Pillow also opens what it can only name (its stubs), videos, and drawings, for which it starts
    Ghostscript. The former are classes of their own, the others' MIME types say so.
    """
    Image.preinit()  # the common formats first
    Image.init()
    formats = []
    for name in Image.ID:
        opener, _ = Image.OPEN[name]
        stub = isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile)
        if not stub and Image.MIME.get(name, "image/").startswith("image/"):
            formats.append(name)
    return tuple(sorted(formats, key=lambda name: Image.OPEN[name][1] is None))


IMAGE_FORMATS = _find_formats()
"""Pillow's names of the formats that count as images."""
EXTENSION_FORMATS = {
    extension[1:]: name
    for extension, name in Image.registered_extensions().items()
    if name in (*IMAGE_FORMATS, "MPO")  # a camera's JPEG with more images, opened as one
}
IMAGE_EXTENSIONS = frozenset(EXTENSION_FORMATS)
"""Extensions of such files, in small letters, without the dot."""
