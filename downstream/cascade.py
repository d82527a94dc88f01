"""Cascade Mask R-CNN with ViTDet's heads, of torchvision's parts.

Papers:
    Cascade R-CNN: Delving into High Quality Object Detection (CVPR 2018): three stages of heads, each of which
    gets the boxes of the one before and learns from those that overlap an object more
    Exploring Plain Vision Transformer Backbones for Object Detection (ViTDet, ECCV 2022): no path from level
    to level, heads with layer norm

torchvision has R-CNN with one stage. Where its parts and detectron2's differ, the README says so.

Letters: B images, N boxes of all of them, K classes and the background, which is class 0.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

CHANNELS = 256
OVERLAPS = (0.5, 0.6, 0.7)
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
_LEVELS = ["0", "1", "2", "3"]  # of the five, those that heads look at
_STRIDE = 4  # of the finest
_HIDDEN = 1024
# Boxes that training looks at in an image, and the most of them that are objects
_SAMPLES, _POSITIVE = 512, 0.25
_SCORE, _NMS, _DETECTIONS = 0.05, 0.5, 100

Boxes = list[Tensor]
Target = dict[str, Tensor]


class Necks(nn.Module):
    """Maps of a backbone brought to 256 channels, each by itself, and one of stride 64."""

    def __init__(self, features: nn.Module) -> None:
        """Put convolutions on a backbone.

        Args:
            features: Made by ``make_features``.
        """
        super().__init__()
        self.features = features
        self.necks = nn.ModuleList(_neck(dim) for dim in features.feature_info.channels())
        self.last = LastLevelMaxPool()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return five maps float32 (B, 256, h, w) of images (B, 3, H, W), the finest first.

        torchvision computes anchors in the dtype of the maps, and bfloat16 has steps of 4 px at 1000 px.
        """
        maps = [
            neck(each).float() for neck, each in zip(self.necks, self.features(images), strict=True)
        ]
        maps, names = self.last(maps, maps, list(_LEVELS))
        return OrderedDict(zip(names, maps, strict=True))


