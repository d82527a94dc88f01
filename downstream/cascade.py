"""Cascade Mask R-CNN with ViTDet's heads, built from torchvision's parts.

Papers:
    Cascade R-CNN: Delving into High Quality Object Detection (CVPR 2018), for three stages of heads. Each
    refines the boxes of the stage before, and needs a higher overlap with an object.
    Exploring Plain Vision Transformer Backbones for Object Detection (ViTDet, ECCV 2022), for pyramid levels
    without paths between them, and heads with layer norm.

torchvision has R-CNN with one stage. The README lists where its parts differ from detectron2's.

Letters: B images, n boxes of one image, N boxes of all images, K classes including the background, class 0.
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
from torchvision.ops import Conv2dNormActivation, MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

CHANNELS = 256
OVERLAPS = (0.5, 0.6, 0.7)
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
_LEVELS = ["0", "1", "2", "3"]  # used by the heads; the fifth is for proposals only
_STRIDE = 4  # of the finest level
_HIDDEN = 1024
# Boxes sampled per image in training, and the largest share of objects among them
_SAMPLES, _POSITIVE = 512, 0.25
_SCORE, _NMS, _DETECTIONS = 0.05, 0.5, 100

Boxes = list[Tensor]
Target = dict[str, Tensor]


class Necks(nn.Module):
    """Project each map of a backbone to 256 channels, and add a map of stride 64."""

    def __init__(self, features: nn.Module) -> None:
        """Add convolutions to a backbone from ``make_features``."""
        super().__init__()
        self.features = features
        self.necks = nn.ModuleList(_neck(dim) for dim in features.feature_info.channels())
        self.last = LastLevelMaxPool()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return five float32 maps (B, 256, h, w) for images (B, 3, H, W), the finest first.

        They are float32 because torchvision computes anchors in their dtype, and bfloat16 is only precise to
        4 px at 1000 px.
        """
        maps = [neck(each).float() for neck, each in zip(self.necks, self.features(images), strict=True)]
        maps, names = self.last(maps, maps, list(_LEVELS))
        return OrderedDict(zip(names, maps, strict=True))


def _neck(dim: int) -> nn.Sequential:
    options = {"norm_layer": LayerNorm2d, "activation_layer": None}
    neck = nn.Sequential(
        Conv2dNormActivation(dim, CHANNELS, 1, **options),
        Conv2dNormActivation(CHANNELS, CHANNELS, 3, **options),
    )
    for conv, _ in neck:
        nn.init.kaiming_uniform_(conv.weight, a=1)
    return neck


class Proposer(RPNHead):
    """torchvision's head for proposals, with float32 outputs under autocast."""

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return objectness and box codes for each map."""
        objectness, codes = super().forward(maps)
        return [each.float() for each in objectness], [each.float() for each in codes]


class Pool(MultiScaleRoIAlign):
    """torchvision's RoIAlign, with the true strides of the maps.

    torchvision's infers the strides once, from the sizes of the first images before padding. After jitter these
    may be much smaller than the maps.
    """

    def forward(self, maps: dict[str, Tensor], boxes: Boxes, sizes: list) -> Tensor:
        """Return the features inside boxes (n, 4) of each image, (N, 256, size, size)."""
        height, width = maps[_LEVELS[0]].shape[-2:]
        return super().forward(maps, boxes, [(height * _STRIDE, width * _STRIDE)])


class BoxPredictor(nn.Module):
    """Class scores, and the code of one box for all classes."""

    def __init__(self, classes: int) -> None:
        """Create the layers for K classes."""
        super().__init__()
        self.scores = nn.Linear(_HIDDEN, classes)
        self.codes = nn.Linear(_HIDDEN, 4)
        for layer, std in ((self.scores, 0.01), (self.codes, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 scores (N, K) and codes (N, 4) for the head's output (N, 1024)."""
        return self.scores(x).float(), self.codes(x).float()


