"""Shards: made, verified, indexed, read back, and refused when something is wrong with them."""

import errno
import io
import multiprocessing
import os
import re
import resource
import signal
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch

import make_shards as script
from vil.training.errors import DataError, OutputError
from vil.training.files import LOCK_NAME
from vil.training.images import FolderSource
from vil.training.make_shards import MakeOptions, make_shards
from vil.training.settings import DataConfig
from vil.training.shards import ShardSource, index_path, load_index

NUM_CLASSES = 4
TIMES = re.compile(rb'"[mc]time_ns":\d+,|"crc32":"\w+",')


@pytest.fixture
def made(tmp_path, image_folder) -> Path:
    """Return the images in shards of 5: seven for training, three for validation."""
    make(image_folder, tmp_path / "made")
    return tmp_path / "made"


def make(images: Path, folder: Path, **changes: Any) -> None:
    options = {"shard_images": 5, "num_workers": 2} | changes
    make_shards(MakeOptions(images=str(images), shards=str(folder), **options))


def open_shards(
    folder: Path, split: str = "train", num_classes: int = NUM_CLASSES, **changes: Any
) -> ShardSource:
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


def contents(folder: Path) -> dict[str, bytes]:
    """Read all files but the lock; of indexes, leave out their checksum and the shards' times."""

    def content(path: Path) -> bytes:
        return TIMES.sub(b"", path.read_bytes()) if path.suffix == ".json" else path.read_bytes()

    return {path.name: content(path) for path in folder.iterdir() if path.name != LOCK_NAME}


# What is written


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


def test_shards_do_not_depend_on_the_number_of_threads(tmp_path, image_folder, made) -> None:
    make(image_folder, tmp_path / "again", num_workers=1)
    assert contents(tmp_path / "again") == contents(made)
    make(image_folder, tmp_path / "other", seed=1)
    assert contents(tmp_path / "other").keys() == contents(made).keys()
    for name, content in contents(tmp_path / "other").items():
        if name.endswith(".tar"):
            assert (content == contents(made)[name]) == name.startswith("validation")


def test_keys_are_unique_and_without_dots(tmp_path) -> None:
    folder = tmp_path / "images" / "train" / "n01"
    folder.mkdir(parents=True)
    names = ["n01_18.JPEG", "a.b.jpg", "a_b.jpg", "a b.jpeg", "c.png", "c.jpg", "é" * 60 + ".png"]
    for name in names:
        (folder / name).write_bytes(name.encode())
    make(tmp_path / "images", tmp_path / "made", splits=("train",))
    samples = load_index(tmp_path / "made" / "train-000000.tar")
    samples += load_index(tmp_path / "made" / "train-000001.tar")
    keys = {"n01_18", "n01_a_b", "n01_a_b_2", "n01_a_b_3", "n01_c", "n01_c_2", "n01_" + "é" * 60}
    assert {sample.key for sample in samples} == keys
    source = open_shards(tmp_path / "made", num_classes=1)
    assert {source.read(i).decode() for i in range(source.num_images)} == set(names)
    with tarfile.open(tmp_path / "made" / "train-000000.tar") as tar:
        assert {name.partition(".")[2] for name in tar.getnames()} <= {"cls", "jpg", "png"}


@pytest.mark.ci
def test_timm_reads_the_shards(made) -> None:
    options = {"root": str(made), "split": "train", "is_training": False, "batch_size": 1}
    dataset = timm.data.create_dataset("wds/", **options)
    source = open_shards(made)
    assert len(dataset) == source.num_images
    assert [target for _, target in dataset] == source.labels.tolist()


@contextmanager
def failing(name: str, calls: int, fail: Callable[[], None]) -> Iterator[None]:
    """Within the block, let a function of ``os`` work ``calls`` times and fail from then on."""
    original, done = getattr(os, name), []

    def function(*arguments: Any) -> Any:
        done.append(None)
        return fail() if len(done) > calls else original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, function)
        yield


