"""Sources, their errors, the order of an epoch, and that validation counts each image once."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
import webdataset

from vil.training.config import DataConfig, ModelConfig, TrainConfig
from vil.training.data import (
    RepeatSampler,
    TrainData,
    ValData,
    check_same_classes,
    epoch_seed,
    train_transform,
)
from vil.training.engine import evaluate, train_one_epoch
from vil.training.errors import ConfigError, DataError
from vil.training.setup import build_model, build_training
from vil.training.sources import open_source

CPU = torch.device("cpu")


def with_data(config: TrainConfig, **changes: object) -> TrainConfig:
    """Return the configuration with other data settings."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def test_repeats_draw_each_image_three_times_in_a_row() -> None:
    order = list(RepeatSampler(1000, repeats=3, seed=0))
    assert len(order) == 768  # 1000 rounded down to a multiple of 256
    assert set(Counter(order).values()) == {3}
    assert order[0::3] == order[1::3] == order[2::3]


def test_repeats_of_a_small_data_set_keep_its_length() -> None:
    order = list(RepeatSampler(100, repeats=3, seed=0))
    assert len(order) == len(RepeatSampler(100, repeats=3, seed=0)) == 100
    assert sorted(Counter(order).values()) == [1] + [3] * 33


@pytest.mark.parametrize("repeats", [0, 1])
def test_without_repeats_each_image_is_drawn_once(repeats: int) -> None:
    order = list(RepeatSampler(300, repeats=repeats, seed=0))
    assert sorted(order) == list(range(300))
    assert order != list(range(300))


def test_order_follows_from_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(RepeatSampler(300, 3, epoch_seed(seed, epoch)))

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 0)


def test_digits_hold_out_360_of_every_class_alike() -> None:
    model = ModelConfig(num_classes=10, in_chans=1)
    data = DataConfig(dataset="digits")
    held_out = open_source(data, model, training=False)
    assert open_source(data, model, training=True).num_images == 1437
    assert held_out.num_images == 360
    assert set(Counter(held_out.labels).values()) <= {35, 36, 37}


def test_training_image_is_augmented_tensor(config: TrainConfig) -> None:
    dataset = TrainData(config, CPU).source.dataset(train_transform(config), 0)
    image, label = dataset[0]
    assert image.shape == (3, 16, 16)
    assert label == 0
    assert not torch.equal(image, dataset[0][0])


def test_affine_augmentation_moves_the_image(config: TrainConfig) -> None:
    still = dataclasses.replace(
        config.augment, scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, aa=None, reprob=0.0
    )
    moving = dataclasses.replace(still, degrees=20.0)
    for augment, differs in ((still, False), (moving, True)):
        dataset = TrainData(dataclasses.replace(config, augment=augment), CPU)
        images = dataset.source.dataset(dataset.transform, 0)
        assert torch.equal(images[0][0], images[0][0]) != differs


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_validation_counts_each_image_once(
    config: TrainConfig, shard_config: TrainConfig, kind: str, num_workers: int
) -> None:
    chosen = with_data(config if kind == "folder" else shard_config, num_workers=num_workers)
    batches = list(ValData(with_data(chosen, validation_batch_size=5), CPU).batches())
    labels = torch.cat([targets for _, targets in batches])
    assert Counter(labels.tolist()) == {0: 3, 1: 3, 2: 3, 3: 3}
    images = torch.cat([images for images, _ in batches])
    assert len(torch.unique(images.flatten(1), dim=0)) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_on_shards_gives_every_step(shard_config: TrainConfig, num_workers: int) -> None:
    data = TrainData(with_data(shard_config, num_workers=num_workers), CPU)
    first, second = (list(data.batches(epoch)) for epoch in (0, 1))
    assert len(first) == len(second) == data.batches_per_epoch == 4
    assert {len(targets) for _, targets in first} == {8}
    labels = [torch.cat([targets for _, targets in epoch]) for epoch in (first, second)]
    if num_workers == 0:  # several workers each refill their own last batch
        assert Counter(labels[0].tolist()) == {0: 8, 1: 8, 2: 8, 3: 8}
    assert not torch.equal(*labels)


def test_stated_number_of_training_images_is_taken(shard_config: TrainConfig) -> None:
    config = with_data(shard_config, train_split="train-{0..2}.tar|24")
    assert TrainData(config, CPU).batches_per_epoch == 3


def test_missing_folder_is_an_error(config: TrainConfig) -> None:
    with pytest.raises(DataError, match=r"data\.path /nowhere is not a folder"):
        TrainData(with_data(config, path="/nowhere"), CPU)


def test_unset_folder_is_an_error(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"needs --data\.path"):
        TrainData(with_data(config, path=None), CPU)


def test_digits_take_no_folder(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"has no use for data\.dataset digits"):
        TrainData(with_data(config, dataset="digits"), CPU)


