"""Shapes depend only on seed and number; their boxes, masks and labels agree."""

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
    (image, found), (again, found_again) = (shapes.Shapes(3, n, 64)[7] for n in (10, 20))
    assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
    assert torch.equal(image, again)
    assert all(torch.equal(found[key], found_again[key]) for key in ("mask", "boxes", "labels"))


def test_boxes_masks_and_labels_agree(shapes) -> None:
    for _, found in shapes.Shapes(0, 50, 96):
        mask, inside = found["mask"], torch.zeros(96, 96, dtype=torch.bool)
        assert len(found["boxes"]) == len(found["labels"]) > 0
        for (left, top, right, bottom), label in zip(found["boxes"].int().tolist(), found["labels"], strict=True):
            assert 0 <= left < right <= 96
            assert 0 <= top < bottom <= 96
            own = mask[top:bottom, left:right] == label
            for edge in (own[0], own[-1], own[:, 0], own[:, -1]):
                assert edge.any()
            inside[top:bottom, left:right] |= own
        assert torch.equal(inside, mask > 0)
