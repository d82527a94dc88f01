"""Generate data sets of the examples' shapes in the layouts of ADE20K and COCO, for dry runs."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from examples.shapes import Shapes
from vil.training.files import write_atomically, write_text

# ADE20K labels and COCO categories of the kinds of shapes
_LABELS = (1, 75, 120, 150)
_CATEGORIES = (1, 3, 44, 90)


def make_scenes(root: Path, images: int, size: int) -> Path:
    """Write scenes with labels, in ADE20K's layout.

    Args:
        root: Folder to write; files of the same names are replaced.
        images: Number of training images; half as many are written for validation.
        size: Least height and width of an image in pixels.

    Returns:
        The folder.
    """
    for split, count in (("training", images), ("validation", images // 2)):
        for number, (image, found) in enumerate(_pictures(split, count, size)):
            image = image.convert("L") if number == 0 else image  # ADE20K has a few grey images
            _save(image, root / "images" / split / f"ADE_{number:08}.jpg")
            labels = found["mask"].new_tensor([0, *_LABELS])[found["mask"]]
            _save(to_pil_image(labels.byte()), root / "annotations" / split / f"ADE_{number:08}.png")
    return root


def make_objects(root: Path, images: int, size: int) -> Path:
    """Write images with polygons of objects' boxes, in COCO's layout; same arguments as ``make_scenes``."""
    for split, count in (("train2017", images), ("val2017", images // 2)):
        records, annotations = [], []
        for number, (image, found) in enumerate(_pictures(split, count, size)):
            name, (width, height) = f"{number:012}.jpg", image.size
            _save(image, root / split / name)
            records.append({"id": number, "file_name": name, "width": width, "height": height})
            for box, label in zip(found["boxes"].tolist(), found["labels"].tolist(), strict=True):
                left, top, right, bottom = box
                sides = [right - left, bottom - top]
                corners = [left, top, right, top, right, bottom, left, bottom]
                about = {"bbox": [left, top, *sides], "segmentation": [corners], "iscrowd": 0}
                about |= {"category_id": _CATEGORIES[label - 1], "area": sides[0] * sides[1]}
                annotations.append(about | {"image_id": number, "id": len(annotations) + 1})
        categories = [{"id": category, "name": f"shape {category}"} for category in _CATEGORIES]
        table = {"images": records, "annotations": annotations, "categories": categories}
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        write_text(root / "annotations" / f"instances_{split}.json", json.dumps(table))
    return root


def _pictures(split: str, count: int, size: int) -> Iterator[tuple[Image.Image, dict[str, Tensor]]]:
    """Yield images of several sizes, and their shapes."""
    for number in range(count):
        draw = random.Random(f"{split} {number}")
        image, found = Shapes(draw.randrange(1 << 32), 1, draw.randint(size, size * 3 // 2))[0]
        yield to_pil_image(image), found


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "JPEG" if path.suffix == ".jpg" else "PNG"
    write_atomically(path, lambda file: image.save(file, kind))
