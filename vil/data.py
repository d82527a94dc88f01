"""Look at images before you train on them: ``python -m vil.data PATH``.

    python -m vil.data photos                    # photos/<class>/*, or photos/train/<class>/* and photos/val/<class>/*
    python -m vil.data photos --val-fraction 0.1 --output photos.png

Prints how many images there are in each class and split, their sizes and modes, which may be transparent, which
cannot be used, and which are in both splits. Draws some images of each class and a histogram of the sizes. Only the
heads of files are read, so a damaged image may be found later. Exit codes: see vil/training/errors.py.
"""

import sys
import time
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

try:
    import tyro
    from matplotlib.figure import Figure
    from PIL import Image
    from tyro.conf import Positional

    from vil.messages import printable
    from vil.training.errors import ConfigError, DataError, log, run_script
    from vil.training.files import write_atomically
    from vil.training.images import FolderSource, decode, is_folder, read_head
    from vil.training.recipes import parse
    from vil.training.settings import Count, DataConfig, Section, ShareBelowOne, Text
except ModuleNotFoundError as error:
    sys.exit(f"python -m vil.data needs {error.name}: pip install 'vision-longhorn[train]'")

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_THREADS = 16  # they mostly wait for the disk
_NAMED = 5  # files that a message names
_CLASSES, _EACH = 12, 6  # of the picture: rows, and images in a row
_THUMB = 96  # pixels of an image in the picture


@dataclass(frozen=True, kw_only=True)
class LookConfig(Section):
    """Count and draw the images of a folder."""

    path: Annotated[Positional[str], tyro.conf.arg(metavar="PATH")]
    """Folder with <class>/*, or with train/<class>/* and val/<class>/*."""
    val_fraction: ShareBelowOne = 0.0
    """Divide <class>/* as training with this data.val_fraction does."""
    max_pixels: Count = DataConfig.max_pixels
    """Pixels above which an image cannot be used, as in training."""
    output: Text = "data.png"
    """PNG file to write; replaced if it exists."""


class Head(NamedTuple):
    """What the beginning of an image file says."""

    width: int = 0
    height: int = 0
    mode: str = ""
    transparent: bool = False
    fault: str = ""
    """Why the image cannot be used, empty if it can."""


def look(options: LookConfig) -> None:
    """Print the figures and write the picture.

    Raises:
        ConfigError: If the output is no PNG file.
        DataError: If the folder has no images, or one in a wrong place.
        OutputError: If the picture cannot be written.
    """
    if not options.output.lower().endswith(".png"):
        raise ConfigError(f"output must end with .png, got {options.output}")
    splits = open_splits(options)
    start = time.monotonic()
    heads = {name: read_heads(source, options.max_pixels) for name, source in splits.items()}
    read = (
        f"read         {sum(map(len, heads.values())):,} heads in {time.monotonic() - start:.1f} s"
    )
    log.info("\n".join([*counts(splits), read, *figures(splits, heads), *duplicates(splits)]))
    figure = draw(splits, heads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters of class names that the font lacks
        write_atomically(
            Path(options.output), lambda file: figure.savefig(file, format="png", dpi=80)
        )
    log.info(f"written      {options.output}")


def open_splits(options: LookConfig) -> dict[str, FolderSource]:
    """List the images of each split."""
    root = Path(options.path)
    if not is_folder(root):
        raise DataError(f"{options.path} is not a folder")
    if options.val_fraction:
        config = DataConfig(path=options.path, val_fraction=options.val_fraction)
        return {name: FolderSource(config, name == "train") for name in ("train", "val")}
    found = [name for name in ("train", "validation", "val") if is_folder(root / name)]
    if "train" in found:
        return {n: FolderSource(DataConfig(path=options.path, val_split=n), False) for n in found}
    config = DataConfig(path=str(root.absolute().parent), val_split=root.absolute().name)
    return {"all": FolderSource(config, False)}


def read_heads(source: FolderSource, max_pixels: int) -> list[Head]:
    """Read the beginnings of all files."""

    def read(index: int) -> Head:
        try:
            with read_head(source.path(index)) as (image, transparent):
                pixels, size = image.width * image.height, (image.width, image.height)
                large = f"it has {pixels:,} pixels, more than {max_pixels:,}"
                return Head(*size, image.mode, transparent, large * (pixels > max_pixels))
        except (DataError, OSError) as error:
            return Head(fault=str(error))

    usual, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # max_pixels replaces it
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(read, range(source.num_images)))
    finally:
        Image.MAX_IMAGE_PIXELS = usual


