"""Shapes: what follows from what, and whether boxes, masks and labels tell the same."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield pytest.importorskip("shapes")
    sys.modules.pop("shapes")


def test_an_image_follows_from_seed_and_number(shapes) -> None:
    image, found = shapes.Shapes(3, 10, 64)[7]
    again, found_again = shapes.Shapes(3, 20, 64)[7]
    assert image.shape == (3, 64, 64)
    assert image.dtype == torch.uint8
    assert torch.equal(image, again)
    for key in ("mask", "boxes", "labels"):
        assert torch.equal(found[key], found_again[key])


def test_images_of_other_seeds_or_numbers_are_others(shapes) -> None:
    images = [shapes.Shapes(seed, 20, 32)[index][0] for seed in range(4) for index in range(20)]
    assert len({image.numpy().tobytes() for image in images}) == len(images)


def test_boxes_masks_and_labels_agree(shapes) -> None:
    for _, found in shapes.Shapes(0, 50, 96):
        mask, inside = found["mask"], torch.zeros(96, 96, dtype=torch.bool)
        assert len(found["boxes"]) == len(found["labels"]) > 0
        for (left, top, right, bottom), label in zip(
            found["boxes"].int().tolist(), found["labels"], strict=True
        ):
            assert 0 <= left < right <= 96
            assert 0 <= top < bottom <= 96
            own = mask[top:bottom, left:right] == label
            for edge in (own[0], own[-1], own[:, 0], own[:, -1]):
                assert edge.any()
            inside[top:bottom, left:right] |= own
        assert torch.equal(inside, mask > 0)


def test_all_classes_are_about_as_frequent(shapes) -> None:
    labels = torch.cat([found["labels"] for _, found in shapes.Shapes(1, 300, 32)])
    counts = labels.bincount(minlength=len(shapes.CLASSES))
    assert counts[0] == 0
    assert counts[1:].min() > 0.7 * counts[1:].max()


def test_colours_alone_find_neither_all_of_the_shapes_nor_their_kinds(shapes) -> None:
    distances, truth, colour_of = [], [], {label: [] for label in range(1, len(shapes.CLASSES))}
    for image, found in shapes.Shapes(2, 50, 96):
        colours = image.flatten(1) / 255
        usual = colours.median(1, keepdim=True).values
        distances.append((colours - usual).norm(dim=0))
        truth.append(found["mask"].flatten() > 0)
        for label in found["labels"].unique().tolist():
            colour_of[label].append(colours[:, found["mask"].flatten() == label].mean(1))
    distance, shape = torch.cat(distances), torch.cat(truth)
    ious = [
        ((distance > t) & shape).sum() / ((distance > t) | shape).sum()
        for t in torch.arange(0, 1, 0.02)
    ]
    assert max(ious) < 0.9  # although the best threshold is taken
    means = torch.stack([torch.stack(colours).mean(0) for colours in colour_of.values()])
    within = torch.stack([torch.stack(colours).std(0) for colours in colour_of.values()])
    assert means.std(0).max() < 0.5 * within.min()


def test_what_does_not_exist_is_refused(shapes) -> None:
    with pytest.raises(ValueError, match="img_size of shapes must be at least 32, got 16"):
        shapes.Shapes(0, 1, 16)
    with pytest.raises(IndexError, match="image 5 of 5"):
        shapes.Shapes(0, 5, 32)[5]
