"""Pack image folders into webdataset shards.

Images are copied byte for byte. Equal images and options give bit-identical shards, so repeating the
command after a crash finishes the work.
"""

import json
import os
import re
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
import tyro
import webdataset
from tqdm import tqdm
from tyro.conf import Positional

from vil.messages import printable
from vil.training.errors import ConfigError, DataError, OutputError, log
from vil.training.files import lock_folder, write_atomically, write_text
from vil.training.images import FolderSource, fingerprint, is_folder
from vil.training.pulse import Pulse
from vil.training.settings import Count, CountFromZero, DataConfig, Section, Threads
from vil.training.shards import (
    INFO_NAME,
    load_index,
    read_index,
    read_info,
    scan,
    stamp_of,
    write_index,
)

_IN_ORDER = ("validation", "val", "test")  # splits that are not shuffled
_JPEG = ("jpg", "jpeg", "jpe", "jfif")


@dataclass(frozen=True, kw_only=True)
class MakeOptions(Section):
    """Pack a folder of images into webdataset shards. Repeat the command to finish an interrupted run."""

    images: Annotated[Positional[str], tyro.conf.arg(metavar="IMAGE_FOLDER")]
    """Folder with images at <split>/<class>/<image>."""
    shards: Annotated[Positional[str], tyro.conf.arg(metavar="SHARD_FOLDER")]
    """Output folder; created if missing."""
    splits: tuple[str, ...] = ("train", "validation")
    """Splits to pack; for `validation`, also looks for `val`."""
    shard_images: Count = 1000
    """Images per shard."""
    seed: CountFromZero = 0
    """Seed of the shuffle, which mixes the classes in each shard. The splits validation, val and test are not
    shuffled."""
    num_workers: Threads | None = None
    """Number of threads that copy; None uses one per core."""


class _Image(NamedTuple):
    """An image to write into a shard; ``size`` is in bytes."""

    path: str
    key: str
    label: int
    size: int


class _Plan(NamedTuple):
    """The shards to write for a split."""

    name: str
    classes: tuple[str, ...]
    made_from: dict[str, Any]
    """Options, and a digest of all names, labels and sizes."""
    shards: dict[str, list[_Image]]
    """Images of each shard, by file name."""

    def info(self) -> dict[str, Any]:
        """Return timm's description of the split, with additional fields."""
        lengths = [len(images) for images in self.shards.values()]
        return {
            "name": self.name,
            "filenames": list(self.shards),
            "shard_lengths": lengths,
            "num_samples": sum(lengths),
            "classes": list(self.classes),
            "made_from": self.made_from,
        }


def make_shards(options: MakeOptions) -> None:
    """Pack images into shards; skip shards that are already complete.

    Raises:
        ConfigError: If options.splits contains an invalid folder name or a duplicate.
        DataError: If images are missing, empty or unreadable, or classes differ between splits.
        OutputError: If the folder contains other shards, is in use, or is not writable.
    """
    splits, folder = options.splits, Path(options.shards)
    names = all(re.fullmatch(r"[\w-]+", split) for split in splits)
    if not splits or not names or len(set(splits)) < len(splits):
        raise ConfigError(
            f"splits must be distinct folder names of letters, digits, - and _, got "
            f"{' '.join(splits) or 'none'}"
        )
    if not is_folder(Path(options.images)):
        raise DataError(f"IMAGE_FOLDER {options.images} is not a folder")
    plans = [_plan(split, options) for split in splits]
    with lock_folder(folder):
        _announce(folder, plans)
        jobs = [(folder / name, images) for plan in plans for name, images in plan.shards.items()]
        missing = [job for job in jobs if not _is_whole(job[0])]
        _write_shards(missing, options.num_workers)
    for plan in plans:
        count = sum(map(len, plan.shards.values()))
        log.info(f"{plan.name:12}{count:,} images in {len(plan.shards):,} shards")
    log.info(f"{'written':12}{len(missing):,} shards; {len(jobs) - len(missing):,} already existed")


def _plan(split: str, options: MakeOptions) -> _Plan:
    """List the images of a split and assign them to shards."""
    source = FolderSource(DataConfig(path=options.images, train_split=split), training=True)
    paths = [str(source.path(index)) for index in range(source.num_images)]
    labels = source.labels.tolist()
    order = sorted(range(len(paths)), key=lambda index: (labels[index], paths[index]))
    shuffled = split not in _IN_ORDER
    if shuffled:
        np.random.default_rng(options.seed).shuffle(order)
    paths = [paths[index] for index in order]
    labels = [labels[index] for index in order]
    sizes = _sizes(paths, options.num_workers)
    names = [os.path.relpath(path, source.folder) for path in paths]
    images = [_Image(*row) for row in zip(paths, _keys(names), labels, sizes, strict=True)]
    rows = zip(names, labels, sizes, strict=True)
    made_from = {
        "shard_images": options.shard_images,
        "seed": options.seed if shuffled else None,
        "num_images": len(images),
        "file_list_digest": fingerprint(*(json.dumps(row).encode() for row in rows)),
    }
    shards = {
        f"{split}-{number:06d}.tar": images[first : first + options.shard_images]
        for number, first in enumerate(range(0, len(images), options.shard_images))
    }
    return _Plan(split, source.classes, made_from, shards)


