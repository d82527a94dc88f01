"""Fashion-MNIST (arXiv 1708.07747) from Debian's package as a folder of images.

apt install dataset-fashion-mnist && python -m experiments.images fashion_mnist
"""

import gzip
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGE = Path("/usr/share/datasets/fashion-mnist")
FOLDER = Path(__file__).resolve().parents[1] / "output" / "fashion_mnist"
PER_CLASS = {"train": ("train", 1000), "val": ("t10k", 200)}
"""The package's name of each part, and how many images of each class are taken, the first ones."""
NAMES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)


def _read(path: Path, header: int) -> np.ndarray:
    """Return the bytes of a file after its header."""
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)


def unpack() -> None:
    """Write the images to ``FOLDER`` unless they are there.

    Raises:
        SystemExit: If the package is not installed.
    """
    for part, (prefix, count) in PER_CLASS.items():
        if (FOLDER / part).is_dir():
            continue
        images, labels = (
            PACKAGE / f"{prefix}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")
        )
        if not images.exists():
            raise SystemExit(f"error: no {images}; run apt install dataset-fashion-mnist")
        pixels, classes = _read(images, 16).reshape(-1, 28, 28), _read(labels, 8)
        whole = FOLDER / f"{part}.part"  # renamed once all images are written
        for number, name in enumerate(NAMES):
            folder = whole / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in np.flatnonzero(classes == number)[:count]:
                Image.fromarray(pixels[i]).save(folder / f"{i:05}.png")
        whole.rename(FOLDER / part)
