"""Read COCO's objects, augment them by large-scale jitter, and compute average precision.

The folder has ``train2017``, ``val2017`` and ``annotations/instances_{train,val}2017.json``. Classes are
COCO's categories in the order of their numbers, starting from 1; 0 is the background.

Letters: H, W height and width of an image, n objects in it.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torchvision.datasets import CocoDetection
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as T
from torchvision.tv_tensors import Image, Mask

from downstream.photos import read_photo
from vil.training.errors import DataError

Target = dict[str, Tensor]
_MASK = 0.5  # minimum probability of an object's pixel


class Objects(CocoDetection):
    """Images uint8 (3, H, W), and dicts of labels int64 (n), masks uint8 (n, H, W) and the image's number.

    Crowds are excluded.
    """

    def __init__(
        self,
        root: Path,
        split: str,
        transform: Callable[[Tensor, Target], tuple],
        with_objects: bool,
    ) -> None:
        """Read the annotations of a split.

        Args:
            root: Folder of the data set.
            split: "train2017" or "val2017".
            transform: Function from an image and its target to a sample.
            with_objects: Exclude images without objects, as in training.

        Raises:
            DataError: If there are no annotations or no images.
        """
        path = root / "annotations" / f"instances_{split}.json"
        if not path.is_file():
            raise DataError(f"annotations {path} are missing")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints timings
            super().__init__(root / split, path, transforms=transform)
        self.categories = sorted(self.coco.cats)
        if with_objects:
            self.ids = [number for number in self.ids if self._objects(number)]
        if not self.ids:
            raise DataError(f"{path} has no images")

    def _load_image(self, id: int) -> Tensor:
        about = self.coco.imgs[id]
        return read_photo(Path(self.root) / about["file_name"], (about["height"], about["width"]))

    def _load_target(self, id: int) -> Target:
        size = (self.coco.imgs[id][side] for side in ("height", "width"))
        objects = self._objects(id)
        masks = [torch.from_numpy(self.coco.annToMask(each)) for each in objects]
        labels = [self.categories.index(each["category_id"]) + 1 for each in objects]
        return {
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": torch.stack(masks) if masks else torch.zeros(0, *size, dtype=torch.uint8),
            "image": torch.tensor(id),
        }

    def _objects(self, id: int) -> list[dict[str, Any]]:
        return [each for each in self.coco.imgToAnns[id] if not each["iscrowd"]]


class Jitter:
    """Large-scale jitter: scale by 0.1 to 2 relative to the size that fits, crop, mirror.

    Simple Copy-Paste is a Strong Data Augmentation Method for Instance Segmentation (CVPR 2021), Section 3.
    """

    def __init__(self, size: int) -> None:
        """Create the augmentation.

        Args:
            size: Maximum height and width of the result, which is not padded.
        """
        self.size = size
        self.scale = v2.ScaleJitter((size, size), (0.1, 2.0))

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Return an image float32 (3, h, w) in [0, 1] and its remaining objects, with boxes (n, 4)."""
        size = self.scale.make_params([image])["size"]
        image = Image(T.resize(image, size))
        # NEAREST takes the upper left pixel, which shifts masks to the right and down.
        masks = Mask(T.resize(target["masks"], size, v2.InterpolationMode.NEAREST_EXACT))
        crop = v2.RandomCrop([min(self.size, length) for length in image.shape[1:]])
        image, masks = v2.RandomHorizontalFlip()(*crop(image, masks))
        seen = (masks != 0).flatten(1).any(1)
        masks = masks.as_subclass(Tensor)[seen]
        target = {"labels": target["labels"][seen], "masks": masks, "boxes": boxes_of(masks)}
        return T.to_dtype(image.as_subclass(Tensor), torch.float32, scale=True), target


def as_it_is(image: Tensor, target: Target) -> tuple[Tensor, int]:
    """Return an image float32 (3, H, W) in [0, 1] and its number, for validation."""
    return T.to_dtype(image, torch.float32, scale=True), int(target["image"])


def boxes_of(masks: Tensor) -> Tensor:
    """Return the float32 boxes (n, 4) around non-empty masks (n, H, W), in pixels."""
    boxes = masks_to_boxes(masks)  # these end in the last pixel, not behind it
    return boxes + boxes.new_tensor([0, 0, 1, 1])


def found(number: int, categories: list[int], detections: Target) -> list[dict[str, Any]]:
    """Convert the detections of an image to COCO's format.

    Args:
        number: Number of the image.
        categories: COCO's numbers of classes 1, 2, ...
        detections: torchvision's boxes (n, 4), scores (n), labels (n) and masks (n, 1, H, W).

    Returns:
        One dict per detection: image_id, category_id, score, bbox (left, top, width, height), segmentation (RLE).
    """
    boxes = detections["boxes"].cpu().clone()
    boxes[:, 2:] -= boxes[:, :2]
    rows = []
    columns = (boxes.tolist(), detections["scores"].tolist(), detections["labels"].tolist())
    for box, score, label, mask in zip(*columns, detections["masks"], strict=True):
        pixels = np.asfortranarray((mask[0] > _MASK).cpu().numpy().astype(np.uint8))
        code = rle.encode(pixels)
        rows.append(
            {
                "image_id": number,
                "category_id": categories[label - 1],
                "score": score,
                "bbox": box,
                "segmentation": code | {"counts": code["counts"].decode()},
            }
        )
    return rows


def average_precision(
    coco: COCO, rows: list[dict[str, Any]], images: list[int]
) -> dict[str, float]:
    """Return COCO's average precision of boxes and masks, in percent.

    Args:
        coco: Annotations.
        rows: Results of ``found`` for all images.
        images: Numbers of the evaluated images.
    """
    figures = {}
    with contextlib.redirect_stdout(io.StringIO()):
        results = coco.loadRes(rows) if rows else None
        for kind, name in (("bbox", "box"), ("segm", "mask")):
            ap = [0.0, 0.0, 0.0]
            if results is not None:
                evaluation = COCOeval(coco, results, kind)
                evaluation.params.imgIds = images
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
                ap = [100 * float(value) for value in evaluation.stats[:3]]
            figures |= dict(zip((f"{name}_ap", f"{name}_ap50", f"{name}_ap75"), ap, strict=True))
    return figures
