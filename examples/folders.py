"""Your own data for the examples: folders of images and masks, and COCO's layout of boxes."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection, VisionDataset
from torchvision.transforms.v2.functional import pil_to_tensor

IGNORED = 255  # in masks: pixels that are neither learned from nor counted
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


class MaskFolder(VisionDataset):
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
        super().__init__(folder, transforms=transform)
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
            mode, mask = file.mode, pil_to_tensor(file)[0].long()
        most = len(self.classes) - 1
        wrong = mask[(mask > most) & (mask != IGNORED)].unique().tolist()
        if mode not in ("L", "P") or mask.shape != image.shape[1:] or wrong:
            raise ValueError(
                f"{path} must have mode L or P, the size {tuple(image.shape[1:])} of its image, and "
                f"classes up to {most} or {IGNORED} to ignore, got {mode}, {tuple(mask.shape)}, {wrong}"
            )
        return self.transforms(image, {"mask": tv_tensors.Mask(mask)})


class CocoFolder(CocoDetection):
    """One split of a folder laid out as COCO is, of images and boxes.

    It has ``SPLIT/*`` or ``SPLIT2017/*`` with images, and ``annotations/instances_SPLIT.json`` or
    ``annotations/instances_SPLIT2017.json``. Annotations of crowds and boxes without an area are left out.

    An item is the image, (3, H, W), uint8; and a dict of ``boxes``, (N, 4), float32, left, top, right
    and bottom in pixels, and ``labels``, (N,), int64, from 1 on in the order of the category ids.
    """

    def __init__(self, folder: Path, split: str, transform: Callable = lambda *item: item) -> None:
        """Read the annotations.

        Args:
            folder: The folder.
            split: "train" or "val".
            transform: Of torchvision's v2; gets the image and the dict.

        Raises:
            FileNotFoundError: the folder has no annotations or no images of the split.
        """
        path = _only(folder / "annotations", f"instances_{split}*.json")
        with contextlib.redirect_stdout(io.StringIO()):  # it tells how long it took
            super().__init__(_only(folder, f"{split}*"), path, transforms=transform)
        self.numbers = sorted(self.coco.cats)
        self.classes = ["background", *(self.coco.cats[n]["name"] for n in self.numbers)]

    def _load_image(self, id: int) -> tv_tensors.Image:
        return _image(Path(self.root) / self.coco.imgs[id]["file_name"])

    def _load_target(self, id: int) -> dict[str, Tensor]:
        found = [
            one
            for one in super()._load_target(id)
            if not one.get("iscrowd") and min(one["bbox"][2:]) > 0
        ]
        boxes = torch.tensor([one["bbox"] for one in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        size = self.coco.imgs[id]["height"], self.coco.imgs[id]["width"]
        labels = [self.numbers.index(one["category_id"]) + 1 for one in found]
        return {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }


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
