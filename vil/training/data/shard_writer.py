"""Folders of images packed into webdataset shards, and the verification of such shards.

Images are copied byte for byte. Equal images and options give equal shards, byte for byte too, which
is what lets a run that was killed be finished by the same command.
"""

import json
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import webdataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vil.messages import printable
from vil.training.config import DataConfig
from vil.training.data.base import fingerprint
from vil.training.data.image_files import EXTENSION_FORMATS
from vil.training.data.reading import is_folder, read_file
from vil.training.data.shard_index import (
    index_path,
    load_index,
    read_index,
    remove_unfinished,
    stamp_of,
    write_index,
)
from vil.training.data.shard_info import INFO_NAME, read_info
from vil.training.data.shard_scan import Sample, scan_shard
from vil.training.data.sources import FolderSource
from vil.training.errors import DataError, OutputError
from vil.training.files import LOCK_NAME, lock_folder, write_atomically, write_text
from vil.training.options import MakeOptions, VerifyOptions

_IN_ORDER = ("validation", "val", "test")  # splits of which every image is read alike
_MOST_NAMES = 20  # of bad images in a line
_CHUNK = 1000  # files looked at by one thread in turn

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class _Image(NamedTuple):
    """An image on its way into a shard."""

    path: str
    key: str
    label: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class _Plan:
    """What becomes of a split."""

    name: str
    images: list[_Image]
    """In the order of the shards."""
    classes: tuple[str, ...]
    made_from: dict[str, Any]
    """The options, and a digest of all names, labels and sizes."""
    shards: list[tuple[str, list[_Image]]]
    """File names and contents."""
    ignored: str
    """A line about the files that are no images; empty where there are none."""

    def info(self) -> dict[str, Any]:
        """Describe the split as timm does, and more."""
        return {
            "name": self.name,
            "filenames": [name for name, _ in self.shards],
            "shard_lengths": [len(images) for _, images in self.shards],
            "num_samples": len(self.images),
            "classes": list(self.classes),
            "made_from": self.made_from,
        }


def make_shards(options: MakeOptions, console: Console) -> None:
    """Pack images into shards, except those that are there already.

    Args:
        options: What to pack, and how.
        console: Where progress and the summary go.

    Raises:
        DataError: images are missing, empty, unreadable, or classes differ between splits.
        OutputError: the folder holds other shards, is in use, or cannot be written to.
    """
    start = time.perf_counter()
    if not is_folder(Path(options.images)):
        raise DataError(f"IMAGE_FOLDER {options.images} is not a folder")
    num_workers = options.num_workers or os.cpu_count() or 1
    plans = [_plan(split, options, num_workers) for split in options.splits]
    for plan in plans:
        if plan.ignored:
            console.print(plan.ignored)
    folder = Path(options.shards)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        was_here = (folder / LOCK_NAME).exists()
        lock = lock_folder(folder)
    except OSError as error:
        raise OutputError(f"SHARD_FOLDER {folder} cannot be written: {error.strerror}") from error
    with lock:
        _announce(folder, plans)
        jobs = [(folder / name, images) for plan in plans for name, images in plan.shards]
        if was_here:  # in a folder that is new to this program nothing can be its own
            files = [path.name for shard, _ in jobs for path in (shard, index_path(shard))]
            remove_unfinished(folder, {INFO_NAME, *files})
        missing = [job for job in jobs if not _is_whole(job[0])]
        _work(_write_shard, missing, num_workers, console, "written")
    seconds = time.perf_counter() - start
    for plan in plans:
        size = sum((folder / name).stat().st_size for name, _ in plan.shards)
        console.print(f"{plan.name:12}{_amount(len(plan.images), len(plan.shards), size)}")
    count = sum(len(images) for _, images in missing)
    before = len(jobs) - len(missing)
    console.print(
        f"{'written':12}{count:,} images in {timedelta(seconds=round(seconds))}, "
        f"{count / seconds:,.0f} images/s" + (f"; {before} shards were there" if before else "")
    )


def verify_shards(options: VerifyOptions, console: Console) -> None:
    """Read all shards that a folder's _info.json names and say which are damaged.

    Args:
        options: Names the folder.
        console: Where progress, a line per damaged shard and the summary go.

    Raises:
        DataError: a shard is damaged, or the folder holds none.
    """
    start = time.perf_counter()
    folder = Path(options.shards)
    splits = read_info(folder)
    if not splits:
        raise DataError(f"SHARD_FOLDER {folder} has no {INFO_NAME} that names shards")
    for name, split in splits.items():
        if split.made_from is None or split.lengths is None:
            raise DataError(f"split {name} in {folder} was not written by make_shards.py")
    jobs = [
        (folder / name, length)
        for split in splits.values()
        for name, length in zip(split.filenames, split.lengths, strict=True)
    ]
    num_workers = options.num_workers or os.cpu_count() or 1
    faults = _work(_find_faults, jobs, num_workers, console, "verified")
    damaged = [(path, fault) for (path, _), fault in zip(jobs, faults, strict=True) if fault]
    for path, fault in damaged:
        console.print(f"{path.name}: {fault}")
    if damaged:
        raise DataError(
            f"{len(damaged)} of {len(jobs)} shards in {folder} are damaged; delete them and their "
            f"indexes, then make_shards.py writes them again"
        )
    count = sum(length for _, length in jobs)
    seconds = time.perf_counter() - start
    amount = _amount(count, len(jobs), sum(path.stat().st_size for path, _ in jobs))
    console.print(f"all whole: {amount}, {count / seconds:,.0f} images/s")