def _neck(dim: int) -> nn.Sequential:
    layers = []
    for kernel, channels in ((1, dim), (3, CHANNELS)):
        conv = nn.Conv2d(channels, CHANNELS, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_uniform_(conv.weight, a=1)
        layers += [conv, LayerNorm2d(CHANNELS)]
    return nn.Sequential(*layers)


class Proposer(RPNHead):
    """torchvision's, whose boxes are float32 in mixed precision, too."""

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return what torchvision's does: objectness and codes of boxes for each map."""
        objectness, codes = super().forward(maps)
        return [each.float() for each in objectness], [each.float() for each in codes]


class Pool(MultiScaleRoIAlign):
    """torchvision's, with the strides that the maps have.

    torchvision's guesses them for good from the first images, which jitter may have made much smaller than
    what they are padded to.
    """

    def __init__(self, size: int) -> None:
        """Create a pool.

        Args:
            size: Height and width of what is cut out.
        """
        super().__init__(_LEVELS, size, sampling_ratio=0)

    def forward(self, maps: dict[str, Tensor], boxes: Boxes, sizes: list) -> Tensor:
        """Return what is in boxes (n, 4) of each image, (N, 256, size, size)."""
        height, width = maps[_LEVELS[0]].shape[-2:]
        return super().forward(maps, boxes, [(height * _STRIDE, width * _STRIDE)])


class BoxPredictor(nn.Module):
    """Scores of each class, and codes of one box for all of them."""

    def __init__(self, classes: int) -> None:
        """Create the layers.

        Args:
            classes: K, with the background.
        """
        super().__init__()
        self.scores = nn.Linear(_HIDDEN, classes)
        self.codes = nn.Linear(_HIDDEN, 4)
        for layer, std in ((self.scores, 0.01), (self.codes, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores (N, K) and codes (N, 4), float32, of what the head makes (N, 1024)."""
        return self.scores(x).float(), self.codes(x).float()


class Stage(RoIHeads):
    """The heads of one stage of the cascade, with its overlap and its code of boxes."""

    def __init__(self, pool: nn.Module, overlap: float, weights: tuple, classes: int) -> None:
        """Create a stage.

        Args:
            pool: Cuts boxes out of the maps; shared by all stages.
            overlap: With an object, from which on a box is its.
            weights: Of the four numbers that encode a box.
            classes: K.
        """
        size = (CHANNELS, *pool.output_size)
        head = FastRCNNConvFCHead(size, [CHANNELS] * 4, [_HIDDEN], norm_layer=LayerNorm2d)
        training = (overlap, overlap, _SAMPLES, _POSITIVE, weights)
        predictor = BoxPredictor(classes)
        super().__init__(pool, head, predictor, *training, _SCORE, _NMS, _DETECTIONS)

    def predict(
        self, maps: dict[str, Tensor], proposals: Boxes, sizes: list, part: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return scores (N, K) and codes (N, 4) of proposals.

        Args:
            maps: Of the backbone.
            proposals: Boxes (n, 4) in pixels of each image.
            sizes: Height and width of each image.
            part: Of the gradient that the maps get.
        """
        cut = self.box_roi_pool(maps, proposals, sizes)
        if cut.requires_grad:
            cut.register_hook(lambda gradient: gradient * part)
        return self.box_predictor(self.box_head(cut))

    def decode(self, codes: Tensor, proposals: Boxes, sizes: list) -> Boxes:
        """Return the boxes that codes (N, 4) make of proposals, cut to the images, without gradient.

        A proposal stays as it is where nothing of its box is in the image.
        """
        boxes = self.box_coder.decode(codes.detach(), proposals).flatten(0, 1)
        boxes = boxes.split([len(each) for each in proposals])
        boxes = [clip_boxes_to_image(each, size) for each, size in zip(boxes, sizes, strict=True)]
        return [
            torch.where((box[:, 2:] > box[:, :2]).all(1, keepdim=True), box, proposal)
            for box, proposal in zip(boxes, proposals, strict=True)
        ]

    def match(self, proposals: Boxes, targets: list[Target]) -> tuple[Boxes, list[Tensor]]:
        """Return the object's box (n, 4) and class (n) of each proposal; class 0 where it has none."""
        boxes = [target["boxes"].to(proposals[0].dtype) for target in targets]
        which, labels = self.assign_targets_to_proposals(
            proposals, boxes, [target["labels"] for target in targets]
        )
        boxes = [each if len(each) else each.new_zeros(1, 4) for each in boxes]
        return [each[index] for each, index in zip(boxes, which, strict=True)], labels

    def loss(
        self, scores: Tensor, codes: Tensor, labels: list[Tensor], aims: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of classes and of boxes.

        Args:
            scores: (N, K).
            codes: (N, 4).
            labels: Class (n) of each proposal of an image.
            aims: Codes (n, 4) of the boxes of their objects.
        """
        labels, aims = torch.cat(labels), torch.cat(aims)
        own = labels > 0
        boxes = F.l1_loss(codes[own], aims[own], reduction="sum")
        return F.cross_entropy(scores, labels), boxes / len(labels)


class Cascade(RoIHeads):
    """Three stages of box heads, and a mask head; in the place of torchvision's ``RoIHeads``."""

    def __init__(self, classes: int) -> None:
        """Create the heads.

        Args:
            classes: K, with the background.
        """
        training = (OVERLAPS[0], OVERLAPS[0], _SAMPLES, _POSITIVE, BOX_WEIGHTS[0])
        pools = [Pool(size) for size in (7, 14)]
        mask_head = MaskRCNNHeads(CHANNELS, [CHANNELS] * 4, 1, norm_layer=LayerNorm2d)
        mask_predictor = MaskRCNNPredictor(CHANNELS, CHANNELS, classes)
        testing = (_SCORE, _NMS, _DETECTIONS)
        masks = (pools[1], mask_head, mask_predictor)
        super().__init__(pools[0], None, None, *training, *testing, *masks)
        settings = zip(OVERLAPS, BOX_WEIGHTS, strict=True)
        self.stages = nn.ModuleList(Stage(pools[0], *each, classes) for each in settings)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: Boxes,
        image_shapes: list[tuple[int, int]],
        targets: list[Target] | None = None,
    ) -> tuple[list[Target], dict[str, Tensor]]:
        """Return detections where not in training, and losses in training.

        Args:
            features: Maps by their level.
            proposals: Boxes (n, 4) in pixels of each image.
            image_shapes: Height and width of each image.
            targets: In training, boxes (n, 4), labels (n) and masks uint8 (n, H, W) of each image.

        Returns:
            boxes, scores, labels and masks (n, 1, 28, 28) of each image, and losses by name.
        """
        if self.training:
            return [], self.losses(features, proposals, image_shapes, targets)
        boxes, scores, labels = self.detect(features, proposals, image_shapes)
        masks = maskrcnn_inference(self._masks(features, boxes, image_shapes), labels)
        names, columns = ("boxes", "scores", "labels", "masks"), (boxes, scores, labels, masks)
        rows = zip(*columns, strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows], {}

    def losses(
        self, maps: dict[str, Tensor], proposals: Boxes, sizes: list, targets: list[Target]
    ) -> dict[str, Tensor]:
        """Return the losses of each stage and of the masks; arguments as of ``forward``.

        Boxes are sampled for the first stage, whose objects get masks, and all kept for the others.
        """
        sampled = self.select_training_samples(proposals, targets)
        losses = {"loss_mask": self._mask_loss(maps, sizes, targets, *sampled[:3])}
        proposals, _, labels, aims = sampled
        for number, stage in enumerate(self.stages):
            if number:
                objects, labels = stage.match(proposals, targets)
                aims = stage.box_coder.encode(objects, proposals)
            scores, codes = stage.predict(maps, proposals, sizes, 1 / len(self.stages))
            classes, boxes = stage.loss(scores, codes, labels, aims)
            losses |= {f"loss_classes_{number}": classes, f"loss_boxes_{number}": boxes}
            proposals = stage.decode(codes, proposals, sizes)
        return losses

    def detect(
        self, maps: dict[str, Tensor], proposals: Boxes, sizes: list
    ) -> tuple[Boxes, list[Tensor], list[Tensor]]:
        """Return boxes of the last stage, with scores that are the mean of all, and labels."""
        total = torch.tensor(0.0)
        for stage in self.stages:
            scores, codes = stage.predict(maps, proposals, sizes)
            total = total.to(scores) + scores.softmax(-1)
            last, proposals = proposals, stage.decode(codes, proposals, sizes)
        # torchvision's takes the softmax of these, and a box for each class
        logits = (total / len(self.stages)).log()
        return stage.postprocess_detections(logits, codes.repeat(1, logits.shape[1]), last, sizes)

    def _masks(self, maps: dict[str, Tensor], boxes: Boxes, sizes: list) -> Tensor:
        cut = self.mask_roi_pool(maps, boxes, sizes)
        return self.mask_predictor(self.mask_head(cut)).float()

    def _mask_loss(
        self,
        maps: dict[str, Tensor],
        sizes: list,
        targets: list[Target],
        proposals: Boxes,
        which: list[Tensor],
        labels: list[Tensor],
    ) -> Tensor:
        own = [each > 0 for each in labels]
        boxes = [each[keep] for each, keep in zip(proposals, own, strict=True)]
        which = [each[keep] for each, keep in zip(which, own, strict=True)]
        masks, classes = ([target[name] for target in targets] for name in ("masks", "labels"))
        return maskrcnn_loss(self._masks(maps, boxes, sizes), boxes, masks, classes, which)


def cascade_mask_rcnn(features: nn.Module, classes: int, size: int) -> GeneralizedRCNN:
    """Return Cascade Mask R-CNN, which is called as torchvision's Mask R-CNN.

    In training images are taken as they are and padded to ``size``; else they are resized so that their
    longer side is that, and boxes and masks are of the images as they were given.

    Args:
        features: Made by ``make_features``.
        classes: K, with the background.
        size: Height and width in pixels of what the backbone gets.
    """
    anchors = AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    rpn = RegionProposalNetwork(
        anchors,
        Proposer(CHANNELS, anchors.num_anchors_per_location()[0], conv_depth=2),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2000, "testing": 1000},
        post_nms_top_n={"training": 1000, "testing": 1000},
        nms_thresh=0.7,
    )
    mean, std = list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD)
    transform = GeneralizedRCNNTransform(size, size, mean, std, size, _skip_resize=True)
    return GeneralizedRCNN(Necks(features), rpn, Cascade(classes), transform)
