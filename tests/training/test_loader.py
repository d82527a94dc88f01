"""Image sources, their errors, and what happens to an unreadable image."""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.training.run_files import rows, train_data, val_data
from vil.training.distributed import World
from vil.training.errors import DataError
from vil.training.loader import Step
from vil.training.recipes import to_yaml
from vil.training.sampler import image_size_of_step
from vil.training.settings import DataConfig
from vil.training.splits import open_source, open_splits


def assert_same_steps(left: list[Step], right: list[Step]) -> None:
    """Compare step numbers, pixels, labels and replaced images."""
    assert [step.number for step in left] == [step.number for step in right]
    for one, other in zip(left, right, strict=True):
        assert one.bad_images == other.bad_images
        for batch, same in zip(one.micro_batches, other.micro_batches, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch, same, strict=True))


def damage(folder: Path, name: str) -> Path:
    """Cut an image off within its header."""
    path = folder / name
    path.write_bytes(path.read_bytes()[:300])
    return path


def test_digits_hold_out_360_of_every_class_alike() -> None:
    data = DataConfig(dataset="digits")
    held_out = open_source(data, 10, training=False)
    assert open_source(data, 10, training=True).num_images == 1437
    assert held_out.num_images == 360
    assert set(Counter(held_out.labels).values()) <= {35, 36, 37}


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_validation_counts_each_image_once_over_all_processes(config, shard_config, kind, world_size) -> None:
    chosen = (config if kind == "folder" else shard_config).changed("data", batch_size=30)
    shares = [val_data(chosen, World(rank, world_size)) for rank in range(world_size)]
    labels = [torch.cat([targets for _, targets in share.batches()]) for share in shares]
    assert Counter(torch.cat(labels).tolist()) == {0: 3, 1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_steps_do_not_depend_on_loader_processes_nor_on_where_they_start(config, shard_config, kind) -> None:
    chosen = config if kind == "folder" else shard_config
    whole = list(train_data(chosen).steps(0))
    assert len(whole) == 3 * 4
    assert {step.micro_batches[0][0].shape for step in whole} == {(8, 3, 16, 16)}
    assert_same_steps(list(train_data(chosen.changed("data", num_workers=2)).steps(5)), whole[5:])


@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_processes_make_equal_steps_of_the_same_images(config, shard_config, kind) -> None:
    chosen = config if kind == "folder" else shard_config
    divided = chosen.changed("run", grad_accum_steps=2)
    whole = list(train_data(chosen).steps(0))
    parts = [list(train_data(divided, World(rank, 2)).steps(0)) for rank in range(2)]
    for step, *shares in zip(whole, *parts, strict=True):
        images = [images for share in shares for images, _ in share.micro_batches]
        assert {len(part) for part in images} == {2}
        assert torch.equal(torch.cat(images), step.micro_batches[0][0])


def test_names_are_those_of_the_images_trained_on(config) -> None:
    data = train_data(config.changed("data", aug_repeats=0))
    for step in data.steps(6):
        labels = [Path(name).parent.name for name in data.names(step.number)]
        assert [data.source.classes[i] for i in step.micro_batches[0][1]] == labels


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unreadable_training_image_is_replaced_and_told(config, image_folder, num_workers) -> None:
    healthy = list(train_data(config).steps(0))
    path = damage(image_folder, "train/birch/1.jpg")
    data = train_data(config.changed("data", num_workers=num_workers))
    steps = list(data.steps(0))
    told = {index for step in steps for index in step.bad_images}
    assert [data.source.name(index) for index in told] == [str(path)]
    assert {why for step in steps for why in step.bad_images.values()} == {"Truncated File Read"}
    assert_same_steps(steps, list(train_data(config).steps(0)))
    for step, before in zip(steps, healthy, strict=True):
        same = torch.equal(step.micro_batches[0][0], before.micro_batches[0][0])
        assert same == (str(path) not in data.names(step.number))


def test_labels_are_those_of_the_images_and_of_what_replaces_one(config, image_folder) -> None:
    for label, name in enumerate(("ash", "birch", "cedar", "dogwood")):
        for path in (image_folder / "train" / name).iterdir():
            Image.new("L", (24, 20), 60 * label).save(path)
    damage(image_folder, "train/birch/1.jpg")
    steps = list(train_data(config.changed("augment", aa=None, reprob=0.0)).steps(0))
    assert any(step.bad_images for step in steps)
    for step in steps:
        for images, labels in step.micro_batches:
            assert (images.float().mean((1, 2, 3)) / 60).round().tolist() == labels.tolist()


def test_repeats_of_an_image_are_augmented_differently(config) -> None:
    data = train_data(config)
    (images, _), *_ = next(data.steps(0)).micro_batches
    assert len(set(data.names(0))) == 3  # of 8 images
    assert len(images.flatten(1).unique(dim=0)) == 8


def test_empty_class_folder_is_an_error(config, image_folder) -> None:
    (image_folder / "train" / "elm").mkdir()
    with pytest.raises(DataError, match=r"class folder .*train/elm has no images"):
        train_data(config)


def test_classes_without_validation_images_are_trained(
    config, image_folder, train, evaluate, caplog, capsys, tmp_path
) -> None:
    """One folder is missing and one is empty: labels are those of training, and eval.py agrees."""
    shutil.rmtree(image_folder / "val" / "birch")
    for path in (image_folder / "val" / "dogwood").iterdir():
        path.unlink()
    _, val = open_splits(config.data, 4, World())
    assert val.labels.tolist() == [0] * 3 + [2] * 3
    assert val.classes == ("ash", "birch", "cedar", "dogwood")
    chosen, folder = config.changed("schedule", epochs=1, warmup_epochs=0), tmp_path / "run"
    assert train(chosen, "--run.output", str(folder)) == 0
    (row,) = rows(folder)
    assert evaluate(str(folder / "last.pt")) == 0
    result = json.loads((folder / "last-eval.json").read_text())
    assert result["loss"] == pytest.approx(float(row["val_loss"]))
    told = caplog.text + capsys.readouterr().out
    warning = "classes without validation images are not scored (2): birch, dogwood"
    assert told.count(warning) >= 2


def test_splits_must_have_the_same_classes_in_the_same_order(shard_config) -> None:
    config = shard_config.changed("data", train_split="train", val_split="val")
    splits = {}
    for split in ("train", "val"):
        files = [f"{split}-{number}.tar" for number in range(3)]
        splits[split] = {"filenames": files, "classes": ["ash", "birch", "cedar", "dogwood"]}
    for classes, told in (
        (["ash", "elm", "cedar", "dogwood"], "class birch is in the training data only (2 classes"),
        (["dogwood", "cedar", "birch", "ash"], "class 0 is ash in the training data and dogwood"),
    ):
        splits["val"]["classes"] = classes
        Path(config.data.path, "_info.json").write_text(json.dumps({"splits": splits}))
        with pytest.raises(DataError, match=re.escape(told)):
            open_splits(config.data, 4, World())


def test_an_image_too_narrow_to_enlarge_is_named(config, image_folder) -> None:
    Image.new("RGB", (1, 20_000)).save(image_folder / "val" / "ash" / "narrow.png")
    narrow = config.changed("data", max_pixels=1_000_000)
    with pytest.raises(DataError, match=r"ash/narrow\.png: .* 1 x 20000 px.* exceeds max_pixels"):
        val_data(narrow).verify()
    val_data(narrow.changed("data", crop_mode="squash")).verify()


def test_accents_of_class_names_may_be_composed_or_separate(config, image_folder) -> None:
    for split, name in (("train", "b\u00edrch"), ("val", "bi\u0301rch")):
        (image_folder / split / "birch").rename(image_folder / split / name)
    train, val = open_splits(config.data, None, World())
    assert train.classes == val.classes == ("ash", "b\u00edrch", "cedar", "dogwood")
    assert [*dict.fromkeys(train.labels)] == [*dict.fromkeys(val.labels)] == [0, 1, 2, 3]
    shutil.copytree(image_folder / "train" / "ash", image_folder / "train" / "bi\u0301rch")
    with pytest.raises(DataError, match=r"two folders in .* have the name"):
        open_splits(config.data, None, World())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unreadable_validation_images_are_left_out_from_the_first_pass_on(config, image_folder, num_workers) -> None:
    damage(image_folder, "val/birch/1.jpg")
    told = r"1 of 12 images cannot be read.* birch/1\.jpg: Trunc.*; repair or delete them, or"
    with pytest.raises(DataError, match=told.replace(" birch", ".*birch")):
        val_data(config.changed("data", num_workers=num_workers)).verify()
    data = val_data(config.changed("data", num_workers=num_workers, max_bad_images=0.1))
    for _ in range(2):
        data.verify()
        assert sum(len(targets) for _, targets in data.batches()) == data.num_images == 11
        data.settle()
    damage(image_folder, "val/ash/0.jpg")  # later scores would be of other images than these
    with pytest.raises(DataError, match=r"1 of 12 .* cannot be read any more: .*ash/0\.jpg"):
        data.verify()


def overwrite(path: Path) -> None:
    """Change a file's last bit."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(("kind", "images_per_class"), [("folder", 3), ("wds", None)])
def test_other_contents_under_the_same_names_have_other_fingerprints(
    config, shard_config, kind, images_per_class
) -> None:
    chosen = (config if kind == "folder" else shard_config).changed("data", images_per_class=images_per_class)
    source = train_data(chosen).source
    assert train_data(chosen).source.fingerprint == source.fingerprint
    if kind == "folder":
        overwrite(Path(source.name(5)))
    else:
        shard = Path(shard_config.data.path, source.name(5).split(":")[0])
        image = source.read(5)
        shard.write_bytes(shard.read_bytes().replace(image, image[::-1]))
    other = train_data(chosen).source
    assert other.listing == source.listing
    assert other.fingerprint != source.fingerprint


@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_fewer_images_of_each_class_are_nested_and_read_right(config, shard_config, kind) -> None:
    chosen = config if kind == "folder" else shard_config
    configs = [chosen.changed("data", images_per_class=number) for number in (None, 3, 5, 3)]
    sources = [open_source(one.data, 4, training=True) for one in configs]
    whole, few, more, again = sources
    for source, count in ((few, 3), (more, 5)):
        assert Counter(source.labels.tolist()) == dict.fromkeys(range(4), count)
        drawn = source.order(torch.Generator().manual_seed(0))
        assert torch.equal(drawn.sort().values, torch.arange(4 * count))
    names = [{source.name(index) for index in range(source.num_images)} for source in sources]
    assert names[3] == names[1] < names[2] < names[0]
    places = {whole.name(index): index for index in range(whole.num_images)}
    for index in range(few.num_images):
        place = places[few.name(index)]
        assert few.read(index) == whole.read(place)
        assert few.labels[index] == whole.labels[place]
    assert few.classes == whole.classes
    assert again.fingerprint == few.fingerprint
    assert len({source.fingerprint for source in sources}) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_images_of_a_step_are_made_at_its_size(config, num_workers) -> None:
    several = config.changed("data", img_sizes=(8, 24, 16), num_workers=num_workers)
    several = several.changed("run", grad_accum_steps=2)
    whole = train_data(several)
    drawn = [image_size_of_step((8, 24, 16), 0, number) for number in range(12)]
    assert set(drawn) == {8, 24, 16}
    steps = [list(train_data(several, World(rank, 2)).steps(5)) for rank in (0, 1)]
    for step in [*whole.steps(0), *steps[0], *steps[1]]:
        shapes = {images.shape[1:] for images, _ in step.micro_batches}
        assert shapes == {(3, drawn[step.number], drawn[step.number])}
    assert {images.shape[1:] for images, _ in val_data(several).batches()} == {(3, 16, 16)}
    # Other sizes of the list have no effect on it.
    one = next(train_data(several.changed("data", img_sizes=(drawn[0],))).steps(0))
    assert_same_steps([one], [next(whole.steps(0))])


def test_a_program_that_leaves_loader_processes_ends(config, tmp_path) -> None:
    """Workers ignore SIGTERM, with which Python would end them before it waits for them."""
    (tmp_path / "recipe.yaml").write_text(to_yaml(config.changed("data", num_workers=1)))
    program = (
        "from pathlib import Path; from vil.training.distributed import World\n"
        "from vil.training.loader import TrainData\n"
        "from vil.training.splits import open_source\n"
        "from vil.training.recipes import read_recipe\n"
        f"config = read_recipe(Path({str(tmp_path / 'recipe.yaml')!r}))\n"
        "source = open_source(config.data, 4, training=True)\n"
        "steps = TrainData(config, source, World()).steps(0)\n"
        "print(next(steps).number)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_run_tells_of_bad_images_and_goes_on_without_them(
    config, image_folder, train, evaluate, tmp_path, capsys
) -> None:
    """Of training images when they are read, of held-out ones at its start; eval.py leaves these out, too."""
    data = {"max_bad_images": 0.01, "max_pixels": 20_000, "aug_repeats": 0}
    config = config.changed("data", **data).changed("schedule", epochs=1, warmup_epochs=0)
    (image_folder / "train" / "ash" / "0.jpg").write_bytes(b"")
    (image_folder / "train" / "birch" / "1.jpg").write_bytes(b"no image")
    Image.new("L", (200, 101)).save(image_folder / "train" / "cedar" / "2.jpg")
    Image.new("L", (200, 1)).save(image_folder / "val" / "cedar" / "1.jpg")
    folder = tmp_path / "run"
    assert train(config, "--run.output", str(folder)) == 3
    told = r"1 of 12 images .* 0.01: .*cedar/1\.jpg: resized from 200 x 1 px, it would have 64,800 pix"
    assert re.search(told, capsys.readouterr().err)
    more = config.changed("data", max_bad_images=0.3)
    assert train(more, "--run.output", str(folder)) == 0
    printed, listed = capsys.readouterr().out, (folder / "skipped.txt").read_text()
    for why in (
        r"ash/0\.jpg: the file is empty",
        r"birch/1\.jpg: cannot identify image file",
        r"cedar/2\.jpg: it has 20,200 pixels, which exceeds max_pixels 20,000",
        r"cedar/1\.jpg: resized from 200 x 1 px",
    ):
        assert re.search(f"warning: .* cannot be read.*{why}", printed)
        assert re.search(why, listed)
    assert "32 images to train on, 11 held out, 4 classes" in printed
    assert "skipped  3 images, 0 steps, listed in skipped.txt" in printed
    assert evaluate(str(folder / "last.pt")) == 0
    result = json.loads((folder / "last-eval.json").read_text())
    assert (result["num_images"], result["unreadable_images"]) == (11, 1)
    log = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert result["loss"] == pytest.approx(float(log[-1]["val_loss"]))
    # A class that no readable image is left of cannot be learned.
    for path in (image_folder / "train" / "ash").iterdir():
        path.write_bytes(b"")
    assert train(more, "--run.output", str(tmp_path / "lost")) == 3
    assert "no training image of class ash can be read, for example" in capsys.readouterr().err


def test_splits_that_are_the_same_images_are_told(config, shard_config, image_folder, caplog) -> None:
    told = "the validation images are the training images"
    for chosen in (config, shard_config, config.changed("data", images_per_class=2)):
        open_splits(chosen.data, 4, World())
        assert told not in caplog.text
        name = chosen.data.train_split
        open_splits(dataclasses.replace(chosen.data, val_split=name), 4, World())
        assert told in caplog.text
        caplog.clear()
    shutil.rmtree(image_folder / "val")
    (image_folder / "val").symlink_to(image_folder / "train")
    open_splits(config.data, 4, World())
    assert told in caplog.text


def test_a_class_without_images_is_refused_wherever_it_is_named(
    config, shard_config, image_folder, pack, tmp_path, caplog
) -> None:
    shards = pack(image_folder, tmp_path / "packed", 100)
    info = json.loads((shards / "_info.json").read_text())
    for split in info["splits"].values():
        split["classes"].append("elm")
    (shards / "_info.json").write_text(json.dumps(info))
    data = {"path": str(shards), "train_split": "train", "val_split": "validation"}
    chosen = shard_config.changed("data", **data)
    with pytest.raises(DataError, match=r"classes without training images \(1\): elm"):
        open_splits(chosen.data, None, World())
    (image_folder / "train" / "birch").rename(image_folder / "train" / ".birch")
    (image_folder / "train" / ".cache").mkdir()
    with pytest.raises(DataError, match="class birch is in the validation data only"):
        open_splits(config.data, None, World())
    assert re.search(r"\.birch in .* left out, because names that begin with a dot", caplog.text)
    assert ".cache" not in caplog.text


def test_a_fraction_of_a_folder_with_splits_is_refused(config) -> None:
    data = dataclasses.replace(config.data, val_fraction=0.1, val_split="validation")
    with pytest.raises(DataError, match=r"has folders train and val, so .* leave out data\.val_fraction"):
        open_splits(data, 4, World())


def test_a_link_to_nothing_is_an_unreadable_image_at_once(config, image_folder, monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits for the file"))
    (image_folder / "val" / "ash" / "link.jpg").symlink_to("nothing")
    with pytest.raises(DataError, match=r"ash/link\.jpg: the link leads to no file"):
        val_data(config).verify()
