"""Fractals as a data set: what an image depends on and what not, and that classes can be told apart."""

import dataclasses
import hashlib
import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from vil.training.config import DataConfig, ModelConfig, TrainConfig
from vil.training.data import fractal_loops
from vil.training.data.batches import TrainData, ValData
from vil.training.data.fractals import FILLING_RATE, FractalSource, find_classes
from vil.training.data.sources import decode, open_source
from vil.training.distributed import World
from vil.training.errors import ConfigError
from vil.training.recipes import flat_dict, read_recipe

CONFIGS = Path(__file__).parents[3] / "configs"
CPU = torch.device("cpu")


def make(
    seed: int = 0, num_classes: int = 4, count: int = 8, size: int = 16, training: bool = True
) -> FractalSource:
    return FractalSource(seed, num_classes, count, size, training)


def pixels(source: FractalSource, label: int, number: int) -> np.ndarray:
    """Return an image of a class, uint8 (H, W, 3)."""
    index = number * len(source.classes) + label
    assert source.labels[index] == label
    return np.asarray(decode(source.read(index), "RGB"))


@pytest.fixture
def fractal_config(config: TrainConfig) -> TrainConfig:
    """A minuscule ViL on 4 classes of 8 fractals."""
    data = dataclasses.replace(config.data, dataset="fractals", path=None, images_per_class=8)
    return dataclasses.replace(config, data=data)


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


def test_pickled_source_reads_the_same() -> None:
    source = make()
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(5) == source.read(5)
    assert copy.name(5) == source.name(5) == "fractal 1 of class 1"


def test_class_does_not_depend_on_the_number_of_classes_or_images() -> None:
    few, many = make(num_classes=3, count=2), make(num_classes=7, count=5)
    for label in range(3):
        for number in range(2):
            assert np.array_equal(pixels(few, label, number), pixels(many, label, number))
    assert not np.array_equal(pixels(many, 2, 0), pixels(many, 3, 0))


def test_splits_share_classes_and_no_image() -> None:
    train, val = make(count=30), make(count=30, training=False)
    assert train.classes == val.classes
    images = [{source.read(index) for index in range(120)} for source in (train, val)]
    assert len(images[0] | images[1]) == 240


@pytest.mark.parametrize("size", [16, 17, 64, 225])
def test_images_have_the_size_asked_for_and_fill_it(size: int) -> None:
    source = make(size=size)
    for label in range(4):
        image = pixels(source, label, 0)
        assert image.shape == (size, size, 3)
        assert image.dtype == np.uint8
        bright = image.max(-1) > 80  # the background is darker
        for axis in (0, 1):
            extent = np.flatnonzero(bright.any(axis))
            assert extent[-1] - extent[0] > 0.7 * size


def test_images_are_read_as_grey() -> None:
    source = make()
    grey = decode(source.read(3), "L")
    assert grey.mode == "L"
    assert np.asarray(grey).std() > 10


