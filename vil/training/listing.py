"""Which files of a folder are images of which class, and which of them are held out."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vil.messages import counted, nfc, printable
from vil.training.errors import DataError, log
from vil.training.settings import DataConfig
from vil.weights.sources import Weights

IMAGE_EXTENSIONS = frozenset(
    (
        *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "avif", "bmp", "dib", "gif"),
        *("tif", "tiff", "ppm", "pgm", "pbm", "pnm", "jp2", "tga"),
    )
)
"""Lower-case file extensions that count as images, without the dot."""
_OF_A_DESKTOP = frozenset(("Thumbs.db", "desktop.ini"))
_NUMBERS = re.compile(r"(\d+)")


class Listing(NamedTuple):
    """Images of a folder."""

    folder: Path
    paths: list[str]
    """Path of each image, <class>/<image>, in the order of timm's reader."""
    classes: tuple[str, ...]
    labels: list[int]
    """Class index of each image."""

    def names(self) -> list[str]:
        """Return the name of each image that data.val_fraction hashes: its class and file name."""
        pairs = zip(self.paths, self.labels, strict=True)
        return [f"{self.classes[label]}/{path.rpartition('/')[2]}" for path, label in pairs]


def list_split(data: DataConfig, training: bool, exceptions: Collection[str] = ()) -> Listing:
    """List data.path/<split>/<class>/<image>, or one side of data.val_fraction.

    Args:
        data: Data options.
        training: Whether to list the training images; else those for validation.
        exceptions: Images, as <class>/<name>, on the other side than their hash says.

    Raises:
        DataError: As in ``list_images``; also if there is no folder of the split, or if no image of
            a class is left to train on.
    """
    if not data.val_fraction:
        split = data.train_split if training else data.val_split
        names = [split, "val"] if split == "validation" else [split]
        for name in names:
            if is_folder(Path(data.path, name)):
                return list_images(Path(data.path, name), all_classes=training)
        raise DataError(
            f"no folder {' or '.join(names)} in data.path {data.path}; expected images at "
            f"{Path(data.path, names[-1])}/<class>/<image>, or at {data.path}/<class>/<image> with "
            f"--data.val-fraction 0.1"
        )
    whole, exceptions = _list_undivided(data, warn=training), {*exceptions}
    folder, paths, classes, labels = whole
    held_out = [(_hashed(name) < data.val_fraction) != (name in exceptions) for name in whole.names()]
    left = {label for label, out in zip(labels, held_out, strict=True) if not out}
    if len(left) < len(classes):
        name = next(name for label, name in enumerate(classes) if label not in left)
        raise DataError(f"data.val_fraction {data.val_fraction:g} leaves class {printable(name)} no image to train on")
    taken = [place for place, out in enumerate(held_out) if out != training]
    return Listing(folder, [paths[i] for i in taken], classes, [labels[i] for i in taken])


def choose_exceptions(data: DataConfig, weights: Weights | None) -> tuple[str, ...]:
    """Choose the ``exceptions`` of ``list_split`` for a new run with data.val_fraction.

    About this fraction of each class is held out, at least one image, and one is left to train on.
    If the weights come from a run with the same fraction, its images stay on their side. Raises
    DataError as in ``list_images``.
    """
    fraction = data.val_fraction
    if not fraction or data.path is None or not is_folder(Path(data.path)):
        return ()  # if the folder is missing, whoever opens the data says so
    whole = _list_undivided(data, warn=False)
    images: list[list[tuple[float, str]]] = [[] for _ in whole.classes]
    for label, name in zip(whole.labels, whole.names(), strict=True):
        images[label].append((_hashed(name), name))
    exceptions = tuple(name for own in images for name in _moved(sorted(own), fraction))
    if weights is None or not weights.config or weights.val_fraction != fraction:
        return exceptions
    known = {*(weights.label_names or ())}
    new = [name for name in exceptions if name.partition("/")[0] not in known]
    return (*weights.val_exceptions, *new)


def _moved(images: list[tuple[float, str]], fraction: float) -> list[str]:
    """Return which images of a class, ascending by hash, change sides.

    It is none if about the right number is held out.
    """
    count, most = sum(hashed < fraction for hashed, _ in images), len(images) - 1
    target = min(max(round(fraction * len(images)), 1), most)
    slack = max(target // 10, 1)
    if min(target, max(target - slack, 1)) <= count <= min(target + slack, most):
        return []
    return [name for _, name in images[min(count, target) : max(count, target)]]


def _hashed(name: str) -> float:
    """Return a number in [0, 1) that depends on a name alone."""
    content = name.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest()) / 2**48


