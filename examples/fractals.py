"""Write a folder of images of fractals: a stand-in for ImageNet without a download.

    python examples/fractals.py output/fractals --classes 1000 --images 1000 --size 224

writes train/<class>/<number>.png and, a twentieth as many, val/<class>/<number>.png. Repeat the command to
write missing images. --seed, class, number, split and size determine classes and images to the bit.

The method follows FractalDB (Kataoka et al., "Pre-training without Natural Images", ACCV 2020,
arXiv:2101.08515). A class is a random iterated function system that fills enough of the image. Its images
vary coefficients, mirror the system, and draw other points in other colours. Unlike FractalDB, every map
contracts under every variation, so no orbit diverges. A coefficient's factor is drawn from a range instead of
five values, and points are blended in colour instead of painted in grey. Random numbers are raw bits of NumPy's
Philox, and all arithmetic is sums, products, quotients and square roots, which IEEE 754 defines to the last bit.
"""

import argparse
import colorsys
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numba import njit
from PIL import Image
from tqdm import tqdm

MAPS = 8  # maximum number of maps of a system; the minimum is 2
VARIATION = 0.2  # an image scales one coefficient of all maps by 1 - VARIATION ... 1 + VARIATION
FILLING_RATE = 0.2  # FractalDB's best
_GRID = 64  # cells per axis that the filling rate is counted over
_POINTS = 4  # per cell of the grid, or per pixel
_LEAST_AREA = 0.01  # minimum of |det|, or else a flat map would never be applied
_SETTLING = 32  # steps that bring an orbit to the attractor
_MARGIN = 0.04  # of the image, on each side of the attractor
# Both ends of each coefficient's variation; by convexity, a map that contracts there contracts in between.
_ENDS = np.concatenate([1 + end * np.eye(4) for end in (-VARIATION, VARIATION)])

Uniform = Callable[..., np.ndarray]


def write(folder: Path, classes: int, counts: Mapping[str, int], size: int, seed: int = 0, jobs: int = 1) -> None:
    """Write the images that a folder lacks.

    Args:
        folder: Receives <split>/<class>/<number>.png.
        classes: Number of classes.
        counts: Number of images of each class in the splits "train" and "val", which have no image in common.
        size: Height and width in pixels, at least 16.
        seed: Seed of the data set; class k depends only on it and on k.
        jobs: Number of processes; each writes one class at a time.
    """
    if size < 16:
        raise ValueError(f"size must be at least 16, got {size}")
    write_class = functools.partial(_write_class, folder, counts, size, seed)
    every = 0.1 if sys.stderr.isatty() else 30.0  # seconds
    with ProcessPoolExecutor(jobs) as pool:
        written = pool.map(write_class, range(classes))
        for _ in tqdm(written, total=classes, unit=" classes", mininterval=every):
            pass
    for split, count in counts.items():
        print(f"{folder / split}: {classes * count:,} images of {classes:,} classes")


def _write_class(folder: Path, counts: Mapping[str, int], size: int, seed: int, label: int) -> None:
    system = find_class(seed, label)
    for split, count in counts.items():
        (folder / split / str(label)).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            path = folder / split / str(label) / f"{number}.png"
            if not path.exists():
                place = (seed, label, number, int(split == "train"))
                image = Image.fromarray(draw(system, size, uniform("fractal", *place)))
                part = path.with_suffix(".part")  # renamed once the image is written
                image.save(part, format="png", compress_level=1)
                part.replace(path)


def uniform(purpose: str, *place: int) -> Uniform:
    """Return a function that draws numbers in [0, 1) of a shape; 64 bits of key name the purpose and place."""
    halves = (f"{name} {place}".encode() for name in (purpose, f"{purpose}, upper half"))
    low, high = (hashlib.blake2b(half, digest_size=4).digest() for half in halves)
    bits = np.random.Philox(key=int.from_bytes(low + high, "little"))
    return lambda *shape: (bits.random_raw(math.prod(shape)) >> np.uint64(11)).reshape(shape) * 2.0**-53


def find_class(seed: int, label: int) -> np.ndarray:
    """Search the first iterated function system that fills enough of its bounding box.

    Returns:
        Array (2 ... 8, 7). Row i holds a, b, c, d, e, f and p of the map (x, y) -> (a x + b y + e, c x + d y + f),
        which the chaos game applies with probability p.
    """
    draws = uniform("fractal class", seed, label)
    while True:
        maps = np.array([_contraction(draws) for _ in range(2 + int(draws() * (MAPS - 1)))])
        a, b, c, d = maps.T[:4]
        areas = np.maximum(abs(a * d - b * c), _LEAST_AREA)
        system = np.column_stack([maps, areas / areas.cumsum()[-1]])
        points, _ = _attractor(system, np.zeros((MAPS, 3)), _POINTS * _GRID**2, draws)
        x, y = np.minimum(points * _GRID, _GRID - 1).astype(np.int64)
        if len(np.unique(y * _GRID + x)) >= FILLING_RATE * _GRID**2:
            return system


