"""Time the training loader against timm's: images per second and core, with either decoder.

    python -m lab.benchmarks.loader [--rounds 5] [--num-workers 1 2] [--output FILE]
    python -m lab.benchmarks.loader --record FILE  # the table of a record

The recipe is DeiT's: bicubic random resized crop to 224, flip, RandAugment rand-m9-mstd0.5-inc1.
The main figure is CPU time per image. It covers all data-loading workers and the training process's
share of the loading. On a machine whose cores only load, each core loads 1000 / (CPU ms
per image) images per second. Wall time also depends on other programs of this machine. Each round
runs every loader once, so a drift in the machine's speed affects all equally. A loader's figure is
the median over the rounds. Its ratio is the median of the round-by-round ratios to timm's folder.
Each run starts new workers, and their start is counted.

Both packages mix, normalise and erase on the training device. Repeated augmentation decodes an image
once for its three draws; timm has none in a single process.

The images are generated: smooth random fields with noise, 500 x 375, JPEG of quality 90, 110 kB on
average, like ImageNet's.
"""

import argparse
import dataclasses
import gc
import io
import json
import multiprocessing
import os
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from timm.data import create_dataset, create_loader

from lab.benchmarks import provenance
from vil.training.distributed import World
from vil.training.files import write_text
from vil.training.loader import TrainData
from vil.training.resolve import complete
from vil.training.settings import DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from vil.training.splits import open_source

SIZE = (500, 375)
CLASSES, SHARDS = 4, 16
IMAGES, BATCH = 512, 64
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


def our_config(root: Path, decoder: str, shards: bool, repeats: int, batch_size: int, workers: int) -> TrainConfig:
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
    return TrainConfig(model=MODEL, data=data, schedule=schedule)


def run_ours(root: Path, **options: Any) -> Iterator[int]:
    """Load as our trainer does; yield 0 once the data is open, then the size of each batch."""
    config = our_config(root, **options)
    source = open_source(config.data, config.model.num_classes, training=True)
    data = TrainData(complete(config, None, source, source), source, World())
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
    loader = create_loader(dataset, (3, 224, 224), batch_size, num_workers=workers, device=CPU, **RECIPE).loader
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


def show(figures: dict[str, Any]) -> None:
    """Print a record."""
    print(", ".join(f"{name} {value}" for name, value in figures["environment"].items()))
    for workers, rows in figures["loaders"].items():
        print(f"\n{workers} workers\n\n{table(related([Row(**row) for row in rows]))}")


def environment(files: list[bytes]) -> dict[str, Any]:
    """Return the machine, data and versions that the figures depend on."""
    kilobytes = statistics.mean(len(file) for file in files) / 1e3
    return {
        "cores": os.cpu_count(),
        "batch": BATCH,
        "images": len(files),
        "kB_per_image": round(kilobytes, 1),
        "pillow": PIL.__version__,
        "torchvision": torchvision.__version__,
    } | provenance.environment()


def main() -> None:
    """Measure, print the tables, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, help="write the figures there as JSON")
    parser.add_argument("--record", type=Path, help="print such a file, measure nothing")
    args = parser.parse_args()
    if args.record:
        show(json.loads(args.record.read_text()))
        return
    torch.set_num_threads(1)
    count = max(IMAGES, max(args.num_workers) * BATCH)  # at least a batch for each worker
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        figures = {"environment": environment(store(generate(count), root)), "loaders": {}}
        for workers in args.num_workers:
            common = {"root": root, "batch_size": BATCH, "workers": workers}
            chosen = {name: partial(run, **common) for name, run in CONTESTANTS.items()}
            rows = compare(chosen, args.rounds)
            figures["loaders"][str(workers)] = [dataclasses.asdict(row) for row in rows]
    if args.output:
        write_text(args.output, json.dumps(figures, indent=1) + "\n")
    show(figures)


if __name__ == "__main__":
    main()
