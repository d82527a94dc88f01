"""Data sets of random shapes in the layout of ADE20K and COCO, to try a run without them."""

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from vil.training.files import write_atomically, write_text

Shape = list[tuple[int, int]]


def make_scenes(root: Path, images: int, size: int) -> Path:
    """Write scenes with labels, in ADE20K's layout.

    Args:
        root: Folder to write; what is there by the same name is replaced.
        images: To train on; half as many to validate on.
        size: About the height and width of an image, in pixels.

    Returns:
        The folder.
    """
    for split, count in (("training", images), ("validation", images // 2)):
        for number in range(count):
            draw = random.Random(f"{split} {number}")
            shapes, area = _shapes(draw, size)
            image, labels = _picture(draw, area, shapes), Image.new("L", area, 0)
            for shape in shapes:
                ImageDraw.Draw(labels).polygon(shape, fill=draw.randint(1, 150))
            # ADE20K has a few grey images
            image = image.convert("L") if number == 0 else image
            _save(image, root / "images" / split / f"ADE_{number:08}.jpg")
            _save(labels, root / "annotations" / split / f"ADE_{number:08}.png")
    return root


def make_objects(root: Path, images: int, size: int) -> Path:
    """Write images with polygons of objects, in COCO's layout; arguments as of ``make_scenes``."""
    for split, count in (("train2017", images), ("val2017", max(images // 2, 1))):
        records, annotations = [], []
        for number in range(count):
            draw = random.Random(f"{split} {number}")
            shapes, area = _shapes(draw, size)
            name = f"{number:012}.jpg"
            _save(_picture(draw, area, shapes), root / split / name)
            width, height = area
            records += [{"id": number, "file_name": name, "width": width, "height": height}]
            annotations += [_annotation(draw, number, shape) for shape in shapes]
        for number, annotation in enumerate(annotations):
            annotation["id"] = number + 1
        categories = [{"id": category, "name": f"shape {category}"} for category in (1, 3, 90)]
        table = {"images": records, "annotations": annotations, "categories": categories}
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        write_text(root / "annotations" / f"instances_{split}.json", json.dumps(table))
    return root


def _shapes(draw: random.Random, size: int) -> tuple[list[Shape], tuple[int, int]]:
    """Return triangles and quadrangles, and the width and height of their image."""
    width, height = (draw.randint(size * 3 // 4, size * 3 // 2) for _ in range(2))
    shapes = []
    for _ in range(draw.randint(2, 5)):
        side = draw.randint(size // 4, size // 2)
        left, top = draw.randint(0, width - side - 1), draw.randint(0, height - side - 1)
        corners = [(left, top), (left + side, top), (left + side, top + side), (left, top + side)]
        shapes.append(corners[: draw.choice((3, 4))])
    return shapes, (width, height)


def _picture(draw: random.Random, area: tuple[int, int], shapes: list[Shape]) -> Image.Image:
    image = Image.new("RGB", area, _colour(draw))
    for shape in shapes:
        ImageDraw.Draw(image).polygon(shape, fill=_colour(draw))
    return image


def _colour(draw: random.Random) -> tuple[int, int, int]:
    return draw.randrange(256), draw.randrange(256), draw.randrange(256)


def _annotation(draw: random.Random, image: int, shape: Shape) -> dict:
    across, down = zip(*shape, strict=True)
    box = [min(across), min(down), max(across) - min(across), max(down) - min(down)]
    return {
        "image_id": image,
        "category_id": draw.choice((1, 3, 90)),
        "iscrowd": 0,
        "bbox": box,
        "area": box[2] * box[3] / (2 if len(shape) == 3 else 1),
        "segmentation": [[length for corner in shape for length in corner]],
    }


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "JPEG" if path.suffix == ".jpg" else "PNG"
    write_atomically(path, lambda file: image.save(file, kind))
