"""Train a detector on a timm backbone: torchvision's RetinaNet with a feature pyramid network.

    python examples/detect.py
    python examples/detect.py --backbone resnet18 --data FOLDER --img-size 512
    python examples/detect.py --predict photo.jpg --threshold 0.4

By default it learns generated shapes. FOLDER has COCO's layout (``CocoFolder`` in folders.py). AP is COCO's
mean over overlaps of 0.5 to 0.95, and AP50 is the AP at 0.5, both on held-out images at ``--img-size``.
``--predict`` uses the model that was trained with the same ``--output``, and draws boxes into photographs of any size.
"""

from training import backbone, batches, fit, options, parse

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import FeaturePyramidNetwork

from folders import CocoFolder
from pictures import draw_boxes, paint_boxes
from prediction import add_predict, predict_photos

Targets = list[dict[str, Tensor]]  # boxes (N, 4) in pixels, labels (N,), and scores if predicted
SHOWN = 8  # images in picture.png
_norm = partial(nn.GroupNorm, 8)


class Pyramid(nn.Module):
    """Feature pyramid of one width on a backbone's maps of stride 8 and more; bfloat16 on GPUs."""

    def __init__(self, features: nn.Module, out_channels: int = 64) -> None:
        """Add a feature pyramid network to a timm model made with ``features_only``."""
        super().__init__()
        self.features, self.out_channels = features, out_channels
        self.strides = [s for s in features.feature_info.reduction() if s >= 8]
        channels = features.feature_info.channels()[-len(self.strides) :]
        self.fpn = FeaturePyramidNetwork(channels, out_channels, norm_layer=_norm)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return maps, (B, out_channels, H, W), float32, finest first, of images (B, 3, H, W)."""
        device = images.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            maps = self.features(images)[-len(self.strides) :]
            maps = self.fpn({str(stride): m for stride, m in zip(self.strides, maps, strict=True)})
        return {stride: m.float() for stride, m in maps.items()}


def main() -> None:
    """Train, and save log, weights and a picture; or predict."""
    parser = options(__doc__, "detect", epochs=3)
    add_predict(parser)
    parser.add_argument("--threshold", type=float, default=0.5, help="lowest score of a box that is drawn, 0 to 1")
    args = parse(parser)
    if not 0 <= args.threshold <= 1:
        parser.error(f"--threshold must be 0 to 1, got {args.threshold:g}")
    if args.predict:
        predict_photos(args, detector, partial(paint, args.classes, args.threshold))
        return
    torch.manual_seed(args.seed)
    train, val = batches(args, CocoFolder, listed)
    model = detector(args, len(val.dataset.classes)).to(args.device)
    loss = partial(loss_of, model, args.device)
    metric = partial(average_precision, model, val, args.device)
    fit(args, model, model.backbone.features, train, loss, metric, val.dataset.classes)
    images, targets = (part[:SHOWN] for part in next(iter(val)))
    with torch.inference_mode():
        found = predict(model, args.device, images)
    draw_boxes(args.output / "picture.png", images, targets, found, val.dataset.classes, args.threshold)


def listed(items: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[list[Tensor], Targets]:
    """Return a batch for torchvision's detectors: a list of images in 0 to 1, and their targets."""
    targets = [{key: found[key] for key in ("boxes", "labels")} for _, found in items]
    return [image for image, _ in items], targets


def detector(args: argparse.Namespace, num_classes: int) -> RetinaNet:
    """Return the model that the command line asks for; the smallest anchors are four strides long."""
    pyramid = Pyramid(backbone(args))
    sizes = tuple(tuple(4 * s * 2 ** (k / 3) for k in range(3)) for s in pyramid.strides)
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    head = RetinaNetHead(pyramid.out_channels, 9, num_classes, norm_layer=_norm)
    images = dict.fromkeys(("min_size", "max_size"), args.img_size)
    images |= {"image_mean": args.mean, "image_std": args.std}
    made = {"anchor_generator": anchors, "head": head, "detections_per_img": 100}
    return RetinaNet(pyramid, num_classes, **images, **made)


def loss_of(model: nn.Module, device: str, images: list[Tensor], targets: Targets) -> Tensor:
    """Return the loss of a batch."""
    targets = [{key: value.to(device) for key, value in found.items()} for found in targets]
    return sum(model([image.to(device) for image in images], targets).values())


def predict(model: nn.Module, device: str, images: list[Tensor]) -> Targets:
    """Return the detections in images, on the CPU."""
    found = model([image.to(device) for image in images])
    return [{key: value.cpu() for key, value in one.items()} for one in found]


@torch.inference_mode()
def average_precision(model: nn.Module, val: DataLoader, device: str) -> dict[str, float]:
    """Return AP and AP50 of held-out images."""
    metric = MeanAveragePrecision(backend="pycocotools")
    for images, targets in val:
        metric.update(predict(model, device, images), targets)
    result = metric.compute()
    return {"ap": result["map"].item(), "ap50": result["map_50"].item()}


def paint(classes: list[str], threshold: float, model: nn.Module, photo: Tensor, images: Tensor, path: Path) -> str:
    """Save a photograph with its predicted boxes of at least a score; return classes and scores in words."""
    (found,) = predict(model, images.device, list(images))
    sure = {key: value[found["scores"] >= threshold] for key, value in found.items()}
    scale = [own / side for own, side in zip(photo.shape[:0:-1], images.shape[:1:-1], strict=True)]  # of x and y
    sure["boxes"] = sure["boxes"] * torch.tensor(2 * scale)
    paint_boxes(path, photo, sure, classes)
    pairs = zip(sure["labels"].tolist(), sure["scores"].tolist(), strict=True)
    return ", ".join(f"{classes[label]} {score:.2f}" for label, score in pairs)


if __name__ == "__main__":
    main()
