"""Time fractals as training data against photographs: images per second of one core, and classes.

    python -m benchmarks.fractals [--images 400] [--rounds 5] [--output FILE] [--sheet FILE.png]

A fractal is computed, read and decoded at the size wanted. A photograph, a JPEG file of 500 x 375 as
loader.py generates them, is decoded and has a random crop resized to that size: what feeding ImageNet
costs before anything else is done to an image. Both are given in CPU time of this one process. Every
round times each in turn, so that a drift of the machine's speed hits all alike; figures are medians
over the rounds, ratios medians of the round-by-round ratios. Compiling is not counted. --sheet draws
instances (columns) of classes (rows).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation

from benchmarks.loader import generate
from benchmarks.provenance import environment
from vil.training.data.draws import seed_image
from vil.training.data.fractals import FractalSource, find_classes
from vil.training.data.sources import decode
from vil.training.files import write_text

SIZES = (64, 128, 224)
CLASSES, SEARCHED = 100, 1000
SHEET = (6, 8, 80)  # classes, instances, pixels of each


def rate(function: Callable[[int], Any], count: int) -> float:
    """Return how often a core calls a function of a number in a second."""
    start = time.process_time()
    for number in range(count):
        function(number)
    return count / (time.process_time() - start)


def read_fractals(size: int) -> Callable[[int], Image.Image]:
    """Return a function that computes and decodes the image of a number."""
    source = FractalSource(0, CLASSES, 1000, size, training=True)
    return lambda number: decode(source.read(number), "RGB")


def read_photographs(files: list[bytes], size: int) -> Callable[[int], Image.Image]:
    """Return a function that decodes a file and crops it as in training."""
    crop = RandomResizedCropAndInterpolation(size, interpolation="bicubic")
    return lambda number: crop(decode(files[number % len(files)], "RGB"))


def search_rate(count: int) -> float:
    """Return the classes that a core finds in a second."""
    find_classes.cache_clear()
    start = time.process_time()
    find_classes(0, count)
    return count / (time.process_time() - start)


def measure(images: int, rounds: int) -> dict[str, Any]:
    """Return classes per second, and images per second of each kind and size."""
    files = list(generate(min(images, 64)))
    readers = {size: (read_fractals(size), read_photographs(files, size)) for size in SIZES}
    found, taken = [], {size: [] for size in SIZES}
    for _ in range(rounds):
        found.append(search_rate(SEARCHED))
        for size, kinds in readers.items():
            seed_image(0)
            taken[size].append([rate(kind, images) for kind in kinds])
    return {
        "classes_per_second": statistics.median(found),
        "sizes": [
            {
                "size": size,
                "fractals": statistics.median(ours for ours, _ in rates),
                "photographs": statistics.median(theirs for _, theirs in rates),
                "ratio": statistics.median(ours / theirs for ours, theirs in rates),
            }
            for size, rates in taken.items()
        ],
    }


def table(figures: dict[str, Any]) -> str:
    """Format the figures as Markdown."""
    lines = ["| pixels | fractals/s | photographs/s | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {row['size']} | {row['fractals']:.0f} | {row['photographs']:.0f} | {row['ratio']:.1f} |"
        for row in figures["sizes"]
    ]
    return "\n".join([*lines, "", f"classes found per second: {figures['classes_per_second']:.0f}"])


def contact_sheet(classes: int, instances: int, size: int) -> Image.Image:
    """Draw the first classes, a row each, and their first training images."""
    source = FractalSource(0, classes, instances, size, training=True)
    images = [np.asarray(decode(source.read(i), "RGB")) for i in range(source.num_images)]
    grid = np.stack(images).reshape(instances, classes, size, size, 3)
    pixels = grid.transpose(1, 2, 0, 3, 4).reshape(classes * size, instances * size, 3)
    return Image.fromarray(pixels)


def main(arguments: list[str] | None = None) -> None:
    """Print the table and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--images", type=int, default=400, help="images of each kind, size and round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures there as JSON")
    parser.add_argument("--sheet", type=Path, help="write a sheet of images there as PNG")
    args = parser.parse_args(arguments)
    for name in ("images", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    figures = measure(args.images, args.rounds)
    print(table(figures))
    if args.output:
        settings = {"images": args.images, "rounds": args.rounds, "classes": CLASSES}
        content = {"environment": environment(), "settings": settings, **figures}
        write_text(args.output, json.dumps(content, indent=1) + "\n")
    if args.sheet:
        args.sheet.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(*SHEET).save(args.sheet, optimize=True)


if __name__ == "__main__":
    main()