def _plan(split: str, options: MakeOptions, num_workers: int) -> _Plan:
    """List the images of a split and divide them among shards."""
    source = FolderSource(DataConfig(path=options.images, val_split=split), training=False)
    paths = [str(source.path(index)) for index in range(source.num_images)]
    # timm's order of images whose names differ in case only is that of the disk.
    labels = source.labels.tolist()
    order = sorted(range(len(paths)), key=lambda index: (labels[index], paths[index]))
    shuffled = split not in _IN_ORDER
    if shuffled:
        np.random.default_rng(options.seed).shuffle(order)
    paths = [paths[index] for index in order]
    labels = [labels[index] for index in order]
    sizes = _sizes(paths, num_workers)
    names = [os.path.relpath(path, source.folder) for path in paths]
    images = [_Image(*row) for row in zip(paths, _keys(names), labels, sizes, strict=True)]
    rows = zip(names, labels, sizes, strict=True)
    made_from = {
        "shard_images": options.shard_images,
        "seed": options.seed if shuffled else None,
        "num_images": len(images),
        "file_list_digest": fingerprint(*(json.dumps(row).encode() for row in rows)),
    }
    shards = [
        (f"{split}-{number:06d}.tar", images[first : first + options.shard_images])
        for number, first in enumerate(range(0, len(images), options.shard_images))
    ]
    return _Plan(split, images, source.classes, made_from, shards, source.ignored)


def _sizes(paths: list[str], num_workers: int) -> list[int]:
    """Return the bytes of all files, none of which may be empty."""
    chunks = [paths[first : first + _CHUNK] for first in range(0, len(paths), _CHUNK)]
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            found = pool.map(lambda chunk: [os.stat(path).st_size for path in chunk], chunks)
            sizes = [size for chunk in found for size in chunk]
    except OSError as error:
        raise DataError(
            f"image {printable(error.filename)} cannot be read: {error.strerror}"
        ) from error
    empty = [path for path, size in zip(paths, sizes, strict=True) if size == 0]
    if empty:
        raise DataError(
            f"image {printable(min(empty))} is empty ({len(empty)} such, of {len(paths)})"
        )
    return sizes


def _keys(names: list[str]) -> list[str]:
    """Make keys that tell class and file; webdataset takes what follows a dot for the extension.

    Args:
        names: Paths below the split's folder, in an order that is always the same.
    """
    keys: list[str] = []
    taken: set[str] = set()
    uses: Counter[str] = Counter()
    for name in names:
        folders, stem = os.path.split(os.path.splitext(name)[0])
        told = stem.startswith(f"{os.path.basename(folders)}_")  # as in n01440764/n01440764_18
        plain = re.sub(r"[^\w-]", "_", stem if told else f"{folders}_{stem}")
        key = plain
        while key in taken:  # as of 1.jpg and 1.png
            uses[plain] += 1
            key = f"{plain}_{uses[plain] + 1}"
        taken.add(key)
        keys.append(key)
    return keys


def _announce(folder: Path, plans: list[_Plan]) -> None:
    """Write down what the folder is going to hold, or check that it is what it was to hold.

    Raises:
        DataError: the classes of two splits differ.
        OutputError: the folder holds shards of other images or options.
    """
    present = read_info(folder)
    classes = {name: split.classes for name, split in present.items() if split.classes is not None}
    _check_classes(classes | {plan.name: plan.classes for plan in plans})
    others = [name for name, split in present.items() if split.made_from is None]
    if others:
        raise OutputError(
            f"{folder / INFO_NAME} was not written by make_shards.py: it describes split {others[0]} of "
            f"other shards; choose another SHARD_FOLDER"
        )
    for plan in plans:
        if plan.name in present:
            before = present[plan.name].made_from
            for key, value in plan.made_from.items():
                if before.get(key) != value:
                    raise OutputError(
                        f"SHARD_FOLDER {folder} holds split {plan.name} with {key} "
                        f"{before.get(key)}, now it is {value}; choose another folder"
                    )
        else:
            shards = [folder / name for name, _ in plan.shards]
            files = [path for shard in shards for path in (shard, index_path(shard))]
            foreign = [path for path in files if os.path.lexists(path)]
            if foreign:
                raise OutputError(f"{foreign[0]} exists and {INFO_NAME} names no such shard")
    path = folder / INFO_NAME
    info = json.loads(path.read_bytes()) if path.exists() else {"splits": {}}
    info["splits"] |= {plan.name: plan.info() for plan in plans}
    write_text(path, json.dumps(info, indent=1) + "\n")