@pytest.mark.parametrize("training", [True, False])
def test_labels_are_balanced_in_every_stretch(training: bool) -> None:
    source = open_source(
        DataConfig(dataset="fractals"), ModelConfig(num_classes=7, img_size=224), training
    )
    assert source.num_images == len(source.labels) == 7 * (1000 if training else 50)
    assert source.labels.dtype == np.int64
    assert (np.bincount(source.labels) == source.num_images // 7).all()
    assert sorted(source.labels[10:17]) == list(range(7))
    order = source.order(torch.Generator().manual_seed(0))
    assert torch.equal(order.sort().values, torch.arange(source.num_images))


def test_systems_contract_and_fill() -> None:
    systems = find_classes(0, 200)
    used = systems[..., 6] > 0
    assert set(used.sum(1)) == set(range(2, 9))
    assert np.allclose(systems[..., 6].sum(1), 1)
    assert np.abs(systems[..., :6]).max() <= 1
    for j in range(4):
        for factor in (0.8, 0.9, 1.0, 1.1, 1.2):
            varied = systems[..., :4].copy()
            varied[..., j] *= factor
            assert np.linalg.svd(varied.reshape(200, 8, 2, 2))[1][used].max() < 1
    state = np.array([7], np.uint64)  # other points than the search's
    rates = np.array([fractal_loops.filling_rate(state, system.copy()) for system in systems])
    assert rates.min() > FILLING_RATE - 0.03
    assert rates.max() < 0.95


def test_fingerprint_is_that_of_the_images() -> None:
    one = make().fingerprint
    assert make().fingerprint == one
    changes = ({"seed": 1}, {"num_classes": 5}, {"count": 9}, {"size": 17}, {"training": False})
    others = [make(**change).fingerprint for change in changes]
    assert len({one, *others}) == 6


def test_seed_of_the_data_is_not_that_of_the_run(fractal_config: TrainConfig) -> None:
    def first(data: DataConfig, run_seed: int) -> bytes:
        run = dataclasses.replace(fractal_config.run, seed=run_seed)
        changed = dataclasses.replace(fractal_config, data=data, run=run)
        return TrainData(changed, CPU, World()).source.read(0)

    data = fractal_config.data
    assert first(data, 0) == first(data, 1)
    assert first(data, 0) != first(dataclasses.replace(data, fractal_seed=1), 0)


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


def test_instances_of_a_class_vary_in_shape_and_in_colour() -> None:
    images = np.stack([pixels(make(count=20, size=32), 0, number) for number in range(20)])
    shapes = images.max(-1) > 80
    shared = [(a & b).sum() / (a | b).sum() for a, b in itertools.pairwise(shapes)]
    assert max(shared) < 0.99
    colours = np.array([image[shape].mean(0) for image, shape in zip(images, shapes, strict=True)])
    assert colours.std(0).min() > 10


def test_smaller_numbers_take_the_first_images() -> None:
    model = ModelConfig(num_classes=3, img_size=16)
    few, more = (
        open_source(DataConfig(dataset="fractals", images_per_class=n), model, True) for n in (2, 5)
    )
    assert (few.num_images, more.num_images) == (6, 15)
    assert [few.read(i) for i in range(6)] == [more.read(i) for i in range(6)]
    assert few.fingerprint != more.fingerprint
    val = open_source(DataConfig(dataset="fractals", images_per_class=2), model, False)
    assert val.num_images == 150


def test_folder_is_refused(fractal_config: TrainConfig) -> None:
    data = dataclasses.replace(fractal_config.data, path="/data")
    with pytest.raises(ConfigError, match=r"no use for data\.dataset fractals, got /data"):
        open_source(data, fractal_config.model, training=True)


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.img_size must be at least 16 .*, got 15"):
        make(size=15)


def test_images_to_train_on_have_the_largest_size(fractal_config: TrainConfig) -> None:
    data = dataclasses.replace(fractal_config.data, img_sizes=(12, 24))
    sources = [open_source(data, fractal_config.model, training) for training in (True, False)]
    assert [pixels(source, 0, 0).shape for source in sources] == [(24, 24, 3), (16, 16, 3)]


def test_missing_numba_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "vil.training.data.fractal_loops")
    monkeypatch.delattr("vil.training.data.fractal_loops")
    with pytest.raises(ConfigError, match=r"needs numba, .* pip install 'vision-longhorn\[cpu\]'"):
        find_classes(0, 11)


def test_loader_processes_read_the_same_images(fractal_config: TrainConfig) -> None:
    loaded = []
    for num_workers in (0, 2):
        data = dataclasses.replace(fractal_config.data, num_workers=num_workers)
        chosen = dataclasses.replace(fractal_config, data=data)
        train, val = TrainData(chosen, CPU, World()), ValData(chosen, CPU, World())
        assert train.source.classes == val.source.classes
        batches = [step.micro_batches[0] for step in train.steps(0)] + list(val.batches())
        loaded.append([torch.cat(parts) for parts in zip(*batches, strict=True)])
    assert all(torch.equal(one, other) for one, other in zip(*loaded, strict=True))
    images, labels = loaded[0]
    assert images.shape == (3 * 32 + 200, 3, 16, 16)
    assert torch.equal(labels[96:].bincount(), torch.full((4,), 50))


def test_run_trains_and_is_not_continued_on_other_images(
    fractal_config: TrainConfig,
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = dataclasses.replace(fractal_config.run, output=str(tmp_path / "run"))
    schedule = dataclasses.replace(fractal_config.schedule, epochs=1)
    short = dataclasses.replace(fractal_config, run=run, schedule=schedule)
    assert train(short) == 0
    log = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert len(log) == 2
    for change in (("--data.fractal-seed", "1"), ("--data.images-per-class", "9")):
        assert train(short, *change) == ConfigError.exit_code
        assert change[0][2:].replace("-", "_") in capsys.readouterr().err


def test_recipe_differs_from_imagenet_in_the_data_alone() -> None:
    ours, imagenet = (
        flat_dict(read_recipe(CONFIGS / f"{name}.yaml")) for name in ("fractals", "vil_tiny")
    )
    differing = {key for key in ours if ours[key] != imagenet[key]}
    assert differing == {"data.dataset", "model.num_classes"}
    assert ours["data.dataset"] == "fractals"
