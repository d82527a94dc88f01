"""Write Fashion-MNIST (arXiv 1708.07747) from Debian's package as folders of images.

    apt-get install dataset-fashion-mnist && python examples/fashion_mnist.py

``output/fashion_mnist_images`` gets 60,000 images in train/ and 10,000 in val/. ``output/fashion_mnist_tuning``
gets training images only: 10,000 to train on and 10,000 more to choose learning rates.
"""

import gzip
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGE = Path("/usr/share/datasets/fashion-mnist")
OUTPUT = Path(__file__).resolve().parents[1] / "output"
PARTS = {
    "fashion_mnist_images/train": ("train", slice(None)),
    "fashion_mnist_images/val": ("t10k", slice(None)),
    "fashion_mnist_tuning/train": ("train", slice(1000)),
    "fashion_mnist_tuning/val": ("train", slice(1000, 2000)),
}
"""Prefix of each part's files in the package, and the slice of images taken from each class."""
NAMES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)


def _read(path: Path, header: int) -> np.ndarray:
    """Return the bytes of a file after its header."""
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)


def unpack() -> None:
    """Write the images unless they exist.

    Raises:
        SystemExit: If the package is not installed.
    """
    for part, (prefix, taken) in PARTS.items():
        if (OUTPUT / part).is_dir():
            continue
        images, labels = (PACKAGE / f"{prefix}-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
        if not images.exists():
            raise SystemExit(f"error: no {images}; run apt-get install dataset-fashion-mnist")
        pixels, classes = _read(images, 16).reshape(-1, 28, 28), _read(labels, 8)
        whole = OUTPUT / f"{part}.part"  # renamed once all images are written
        for number, name in enumerate(NAMES):
            folder = whole / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in np.flatnonzero(classes == number)[taken]:
                Image.fromarray(pixels[i]).save(folder / f"{i:05}.png")
        whole.rename(OUTPUT / part)
        print(f"{OUTPUT / part}: {sum(1 for _ in (OUTPUT / part).glob('*/*'))} images")


if __name__ == "__main__":
    unpack()