def _contraction(draws: Uniform) -> np.ndarray:
    """Draw a, b, c, d, e and f in [-1, 1) until the map contracts under every variation."""
    while True:
        found = 2 * draws(6) - 1
        a, b, c, d = (found[:4] * _ENDS).T
        squares, det = a * a + b * b + c * c + d * d, a * d - b * c
        # Twice the square of the larger singular value of [[a, b], [c, d]].
        if (squares + np.sqrt(np.maximum(squares * squares - 4 * det * det, 0)) < 2).all():
            return found


def _attractor(system: np.ndarray, colours: np.ndarray, count: int, draws: Uniform) -> tuple[np.ndarray, np.ndarray]:
    """Return points (2, count), with their bounding box scaled to [0, 1], and their colours (3, count)."""
    which = np.searchsorted(system[:-1, 6].cumsum(), draws(_SETTLING + count), side="right")
    points, mixed = (found[:, _SETTLING:] for found in _play(system, which, colours))
    low, high = points.min(1, keepdims=True), points.max(1, keepdims=True)
    return (points - low) / np.maximum(high - low, 1e-9), mixed


@njit(cache=True, error_model="numpy")
def _play(system, which, colours):
    """Apply the maps ``which`` to (0, 0); return the orbit's points and colours, each mixed with the last."""
    points, mixed = np.zeros((2, len(which))), np.zeros((3, len(which)))
    for n in range(1, len(which)):
        m = system[which[n]]
        x, y = points[0, n - 1], points[1, n - 1]
        points[0, n], points[1, n] = m[0] * x + m[1] * y + m[4], m[2] * x + m[3] * y + m[5]
        for channel in range(3):
            mixed[channel, n] = (mixed[channel, n - 1] + colours[which[n], channel]) / 2
    return points, mixed


def draw(system: np.ndarray, size: int, draws: Uniform) -> np.ndarray:
    """Draw one image (size, size, 3) of a system: varied, mirrored and coloured at random."""
    varied = system.copy()
    varied[:, int(draws() * 6)] *= 1 + VARIATION * (2 * draws() - 1)
    mirrored = draws(2, 1) < 0.5
    bright, dark = ((0.3, 0.7), (0.7, 0.3)), ((0.0, 0.8), (0.0, 0.3))
    points, mixed = _attractor(varied, _colours(MAPS, *bright, draws), _POINTS * size**2, draws)
    points = np.where(mirrored, 1 - points, points)
    x, y = ((_MARGIN + points * (1 - 2 * _MARGIN)) * size).astype(np.int64)
    # A pixel's mean colour of n points has the weight n / (n + 1) in front of the background.
    add = functools.partial(np.bincount, y * size + x, minlength=size**2)
    first, last = _colours(2, *dark, draws)
    background = first + (last - first) * np.arange(size)[:, None, None] / size
    sums = np.stack([add(light) for light in mixed], -1).reshape(size, size, 3)
    return ((sums + background) / (add().reshape(size, size, 1) + 1)).astype(np.uint8)


def _colours(count: int, saturation: tuple[float, float], value: tuple[float, float], draws: Uniform) -> np.ndarray:
    """Draw colours of any hue, (count, 3) from 0 to 255; each range is its start and its width."""
    starts, widths = zip((0.0, 1.0), saturation, value, strict=True)
    drawn = np.array(starts) + np.array(widths) * draws(count, 3)
    return 255 * np.array([colorsys.hsv_to_rgb(*colour) for colour in drawn.tolist()])


def main() -> None:
    """Write the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--images", type=int, default=1000, help="to train on, of each class")
    parser.add_argument("--size", type=int, default=224, help="height and width in pixels")
    parser.add_argument("--seed", type=int, default=0, help="names the data set")
    parser.add_argument("--jobs", type=int, help="processes; default: one per core")
    args = parser.parse_args()
    counts = {"train": args.images, "val": max(args.images // 20, 1)}
    write(args.folder, args.classes, counts, args.size, args.seed, args.jobs)


if __name__ == "__main__":
    main()