def test_missing_split_is_an_error(config: TrainConfig, image_folder: Path) -> None:
    (image_folder / "val").rename(image_folder / "other")
    with pytest.raises(DataError, match="has no folder validation or val"):
        ValData(config, CPU)
    assert ValData(with_data(config, val_split="other"), CPU).num_images == 12


def test_empty_class_folder_is_an_error(config: TrainConfig, image_folder: Path) -> None:
    (image_folder / "train" / "elm").mkdir()
    with pytest.raises(DataError, match=r"class folder .*train/elm has no images"):
        TrainData(config, CPU)


def test_split_without_images_is_an_error(config: TrainConfig, image_folder: Path) -> None:
    for path in image_folder.glob("val/*/*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match=r"no images in the sub-folders of .*val"):
        ValData(config, CPU)


def test_other_number_of_classes_is_an_error(config: TrainConfig) -> None:
    model = dataclasses.replace(config.model, num_classes=5)
    with pytest.raises(DataError, match=r"has 4 classes, model\.num_classes is 5"):
        TrainData(dataclasses.replace(config, model=model), CPU)


def test_other_classes_in_validation_are_an_error(config: TrainConfig, image_folder: Path) -> None:
    (image_folder / "val" / "cedar").rename(image_folder / "val" / "elm")
    with pytest.raises(DataError, match=r"class cedar is in the training data only \(2 "):
        check_same_classes(TrainData(config, CPU), ValData(config, CPU))


def test_fewer_images_than_a_batch_is_an_error(config: TrainConfig) -> None:
    with pytest.raises(DataError, match=r"32 training images, fewer than data\.batch_size 34"):
        TrainData(with_data(config, batch_size=34), CPU)


def test_unknown_policy_is_an_error(config: TrainConfig) -> None:
    augment = dataclasses.replace(config.augment, aa="rand-z9")
    with pytest.raises(ConfigError, match="rand-z9"):
        TrainData(dataclasses.replace(config, augment=augment), CPU)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unreadable_validation_image_is_an_error(
    config: TrainConfig, image_folder: Path, num_workers: int
) -> None:
    path = image_folder / "val" / "birch" / "1.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"image .*birch/1\.jpg cannot be read"):
        list(ValData(with_data(config, num_workers=num_workers), CPU).batches())


def test_missing_shard_is_an_error(shard_config: TrainConfig) -> None:
    with pytest.raises(DataError, match=r"shard .*val-3\.tar does not exist \(1 of 4 missing\)"):
        ValData(with_data(shard_config, val_split="val-{0..3}.tar"), CPU)


def test_unknown_shard_split_is_an_error(shard_config: TrainConfig) -> None:
    with pytest.raises(DataError, match="has no shards validation"):
        ValData(with_data(shard_config, val_split="validation"), CPU)


def test_truncated_shard_is_an_error(shard_config: TrainConfig, image_shards: Path) -> None:
    shard = image_shards / "val-1.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(DataError, match=r"val-1\.tar is truncated or not a tar"):
        ValData(shard_config, CPU)


def test_shards_without_images_are_an_error(shard_config: TrainConfig, image_shards: Path) -> None:
    with webdataset.TarWriter(str(image_shards / "none.tar")) as writer:
        writer.write({"__key__": "elm0", "cls": "0"})
    with pytest.raises(DataError, match=r"the validation data in .*shards holds no images"):
        ValData(with_data(shard_config, val_split="none.tar"), CPU)


def test_training_shards_that_run_dry_are_an_error(
    shard_config: TrainConfig, image_shards: Path
) -> None:
    with webdataset.TarWriter(str(image_shards / "none.tar")) as writer:
        writer.write({"__key__": "elm0", "cls": "0"})
    config = with_data(shard_config, train_split="none.tar|16")
    training, data = build_training(config), TrainData(config, CPU)
    with pytest.raises(DataError, match="the training data ended after 0 of 2 batches"):
        train_one_epoch(training, data, config, 0, print)


def test_unlabelled_image_in_shard_is_an_error(
    shard_config: TrainConfig, image_shards: Path
) -> None:
    image = b"never decoded, for it has no label"
    with webdataset.TarWriter(str(image_shards / "val-3.tar")) as writer:
        writer.write({"__key__": "elm0", "jpg": image})
    shard_config = with_data(shard_config, val_split="val-{0..3}.tar")
    model = build_model(shard_config.model)
    with pytest.raises(DataError, match="holds 13 images, 12 could be scored"):
        evaluate(model, ValData(shard_config, CPU), CPU, amp=False)


def test_label_without_output_is_an_error(shard_config: TrainConfig) -> None:
    sizes = dataclasses.replace(shard_config.model, num_classes=3)
    config = dataclasses.replace(shard_config, model=sizes)
    with pytest.raises(DataError, match=r"holds label 3, model\.num_classes is 3"):
        evaluate(build_model(sizes), ValData(config, CPU), CPU, amp=False)
