"""Time the training loader against timm's: images per second and core, with either decoder.

    python -m benchmarks.loader [--rounds 5] [--num-workers 1 2] [--images 512] [--output FILE]
    python -m benchmarks.loader --data /data/imagenet/train  # a sample of its images instead
    python -m benchmarks.loader --record FILE  # the tables of a record

The recipe is DeiT's: bicubic random resized crop to 224, flip, RandAugment rand-m9-mstd0.5-inc1.
The main figure is CPU time per image. It covers all data-loading workers and the training process's
share of the loading. On a machine whose cores only load, each core loads 1000 / (CPU ms
per image) images per second. Wall time also depends on other programs of this machine. Each round
runs every loader once, so a drift in the machine's speed affects all equally. A loader's figure is
the median over the rounds. Its ratio is the median of the round-by-round ratios to timm's folder.
Each run starts new workers, and their start is counted.

Both packages mix, normalise and erase on the training device. Repeated augmentation decodes an image
once for its three draws; timm has none in a single process. A second table has the CPU time of the
parts of an image. "The rest" is what the loader with the most workers takes beyond its parts: reading files, batches
and their transfer to the training process.

The images are generated: smooth random fields with noise, 500 x 375, JPEG of quality 90, 110 kB on
average, like ImageNet's. The exit status is 1 if, with Pillow, a pixel differs from timm's for the same image
and seed. With torchvision, the share of values that differ after the crop is printed.
"""

import argparse
import dataclasses
import gc
import io
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from timm.data import create_dataset, create_loader, create_transform

from benchmarks import provenance
from vil.preprocess import decode
from vil.training.distributed import World
from vil.training.draws import seed_image
from vil.training.files import write_text
from vil.training.loader import TrainData, open_source
from vil.training.resolve import fill_from_weights
from vil.training.settings import DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from vil.training.transforms import train_transform

SIZE = (500, 375)
CLASSES, SHARDS = 4, 16
MODEL = ModelConfig(name="vil_tiny", num_classes=CLASSES)
EPOCHS = 3  # in one run, so that starting the workers weighs little
CPU = torch.device("cpu")
RECIPE = {
    "is_training": True,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "interpolation": "bicubic",
    "use_prefetcher": True,
}
DECODERS = ("pillow", "torchvision")
PLACES = ("folder", "shards")


@dataclass
class Row:
    """Milliseconds per image of one loader, wall and CPU, in every round."""

    name: str
    wall_ms: list[float]
    cpu_ms: list[float]
    ratio: float = 1.0
    """Images per second and core, relative to the baseline row."""

    @property
    def wall_rate(self) -> float:
        """Images per second of wall time."""
        return 1e3 / statistics.median(self.wall_ms)

    @property
    def core_rate(self) -> float:
        """Images per second and core."""
        return 1e3 / statistics.median(self.cpu_ms)


