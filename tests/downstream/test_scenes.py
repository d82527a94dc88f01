"""ADE20K's data and its windows: labels, crops, sizes, overlaps."""

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from PIL import Image

from downstream.generated import make_scenes
from downstream.scenes import Augment, Scenes, by_windows, resized, whole
from vil.training.errors import DataError


def test_generated_scenes_are_read_as_ade20k(tmp_path: Path) -> None:
    scenes = Scenes(make_scenes(tmp_path, 4, 64), "training", lambda *sample: sample)
    assert len(scenes) == 4
    assert len({image.shape for image, _ in scenes}) > 1
    for image, labels in scenes:
        assert image.dtype == labels.dtype == torch.uint8
        assert image.shape == (3, *labels.shape)
        assert {*labels.unique().tolist()} <= {0, 74, 119, 149, 255}  # of 1, 75, 120, 150 and 0
        assert 255 in labels


def test_an_image_without_labels_is_refused(tmp_path: Path) -> None:
    make_scenes(tmp_path, 4, 64)
    missing = tmp_path / "annotations" / "validation" / "ADE_00000001.png"
    missing.unlink()
    with pytest.raises(DataError, match=f"1 images have no labels, the first {missing}"):
        Scenes(tmp_path, "validation", partial(whole, size=64))
    with pytest.raises(DataError, match="no images"):
        Scenes(tmp_path, "testing", partial(whole, size=64))


@pytest.mark.parametrize("fault", ["class", "size", "RGB", "I;16", "image", "labels"])
def test_a_file_that_is_wrong_or_cut_off_is_named(tmp_path: Path, fault: str) -> None:
    make_scenes(tmp_path, 2, 64)
    image = tmp_path / "images/training/ADE_00000001.jpg"
    labels = tmp_path / "annotations/training/ADE_00000001.png"
    with Image.open(labels) as own:
        size = own.size
    if fault in ("class", "size"):
        Image.new("L", size if fault == "class" else (5, 5), 151 if fault == "class" else 3).save(labels)
        told = f"{labels} must have classes from 0 to 150, got .151" if fault == "class" else image.stem
    elif fault in ("RGB", "I;16"):
        Image.new(fault, size).save(labels)
        told = f"{labels} must have mode L or P.* got {fault}"
    else:
        path = image if fault == "image" else labels
        path.write_bytes(path.read_bytes()[:100])
        told = f"cannot read {path}"
    with pytest.raises(DataError, match=told):
        Scenes(tmp_path, "training", partial(whole, size=64))[1]


def test_image_and_labels_move_together() -> None:
    augment = Augment(32)
    augment.distort = lambda image: image
    labels = torch.arange(4, dtype=torch.uint8).reshape(2, 2)
    labels = labels.repeat_interleave(40, 0).repeat_interleave(30, 1)
    image = (labels * 60).expand(3, -1, -1)
    sides, heights = set(), set()
    for seed in range(20):
        torch.manual_seed(seed)
        pixels, classes = augment(image, labels)
        assert pixels.shape == (3, 32, 32)
        assert classes.dtype == torch.int64
        shade = ((pixels[0] * 0.229 + 0.485) * 255 / 60).round().long()
        seen = classes != 255
        edge = (shade != classes) & seen
        assert edge.sum() <= 4 * 32  # between classes the image is interpolated
        assert not pixels[:, ~seen].any()
        sides.add((classes[0, 0].item(), seen.all().item()))
        heights.add(seen.any(1).sum().item())
    assert len(sides) >= 3
    assert 16 <= min(heights) < 24  # scales begin at 0.5


def test_colours_are_normalised_and_in_training_distorted_but_not_exchanged() -> None:
    colour = torch.tensor([200, 60, 40], dtype=torch.uint8)[:, None, None]
    image, labels = colour.expand(3, 32, 32), torch.zeros(32, 32, dtype=torch.uint8)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
    plain, _ = whole(image, labels, 16)
    torch.testing.assert_close(plain * std + mean, (colour / 255).expand(3, 16, 16))
    found = set()
    for seed in range(20):
        torch.manual_seed(seed)
        pixels = Augment(32)(image, labels)[0][:, 0, 0] * std[:, 0, 0] + mean[:, 0, 0]
        assert pixels.argmax() == 0  # still red
        found.add(pixels[0].item())
    assert len(found) > 10


def test_a_crop_is_not_mostly_one_class() -> None:
    labels = torch.zeros(64, 320, dtype=torch.uint8)
    labels[:, 300:] = 1
    image, augment = labels.expand(3, -1, -1), Augment(64)
    torch.manual_seed(0)
    shares = [(augment.crop(image, labels)[1] == 1).float().mean().item() for _ in range(60)]
    plain = [(labels[:, left : left + 64] == 1).float().mean().item() for left in range(257)]
    kept = sum(share > 0.25 for share in shares) / len(shares)
    assert kept > 3 * sum(share > 0.25 for share in plain) / len(plain)


def test_ignored_pixels_do_not_count_in_a_crop() -> None:
    labels = torch.full((64, 64), 255, dtype=torch.uint8)
    labels[:2, :2], labels[0, 0] = 1, 2
    assert Augment(64).crop(labels.expand(3, -1, -1), labels)[1].shape == (64, 64)


@pytest.mark.parametrize(("height", "width", "expected"), [(300, 600, (512, 1024)), (100, 1000, (205, 2048))])
def test_the_shorter_side_is_resized_unless_the_longer_gets_too_long(
    height: int, width: int, expected: tuple[int, int]
) -> None:
    assert resized(torch.zeros(3, height, width, dtype=torch.uint8), 512).shape[1:] == expected


def test_windows_are_averaged_where_they_overlap() -> None:
    seen = []

    def count(images: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(images.shape[-2:]))
        return torch.full((1, 1, *images.shape[-2:]), float(len(seen)))

    logits = by_windows(count, torch.zeros(1, 3, 32, 60), 32, 21)[0, 0]
    assert seen == [(32, 32)] * 3  # from 0, from 21, and from 28 to the end
    assert logits[0, [0, 20, 21, 27, 28, 31, 32, 52, 53, 59]].tolist() == [*(1, 1, 1.5, 1.5, 2, 2, 2.5, 2.5, 3, 3)]


@pytest.mark.parametrize("size", [(70, 95), (30, 32)])
def test_windows_of_a_local_function_are_the_whole(size: tuple[int, int]) -> None:
    images = torch.rand(2, 3, *size)
    torch.testing.assert_close(by_windows(torch.sin, images, 32, 21), images.sin())