def _check_classes(classes: dict[str, tuple[str, ...]]) -> None:
    """Check that all splits number the same classes."""
    first = next(iter(classes))
    for split, names in classes.items():
        differing = sorted(set(names) ^ set(classes[first]))
        if differing:
            where = first if differing[0] in classes[first] else split
            raise DataError(
                f"class {differing[0]} is in split {where} only, of {first} and {split} "
                f"({len(differing)} classes differ)"
            )
        for label, name in enumerate(names):
            if name != classes[first][label]:
                raise DataError(
                    f"class {label} is {classes[first][label]} in split {first} and {name} in {split}"
                )


def _is_whole(path: Path) -> bool:
    """Tell whether a shard was finished; its index is written last."""
    try:
        index = read_index(path)
        if index is None or any(sample.crc32 is None for sample in index.samples):
            return False
        load_index(path)
    except DataError:
        return False
    return True


def _write_shard(job: tuple[Path, list[_Image]]) -> int:
    """Write a shard and its index, and return the number of images."""
    path, images = job
    checksums: list[int] = []

    def write(file: BinaryIO) -> None:
        with webdataset.TarWriter(file, encoder=False, mtime=0) as tar:
            for image in images:
                content = _read(image)
                checksums.append(zlib.crc32(content))
                extension = image.path.rpartition(".")[2].lower()
                if EXTENSION_FORMATS[extension] == "JPEG":
                    extension = "jpg"  # the only one that timm looks for
                label = str(image.label).encode()
                tar.write({"__key__": image.key, extension: content, "cls": label})

    write_atomically(path, write)
    stamp, samples = stamp_of(path), scan_shard(path)
    pairs = zip(samples, checksums, strict=True)
    write_index(path, [sample._replace(crc32=checksum) for sample, checksum in pairs], stamp)
    return len(images)


def _read(image: _Image) -> bytes:
    try:
        content = read_file(Path(image.path))
    except OSError as error:
        raise DataError(
            f"image {printable(image.path)} cannot be read: {error.strerror}"
        ) from error
    if len(content) != image.size:
        raise DataError(
            f"image {printable(image.path)} changed meanwhile, from {image.size} to {len(content)} bytes"
        )
    return content


def _find_faults(job: tuple[Path, int]) -> str:
    """Say in a line what is wrong with a shard, nothing if it is whole.

    Args:
        job: The shard, and the number of its images by _info.json.
    """
    path, length = job
    try:
        index = read_index(path)
        if index is None:
            return f"no {index_path(path).name}: not finished, or not written by make_shards.py"
        faults = []
        size = path.stat().st_size
        if size != index.stamp.size:
            faults.append(f"{size} of {index.stamp.size} bytes")
        if len(index.samples) != length:
            faults.append(f"{len(index.samples)} images of {length}")
        bad = _bad_images(path, index.samples)
        if bad:
            more = f" and {len(bad) - _MOST_NAMES} more" if len(bad) > _MOST_NAMES else ""
            faults.append(f"{len(bad)} bad images: {', '.join(bad[:_MOST_NAMES])}{more}")
        if not faults and scan_shard(path) != index.scanned:
            faults.append("keys or labels are not those of its index")
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "; ".join(faults)


def _bad_images(path: Path, samples: Iterable[Sample]) -> list[str]:
    """Return the keys of images that are not as they were written."""
    with path.open("rb") as file:
        return [
            sample.key
            for sample in samples
            if sample.offset is None
            or zlib.crc32(os.pread(file.fileno(), sample.size, sample.offset)) != sample.crc32
        ]


def _work(
    function: Callable[[_Job], _Result],
    jobs: list[_Job],
    num_workers: int,
    console: Console,
    done: str,
) -> list[_Result]:
    """Apply a function to every shard in threads, and show how many are done.

    Threads, because the work is the disk's, and none of them survives a killed process.
    """
    pool = ThreadPoolExecutor(num_workers)
    futures = [pool.submit(function, job) for job in jobs]
    every = max(1, len(jobs) // 20)
    bar = Progress(
        TextColumn(done),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    try:
        with bar:
            task = bar.add_task(done, total=len(jobs))
            for count, future in enumerate(as_completed(futures), start=1):
                future.result()
                bar.advance(task)
                if not console.is_terminal and count % every == 0:
                    console.print(f"{done} {count:,} of {len(jobs):,} shards")
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _amount(images: int, shards: int, size: int) -> str:
    return f"{images:,} images in {shards:,} shards, {size / 1e9:,.2f} GB"
