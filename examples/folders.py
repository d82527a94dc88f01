"""Read your own data in the examples: folders of images and masks, or boxes in COCO's layout."""

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection, VisionDataset
from torchvision.transforms.v2.functional import pil_to_tensor

IGNORED = 255  # in masks: pixels that count neither in the loss nor in the metric
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


class MaskFolder(VisionDataset):
    """One split of a folder of images and masks with a class index in each pixel.

    The folder has ``images/SPLIT/NAME.jpg`` (or another format) and ``masks/SPLIT/NAME.png``, grey or
    with a palette. ``classes.txt`` has a class name in each line, starting with index 0.
    """

    def __init__(self, folder: Path, split: str, transform: Callable = lambda *item: item) -> None:
        """List the images.

        Args:
            folder: The folder.
            split: "train" or "val".
            transform: torchvision v2 transform of the image and the dict.

        Raises:
            FileNotFoundError: If classes.txt, the images or a mask are missing.
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
            The image, (3, H, W), uint8, and a dict with the ``mask``, (H, W), int64: class indices, and
            255 for pixels to ignore.

        Raises:
            OSError: If a file cannot be read.
            ValueError: If the mask's mode is not L or P, its size not the image's, or a class too high.
        """
        mask = read_mask(self.masks[index], len(self.classes) - 1, IGNORED)
        image = read_image(self.images[index], tuple(mask.shape))
        return self.transforms(image, {"mask": tv_tensors.Mask(mask.long())})


class AnnotatedFolder(CocoDetection):
    """Images with annotations as labelling programs write them, some of which leave out entries.

    Labels count from 1 in the order of ``numbers``, the category ids. ``classes`` has a name for each label.
    """

    def __init__(self, folder: Path, path: Path, masks: bool = False, **arguments: object) -> None:
        """Read the annotations, and fill in ``iscrowd`` (0) and ``area`` (of the mask, else of the box).

        Args:
            folder: Folder of the images.
            path: JSON file of the annotations.
            masks: Whether each object needs a segmentation.
            **arguments: Arguments of ``CocoDetection``.

        Raises:
            ValueError: If an image or an annotation lacks anything else; with the file and its id.
        """
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints timings
                super().__init__(folder, path, **arguments)
            self.path, self.numbers = path, sorted(self.coco.cats)
            self.classes = ["background", *(self.coco.cats[n]["name"] for n in self.numbers)]
        except KeyError as error:
            raise ValueError(f"{path}: an image, annotation or category has no {error}") from error
        for number, image in self.coco.imgs.items():
            for key in {"file_name", "height", "width"} - image.keys():
                raise ValueError(f"{path}: image {number} has no {key}")
        for number, one in self.coco.anns.items():
            if problem := self._problem(one, masks):
                raise ValueError(f"{path}: annotation {number} {problem}")
            one["iscrowd"] = one.get("iscrowd") or 0
            if one.get("area") is None:
                masked, (_, _, width, height) = one.get("segmentation"), one["bbox"]
                one["area"] = float(self.coco.annToMask(one).sum()) if masked else width * height

    def number_as(self, train: "AnnotatedFolder") -> None:
        """Give each category the label that it has in training, whose annotations may list more categories.

        Raises:
            ValueError: If training lacks a category, or has another name for its id.
        """
        own, known = ({(number, about["name"]) for number, about in data.coco.cats.items()} for data in (self, train))
        if own - known:
            raise ValueError(
                f"{self.path} must have only categories (id, name) of {train.path}, got also {sorted(own - known)}"
            )
        self.numbers, self.classes = train.numbers, train.classes

    def _problem(self, one: dict, masks: bool) -> str:
        box, parts = one.get("bbox"), one.get("segmentation")
        if one["image_id"] not in self.coco.imgs:
            return f"is of image {one['image_id']}, which is not listed"
        if one.get("category_id") not in self.coco.cats:
            return f"has category {one.get('category_id')}, which is not listed"
        if not isinstance(box, list) or [isinstance(n, int | float) for n in box] != [True] * 4:
            return f"needs bbox, four numbers: left, top, width and height, got {box}"
        if isinstance(parts, list):
            if any(len(part) < 6 or len(part) % 2 for part in parts) or (masks and not parts):
                return "needs a segmentation of polygons, each with at least three points"
        elif masks and not isinstance(parts, dict):
            return f"needs a segmentation, got {parts}"
        return ""


