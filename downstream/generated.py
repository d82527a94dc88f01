"""Generate data sets of coloured shapes in the layouts of ADE20K and COCO, for dry runs."""

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from vil.training.files import write_atomically, write_text

# Colours, ADE20K labels and COCO categories of the three kinds of shapes
_COLOURS = ((220, 60, 60), (60, 220, 60), (60, 60, 220))
_LABELS = (1, 75, 150)
_CATEGORIES = (1, 3, 90)

Shape = tuple[int, list[tuple[int, int]]]  # kind and corners


def make_scenes(root: Path, images: int, size: int) -> Path:
    """Write scenes with labels, in ADE20K's layout.

    Args:
        root: Folder to write; files of the same names are replaced.
        images: Number of training images; half as many are written for validation.
        size: Approximate height and width of an image in pixels.

    Returns:
        The folder.
    """
    for split, count in (("training", images), ("validation", images // 2)):
        for number in range(count):
            image, shapes = _picture(random.Random(f"{split} {number}"), size)
            labels = Image.new("L", image.size, 0)
            for kind, corners in shapes:
                ImageDraw.Draw(labels).polygon(corners, fill=_LABELS[kind])
            image = image.convert("L") if number == 0 else image  # ADE20K has a few grey images
            _save(image, root / "images" / split / f"ADE_{number:08}.jpg")
            _save(labels, root / "annotations" / split / f"ADE_{number:08}.png")
    return root


def make_objects(root: Path, images: int, size: int) -> Path:
    """Write images with polygons of objects, in COCO's layout; same arguments as ``make_scenes``."""
    for split, count in (("train2017", images), ("val2017", images // 2)):
        records, annotations = [], []
        for number in range(count):
            image, shapes = _picture(random.Random(f"{split} {number}"), size)
            name, (width, height) = f"{number:012}.jpg", image.size
            _save(image, root / split / name)
            records.append({"id": number, "file_name": name, "width": width, "height": height})
            for kind, corners in shapes:
                across, down = zip(*corners, strict=True)
                left, top, side = min(across), min(down), max(across) - min(across)
                about = {"category_id": _CATEGORIES[kind], "bbox": [left, top, side, side]}
                about |= {"segmentation": [[length for corner in corners for length in corner]]}
                about |= {"area": side**2 / (2 if len(corners) == 3 else 1), "iscrowd": 0}
                annotations.append(about | {"image_id": number, "id": len(annotations) + 1})
        categories = [{"id": category, "name": f"shape {category}"} for category in _CATEGORIES]
        table = {"images": records, "annotations": annotations, "categories": categories}
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        write_text(root / "annotations" / f"instances_{split}.json", json.dumps(table))
    return root


def _picture(draw: random.Random, size: int) -> tuple[Image.Image, list[Shape]]:
    """Return an image and the triangles and quadrangles in it."""
    width, height = (draw.randint(size * 3 // 4, size * 3 // 2) for _ in range(2))
    image, shapes = Image.new("RGB", (width, height), (draw.randrange(256),) * 3), []
    for _ in range(draw.randint(2, 5)):
        kind, side = draw.randrange(3), draw.randint(size // 4, size // 2)
        left, top = draw.randint(0, width - side - 1), draw.randint(0, height - side - 1)
        corners = [(left, top), (left + side, top), (left + side, top + side), (left, top + side)]
        shapes.append((kind, corners[: draw.choice((3, 4))]))
        ImageDraw.Draw(image).polygon(shapes[-1][1], fill=_COLOURS[kind])
    return image, shapes


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "JPEG" if path.suffix == ".jpg" else "PNG"
    write_atomically(path, lambda file: image.save(file, kind))