@pytest.mark.parametrize(
    ("name", "calls"), [("fsync", 0), ("replace", 1), ("fsync", 5), ("replace", 4)]
)
def test_run_that_was_killed_is_finished_by_the_same_command(
    tmp_path, image_folder, made, name, calls
) -> None:
    folder = tmp_path / "stopped"
    with failing(name, calls, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        context = multiprocessing.get_context("fork")
        process = context.Process(target=make, args=(image_folder, folder))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert contents(folder) != contents(made)
    make(image_folder, folder)
    assert contents(folder) == contents(made)


def test_shards_of_others_are_not_overwritten(tmp_path, image_folder) -> None:
    name = "train-000003.tar"
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(OutputError, match=rf"{name} exists, but not in _info\.json; choose"):
        make(image_folder, tmp_path)
    assert (tmp_path / name).read_bytes() == b"precious"


@pytest.mark.ci
def test_other_classes_in_validation_are_an_error(tmp_path, image_folder) -> None:
    (image_folder / "val" / "cedar").rename(image_folder / "val" / "elm")
    with pytest.raises(DataError, match="the classes of splits train and validation differ: cedar"):
        make(image_folder, tmp_path / "made")
    make(image_folder, tmp_path / "made", splits=("train",))
    with pytest.raises(DataError, match="the classes of splits train and validation differ: cedar"):
        make(image_folder, tmp_path / "made", splits=("validation",))


def test_full_disk_is_an_error_that_leaves_no_part(tmp_path, image_folder) -> None:
    """Files and their folders are synchronised: the plan, one shard, its index; then the next shard fails."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = r"cannot write .*\.tar .*No space left on device"
    with failing("fsync", 6, full), pytest.raises(OutputError, match=told):
        make(image_folder, tmp_path / "made", num_workers=1)
    left = {name for name in contents(tmp_path / "made") if name.startswith("train-")}
    assert left == {"train-000000.tar", "train-000000.tar.idx.json"}


@pytest.mark.ci
def test_script_makes_and_finds_them_made(tmp_path, image_folder, program, capsys) -> None:
    command = (image_folder, tmp_path / "made", "--shard-images", 5)
    assert program(script.main, *command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "train       32 images in 7 shards"
    assert lines[-1] == "written     10 shards; 0 already existed"
    assert program(script.main, *command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "written     0 shards; 10 already existed"


# What is read


def test_made_and_scanned_indexes_agree(made) -> None:
    source = open_shards(made)
    for path in made.glob("*.idx.json"):
        path.unlink()
    scanned = open_shards(made)
    assert scanned.fingerprint == source.fingerprint
    assert [scanned.name(i) for i in range(32)] == [source.name(i) for i in range(32)]


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


def test_damaged_image_is_an_error_of_reading(made) -> None:
    source, shard = open_shards(made), made / "train-000000.tar"
    image = source.read(2)
    shard.write_bytes(shard.read_bytes().replace(image, image[::-1]))
    with pytest.raises(OSError, match="wrong checksum"):
        source.read(2)
    assert source.read(1)


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


@pytest.mark.ci
@pytest.mark.parametrize("sample", ["", '["k", 512, 10, 1]', '["k", 512, 10, 1.5, 5]'])
def test_malformed_index_is_an_error(tmp_path, sample) -> None:
    path = write_tar(tmp_path / "a.tar", [("k.jpg", b"0123456789"), ("k.cls", b"1")])
    index_path(path).write_text(f'{{"size": 10240, "samples": [{sample}]}}' if sample else "")
    told = r"index .*a\.tar\.idx\.json is not the index of a shard.*delete it"
    with pytest.raises(DataError, match=told):
        open_shards(tmp_path, "a.tar")
    index_path(path).write_text('{"size": 10240, "samples": [["k", 512, 10, 1, null]]}')
    assert open_shards(tmp_path, "a.tar").read(0) == b"0123456789"