def generate(count: int) -> Iterator[bytes]:
    """Yield JPEG files of random fields, with detail from coarse down to one pixel."""
    width, height = SIZE
    for number in range(count):
        rng = np.random.default_rng(number)
        noise = rng.uniform(8, 32)  # makes up most of a file's size
        pixels = 128 + rng.normal(0, noise, (height, width, 1)).astype(np.float32)
        for columns, contrast in ((4, 70), (12, 35), (40, 18), (120, noise)):
            field = rng.normal(0, contrast, (columns * 3 // 4, columns, 3)).astype(np.float32)
            bands = [Image.fromarray(field[..., c]).resize(SIZE, 3) for c in range(3)]
            pixels = pixels + np.stack([np.asarray(band) for band in bands], -1)
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
        yield file.getvalue()


def sample(folder: Path, count: int) -> Iterator[bytes]:
    """Yield a random sample of the images in ``folder/<class>/``."""
    paths = sorted(folder.glob("*/*"))
    for path in random.Random(0).sample(paths, min(count, len(paths))):
        yield path.read_bytes()


def store(images: Iterable[bytes], root: Path) -> list[bytes]:
    """Write images to ``root`` as class folders and as shards, with arbitrary classes; return them."""
    files = list(images)
    for folder in (*(f"train/{label}" for label in range(CLASSES)), "shards"):
        (root / folder).mkdir(parents=True)
    for shard in range(SHARDS):
        first, stop = (n * len(files) // SHARDS for n in (shard, shard + 1))
        with tarfile.open(root / "shards" / f"train-{shard:04d}.tar", "w") as tar:
            for number in range(first, stop):
                label = str(number % CLASSES)
                (root / "train" / label / f"{number:06d}.jpg").write_bytes(files[number])
                for suffix, part in (("jpg", files[number]), ("cls", label.encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(part)
                    tar.addfile(member, io.BytesIO(part))
    return files


def our_config(
    root: Path, decoder: str, shards: bool, repeats: int, batch_size: int, workers: int
) -> TrainConfig:
    """Return the recipe's configuration for the stored images."""
    data = DataConfig(
        dataset="wds" if shards else "folder",
        path=str(root / "shards" if shards else root),
        train_split=f"train-{{0000..{SHARDS - 1:04d}}}.tar" if shards else "train",
        batch_size=batch_size,
        decoder=decoder,
        aug_repeats=repeats,
        num_workers=workers,
    )
    schedule = ScheduleConfig(epochs=EPOCHS, warmup_epochs=0)
    return fill_from_weights(TrainConfig(model=MODEL, data=data, schedule=schedule), None)


def run_ours(root: Path, **options: Any) -> Iterator[int]:
    """Load as our trainer does; yield 0 once the data is open, then the size of each batch."""
    config = our_config(root, **options)
    data = TrainData(config, open_source(config.data, config.model, training=True), World())
    yield 0
    for step in data.steps(0):
        yield sum(len(images) for images, _ in step.micro_batches)


def run_timm(root: Path, shards: bool, batch_size: int, workers: int) -> Iterator[int]:
    """Load as timm's train.py does, without the device part of its prefetcher; yield as ``run_ours``."""
    if shards:
        count = len(list((root / "train").glob("*/*")))
        dataset = create_dataset(
            "wds/images",
            root=str(root / "shards"),
            split=f"train-{{0000..{SHARDS - 1:04d}}}.tar|{count}",
            is_training=True,
            batch_size=batch_size,
        )
    else:
        dataset = create_dataset("", root=str(root / "train"))
    loader = create_loader(
        dataset, (3, 224, 224), batch_size, num_workers=workers, device=CPU, **RECIPE
    ).loader
    yield 0
    for _ in range(EPOCHS):
        for images, _ in loader:
            yield len(images)


Contestant = Callable[..., Iterator[int]]
BASE = "timm, folder"

CONTESTANTS: dict[str, Contestant] = {
    f"timm, {place}": partial(run_timm, shards=place == "shards") for place in PLACES
} | {
    f"{decoder}, {place}{f', {repeats} repeats' if repeats > 1 else ''}": partial(
        run_ours, decoder=decoder, shards=place == "shards", repeats=repeats
    )
    for decoder in DECODERS
    for place in PLACES
    for repeats in (1, 3)
}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished child processes."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(batches: Iterator[int]) -> tuple[float, float]:
    """Run a loader to its end; return milliseconds of wall time and of CPU time per image."""
    next(batches)  # opens the data
    gc.collect()
    wall, cpu = time.perf_counter(), cpu_seconds()
    count = sum(batches)
    if multiprocessing.active_children():
        raise RuntimeError("data-loading workers still run, so their CPU time is not counted")
    return (1e3 * (time.perf_counter() - wall) / count, 1e3 * (cpu_seconds() - cpu) / count)


def compare(contestants: dict[str, Callable[[], Iterator[int]]], rounds: int) -> list[Row]:
    """Measure every loader once in each round and return their rows."""
    rows = [Row(name, [], []) for name in contestants]
    for _ in range(rounds):
        for row, start in zip(rows, contestants.values(), strict=True):
            wall, cpu = measure(start())
            row.wall_ms.append(wall)
            row.cpu_ms.append(cpu)
    return related(rows)


def related(rows: list[Row]) -> list[Row]:
    """Set each row's ratio to ``BASE``, or to the first row if it is missing, round by round."""
    compared = next((row for row in rows if row.name == BASE), rows[0])
    for row in rows:
        pairs = zip(compared.cpu_ms, row.cpu_ms, strict=True)
        row.ratio = statistics.median(base / cpu for base, cpu in pairs)
    return rows


def differences(files: list[bytes], config: TrainConfig) -> dict[str, Any]:
    """Compare decoded, cropped and augmented pixels with timm's, for the same images and seeds.

    Returns:
        Numbers of the images that differ with Pillow; with torchvision, the share of values that differ after the
        crop, and by how much at most, before RandAugment.
    """
    expected = create_transform((3, 224, 224), **RECIPE)
    plain = {**RECIPE, "auto_augment": None}
    cropped = create_transform((3, 224, 224), **plain, color_jitter=None)
    own = train_transform(config)
    crop = train_transform(replace(config, augment=replace(config.augment, aa=None)))
    different, errors, most = [], 0.0, 0
    for number, content in enumerate(files):
        theirs = Image.open(io.BytesIO(content)).convert("RGB")
        seed_image(number)
        found = own(decode(content, "RGB"))
        seed_image(number)
        if not torch.equal(found, expected(theirs)):
            different.append(number)
        seed_image(number)
        found = crop(decode(content, "RGB", decoder="torchvision")).int()
        seed_image(number)
        error = (found - cropped(theirs).int()).abs()
        errors += (error > 0).float().mean().item()
        most = max(most, int(error.max()))
    return {"different_images": different, "share": errors / len(files), "most": most}


def parts(files: list[bytes], config: TrainConfig) -> dict[str, dict[str, float]]:
    """Return CPU milliseconds of decoding, crop with resize and flip, and RandAugment, per image and decoder."""
    steps = {
        "augmentation": config,
        "crop": replace(config, augment=replace(config.augment, aa=None)),
    }
    found: dict[str, dict[str, float]] = {}
    for decoder in DECODERS:
        times, before = {}, 0.0
        work: dict[str, Callable[[bytes], Any]] = {
            "decoding": lambda content, how=decoder: decode(content, "RGB", decoder=how)
        }
        for name, options in reversed(steps.items()):
            transform = train_transform(options)
            work[name] = lambda content, how=decoder, then=transform: then(
                decode(content, "RGB", decoder=how)
            )
        for name, function in work.items():
            rounds = [1e3 * _timed(function, files) / len(files) for _ in range(3)]
            times[name] = min(rounds) - before
            before = min(rounds)
        found[decoder] = times
    return found


def _timed(function: Callable[[bytes], Any], files: list[bytes]) -> float:
    start = time.process_time()
    for number, content in enumerate(files):
        seed_image(number)
        function(content)
    return time.process_time() - start


def table(rows: list[Row]) -> str:
    """Format rows as Markdown."""
    lines = [
        "| loader | images/s, wall | CPU ms per image | least | images/s and core | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.wall_rate:.0f} | {statistics.median(row.cpu_ms):.2f} "
            f"| {min(row.cpu_ms):.2f} | {row.core_rate:.0f} | {row.ratio:.2f} |"
        )
    return "\n".join(lines)


def part_table(figures: dict[str, Any]) -> str:
    """Format the parts of an image as Markdown."""
    rows = {row["name"]: row["cpu_ms"] for row in list(figures["loaders"].values())[-1]}
    lines = [
        "| decoder | decoding | crop, resize, flip | RandAugment | the rest |",
        "|---|---|---|---|---|",
    ]
    for decoder, times in figures["parts"].items():
        whole = statistics.median(rows[f"{decoder}, folder"])
        rest = whole - sum(times.values())
        cells = (*(times[name] for name in ("decoding", "crop", "augmentation")), rest)
        shares = " | ".join(f"{cell:.2f} ms, {100 * cell / whole:.0f} %" for cell in cells)
        lines.append(f"| {decoder} | {shares} |")
    return "\n".join(lines)


def show(figures: dict[str, Any]) -> int:
    """Print a record; return 1 if an image differs from timm's with Pillow."""
    print(", ".join(f"{name} {value}" for name, value in figures["environment"].items()))
    print(f"images that differ from timm's, with Pillow: {len(figures['different_images'])}")
    print(
        f"with torchvision, {100 * figures['share']:.2f} % of the values differ after the crop, by at "
        f"most {figures['most']} of 255"
    )
    for workers, rows in figures["loaders"].items():
        print(f"\n{workers} workers\n\n{table(related([Row(**row) for row in rows]))}")
    print(f"\n{part_table(figures)}")
    return int(bool(figures["different_images"]))


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--images", type=int, default=512, help="distinct images")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--data", type=Path, help="folder per class to sample images from")
    parser.add_argument("--output", type=Path, help="write the figures there as JSON")
    parser.add_argument("--record", type=Path, help="print such a file, measure nothing")
    args = parser.parse_args(arguments)
    least = max(max(args.num_workers) * args.batch_size, SHARDS)
    if args.images < least:
        parser.error(f"--images must be at least {least}: a batch per worker")
    return args


def environment(args: argparse.Namespace, files: list[bytes]) -> dict[str, Any]:
    """Return the machine, data and versions that the figures depend on."""
    kilobytes = statistics.mean(len(file) for file in files) / 1e3
    return {
        "cores": os.cpu_count(),
        "batch": args.batch_size,
        "images": len(files),
        "kB_per_image": round(kilobytes, 1),
        "data": "sampled" if args.data else "generated",
        "pillow": PIL.__version__,
        "torchvision": torchvision.__version__,
    } | provenance.environment()


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables, write the figures if asked to, and return the exit status."""
    args = parse_args(arguments)
    if args.record:
        return show(json.loads(args.record.read_text()))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = store(sample(args.data, args.images) if args.data else generate(args.images), root)
        config = our_config(root, "pillow", False, 1, 2, 0)
        figures = {"environment": environment(args, files), **differences(files, config)}
        figures |= {"parts": parts(files, config), "loaders": {}}
        for workers in args.num_workers:
            common = {"root": root, "batch_size": args.batch_size, "workers": workers}
            chosen = {name: partial(run, **common) for name, run in CONTESTANTS.items()}
            rows = compare(chosen, args.rounds)
            figures["loaders"][str(workers)] = [dataclasses.asdict(row) for row in rows]
    if args.output:
        write_text(args.output, json.dumps(figures, indent=1) + "\n")
    return show(figures)


if __name__ == "__main__":
    sys.exit(main())