class CocoFolder(AnnotatedFolder):
    """One split of a folder of images and boxes in COCO's layout.

    The folder has images in ``SPLIT/*`` or ``SPLIT2017/*``, and ``annotations/instances_SPLIT.json`` or
    ``annotations/instances_SPLIT2017.json``. Crowd annotations and boxes without an area are left out.

    An item is the image, (3, H, W), uint8, and a dict. ``boxes``, (N, 4), float32, are left, top, right and
    bottom in pixels. ``labels``, (N,), int64, count from 1 in the order of the category ids.
    """

    def __init__(self, folder: Path, split: str, transform: Callable = lambda *item: item) -> None:
        """Read the annotations.

        Args:
            folder: The folder.
            split: "train" or "val".
            transform: torchvision v2 transform of the image and the dict.

        Raises:
            FileNotFoundError: If annotations or images of the split are missing or ambiguous.
            ValueError: Same as in ``AnnotatedFolder``.
        """
        path = _only(folder / "annotations", f"instances_{split}*.json")
        super().__init__(_only(folder, f"{split}*"), path, transforms=transform)

    def _load_image(self, id: int) -> tv_tensors.Image:
        about = self.coco.imgs[id]
        return read_image(Path(self.root) / about["file_name"], (about["height"], about["width"]))

    def _load_target(self, id: int) -> dict[str, Tensor]:
        found = [one for one in super()._load_target(id) if not one["iscrowd"]]
        found = [one for one in found if min(one["bbox"][2:]) > 0]
        boxes = torch.tensor([one["bbox"] for one in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        size = self.coco.imgs[id]["height"], self.coco.imgs[id]["width"]
        labels = [self.numbers.index(one["category_id"]) + 1 for one in found]
        return {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }


def read_mask(path: Path, most: int, *others: int) -> Tensor:
    """Read class indices, (H, W), uint8, from a grey image or from one with a palette.

    Args:
        path: Image file.
        most: Highest class.
        *others: Values above it that are also allowed.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If its mode is not L or P, or it has other values.
    """
    try:
        with Image.open(path) as file:
            mode, mask = file.mode, pil_to_tensor(file)[0]
    except (OSError, Image.DecompressionBombError) as error:
        raise OSError(f"cannot read {path}: {error}") from error
    if mode not in ("L", "P"):
        raise ValueError(f"{path} must have mode L or P, with a class in each pixel, got {mode}")
    if wrong := {*mask[mask > most].unique().tolist()} - {*others}:
        allowed = "".join(f" or {value}" for value in others)
        raise ValueError(f"{path} must have classes from 0 to {most}{allowed}, got {sorted(wrong)}")
    return mask


def read_image(path: Path, size: tuple[int, int]) -> tv_tensors.Image:
    """Read an image as RGB, in the orientation in which it has the size (H, W) of its annotations.

    A camera held sideways stores a photograph sideways, with an EXIF orientation. Most annotations are for the upright
    photograph, some for the stored one; if both have this size, it is the upright one.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it has another size.
    """
    upright, stored = _decoded(path)
    fitting = [image for image in (upright, stored) if (image.height, image.width) == size]
    if not fitting:
        raise ValueError(
            f"{path} has {upright.height} x {upright.width} pixels, but its annotations are for {size[0]} x {size[1]}"
        )
    return tv_tensors.Image(pil_to_tensor(fitting[0]))


def read_photo(path: Path) -> tv_tensors.Image:
    """Read a photograph of any size as RGB, upright, (3, H, W), uint8.

    Raises:
        OSError: If the file cannot be read.
    """
    return tv_tensors.Image(pil_to_tensor(_decoded(path)[0]))


def find_photos(paths: Sequence[Path]) -> dict[Path, Path]:
    """Find photographs.

    Args:
        paths: Image files, and folders whose images are taken with those of their subfolders.

    Returns:
        The path of each photograph, by a relative path with the suffix .png for its result.

    Raises:
        FileNotFoundError: If a path does not exist, or a folder has no images.
        ValueError: If two photographs would have the same result.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; expected an image or a folder of images")
        images = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES) if path.is_dir() else [path]
        if not images:
            raise FileNotFoundError(f"{path} has no images ({', '.join(sorted(_SUFFIXES))})")
        for image in images:
            name = (image.relative_to(path) if path.is_dir() else Path(image.name)).with_suffix(".png")
            if found.setdefault(name, image) != image:
                raise ValueError(f"{found[name]} and {image} would both be written to {name}; rename one of them")
    return found


def _decoded(path: Path) -> tuple[Image.Image, Image.Image]:
    """Return an image as RGB, turned by its EXIF orientation and as it is stored; errors of ``read_photo``."""
    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file).convert("RGB"), file.convert("RGB")
    except Exception as error:  # decoders raise many types for broken files
        raise OSError(f"cannot read {path}: {error}") from error


def _only(folder: Path, pattern: str) -> Path:
    """Return the only path in a folder that matches a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "nothing"
        raise FileNotFoundError(f"{folder} must have exactly one {pattern}, found {names}")
    return found[0]
