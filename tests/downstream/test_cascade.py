"""The cascade: the targets of each stage, the boxes it passes on, and the result of all three."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")

from torchvision.ops import box_iou

from downstream import cascade
from downstream.cascade import BOX_WEIGHTS, OVERLAPS, Cascade, cascade_mask_rcnn
from downstream.features import make_features
from tests.downstream.small_heads import SIZES
from vil.training.sampler import seed_everything

SIZE, CLASSES = (64, 64), 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in SIZES.items():
        monkeypatch.setattr(cascade, name, value)
    seed_everything(0)
    return


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


def test_each_stage_gets_the_boxes_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Cascade(CLASSES).train()
    seen = []
    for stage in heads.stages:
        torch.nn.init.normal_(stage.box_predictor.codes.weight, std=0.1)

        def predict(maps: dict, proposals: list, sizes: list, *part: float, stage=stage) -> tuple:
            scores, codes = type(stage).predict(stage, maps, proposals, sizes, *part)
            seen.append((proposals, codes))
            return scores, codes

        monkeypatch.setattr(stage, "predict", predict)
    proposals = [torch.tensor([[4.0, 4, 40, 40], [10, 20, 60, 50]])]
    for detect in (False, True):
        seen.clear()
        if detect:
            heads.detect(maps(), proposals, [SIZE])
        else:
            heads.losses(maps(), list(proposals), [SIZE], [target((4, 4, 40, 40))])
        for number in (1, 2):
            before, codes = seen[number - 1]
            made = heads.stages[number - 1].box_coder.decode(codes, before)[:, 0].clamp(0, 64)
            assert not torch.equal(made, before[0])
            torch.testing.assert_close(seen[number][0][0], made.detach())
            assert not seen[number][0][0].requires_grad


def test_a_box_outside_of_the_image_leaves_its_proposal() -> None:
    stage = Cascade(CLASSES).stages[0]
    proposals = [torch.tensor([[4.0, 4, 40, 40], [10, 20, 60, 50]])]
    codes = torch.tensor([[100.0, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(stage.decode(codes, proposals, [SIZE])[0], proposals[0])


def test_right_predictions_give_the_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Cascade(CLASSES).eval()
    objects = target((4, 6, 40, 44), (20, 30, 60, 62))
    proposals = objects["boxes"] + torch.tensor([[3.0, -2, 4, 1], [-4, 2, 1, -3]])

    def predict(stage: torch.nn.Module, _: dict, proposals: list, *__: object) -> tuple:
        codes = torch.cat(stage.box_coder.encode([objects["boxes"]], proposals))
        scores = torch.full((2, CLASSES), -20.0)
        scores[[0, 1], objects["labels"]] = 20
        return scores, codes / 2 if stage is heads.stages[0] else codes

    monkeypatch.setattr(cascade.Stage, "predict", predict)
    (found,), losses = heads(maps(), [proposals], [SIZE])
    order = found["labels"].argsort()
    torch.testing.assert_close(found["boxes"][order], objects["boxes"])
    assert found["labels"][order].tolist() == [1, 2]
    assert (found["scores"] > 0.99).all()
    assert found["masks"].shape == (2, 1, 28, 28)
    assert losses == {}


def test_scores_are_the_mean_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Cascade(CLASSES).eval()
    likely = [torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.tensor([[0.7, 0.1, 0.1, 0.1]])]
    likely.append(torch.tensor([[0.1, 0.6, 0.2, 0.1]]))
    for stage, each in zip(heads.stages, likely, strict=True):
        monkeypatch.setattr(stage, "predict", lambda *_, each=each: (each.log(), torch.zeros(1, 4)))
    _, (scores,), (labels,) = heads.detect(maps(), [torch.tensor([[4.0, 4, 40, 40]])], [SIZE])
    assert labels.tolist() == [1, 2, 3]
    torch.testing.assert_close(scores, torch.tensor([0.3, 0.2, 0.2]))


def test_the_maps_get_a_third_of_the_gradient_of_each_stage() -> None:
    heads = Cascade(CLASSES).train()
    stage, proposals = heads.stages[0], [torch.tensor([[4.0, 4, 40, 40]])]
    gradients, own = [], maps()
    for part in (1.0, 1 / 3):
        heads.zero_grad()
        own["0"].grad = None
        scores, _ = stage.predict(own, proposals, [SIZE], part)
        scores.square().sum().backward()
        gradients.append((own["0"].grad, stage.box_predictor.scores.weight.grad.clone()))
    (whole, weight), (third, same) = gradients
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


def test_boxes_and_masks_are_of_the_images_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network().eval()
    monkeypatch.setattr(cascade.Stage, "predict", fixed_scores)
    images = [torch.rand(3, 30, 100), torch.rand(3, 90, 40)]
    for image, found in zip(images, model(images), strict=True):
        height, width = image.shape[1:]
        assert len(found["boxes"]) > 0
        assert found["masks"].shape == (len(found["boxes"]), 1, height, width)
        assert found["boxes"][:, 2].max() <= width + 1e-3
        assert found["boxes"][:, 3].max() <= height + 1e-3
        assert found["boxes"][:, 2].max() > width / 2


def fixed_scores(stage: torch.nn.Module, maps: dict, proposals: list, *_: object) -> tuple:
    count = sum(len(each) for each in proposals)
    return torch.tensor([[0.0, 3, 0, 0]]).expand(count, -1), torch.zeros(count, 4)


def test_anchors_and_boxes_are_float32_in_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = network().train(), []
    forward = model.roi_heads.forward
    monkeypatch.setattr(
        model.roi_heads, "forward", lambda *args: seen.append(args) or forward(*args)
    )
    with torch.autocast("cpu", torch.bfloat16):
        losses = model([torch.rand(3, 64, 64)], [target((4, 6, 40, 44))])
        codes = model.roi_heads.stages[0].predict(*seen[0][:3])[1]
    features, proposals = seen[0][:2]
    assert {each.dtype for each in features.values()} == {proposals[0].dtype, codes.dtype}
    assert codes.dtype == torch.float32
    assert all(loss.isfinite() for loss in losses.values())
