"""Ranks with different images, options or versions: all ranks end with the same message."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vil.training.distributed import World
from vil.training.errors import DataError
from vil.training.images import fingerprint
from vil.training.recipes import flat
from vil.training.settings import TrainConfig
from vil.training.splits import check_same, described, open_source

OWN = {"data.path", "run.device", "run.num_threads", "run.output"}


def rename_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "birch").rename(root / split / "zelkova")


def add_image(root: Path) -> None:
    shutil.copy(root / "val" / "ash" / "0.jpg", root / "val" / "ash" / "more.jpg")


def swap_classes(root: Path) -> None:
    for one, other in (("ash", "aside"), ("birch", "ash"), ("aside", "birch")):
        (root / "train" / one).rename(root / "train" / other)


def flip_bit(root: Path) -> None:
    path = root / "train" / "dogwood" / "5.jpg"
    content = bytearray(path.read_bytes())
    content[-20] ^= 4
    path.write_bytes(content)


TOLD: dict[Callable[[Path], None], str] = {
    rename_class: " class ",
    add_image: "number of validation images is 13 instead of 12",
    swap_classes: "fingerprint of the training images",
    flip_bit: "fingerprint of the training images",
}


class Meeting(World):
    """A rank that knows what the other ranks see; each has its own node."""

    def __init__(self, seen: list[dict[str, str]], rank: int = 0) -> None:
        super().__init__(rank, len(seen))
        object.__setattr__(self, "seen", seen)

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [fingerprint(str(seen).encode()) for seen in self.seen]
        return [(f"node-{rank}", seen) for rank, seen in enumerate(self.seen)]


def error_of(seen: list[dict[str, str]]) -> str:
    """Return the error that all ranks raise; empty if they see the same."""
    told = set()
    for rank, own in enumerate(seen):
        try:
            check_same(Meeting(seen, rank), own)
            told.add("")
        except DataError as error:
            told.add(str(error))
    [line] = told
    return line


def seen_in(config: TrainConfig, path: Path) -> dict[str, str]:
    """Describe the data in a folder as a run does, with any number of classes."""
    config = config.changed("data", path=str(path))
    sources = [open_source(config.data, None, training) for training in (True, False)]
    return described(flat(config), dict(zip(("training", "validation"), sources, strict=True)))


@pytest.mark.parametrize("dataset", ["folder", "wds"])
def test_copies_of_the_data_that_differ_end_all_processes(dataset, config, image_folder, pack, tmp_path) -> None:
    def packed(folder: Path) -> Path:
        return pack(folder, folder.with_name(f"{folder.name}-shards"), 8)

    if dataset == "wds":
        splits = {"train_split": "train", "val_split": "validation"}
        config = config.changed("data", dataset="wds", **splits)
    place = packed if dataset == "wds" else Path
    whole = seen_in(config, place(image_folder))
    same = shutil.copytree(image_folder, tmp_path / "same")
    assert error_of([whole, seen_in(config, place(same))]) == ""
    for edit, expected in TOLD.items():
        copy = shutil.copytree(image_folder, tmp_path / edit.__name__)
        edit(copy)
        told = error_of([whole, whole, seen_in(config, place(copy))])
        start = "rank 2 on node node-2 does not match rank 0 on node node-0. "
        assert told.startswith(start), edit
        assert expected in told, edit
        assert " instead of " in told, edit


def another(value: Any) -> Any:
    """Return a different value for an option."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (7, 8) if isinstance(value, tuple) else f"{value}x"


def test_each_setting_and_version_that_differs_is_named_with_both_values(config) -> None:
    seen = described(flat(config), {})
    for name, value in flat(config).items():
        section, key = name.split(".")
        other = config.changed(section, **{key: another(value)})
        told = error_of([seen, described(flat(other), {})])
        if name in OWN:
            assert told == "", name
        else:
            assert f"Differences (1): setting {name} is {another(value)} instead of {value}" in told
    for name in ("version of vil", "version of torch", "version of timm"):
        told = error_of([seen, seen | {name: "0.0.7"}])
        assert told.endswith(f"{name} is 0.0.7 instead of {seen[name]}")