def _sizes(paths: list[str], num_workers: int | None) -> list[int]:
    """Return the sizes of all files in bytes; raise DataError if a file is empty."""
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            sizes = list(pool.map(os.path.getsize, paths, chunksize=1000))
    except OSError as error:
        raise DataError(
            f"image {printable(error.filename)} cannot be read: {error.strerror}"
        ) from error
    empty = [path for path, size in zip(paths, sizes, strict=True) if size == 0]
    if empty:
        raise DataError(
            f"image {printable(min(empty))} is empty ({len(empty)} of {len(paths)} images are)"
        )
    return sizes


def _keys(names: list[str]) -> list[str]:
    """Build unique keys from class and file name, without dots: webdataset parses a dot as the extension."""
    keys: list[str] = []
    taken: set[str] = set()
    uses: Counter[str] = Counter()
    for name in names:
        folders, stem = os.path.split(os.path.splitext(name)[0])
        told = stem.startswith(f"{os.path.basename(folders)}_")  # as in n01440764/n01440764_18
        plain = re.sub(r"[^\w-]", "_", stem if told else f"{folders}_{stem}")
        key = plain
        while key in taken:  # 1.jpg and 1.png share a key
            uses[plain] += 1
            key = f"{plain}_{uses[plain] + 1}"
        taken.add(key)
        keys.append(key)
    return keys


def _announce(folder: Path, plans: list[_Plan]) -> None:
    """Write the planned content of the folder to _info.json, or check that it matches an earlier plan."""
    present = read_info(folder)
    classes = {name: split.get("classes") for name, split in present.items()}
    classes |= {plan.name: list(plan.classes) for plan in plans}
    (first, expected), *others = classes.items()
    for name, found in others:
        if found != expected:
            differing = sorted(set(found or ()) ^ set(expected or ())) or ["their order"]
            raise DataError(f"the classes of splits {first} and {name} differ: {differing[0]}")
    for plan in plans:
        before = present.get(plan.name, {}).get("made_from")
        if plan.name in present and before != plan.made_from:
            raise OutputError(
                f"SHARD_FOLDER {folder} contains split {plan.name} made from {before}, but this "
                f"command makes it from {plan.made_from}; choose another folder"
            )
        foreign = [name for name in plan.shards if os.path.lexists(folder / name)]
        if plan.name not in present and foreign:
            raise OutputError(
                f"{folder / foreign[0]} exists, but not in {INFO_NAME}; choose another SHARD_FOLDER"
            )
    path = folder / INFO_NAME
    info = json.loads(path.read_bytes()) if path.exists() else {"splits": {}}
    info["splits"] |= {plan.name: plan.info() for plan in plans}
    write_text(path, json.dumps(info, indent=1) + "\n")


def _is_whole(path: Path) -> bool:
    """Return whether a shard is complete; its index is written last."""
    try:
        index = read_index(path)
        return index is not None and all(s.crc32 is not None for s in load_index(path))
    except DataError:
        return False


def _write_shard(path: Path, images: list[_Image]) -> None:
    """Write a shard and its index."""
    checksums: list[int] = []

    def write(file: BinaryIO) -> None:
        with webdataset.TarWriter(file, encoder=False, mtime=0) as tar:
            for image in images:
                content = _read(image)
                checksums.append(zlib.crc32(content))
                extension = image.path.rpartition(".")[2].lower()
                extension = "jpg" if extension in _JPEG else extension  # timm reads only .jpg
                label = str(image.label).encode()
                tar.write({"__key__": image.key, extension: content, "cls": label})

    write_atomically(path, write)
    stamp, samples = stamp_of(path), scan(path)
    pairs = zip(samples, checksums, strict=True)
    write_index(path, [sample._replace(crc32=checksum) for sample, checksum in pairs], stamp)


def _read(image: _Image) -> bytes:
    try:
        content = Path(image.path).read_bytes()
    except OSError as error:
        raise DataError(
            f"image {printable(image.path)} cannot be read: {error.strerror}"
        ) from error
    if len(content) != image.size:
        raise DataError(
            f"image {printable(image.path)} changed from {image.size} to {len(content)} bytes"
        )
    return content


def _write_shards(jobs: list[tuple[Path, list[_Image]]], num_workers: int | None) -> None:
    """Write shards in threads: the work is I/O-bound, and threads die with the process."""
    pool, pulse = ThreadPoolExecutor(num_workers or os.cpu_count()), Pulse()
    try:
        futures = [pool.submit(_write_shard, *job) for job in jobs]
        bar = tqdm(futures, "written", unit=" shards", disable=None)
        for done, future in enumerate(bar, 1):
            future.result()
            if bar.disable:
                pulse.beat(f"written {done:,} of {len(jobs):,} shards")
    finally:
        pool.shutdown(cancel_futures=True)