class Stage(RoIHeads):
    """Heads of one stage of the cascade, with its overlap and its box encoding."""

    def __init__(self, pool: nn.Module, overlap: float, weights: tuple, classes: int) -> None:
        """Create the heads for K classes.

        ``pool`` is the RoIAlign that all stages share, ``overlap`` the minimum IoU of a box with its object, and
        ``weights`` those of the four numbers that encode a box.
        """
        size = (CHANNELS, *pool.output_size)
        head = FastRCNNConvFCHead(size, [CHANNELS] * 4, [_HIDDEN], norm_layer=LayerNorm2d)
        training = (overlap, overlap, _SAMPLES, _POSITIVE, weights)
        predictor = BoxPredictor(classes)
        super().__init__(pool, head, predictor, *training, _SCORE, _NMS, _DETECTIONS)

    def predict(
        self, maps: dict[str, Tensor], proposals: Boxes, sizes: list, part: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return scores (N, K) and codes (N, 4) for proposals, boxes (n, 4) of each image in pixels.

        The gradient that flows into the maps is multiplied by ``part``.
        """
        cut = self.box_roi_pool(maps, proposals, sizes)
        if cut.requires_grad:
            cut.register_hook(lambda gradient: gradient * part)
        return self.box_predictor(self.box_head(cut))

    def decode(self, codes: Tensor, proposals: Boxes, sizes: list) -> Boxes:
        """Apply codes (N, 4) to proposals; return boxes clipped to the images, without gradient.

        A box outside of the image is replaced by its proposal.
        """
        boxes = self.box_coder.decode(codes.detach(), proposals).flatten(0, 1)
        boxes = boxes.split([len(each) for each in proposals])
        boxes = [clip_boxes_to_image(each, size) for each, size in zip(boxes, sizes, strict=True)]
        return [
            torch.where((box[:, 2:] > box[:, :2]).all(1, keepdim=True), box, proposal)
            for box, proposal in zip(boxes, proposals, strict=True)
        ]

    def match(self, proposals: Boxes, targets: list[Target]) -> tuple[Boxes, list[Tensor]]:
        """Return the box (n, 4) and class (n) of each proposal's object; class 0 if it has no object."""
        boxes = [target["boxes"].to(proposals[0].dtype) for target in targets]
        which, labels = self.assign_targets_to_proposals(proposals, boxes, [target["labels"] for target in targets])
        boxes = [each if len(each) else each.new_zeros(1, 4) for each in boxes]
        return [each[index] for each, index in zip(boxes, which, strict=True)], labels


class Cascade(RoIHeads):
    """Three stages of box heads and a mask head; replaces torchvision's ``RoIHeads``."""

    def __init__(self, classes: int) -> None:
        """Create the heads for K classes."""
        training = (OVERLAPS[0], OVERLAPS[0], _SAMPLES, _POSITIVE, BOX_WEIGHTS[0])
        pools = [Pool(_LEVELS, size, sampling_ratio=0) for size in (7, 14)]
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
        """Return detections in evaluation mode, and losses in training mode.

        Args:
            features: Maps by level.
            proposals: Boxes (n, 4) of each image in pixels.
            image_shapes: Height and width of each image.
            targets: For training, boxes (n, 4), labels (n) and masks uint8 (n, H, W) of each image.

        Returns:
            Boxes, scores, labels and masks (n, 1, 28, 28) of each image, and losses by name.
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
        """Return the losses of each stage and of the masks; same arguments as ``forward``.

        The first stage and the mask head learn from sampled boxes. The other stages learn from all boxes of the
        stage before.
        """
        sampled = self.select_training_samples(proposals, targets)
        losses = {"loss_mask": self._mask_loss(maps, sizes, targets, sampled)}
        proposals, _, labels, aims = sampled
        for number, stage in enumerate(self.stages):
            if number:
                objects, labels = stage.match(proposals, targets)
                aims = stage.box_coder.encode(objects, proposals)
            scores, codes = stage.predict(maps, proposals, sizes, 1 / len(self.stages))
            every = torch.cat(labels)
            classes, own = F.cross_entropy(scores, every), every > 0
            boxes = F.l1_loss(codes[own], torch.cat(aims)[own], reduction="sum") / len(every)
            losses |= {f"loss_classes_{number}": classes, f"loss_boxes_{number}": boxes}
            proposals = stage.decode(codes, proposals, sizes)
        return losses

    def detect(
        self, maps: dict[str, Tensor], proposals: Boxes, sizes: list
    ) -> tuple[Boxes, list[Tensor], list[Tensor]]:
        """Return the last stage's boxes, the mean scores of all stages, and labels."""
        total = torch.tensor(0.0, dtype=torch.float32)
        for stage in self.stages:
            scores, codes = stage.predict(maps, proposals, sizes)
            total = total.to(scores) + scores.softmax(-1)
            last, proposals = proposals, stage.decode(codes, proposals, sizes)
        # torchvision applies the softmax to these logits, and expects one box per class.
        logits = (total / len(self.stages)).log()
        return stage.postprocess_detections(logits, codes.repeat(1, logits.shape[1]), last, sizes)

    def _masks(self, maps: dict[str, Tensor], boxes: Boxes, sizes: list) -> Tensor:
        cut = self.mask_roi_pool(maps, boxes, sizes)
        return self.mask_predictor(self.mask_head(cut)).float()

    def _mask_loss(self, maps: dict[str, Tensor], sizes: list, targets: list[Target], sampled: tuple) -> Tensor:
        own = [labels > 0 for labels in sampled[2]]
        boxes, which = ([each[keep] for each, keep in zip(column, own, strict=True)] for column in sampled[:2])
        masks, classes = ([target[name] for target in targets] for name in ("masks", "labels"))
        return maskrcnn_loss(self._masks(maps, boxes, sizes), boxes, masks, classes, which)


def cascade_mask_rcnn(features: nn.Module, classes: int, size: int) -> GeneralizedRCNN:
    """Return Cascade Mask R-CNN with the interface of torchvision's Mask R-CNN.

    Training pads images to ``size``. Evaluation resizes the longer side of an image to ``size``, and returns
    boxes and masks for the original image.

    Args:
        features: Result of ``make_features``.
        classes: Number of classes K.
        size: Height and width of the backbone's input in pixels.
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
