"""Your own data for the examples: folders of images and masks, and COCO's layout of boxes."""

import json
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

IGNORED = 255  # in masks: pixels that are neither learned from nor counted
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


class MaskFolder(Dataset):
    """One split of a folder of images and of masks with a class index in each pixel.

    It has ``images/SPLIT/NAME.jpg`` (or another format), ``masks/SPLIT/NAME.png``, grey or with a
    palette, and ``classes.txt``, the name of a class in each line, that of index 0 first.
    """

    def __init__(self, folder: Path, split: str, transform: Callable = lambda *item: item) -> None:
        """List the images.

        Args:
            folder: The folder.
            split: "train" or "val".
            transform: Of torchvision's v2; gets the image and the dict.

        Raises:
            FileNotFoundError: classes.txt, the images or a mask are not there.
        """
        self.transform = transform
        images = folder / "images" / split
        self.images = sorted(p for p in images.glob("*") if p.suffix.lower() in _SUFFIXES)
        if not self.images:
            raise FileNotFoundError(f"{images} has no images ({', '.join(sorted(_SUFFIXES))})")
        self.masks = [folder / "masks" / split / f"{path.stem}.png" for path in self.images]
        for image, mask in zip(self.images, self.masks, strict=True):
            if not mask.is_file():
                raise FileNotFoundError(f"{mask} is missing, the mask of {image}")
        self.classes = (folder / "classes.txt").read_text().splitlines()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[tv_tensors.Image, dict[str, Tensor]]:
        """Read an image and its mask.

        Returns:
            The image, (3, H, W), uint8; and a dict of the ``mask``, (H, W), int64, class indices and
            255 for pixels to ignore.

        Raises:
            OSError: a file cannot be read.
            ValueError: the mask has another size than the image, colours, or a class too many.
        """
        image, path = _image(self.images[index]), self.masks[index]
        with Image.open(path) as file:
            if file.mode not in ("L", "P"):
                raise ValueError(
                    f"{path} has pixels of mode {file.mode}, must be class indices, mode L or P"
                )
            mask = pil_to_tensor(file)[0].long()
        if mask.shape != image.shape[1:]:
            raise ValueError(
                f"{path} has {mask.shape[1]} x {mask.shape[0]} px, must be as its image "
                f"{self.images[index]}, {image.shape[2]} x {image.shape[1]} px"
            )
        wrong = mask[(mask >= len(self.classes)) & (mask != IGNORED)]
        if len(wrong):
            raise ValueError(
                f"{path} has class {wrong[0]}, must be below the {len(self.classes)} of "
                f"classes.txt, or {IGNORED} to ignore"
            )
        return self.transform(image, {"mask": tv_tensors.Mask(mask)})


class CocoFolder(Dataset):
    """One split of a folder laid out as COCO is, of images and boxes.

    It has ``SPLIT/*`` or ``SPLIT2017/*`` with images, and ``annotations/instances_SPLIT.json`` or
    ``annotations/instances_SPLIT2017.json``. Annotations of crowds are left out, and so are, with a
    warning, boxes without an area.
    """

    def __init__(self, folder: Path, split: str, transform: Callable = lambda *item: item) -> None:
        """Read the annotations.

        Args:
            folder: The folder.
            split: "train" or "val".
            transform: Of torchvision's v2; gets the image and the dict.

        Raises:
            FileNotFoundError: the annotations or an image are not there.
            ValueError: the annotations are no JSON, lack something, or name what is not there.
        """
        self.transform = transform
        self.path = _only(folder / "annotations", f"instances_{split}*.json")
        images = _only(folder, f"{split}*")
        try:
            content = json.loads(self.path.read_text())
            names = {entry["id"]: entry["name"] for entry in content["categories"]}
            files = {entry["id"]: images / entry["file_name"] for entry in content["images"]}
            annotations = [a for a in content["annotations"] if not a.get("iscrowd")]
            self.boxes, empty = self._by_image(annotations, files, sorted(names))
        except KeyError as error:
            raise ValueError(f"{self.path} lacks {error}, which COCO's instances have") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path} is no JSON: {error}") from error
        if empty:
            warnings.warn(f"{self.path}: {empty} boxes without an area are left out", stacklevel=2)
        missing = [path for path in files.values() if not path.is_file()]
        if missing or not files:
            first = missing[0] if missing else "every image"
            raise FileNotFoundError(f"{first} is missing, of {self.path}")
        self.files = list(files.items())
        self.classes = ["background", *(names[number] for number in sorted(names))]

    def _by_image(
        self, annotations: list[dict], files: dict[int, Path], numbers: list[int]
    ) -> tuple[dict[int, list[tuple[list[float], int]]], int]:
        """Return boxes (left, top, width, height) and labels of each image, and how many are empty."""
        boxes, empty = defaultdict(list), 0
        for annotation in annotations:
            name = f"{self.path}: annotation {annotation['id']}"
            box, image = annotation["bbox"], annotation["image_id"]
            if annotation["category_id"] not in numbers:
                raise ValueError(f"{name} has category_id {annotation['category_id']}, not listed")
            if image not in files:
                raise ValueError(f"{name} has image_id {image}, not listed")
            if len(box) != 4 or not all(abs(number) < 1e6 for number in box):
                raise ValueError(f"{name} has bbox {box}, must be left, top, width, height in px")
            if min(box[2:]) > 0:
                boxes[image].append((box, numbers.index(annotation["category_id"]) + 1))
            else:
                empty += 1
        return boxes, empty

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[tv_tensors.Image, dict[str, Tensor]]:
        """Read an image and its boxes.

        Returns:
            The image, (3, H, W), uint8; and a dict of ``boxes``, (N, 4), float32, left, top, right and
            bottom in pixels, and ``labels``, (N,), int64, from 1 on in the order of the category ids.

        Raises:
            OSError: the file cannot be read.
            ValueError: a box lies outside the image.
        """
        number, path = self.files[index]
        image, found = _image(path), self.boxes.get(number, [])
        height, width = image.shape[1:]
        boxes = torch.tensor([box for box, _ in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        over = (boxes < -1) | (boxes > torch.tensor([width, height, width, height]) + 1)
        if over.any():  # by more than rounding
            box = boxes[over.any(1)][0].tolist()
            raise ValueError(
                f"{self.path}: box {box} (left, top, right, bottom) is not within {path}, "
                f"{width} x {height} px"
            )
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
            "labels": torch.tensor([label for _, label in found], dtype=torch.int64),
        }
        return self.transform(image, target)


def _image(path: Path) -> tv_tensors.Image:
    """Read an image in colour, or say which file it was that cannot be read."""
    try:
        with Image.open(path) as file:
            return tv_tensors.Image(pil_to_tensor(file.convert("RGB")))
    except (OSError, Image.DecompressionBombError) as error:
        raise OSError(f"{path} cannot be read: {error}") from error


def _only(folder: Path, pattern: str) -> Path:
    """Return the one thing in a folder that has such a name."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "nothing"
        raise FileNotFoundError(f"{folder} has {names} for {pattern}, must have exactly one")
    return found[0]