def _list_undivided(data: DataConfig, warn: bool) -> Listing:
    """List the images of a folder that data.val_fraction divides, like ``list_images``."""
    folder = Path(data.path)
    divided = [name for name in ("train", "val", "validation") if is_folder(folder / name)]
    if len(divided) > 1:
        raise DataError(
            f"data.path {folder} has folders {' and '.join(divided)}, so its images are divided "
            f"already; leave out data.val_fraction"
        )
    return list_images(folder, warn)


def list_images(folder: Path, warn: bool = True, all_classes: bool = True) -> Listing:
    """List the images folder/<class>/<image> of a split, without hidden files.

    Names are sorted as in timm's reader, with numbers by value and regardless of case. Accents of
    class names are composed first. A warning counts the files that are left out, unless ``warn`` is
    False. With ``all_classes``, each class must have images.

    Raises DataError if a folder cannot be read, a class has no images, two classes have one name,
    or an image is in the wrong place.
    """
    where = printable(str(folder))
    names, stray, others = _look_into(folder)
    folders = dict(zip(nfc(names), names, strict=True))
    if len(folders) < len(names):
        twice = next(name for name in names if name not in folders.values())
        raise DataError(
            f"two folders in {where} have the name {printable(twice)}, with composed and with separate accents"
        )
    classes = tuple(sorted(folders, key=natural_key))
    places = {name: place for place, name in enumerate(classes)}
    paths, labels, empty = [], [], []
    for name in sorted(classes, key=lambda name: natural_key(f"{name}/")):  # sort as in paths
        own = folders[name]
        inner, images, more = _look_into(folder / own)
        others += more
        for deeper in inner:
            example = files_below(folder / own / deeper, Counter())[:1]
            stray += [str(path.relative_to(folder)) for path in example]
        paths += [f"{own}/{image}" for image in sorted(images, key=natural_key)]
        labels += [places[name]] * len(images)
        empty += [] if images else [own]
    if stray:
        raise DataError(printable(f"image {folder / min(stray)} must lie at {folder}/<class>/<image>"))
    check_found(paths, others if warn else Counter(), where, "the sub-folders of ")
    hidden = []
    with suppress(OSError):  # whoever reads the images says what is wrong with the folder
        for path in sorted(folder.glob(".*")) if warn else ():
            with suppress(DataError):  # such as the trash of another user
                hidden += [path.name] * bool(path.is_dir() and _look_into(path)[1])
    if hidden:
        log.warning(
            f"{printable(', '.join(hidden))} in {where} left out, because names that begin with a "
            f"dot are hidden; if these folders are classes, rename them"
        )
    if empty and all_classes:
        where, others = printable(str(folder / empty[0])), _look_into(folder / empty[0])[2]
        raise DataError(
            f"class folder {where} has no images ({len(empty)} of {len(classes)} class folders "
            f"have none); add images, or delete the folder" + f"; {_describe_left_out(others, where)}" * bool(others)
        )
    return Listing(folder, paths, classes, labels)


def files_below(folder: Path, others: Counter[str]) -> list[Path]:
    """Return all images below a folder in timm's order, and count other files.

    Raises DataError if a folder is unreadable.
    """
    inner, images, more = _look_into(folder)
    others.update(more)
    paths = [folder / name for name in sorted(images, key=natural_key)]
    for name in sorted(inner, key=natural_key):
        paths += files_below(folder / name, others)
    return paths


def check_found(paths: list, others: Counter[str], where: str, within: str = "") -> None:
    """Warn of files left out by their extension; raise DataError if no image was found."""
    message = _describe_left_out(others, where)
    if not paths:
        raise DataError(f"there are no images in {within}{where}" + f"; {message}" * bool(others))
    if others:
        log.warning(message)


def _describe_left_out(others: Counter[str], where: str) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common())
    cure = "; convert .heic files to JPEG first" * bool(others.keys() & {".heic", ".heif"})
    return (
        f"{counted(others.total(), 'file')} left out of {where} ({kinds}), because these extensions are not read{cure}"
    )


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return timm's sort key for a name; names that timm treats as equal are sorted by spelling."""
    parts: list[str | int] = list(_NUMBERS.split(name.lower()))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; raise DataError if the disk fails."""
    try:
        return path.is_dir()
    except OSError as error:
        raise DataError(f"{printable(str(path))} cannot be read: {error.strerror}") from error


def _look_into(folder: Path) -> tuple[list[str], list[str], Counter[str]]:
    """Return the names of folders and images in a folder, and count other extensions.

    Links are followed.
    """
    folders, images, others = [], [], Counter()
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
                elif name not in _OF_A_DESKTOP:
                    others[printable(Path(name).suffix.lower()) or "without an extension"] += 1
    except OSError as error:
        raise DataError(f"folder {printable(str(folder))} cannot be read: {error.strerror}") from error
    return folders, images, others
