"""Shards: indexed, read, and refused when something is wrong with them."""

import io
import json
import os
import resource
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch

from vil.training.errors import DataError
from vil.training.images import FolderSource
from vil.training.settings import DataConfig
from vil.training.shards import ShardSource

NUM_CLASSES = 4


@pytest.fixture
def made(tmp_path, image_folder, pack) -> Path:
    """Return the images in shards of 5: seven for training, three for validation."""
    return pack(image_folder, tmp_path / "made", 5)


def open_shards(folder: Path, split: str = "train", num_classes: int = NUM_CLASSES, **changes: Any) -> ShardSource:
    data = DataConfig(path=str(folder), train_split=split, dataset="wds", **changes)
    return ShardSource(data, training=True, num_classes=num_classes)


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """Write a shard as another program would."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


# What is read


@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards_hold_the_images_of_the_folder(made, image_folder, split) -> None:
    folder = FolderSource(DataConfig(path=str(image_folder), val_split=split), training=False)
    source = open_shards(made, split)
    assert source.classes == folder.classes
    assert source.num_images == folder.num_images == len(source.labels)
    assert source.labels.dtype == np.int64
    assert source.excluded == []
    expected = {folder.read(i): int(folder.labels[i]) for i in range(folder.num_images)}
    assert {source.read(i): int(source.labels[i]) for i in range(source.num_images)} == expected


def test_a_shard_replaced_by_one_of_the_same_size_and_time_is_read_anew(tmp_path) -> None:
    image = b"\xff\xd8\xff"
    path, labels = tmp_path / "train-0.tar", []
    for order in (("a", "b"), ("b", "a")):
        stamp = path.stat() if path.exists() else None
        members = [
            (f"{n}.{kind}", content)
            for n, label in enumerate(order)
            for kind, content in (("cls", str(ord(label) - 97).encode()), ("jpg", image))
        ]
        write_tar(tmp_path / "new.tar", members).replace(path)
        if stamp is not None:
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            assert path.stat().st_size == stamp.st_size
        data = DataConfig(dataset="wds", path=str(tmp_path), train_split="train-0.tar")
        labels.append(ShardSource(data, True, 2).labels.tolist())
    assert labels == [[0, 1], [1, 0]]


@pytest.mark.ci
def test_timm_reads_the_shards(made) -> None:
    options = {"root": str(made), "split": "train", "is_training": False, "batch_size": 1}
    dataset = timm.data.create_dataset("wds/", **options)
    source = open_shards(made)
    assert len(dataset) == source.num_images
    assert [target for _, target in dataset] == source.labels.tolist()


@pytest.mark.parametrize("damage", ["missing", "empty", "foreign", "a digit"])
def test_an_index_that_is_not_that_of_its_shard_is_made_anew(made, damage) -> None:
    """The second time, the shards are not scanned."""
    first = open_shards(made)
    before = {path: path.read_bytes() for path in made.glob("*.idx.json")}
    assert len(before) == 7
    for path, content in before.items():
        index = json.loads(content)
        index["samples"][0][3] += 1  # a label
        path.write_bytes({"empty": b"", "foreign": b"{}"}.get(damage, json.dumps(index).encode()))
        if damage == "missing":
            path.unlink()
    again = open_shards(made)
    assert again.fingerprint == first.fingerprint
    assert again.labels.tolist() == first.labels.tolist()
    assert {path: path.read_bytes() for path in made.glob("*.idx.json")} == before
    for path in made.glob("train-*.tar"):
        times = path.stat()
        path.write_bytes(bytes(times.st_size))
    with pytest.raises(DataError, match="holds no images"):
        open_shards(made)


def test_samples_are_grouped_as_webdataset_does_it(tmp_path) -> None:
    members = {
        "__meta__": b"skipped",
        "a/x.cls": b" 1\n",
        "a/x.png": b"second choice",
        "a/x.JPG": b"first choice",
        "._x.jpg": b"of macOS",
        "a/y.jpeg": b"no label",
        "b.v/z.webp": b"label is a word",
        "b.v/z.cls": b"cat",
        "w.cls": b"0",
        "u.mask.png": b"an image with a dot in its name",
        "u.mask.cls": b"0",
        "t.json": b"{}",
        "bad\nkey.jpg": b"one line",
        "bad\nkey.cls": b"3",
    }
    write_tar(tmp_path / "a.tar", members.items())
    for _ in range(2):  # scanned, then from the index
        source = open_shards(tmp_path, "a.tar")
        assert [source.read(i) for i in range(2)] == [b"first choice", b"one line"]
        assert source.labels.tolist() == [1, 3]
        assert [source.name(i) for i in range(2)] == ["a.tar: a/x", r"a.tar: bad\nkey"]
        assert source.excluded == [
            "a.tar: a/y: no label",
            "a.tar: b.v/z: label 'cat' is not an integer",
            "a.tar: w: no image, or its name has another dot than that of its kind",
            "a.tar: u: no image, or its name has another dot than that of its kind",
        ]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ["0.jpg", "1.jpg", "0.cls", "1.cls"],
            "has other files between those of sample '0'; pack",
        ),
        (["0.jpg", "1.jpg", "1.cls", "0.txt", "0.cls"], "tar --sort=name"),
        (["0.jpg", "0.cls", "1.jpg", "1.cls", "0.jpg", "0.cls"], "holds sample '0' 2 times"),
        (["0.jpg", "0.cls", "1.jpg", "1.cls", "0.cls"], "holds sample '0' 2 times"),
    ],
)
def test_files_of_a_sample_must_be_neighbours(tmp_path, names, told) -> None:
    write_tar(tmp_path / "a.tar", [(name, b"1") for name in names])
    with pytest.raises(DataError, match=told):
        open_shards(tmp_path, "a.tar")


def test_order_stays_within_windows_of_shards(made) -> None:
    source = open_shards(made, shuffle_shards=2)
    order = source.order(torch.Generator().manual_seed(0)).tolist()
    names = [source.name(index).split(":")[0] for index in order]
    visited = list(dict.fromkeys(names))
    assert sorted(visited) == [f"train-{number:06d}.tar" for number in range(7)]
    assert visited != sorted(visited)
    windows = [visited.index(name) // 2 for name in names]
    assert windows == sorted(windows)
    assert [visited.index(name) for name in names] != sorted(visited.index(n) for n in names)


@pytest.mark.ci
def test_there_may_be_more_shards_than_open_files(tmp_path) -> None:
    for number in range(200):
        write_tar(tmp_path / f"{number:03d}.tar", [("x.jpg", b"%d" % number), ("x.cls", b"0")])
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, limits[1]))
    try:
        source = open_shards(tmp_path, "{000..199}.tar")
        for _ in range(2):
            assert [source.read(index) for index in range(200)] == [b"%d" % n for n in range(200)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del source
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_that_was_cut_is_an_error_of_reading(made) -> None:
    source, shard = open_shards(made), made / "train-000000.tar"
    assert source.read(0)
    os.truncate(shard, 600)
    with pytest.raises(OSError, match="the shard ends after "):
        source.read(0)


def test_equal_shards_have_equal_fingerprints_wherever_they_lie(tmp_path, made) -> None:
    before = open_shards(made).fingerprint
    assert open_shards(made, "validation").fingerprint != before
    moved = made.rename(tmp_path / "moved")
    assert open_shards(moved).fingerprint == before
    pattern = f"{moved}/train-{{000000..000006}}.tar"
    assert open_shards(tmp_path, pattern).fingerprint == before


# What is refused


def test_missing_shards_are_an_error(made) -> None:
    (made / "train-000003.tar").unlink()
    (made / "train-000005.tar").unlink()
    for split in ("train", "train-{000000..000006}.tar"):
        with pytest.raises(DataError, match=r"2 of 7 shards are missing, .*train-000003\.tar"):
            open_shards(made, split)


@pytest.mark.ci
@pytest.mark.parametrize("lengths", ["", "[1, 2]", '["1"]'])
def test_malformed_info_is_an_error(tmp_path, lengths) -> None:
    split = f'{{"filenames": ["a.tar"], "shard_lengths": {lengths}}}'
    (tmp_path / "_info.json").write_text(f'{{"splits": {{"train": {split}}}}}')
    told = r"_info\.json (is not in timm's format for shards|must have as many)"
    with pytest.raises(DataError, match=told):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, r"is not a valid tar file at its start: empty file"),
        (100, r"is not a valid tar file at its start: truncated header"),
        (600, r"is truncated: it ends within 'a\.jpg'"),
        (512 + 1536 + 700, r"is not a valid tar file after 'a\.cls': unexpected end of data"),
        (512 + 1536 + 1024, r"is truncated or damaged after 'a\.cls', where a tar file must end"),
        (4096 + 512 + 100, r"is truncated: it ends within 'b\.jpg'"),
        (10240 + 512, r"is truncated or damaged after 'b\.jpg', where a tar file must end"),
    ],
)
def test_truncated_shard_is_an_error_without_an_index(tmp_path, size, message) -> None:
    image = bytes(range(256)) * 5
    path = tmp_path / "a.tar"
    write_tar(path, [("a.jpg", image), ("a.cls", b"1"), ("b.cls", b"1"), ("b.jpg", image)])
    if size > 10240:
        path.write_bytes(2 * path.read_bytes())  # two archives in a row
    os.truncate(path, size)
    with pytest.raises(DataError, match=message):
        open_shards(tmp_path, "a.tar")
