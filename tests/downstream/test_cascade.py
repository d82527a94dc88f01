"""The cascade: the targets of each stage, the boxes it passes on, and the result of all three."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")

from torchvision.ops import box_iou

from downstream import cascade
from downstream.cascade import BOX_WEIGHTS, OVERLAPS, Cascade, cascade_mask_rcnn
from downstream.features import make_features
from vil.training.sampler import seed_everything

SIZE, CLASSES = (64, 64), 4


@pytest.fixture(autouse=True)
def seed() -> None:
    seed_everything(0)


def target(*boxes: tuple[int, int, int, int]) -> dict[str, Tensor]:
    masks = torch.zeros(len(boxes), *SIZE, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = 1
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.arange(1, len(boxes) + 1),
        "masks": masks,
    }


def maps() -> dict[str, Tensor]:
    return {str(i): torch.randn(1, 16, 16 >> i, 16 >> i, requires_grad=True) for i in range(4)}


def network() -> torch.nn.Module:
    features = make_features("vil_tiny_pyramid", embed_dim=16, depth=2, img_size=64)
    return cascade_mask_rcnn(features, CLASSES, 64)


def test_each_stage_asks_for_more_overlap() -> None:
    heads = Cascade(CLASSES)
    objects = target((0, 0, 40, 40))
    proposals = torch.tensor([[0, 0, 40, length] for length in (40, 30, 26, 22, 10)]).float()
    overlaps = box_iou(proposals, objects["boxes"])[:, 0]
    torch.testing.assert_close(overlaps, torch.tensor([1, 0.75, 0.65, 0.55, 0.25]))
    for stage, least, weights in zip(heads.stages, OVERLAPS, BOX_WEIGHTS, strict=True):
        boxes, (labels,) = stage.match([proposals], [objects])
        assert labels.tolist() == (overlaps >= least).int().tolist()
        assert torch.equal(boxes[0], objects["boxes"].expand(5, 4))
        (code,) = stage.box_coder.encode([objects["boxes"]], [torch.tensor([[10.0, 0, 50, 40]])])
        assert code[0, 0].item() == pytest.approx(-0.25 * weights[0])


def predicting(scores: list[list[float]], codes: list[Tensor]) -> Cascade:
    """Return heads whose stages predict the same logits and the same code for every box."""
    heads = Cascade(CLASSES)
    for stage, logits, code in zip(heads.stages, scores, codes, strict=True):
        for layer, value in (
            (stage.box_predictor.scores, logits),
            (stage.box_predictor.codes, code),
        ):
            torch.nn.init.zeros_(layer.weight)
            layer.bias.data = torch.as_tensor(value)
    return heads


def moved(box: list[float], to: list[list[float]]) -> list[Tensor]:
    """Return the codes with which the stages move a box to one place after another."""
    places, codes = [torch.tensor([each]) for each in (box, *to)], []
    for stage, before, after in zip(Cascade(CLASSES).stages, places, places[1:], strict=False):
        codes += stage.box_coder.encode([after], [before])
    return [code[0] for code in codes]


def test_each_stage_moves_the_boxes_of_the_one_before_and_scores_are_their_mean() -> None:
    proposal, last = [4.0, 4, 40, 40], [10.0, 12, 50, 44]
    codes = moved(proposal, [[6.0, 8, 30, 40], [12.0, 8, 44, 60], last])
    likely = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1]])
    heads = predicting(likely.log().tolist(), codes).eval()
    (found,), losses = heads(maps(), [torch.tensor([proposal])], [SIZE])
    assert found["labels"].tolist() == [1, 2, 3]
    torch.testing.assert_close(found["scores"], torch.tensor([0.3, 0.2, 0.2]))
    torch.testing.assert_close(found["boxes"], torch.tensor([last] * 3))
    assert found["masks"].shape == (3, 1, 28, 28)
    assert losses == {}


def test_each_stage_learns_from_the_boxes_of_the_one_before() -> None:
    """The first stage moves a box of half the object onto it, so for the second it is no background."""
    whole, half = [0.0, 0, 40, 40], [0.0, 0, 40, 22]
    objects, proposals = [target((0, 0, 40, 40))], [torch.tensor([half])]
    for codes, right in ((moved(half, [whole] * 3), True), ([torch.zeros(4)] * 3, False)):
        heads = predicting([[0.0, 30, 0, 0]] * 3, codes).train()  # sure of the object's class
        losses = heads.losses(maps(), proposals, [SIZE], objects)
        assert (losses["loss_classes_1"].item() < 1e-5) is right
        losses["loss_boxes_1"].backward()
        assert heads.stages[0].box_predictor.codes.bias.grad is None  # boxes carry no gradient


def test_a_box_outside_of_the_image_leaves_its_proposal() -> None:
    stage = Cascade(CLASSES).stages[0]
    proposals = [torch.tensor([[4.0, 4, 40, 40], [10, 20, 60, 50]])]
    codes = torch.tensor([[100.0, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(stage.decode(codes, proposals, [SIZE])[0], proposals[0])


def test_the_maps_get_a_third_of_the_gradient_of_each_stage() -> None:
    heads, own = Cascade(CLASSES).train(), maps()
    proposals, objects = [torch.tensor([[4.0, 4, 40, 40]])], [target((0, 0, 40, 40))]
    inputs = own["0"], heads.stages[0].box_predictor.scores.weight
    loss = heads.losses(own, proposals, [SIZE], objects)["loss_classes_0"]
    third, same = torch.autograd.grad(loss, inputs)
    boxes, _, labels, _ = heads.select_training_samples(proposals, objects)
    scores, _ = heads.stages[0].predict(own, boxes, [SIZE])
    loss = torch.nn.functional.cross_entropy(scores, torch.cat(labels))
    whole, weight = torch.autograd.grad(loss, inputs)
    assert whole.any()
    torch.testing.assert_close(third, whole / 3)
    torch.testing.assert_close(weight, same)


TWO = ((4, 6, 40, 44), (20, 30, 60, 62))


@pytest.mark.parametrize("objects", [(TWO, TWO[:1]), ((), TWO), ((), ())])
def test_a_step_changes_every_parameter(objects: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images may have no objects; if none has any, box and mask parameters need not change."""
    monkeypatch.setattr(cascade, "_SAMPLES", 512)  # enough to include the objects
    model = network().train()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    images = [torch.rand(3, 64, 64), torch.rand(3, 48, 64)]
    losses = model(images, [target(*each) for each in objects])
    names = {f"loss_{kind}_{stage}" for kind in ("classes", "boxes") for stage in range(3)}
    assert set(losses) == names | {"loss_mask", "loss_objectness", "loss_rpn_box_reg"}
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    # DistributedDataParallel waits for every gradient, even if it is zero
    assert [name for name, each in model.named_parameters() if each.grad is None] == []
    torch.optim.AdamW(model.parameters(), weight_decay=0).step()
    same = [name for name, each in model.named_parameters() if torch.equal(each, before[name])]
    if any(objects):
        assert same == []
    else:
        kinds = ("mask_head", "mask_predictor", "codes", "rpn.head.bbox_pred")
        assert all(any(kind in name for kind in kinds) for name in same), same


