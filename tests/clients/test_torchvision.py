"""torchvision's detectors take any module with out_channels that returns named maps."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from tests.documents.pages import block_with


def documented(name: str) -> type[nn.Module]:
    """Return a class of docs/dense.md, as a user copies it."""
    names: dict[str, object] = {}
    exec(block_with("dense", f"class {name}"), names)
    return names[name]


SMALL = {"min_size": 96, "max_size": 160}
DETECTORS = {
    "retinanet": (RetinaNet, (1, 2, 3)),
    "fcos": (FCOS, (1, 2, 3)),
    "faster_rcnn": (FasterRCNN, (0, 1, 2, 3)),
    "mask_rcnn": (MaskRCNN, (0, 1, 2, 3)),
}


def detector(kind: str) -> nn.Module:
    cls, levels = DETECTORS[kind]
    backbone = documented("Pyramid")("vil_test_pyramid", out_indices=levels, out_channels=32)
    sizes = tuple((2.0 ** (4 + level),) for level in (*levels, levels[-1] + 1))
    ratios = ((1.0,) if cls is FCOS else (0.5, 1.0, 2.0),)
    anchors = AnchorGenerator(sizes, ratios * len(sizes))
    if cls in (RetinaNet, FCOS):
        return cls(backbone, num_classes=4, anchor_generator=anchors, **SMALL)
    names = [str(i) for i in range(len(levels))]
    arguments = {"box_roi_pool": MultiScaleRoIAlign(names, 7, 2)}
    if cls is MaskRCNN:
        arguments["mask_roi_pool"] = MultiScaleRoIAlign(names, 14, 2)
    return cls(backbone, num_classes=4, rpn_anchor_generator=anchors, **arguments, **SMALL)


def target(height: int, width: int) -> dict[str, Tensor]:
    box = torch.tensor([[0.1 * width, 0.2 * height, 0.6 * width, 0.9 * height]])
    masks = torch.zeros(1, height, width, dtype=torch.uint8)
    x0, y0, x1, y1 = box[0].int().tolist()
    masks[:, y0:y1, x0:x1] = 1
    return {"boxes": box, "labels": torch.tensor([2]), "masks": masks}


@pytest.mark.parametrize("kind", list(DETECTORS))
def test_a_detector_trains_and_answers(kind: str, assert_trains: Callable) -> None:
    model = detector(kind)
    with torch.no_grad():
        (found,) = model.eval()([torch.rand(3, 100, 75)])
    assert found["boxes"].shape == (len(found["labels"]), 4)
    assert found["scores"].isfinite().all()
    sizes = ((100, 75), (64, 128))  # torchvision scales these and pads them to one size
    losses = model.train()([torch.rand(3, *size) for size in sizes], [target(*s) for s in sizes])
    assert_trains(model, sum(losses.values()))


def test_the_documented_module_names_its_maps() -> None:
    backbone = documented("Pyramid")("vil_test_pyramid", out_indices=(1, 2, 3), out_channels=16)
    maps = backbone(torch.randn(1, 3, 64, 96))
    assert isinstance(maps, OrderedDict)
    sizes = [(8, 12), (4, 6), (2, 3), (1, 2)]
    assert [tuple(m.shape) for m in maps.values()] == [(1, 16, *size) for size in sizes]
