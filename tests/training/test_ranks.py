"""Ranks with different images, options or versions: all ranks end with the same message."""

import dataclasses
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import CLASSES
from vil.training import loader
from vil.training.distributed import World
from vil.training.errors import DataError
from vil.training.loader import check_same, described, open_source
from vil.training.make_shards import MakeOptions, make_shards
from vil.training.recipes import flat
from vil.training.settings import TrainConfig

OWN = {"data.path", "run.device", "run.num_threads", "run.output"}


def rename_image(root: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(root.glob("*/*/*.jpg")))
    path.rename(path.with_name("other.jpg"))


def rename_class(root: Path, draw: random.Random) -> None:
    name, letter = draw.choice(CLASSES), draw.choice("az")
    for split in ("train", "val"):
        (root / split / name).rename(root / split / f"{letter}{name}")


def add_image(root: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(root.glob("*/*/*.jpg")))
    shutil.copy(path, path.with_name("more.jpg"))


def remove_image(root: Path, draw: random.Random) -> None:
    draw.choice(sorted(root.glob("*/*/*.jpg"))).unlink()


def swap_classes(root: Path, draw: random.Random) -> None:
    one, other = (root / "train" / name for name in draw.sample(CLASSES, 2))
    one.rename(root / "aside")
    other.rename(one)
    (root / "aside").rename(other)


def flip_bit(root: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(root.glob("*/*/*.jpg")))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def add_class(root: Path, draw: random.Random) -> None:
    name = draw.choice(["aspen", "elm"])
    for split in ("train", "val"):
        shutil.copytree(root / split / "birch", root / split / name)


def remove_class(root: Path, draw: random.Random) -> None:
    name = draw.choice(CLASSES)
    for split in ("train", "val"):
        shutil.rmtree(root / split / name)


TOLD: dict[Callable[[Path, random.Random], None], str] = {
    rename_image: "fingerprint of the",
    rename_class: " class ",
    add_image: "number of",
    remove_image: "number of",
    swap_classes: "fingerprint of the training images",
    flip_bit: "fingerprint of the",
    add_class: "number of training images is 40 instead of 32",
    remove_class: "number of training images is 24 instead of 32",
}


class Meeting:
    """Ranks that run as threads, each on its own node."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=600)
        self.given: list[Any] = [None] * size

    def errors(self, seen: list[dict[str, str]]) -> list[str | None]:
        """Return the error that check_same raises in each rank, or None."""
        found: list[str | None] = [None] * self.size

        def be(rank: int) -> None:
            try:
                check_same(_Place(self, rank), seen[rank])
            except DataError as error:
                found[rank] = str(error)

        threads = [
            threading.Thread(target=be, args=(rank,), name=f"node-{rank}")
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class _Place(World):
    """One rank of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.size)
        object.__setattr__(self, "meeting", meeting)

    def gather(self, value: Any) -> list[Any]:
        self.meeting.given[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.given)
        self.meeting.barrier.wait()
        return values


@pytest.fixture(autouse=True)
def nodes(monkeypatch) -> None:
    """Give each thread's node the name of the thread."""
    monkeypatch.setattr(loader.socket, "gethostname", lambda: threading.current_thread().name)


def seen_in(config: TrainConfig) -> dict[str, str]:
    """Describe the data of a configuration as a run does."""
    sources = [open_source(config.data, config.model, training) for training in (True, False)]
    return described(config, dict(zip(("training", "validation"), sources, strict=True)))


def in_place(config: TrainConfig, path: Path) -> TrainConfig:
    """Return the configuration for data in a folder, with the number of classes left to the data."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_classes=None),
        data=dataclasses.replace(config.data, path=str(path)),
    )


def packed(folder: Path) -> Path:
    """Pack the images of a folder into shards, and return their folder."""
    shards = folder.with_name(f"{folder.name}-shards")
    make_shards(MakeOptions(images=str(folder), shards=str(shards), shard_images=8, num_workers=1))
    return shards


@pytest.mark.parametrize("dataset", ["folder", "wds"])
@pytest.mark.parametrize("edit", TOLD, ids=lambda edit: edit.__name__)
def test_copies_of_the_data_that_differ_end_all_processes(
    edit, dataset, config, image_folder, tmp_path
) -> None:
    if dataset == "wds":
        splits = {"train_split": "train", "val_split": "validation"}
        data = dataclasses.replace(config.data, dataset="wds", **splits)
        config = dataclasses.replace(config, data=data)
    place = packed if dataset == "wds" else Path
    whole = seen_in(in_place(config, place(image_folder)))
    for seed in range(3):
        draw = random.Random(f"{edit.__name__} {seed}")
        copy = tmp_path / f"copy-{seed}"
        shutil.copytree(image_folder, copy)
        if seed == 0:
            assert Meeting(2).errors([whole, seen_in(in_place(config, place(copy)))]) == [None] * 2
            shutil.rmtree(tmp_path / f"copy-{seed}-shards", ignore_errors=True)
        edit(copy, draw)
        if dataset == "wds" and edit is rename_image:
            continue  # names in shards have no effect
        other = seen_in(in_place(config, place(copy)))
        size = draw.randint(2, 4)
        rank = draw.randrange(1, size)
        seen = [other if i == rank else whole for i in range(size)]
        [told] = set(Meeting(size).errors(seen))
        assert told is not None, f"seed {seed}: nothing was said"
        start = f"rank {rank} on node node-{rank} does not match rank 0 on node node-0. "
        assert told.startswith(start), f"seed {seed}: {told}"
        assert TOLD[edit] in told, f"seed {seed}: {told}"
        assert " instead of " in told, f"seed {seed}: {told}"


def another(value: Any) -> Any:
    """Return a different value for an option."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (7, 8) if isinstance(value, tuple) else f"{value}x"


def test_each_setting_that_differs_is_named_with_both_values(config) -> None:
    for name, value in flat(config).items():
        section, key = name.split(".")
        changed = dataclasses.replace(getattr(config, section), **{key: another(value)})
        other = dataclasses.replace(config, **{section: changed})
        [told] = set(Meeting(2).errors([described(one, {}) for one in (config, other)]))
        if name in OWN:
            assert told is None, name
        else:
            assert told is not None, name
            assert f"Differences (1): setting {name} is {another(value)} instead of {value}" in told


def test_each_version_that_differs_is_named(config, monkeypatch) -> None:
    installed, seen = loader.versions(), described(config, {})
    for name in ("vil", "torch", "timm"):
        monkeypatch.setattr(loader, "versions", lambda name=name: installed | {name: "0.0.7"})
        [told] = set(Meeting(2).errors([seen, described(config, {})]))
        assert told is not None
        assert told.endswith(
            f"Differences (1): version of {name} is 0.0.7 instead of {installed[name]}"
        )