def counts(splits: dict[str, FolderSource]) -> list[str]:
    """Return lines with the number of images of each split and class."""
    numbers = {
        name: Counter(source.classes[label] for label in source.labels.tolist())
        for name, source in splits.items()
    }
    names = list(dict.fromkeys(name for own in numbers.values() for name in own))
    lines = [f"{len(names)} classes; images of each in {', '.join(splits)}:"]
    for name in names:
        own = "".join(f"{numbers[split][name]:>9,}" for split in splits)
        lines.append(f"{own}  {printable(name)}")
    total = "".join(f"{source.num_images:>9,}" for source in splits.values())
    lines.append(f"{total}  in all")
    return lines


def figures(splits: dict[str, FolderSource], heads: dict[str, list[Head]]) -> list[str]:
    """Return lines about sizes, modes, transparency and images that cannot be used."""
    good = [head for own in heads.values() for head in own if not head.fault]
    lines = []
    if good:
        ordered = sorted(good, key=lambda head: head.width * head.height)
        places = (("smallest", 0), ("median", len(good) // 2), ("largest", len(good) - 1))
        sizes = (f"{which} {ordered[i].width} x {ordered[i].height}" for which, i in places)
        modes = Counter(head.mode for head in good).most_common()
        lines.append(f"sizes        {', '.join(sizes)} px")
        lines.append(f"modes        {', '.join(f'{mode} {count:,}' for mode, count in modes)}")
        share = sum(head.transparent for head in good)
        lines.append(
            f"transparent  {share:,} images may be" + "; see --data.background" * (share > 0)
        )
    faults = [
        f"{splits[name].name(index)}: {head.fault}"
        for name, own in heads.items()
        for index, head in enumerate(own)
        if head.fault
    ]
    return [*lines, f"unusable     {_some(faults)}"]


def duplicates(splits: dict[str, FolderSource]) -> list[str]:
    """Return a line about files with the same content in two splits, if there are two."""
    if len(splits) < 2:
        return []
    sized: dict[int, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for name, source in splits.items():
        for index in range(source.num_images):
            with suppress(OSError):  # told as unusable
                path = source.path(index)
                sized[path.stat().st_size][name].append(path)
    pairs = []
    for by_split in sized.values():
        if len(by_split) > 1:  # only files of equal size need to be read
            seen: dict[bytes, tuple[str, Path]] = {}
            for name, paths in by_split.items():
                for path in paths:
                    with suppress(OSError):
                        content = blake2b(path.read_bytes()).digest()
                        other, first = seen.setdefault(content, (name, path))
                        if other != name:
                            pairs.append(f"{printable(str(path))} is {printable(str(first))}")
    return [f"in two       {_some(pairs)}"]


def _some(messages: list[str]) -> str:
    """Return how many messages there are, and the first of them."""
    more = f"\n  and {len(messages) - _NAMED:,} more" if len(messages) > _NAMED else ""
    return f"{len(messages):,} images" + "".join(f"\n  {m}" for m in messages[:_NAMED]) + more


def draw(splits: dict[str, FolderSource], heads: dict[str, list[Head]]) -> Figure:
    """Draw images of some classes, and a histogram of the shorter sides."""
    name, source = next(iter(splits.items()))
    labels = range(0, len(source.classes), -(-len(source.classes) // _CLASSES))
    figure = Figure(figsize=(_EACH * 1.3, len(labels) * 1.4 + 3), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(len(labels) * 1.4, 3))
    for row, label in zip(above.subplots(len(labels), _EACH, squeeze=False), labels, strict=True):
        own = [
            i
            for i, other in enumerate(source.labels)
            if other == label and not heads[name][i].fault
        ]
        chosen = own[:: -(-len(own) // _EACH) or 1][:_EACH]
        for axes in row:
            axes.set_axis_off()
        row[0].set_title(printable(source.classes[label]), loc="left", fontsize=9, parse_math=False)
        for axes, index in zip(row, chosen, strict=False):
            _show(axes, source.path(index))
    sides = [min(h.width, h.height) for own in heads.values() for h in own if not h.fault]
    axes = below.subplots()
    axes.hist(sides, bins=40)
    axes.set_xlabel("shorter side, pixels")
    axes.set_ylabel("images")
    return figure


def _show(axes: "Axes", path: Path) -> None:
    with suppress(DataError, OSError):
        image = decode(path.read_bytes(), "RGB", exif_rotation=True, background="white")
        image.thumbnail((_THUMB, _THUMB), Image.Resampling.BILINEAR)
        axes.imshow(image)


def main() -> None:
    """Parse the command line and look."""
    look(parse(LookConfig, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_script(main))
