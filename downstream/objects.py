"""Read COCO's objects, and augment them by large-scale jitter.

The folder has ``train2017``, ``val2017`` and ``annotations/instances_{train,val}2017.json``. Classes are
COCO's categories in the order of their numbers, starting from 1; 0 is the background.

Letters: H, W height and width of an image, n objects in it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_convert, masks_to_boxes
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as T
from torchvision.tv_tensors import Image, Mask

from downstream.photos import read_photo
from examples.folders import AnnotatedFolder
from vil.training.errors import DataError

Target = dict[str, Tensor]


class Objects(AnnotatedFolder):
    """Images uint8 (3, H, W), and dicts of labels int64 (n), masks uint8 (n, H, W), boxes, iscrowd and area."""

    def __init__(
        self,
        root: Path,
        split: str,
        transform: Callable[[Tensor, Target], tuple],
        training: bool,
        train: "Objects | None" = None,
    ) -> None:
        """Read the annotations of a split.

        Args:
            root: Folder of the data set.
            split: "train2017" or "val2017".
            transform: Function from an image and its target to a sample.
            training: Exclude crowds, and images without objects.
            train: Training split, whose labels of categories are used; None uses this split's own.

        Raises:
            DataError: If there are no annotations or no images, or some lack what training needs. Also if the training
                split lacks a category.
        """
        path = root / "annotations" / f"instances_{split}.json"
        if not path.is_file():
            raise DataError(f"annotations {path} are missing")
        try:
            super().__init__(root / split, path, masks=True, transforms=transform)
            if train is not None:
                self.number_as(train)
        except ValueError as error:
            raise DataError(str(error)) from error
        self.training = training
        if training:
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
        labels = [self.numbers.index(each["category_id"]) + 1 for each in objects]
        boxes = torch.tensor([each["bbox"] for each in objects], dtype=torch.float32)
        return {
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": torch.stack(masks) if masks else torch.zeros(0, *size, dtype=torch.uint8),
            "boxes": box_convert(boxes.reshape(-1, 4), "xywh", "xyxy"),
            "iscrowd": torch.tensor([each["iscrowd"] for each in objects], dtype=torch.int64),
            "area": torch.tensor([each["area"] for each in objects], dtype=torch.float32),
        }

    def _objects(self, id: int) -> list[dict[str, Any]]:
        found = self.coco.imgToAnns[id]
        return [each for each in found if not each["iscrowd"]] if self.training else found


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


def as_it_is(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Return an image float32 (3, H, W) in [0, 1] and its objects, for validation."""
    return T.to_dtype(image, torch.float32, scale=True), target | {"masks": target["masks"].bool()}


def boxes_of(masks: Tensor) -> Tensor:
    """Return the float32 boxes (n, 4) around non-empty masks (n, H, W), in pixels."""
    boxes = masks_to_boxes(masks)  # these end in the last pixel, not behind it
    return boxes + boxes.new_tensor([0, 0, 1, 1])


def with_certain_masks(detections: Target) -> Target:
    """Return detections with masks bool (n, H, W) instead of probabilities (n, 1, H, W)."""
    return detections | {"masks": detections["masks"][:, 0] > 0.5}


def percentages(precision: dict[str, Tensor]) -> dict[str, float]:
    """Return the average precisions of boxes and masks from torchmetrics' ``MeanAveragePrecision``, in percent."""
    return {
        f"{name}_ap{overlap[1:]}": 100 * precision[f"{kind}_map{overlap}"].item()
        for name, kind in (("box", "bbox"), ("mask", "segm"))
        for overlap in ("", "_50", "_75")
    }