def test_strides_are_those_of_the_maps_where_images_are_smaller() -> None:
    model = network().train()
    model([torch.rand(3, 10, 12)], [target((1, 1, 9, 9))])
    for pool in (model.roi_heads.box_roi_pool, model.roi_heads.mask_roi_pool):
        assert pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]


def test_boxes_and_masks_are_of_the_images_as_given() -> None:
    model = network().eval()
    model.roi_heads.stages = predicting([[0.0, 3, 0, 0]] * 3, [torch.zeros(4)] * 3).stages
    images = [torch.rand(3, 30, 100), torch.rand(3, 90, 40)]
    for image, found in zip(images, model(images), strict=True):
        height, width = image.shape[1:]
        assert len(found["boxes"]) > 0
        assert found["masks"].shape == (len(found["boxes"]), 1, height, width)
        assert found["boxes"][:, 2].max() <= width + 1e-3
        assert found["boxes"][:, 3].max() <= height + 1e-3
        assert found["boxes"][:, 2].max() > width / 2


def test_losses_and_boxes_are_float32_in_mixed_precision() -> None:
    """Boxes in bfloat16 would be rounded to pixels; a map of large values in it, to 4 px."""
    heads = network().train()
    with torch.autocast("cpu", torch.bfloat16):
        losses = heads([torch.rand(3, 64, 64)], [target((4, 6, 40, 44))])
        features = heads.backbone(torch.rand(1, 3, 64, 64))
        (found,) = heads.eval()([torch.rand(3, 64, 64)])
    assert {each.dtype for each in features.values()} == {torch.float32}
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
