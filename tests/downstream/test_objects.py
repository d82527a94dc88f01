"""COCO's data and metrics: masks and boxes move together, and perfect detections score 100."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("pycocotools")

from torchmetrics.detection import MeanAveragePrecision

from downstream.generated import make_objects
from downstream.objects import Jitter, Objects, as_it_is, boxes_of, percentages, with_certain_masks
from vil.training.errors import DataError


def read(root: Path, split: str = "train2017") -> Objects:
    return Objects(make_objects(root, 4, 64), split, lambda *sample: sample, training=True)


def test_generated_objects_are_read_as_coco(tmp_path: Path) -> None:
    objects = read(tmp_path)
    assert len(objects) == 4
    assert objects.numbers == [1, 3, 44, 90]
    for number, (image, target) in enumerate(objects):
        described = objects.coco.imgToAnns[number]
        assert target["masks"].shape == (len(described), *image.shape[1:])
        labels = [objects.numbers[label - 1] for label in target["labels"]]
        assert labels == [each["category_id"] for each in described]
        boxes = boxes_of(target["masks"])
        boxes[:, 2:] -= boxes[:, :2]
        stated = torch.tensor([each["bbox"] for each in described]).float()
        assert (boxes - stated).abs().max() <= 1  # masks have whole pixels


def test_crowds_and_images_without_objects_are_left_out(tmp_path: Path) -> None:
    path = make_objects(tmp_path, 4, 64) / "annotations" / "instances_train2017.json"
    table = json.loads(path.read_text())
    for each in table["annotations"]:
        each["iscrowd"] = int(each["image_id"] == 2)
    path.write_text(json.dumps(table))
    every, some = (Objects(tmp_path, "train2017", lambda *sample: sample, training=only) for only in (False, True))
    assert (every.ids, some.ids) == ([0, 1, 2, 3], [0, 1, 3])
    assert every[2][1]["iscrowd"].all()  # in validation they are ignored areas
    every.training = True
    image, target = every[2]
    assert target["masks"].shape == (0, *image.shape[1:])
    assert Jitter(32)(image, target)[1]["boxes"].shape == (0, 4)


def change(path: Path, **entries: object) -> None:
    """Change entries of the first annotation, or remove them if None; ``image_...`` are those of its image."""
    table = json.loads(path.read_text())
    one = table["annotations"][0]
    (image,) = (each for each in table["images"] if each["id"] == one["image_id"])
    for key, value in entries.items():
        owner, name = (image, "height") if key == "image_height" else (one, key)
        owner[name] = value
        if value is None:
            del owner[name]
    path.write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("id", None, "an image, annotation or category has no 'id'"),
        ("image_id", 99, "annotation 1 is of image 99, which is not listed"),
        ("category_id", 2, "annotation 1 has category 2, which is not listed"),
        ("bbox", [1, 2, 3], r"annotation 1 needs bbox, four numbers.* got \[1, 2, 3\]"),
        ("segmentation", None, "annotation 1 needs a segmentation, got None"),
        ("segmentation", [[1, 1, 5]], "annotation 1 needs a segmentation of polygons, each"),
        ("image_height", None, "image 0 has no height"),
    ],
)
def test_what_annotations_lack_is_named(key: str, value: object, told: str, tmp_path: Path) -> None:
    path = make_objects(tmp_path, 4, 64) / "annotations" / "instances_train2017.json"
    change(path, **{key: value})
    with pytest.raises(DataError, match=f"{path}: {told}"):
        Objects(tmp_path, "train2017", as_it_is, training=False)


def test_both_splits_give_a_category_the_same_label(tmp_path: Path) -> None:
    path = make_objects(tmp_path, 4, 64) / "annotations" / "instances_val2017.json"
    table, train = json.loads(path.read_text()), read(tmp_path)
    whole = Objects(tmp_path, "val2017", as_it_is, training=False)
    table["annotations"] = [one for one in table["annotations"] if one["category_id"] != 1]
    first, *table["categories"] = table["categories"]
    path.write_text(json.dumps(table))
    fewer = Objects(tmp_path, "val2017", as_it_is, training=False, train=train)
    for (_, without), (_, target) in zip(fewer, whole, strict=True):
        assert without["labels"].tolist() == [n for n in target["labels"].tolist() if n > 1]
    table["categories"] += [first | {"name": "another"}, {"id": 2, "name": "new"}]
    path.write_text(json.dumps(table))
    with pytest.raises(DataError, match=rf"{path} must have only .*\[\(1, 'another'\), \(2, 'new'\)\]"):
        Objects(tmp_path, "val2017", as_it_is, training=False, train=train)


def test_area_and_crowd_may_be_missing(tmp_path: Path) -> None:
    path = make_objects(tmp_path, 4, 64) / "annotations" / "instances_train2017.json"
    stated = Objects(tmp_path, "train2017", as_it_is, training=False)[0][1]
    change(path, area=None, iscrowd=None)
    target = Objects(tmp_path, "train2017", as_it_is, training=False)[0][1]
    assert target["area"][0] == target["masks"][0].sum()
    assert torch.allclose(target["area"], stated["area"], rtol=0.2)
    assert torch.equal(target["iscrowd"], stated["iscrowd"])
    change(path, area=7)  # of the parts that are not hidden, say
    assert Objects(tmp_path, "train2017", as_it_is, training=False)[0][1]["area"][0] == 7


def test_a_folder_without_annotations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"annotations .* are missing"):
        Objects(tmp_path, "train2017", as_it_is, training=True)
    objects = read(tmp_path)
    (tmp_path / "train2017" / f"{1:012}.jpg").unlink()
    with pytest.raises(DataError, match=f"cannot read .*{1:012}.jpg"):
        objects[1]


def test_image_and_masks_are_jittered_together() -> None:
    masks = torch.zeros(3, 60, 80, dtype=torch.uint8)
    masks[0, 10:40, 20:60], masks[1, :20, :20], masks[2, 58:, 78:] = 1, 1, 1
    image = (masks * torch.tensor([250, 150, 50], dtype=torch.uint8)[:, None, None]).clone()
    target = {"labels": torch.tensor([1, 2, 3]), "masks": masks}
    shapes, counts, mirrored, jitter = set(), set(), set(), Jitter(48)
    for seed in range(30):
        torch.manual_seed(seed)
        pixels, left = jitter(image, target)
        shapes.add(tuple(pixels.shape[1:]))
        counts.add(len(left["labels"]))
        assert max(pixels.shape[1:]) <= 48
        if left["labels"].tolist()[:2] == [1, 2]:  # the second began left of the first
            mirrored.add((left["boxes"][0, 0] < left["boxes"][1, 0]).item())
        assert set(left) == {"labels", "masks", "boxes"}
        for label, mask, box in zip(*(left[k] for k in ("labels", "masks", "boxes")), strict=True):
            assert mask.any()
            across, down = torch.where(mask.any(0))[0], torch.where(mask.any(1))[0]
            assert box.tolist() == [across[0], down[0], across[-1] + 1, down[-1] + 1]
            own = pixels[label - 1] > (250, 150, 50)[label - 1] / 255 / 2
            different = (own != mask.bool()).sum()
            assert different <= 2 * (len(across) + len(down)) + 4  # along the edge
    assert len(shapes) > 5
    assert min(max(shape) for shape in shapes) < 24  # scales begin at 0.1
    assert mirrored == {False, True}
    assert len(counts) > 1


def test_jittered_boxes_are_where_the_objects_are() -> None:
    """Heights, which are never mirrored, are at most half an output pixel off; the mean is about 0."""
    masks = torch.zeros(1, 200, 200, dtype=torch.uint8)
    masks[0, 31:148, 53:170] = 1
    target = {"labels": torch.tensor([1]), "masks": masks}
    jitter, errors = Jitter(100), []
    for seed in range(200):
        torch.manual_seed(seed)
        image, left = jitter(torch.zeros(3, 200, 200, dtype=torch.uint8), target)
        if (height := image.shape[1]) < 100:  # nothing was cut off
            errors.append(left["boxes"][0, 1::2] - torch.tensor([31, 148]) * height / 200)
    assert len(errors) > 50
    assert torch.stack(errors).abs().max() <= 0.5
    assert torch.stack(errors).mean(0).abs().max() < 0.1


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_the_score_is_the_share_of_objects_found(tmp_path: Path, share: float) -> None:
    """Perfect detections score 100, and crowds do not count."""
    precision = MeanAveragePrecision(iou_type=("bbox", "segm"))
    objects = Objects(make_objects(tmp_path, 4, 64), "train2017", as_it_is, training=False)
    for number, (_, target) in enumerate(objects):
        kept = slice(None) if number < 4 * share else slice(0)
        found = {name: target[name][kept] for name in ("boxes", "labels")}
        found |= {"scores": torch.ones(len(found["labels"]))}
        found |= {"masks": target["masks"][kept, None].float()}
        target["iscrowd"][:] = number == 3
        precision.update([with_certain_masks(found)], [target])
    figures = percentages(precision.compute())
    names = {f"{kind}_{ap}" for kind in ("box", "mask") for ap in ("ap", "ap50", "ap75")}
    assert set(figures) == names
    for value in figures.values():
        assert 0 < value < 100 if share == 0.5 else value == pytest.approx(100 * share)
