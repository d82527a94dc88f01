"""Fractals as a data set: what an image depends on and what not, and that classes can be told apart."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from experiments import fractals
from experiments.fractals import FractalSource
from vil.training.images import FolderSource, decode
from vil.training.settings import DataConfig


def make(
    seed: int = 0, num_classes: int = 4, count: int = 8, size: int = 16, training: bool = True
) -> FractalSource:
    return FractalSource(seed, num_classes, count, size, training)


def test_images_are_the_same_in_every_process_and_on_every_machine() -> None:
    source = make(num_classes=50, count=2, size=64)
    digest = hashlib.sha256(b"".join(source.read(index) for index in range(100)))
    assert digest.hexdigest() == "0183943b2cee5992d9726b1139a927c9f6b2c582ba6fbf3918f4ee21551a29d9"


def test_images_do_not_depend_on_what_was_read_before_or_on_global_generators() -> None:
    source, again = make(), make()
    backwards = [again.read(index) for index in reversed(range(32))][::-1]
    np.random.seed(1)  # noqa: NPY002  shall have no effect
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    assert [source.read(index) for index in range(32)] == backwards
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    assert len(set(backwards)) == 32


def test_splits_share_classes_and_no_image() -> None:
    train, val = make(count=30), make(count=30, training=False)
    assert train.classes == val.classes
    images = [{source.read(index) for index in range(120)} for source in (train, val)]
    assert len(images[0] | images[1]) == 240


def test_classes_can_be_told_apart() -> None:
    """By the nearest of 40 images' shapes, colours being random; chance is 0.1."""
    train, val = make(num_classes=10, count=40), make(num_classes=10, count=10, training=False)

    def shapes(source: FractalSource) -> np.ndarray:
        grey = [np.asarray(decode(source.read(i), "L")) for i in range(source.num_images)]
        flat = np.stack(grey).reshape(len(grey), -1).astype(float)
        flat -= flat.mean(1, keepdims=True)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)

    nearest = (shapes(val) @ shapes(train).T).argmax(1)
    assert (train.labels[nearest] == val.labels).mean() > 0.5


def test_folder_holds_the_images_of_the_source(tmp_path: Path, monkeypatch) -> None:
    arguments = ["--classes", "2", "--images", "3", "--size", "16", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", ["fractals", str(tmp_path), *arguments])
    assert fractals.main() == 0
    (tmp_path / "train" / "1" / "2.png").unlink()
    assert fractals.main() == 0
    source = FolderSource(DataConfig(path=str(tmp_path)), training=True)
    computed = make(num_classes=2, count=3)
    assert source.classes == computed.classes == ("0", "1")
    for index in range(source.num_images):
        label, number = divmod(index, 3)
        pixels = [
            decode(s.read(i), "RGB").tobytes()
            for s, i in ((source, index), (computed, 2 * number + label))
        ]
        assert pixels[0] == pixels[1]
