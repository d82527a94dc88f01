"""Shards: made, verified, indexed, read back, and refused when something is wrong with them."""

import errno
import io
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

import make_shards as script
from vil.training import files
from vil.training.config import DataConfig
from vil.training.data import shard_index, shard_writer, shards
from vil.training.data.shard_index import index_path, read_index
from vil.training.data.shard_writer import MakeOptions, VerifyOptions, make_shards, verify_shards
from vil.training.data.shards import ShardSource
from vil.training.data.sources import FolderSource
from vil.training.errors import ConfigError, DataError, OutputError, run_script
from vil.training.files import LOCK_NAME

NUM_CLASSES = 4
TIMES = re.compile(rb'"[mc]time_ns":\d+,|"crc32":"\w+",')


def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture
def made(tmp_path: Path, image_folder: Path) -> Path:
    """The images in shards of 5: seven to train on, three to validate on."""
    make(image_folder, tmp_path / "made")
    return tmp_path / "made"


def make(images: Path, folder: Path, **changes: Any) -> None:
    options = {"shard_images": 5, "num_workers": 2} | changes
    make_shards(MakeOptions(images=str(images), shards=str(folder), **options), quiet())


def open_shards(
    folder: Path, split: str = "train", num_classes: int = NUM_CLASSES, **changes: Any
) -> ShardSource:
    data = DataConfig(path=str(folder), train_split=split, dataset="wds", **changes)
    return ShardSource(data, training=True, num_classes=num_classes)


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """Write a shard as another program would."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Read all files that a run is to leave, of indexes all but the times of their shards."""

    def content(path: Path) -> bytes:
        return TIMES.sub(b"", path.read_bytes()) if path.suffix == ".json" else path.read_bytes()

    return {path.name: content(path) for path in folder.iterdir() if path.name != LOCK_NAME}


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def offset_of(source: ShardSource, index: int) -> int:
    """Return the first byte of an image in its shard."""
    return int(source._places[index, 0])


# What is written


@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards_hold_the_images_of_the_folder(made: Path, image_folder: Path, split: str) -> None:
    folder = FolderSource(DataConfig(path=str(image_folder), val_split=split), training=False)
    source = open_shards(made, split)
    assert source.classes == folder.classes
    assert source.num_images == folder.num_images == len(source.labels)
    assert source.labels.dtype == np.int64
    assert source.excluded == []
    expected = {folder.read(i): int(folder.labels[i]) for i in range(folder.num_images)}
    assert {source.read(i): int(source.labels[i]) for i in range(source.num_images)} == expected


def test_training_shards_are_mixed_and_validation_is_in_order(made: Path) -> None:
    assert len(set(open_shards(made).labels[:8].tolist())) > 1
    labels = open_shards(made, "validation").labels
    assert labels.tolist() == sorted(labels.tolist())


def test_names_tell_shard_and_image(made: Path) -> None:
    source = open_shards(made, "validation")
    assert source.name(0) == "validation-000000.tar: ash_0"
    assert source.name(11) == "validation-000002.tar: dogwood_2"


def test_shards_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, image_folder: Path, made: Path
) -> None:
    make(image_folder, tmp_path / "again", num_workers=1)
    assert contents(tmp_path / "again") == contents(made)
    make(image_folder, tmp_path / "other", seed=1)
    assert contents(tmp_path / "other").keys() == contents(made).keys()
    for name, content in contents(tmp_path / "other").items():
        if name.endswith(".tar"):
            assert (content == contents(made)[name]) == name.startswith("validation")


def test_keys_are_unique_and_without_dots(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "train" / "n01"
    folder.mkdir(parents=True)
    names = ["n01_18.JPEG", "a.b.jpg", "a_b.jpg", "a b.jpeg", "c.png", "c.jpg", "é" * 60 + ".png"]
    for name in names:
        (folder / name).write_bytes(name.encode())
    make(tmp_path / "images", tmp_path / "made", splits=("train",))
    samples = read_index(tmp_path / "made" / "train-000000.tar").samples
    samples += read_index(tmp_path / "made" / "train-000001.tar").samples
    keys = {sample.key for sample in samples}
    assert keys == {
        *("n01_18", "n01_a_b", "n01_a_b_2", "n01_a_b_3", "n01_c", "n01_c_2"),
        "n01_" + "é" * 60,
    }
    source = open_shards(tmp_path / "made", num_classes=1)
    assert {source.read(i).decode() for i in range(source.num_images)} == set(names)
    with tarfile.open(tmp_path / "made" / "train-000000.tar") as tar:
        assert {name.partition(".")[2] for name in tar.getnames()} <= {"cls", "jpg", "png"}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_timm_reads_the_shards(made: Path, split: str) -> None:
    dataset = timm.data.create_dataset(
        "wds/", root=str(made), split=split, is_training=False, batch_size=1
    )
    source = open_shards(made, split)
    assert len(dataset) == source.num_images
    assert [target for _, target in dataset] == source.labels.tolist()


MOMENTS = [
    (shard_writer, "_announce", 0),
    (shard_writer, "_write_shard", 0),
    (shard_writer, "_read", 7),
    (files, "sync", 3),
    (shard_writer, "scan_shard", 2),
    (shard_writer, "write_index", 2),
]


def fail_after(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: int, fail: Callable[..., None]
) -> None:
    """Let a function do its work some times and then fail for ever."""
    original, done = getattr(module, name), []

    def failing(*arguments: Any) -> Any:
        done.append(None)
        return fail() if len(done) > calls else original(*arguments)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize(("module", "name", "calls"), MOMENTS)
def test_run_that_was_killed_is_finished_by_the_same_command(
    tmp_path: Path,
    image_folder: Path,
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    calls: int,
) -> None:
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        fail_after(patch, module, name, calls, lambda: os.kill(os.getpid(), signal.SIGKILL))
        context = multiprocessing.get_context("fork")
        process = context.Process(target=make, args=(image_folder, folder))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert contents(folder) != contents(made)
    make(image_folder, folder)
    assert contents(folder) == contents(made)


def test_shards_that_are_whole_are_not_written_again(
    made: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(made)
    index_path(made / "train-000002.tar").unlink()
    (made / "train-000004.tar").write_bytes(b"cut off")
    (made / "validation-000001.tar").unlink()
    written = []
    original = shard_writer.write_atomically
    monkeypatch.setattr(
        shard_writer,
        "write_atomically",
        lambda path, write: (written.append(path.name), original(path, write)),
    )
    make(image_folder, made)
    assert sorted(written) == ["train-000002.tar", "train-000004.tar", "validation-000001.tar"]
    assert contents(made) == before


def test_splits_can_be_made_one_after_the_other(
    tmp_path: Path, image_folder: Path, made: Path
) -> None:
    for split in ("train", "validation"):
        make(image_folder, tmp_path / "parts", splits=(split,))
    assert contents(tmp_path / "parts") == contents(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard_images": 6}, "holds split train with shard_images 5, now it is 6"),
        ({"seed": 1}, "holds split train with seed 0, now it is 1"),
    ],
)
def test_other_options_are_refused(
    made: Path, image_folder: Path, changes: dict[str, int], message: str
) -> None:
    before = contents(made)
    with pytest.raises(OutputError, match=message):
        make(image_folder, made, **changes)
    assert contents(made) == before
    make(image_folder, made, seed=1, splits=("validation",))  # which is not shuffled


def test_other_images_are_refused(made: Path, image_folder: Path) -> None:
    path = image_folder / "train" / "ash" / "0.jpg"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(OutputError, match=r"holds split train with file_list_digest .*, now it is"):
        make(image_folder, made)
    path.unlink()
    with pytest.raises(OutputError, match="holds split train with num_images 32, now it is 31"):
        make(image_folder, made)


@pytest.mark.parametrize("name", ["train-000003.tar", "train-000003.tar.idx.json"])
def test_shards_of_others_are_not_overwritten(
    tmp_path: Path, image_folder: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(OutputError, match=rf"{name} exists and _info\.json names no such shard"):
        make(image_folder, tmp_path)
    assert (tmp_path / name).read_bytes() == b"precious"


def test_description_of_others_is_not_overwritten(tmp_path: Path, image_folder: Path) -> None:
    text = '{"splits": {"test": {"filenames": ["test.tar"]}}}'
    (tmp_path / "_info.json").write_text(text)
    with pytest.raises(OutputError, match=r"_info\.json was not written by make_shards\.py"):
        make(image_folder, tmp_path)
    assert (tmp_path / "_info.json").read_text() == text


def test_other_files_in_the_folder_stay(tmp_path: Path, image_folder: Path) -> None:
    folder, mine = tmp_path / "made", ".train-000003.tar.4194399.tmp"
    others = (
        *(".cache.tmp", ".a.b.7.tmp", ".train-000003.tar.tmp", "train-000003.tar.7.tmp"),
        *(".train-000003.tar.0.tmp", ".train-000003.tar.x7.tmp", ".train-000099.tar.7.tmp"),
        f".train-000004.tar.{os.getppid()}.tmp",  # of a living process
    )
    (folder / ".d.tmp").mkdir(parents=True)
    (folder / ".train-000002.tar.4194399.tmp").mkdir()
    for name in (*others, mine):
        (folder / name).write_text("precious")
    make(image_folder, folder)
    assert {(folder / name).read_text() for name in (*others, mine)} == {"precious"}
    make(image_folder, folder)  # now it can be of the first attempt
    assert {(folder / name).read_text() for name in others} == {"precious"}
    assert (folder / ".d.tmp").is_dir()
    assert (folder / ".train-000002.tar.4194399.tmp").is_dir()
    assert not (folder / mine).exists()


def test_empty_images_are_an_error_before_anything_is_written(
    tmp_path: Path, image_folder: Path
) -> None:
    for number in (2, 1):
        (image_folder / "val" / "birch" / f"{number}.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"birch/1\.jpg is empty \(2 such, of 12\)"):
        make(image_folder, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_dangling_link_is_an_error(tmp_path: Path, image_folder: Path) -> None:
    (image_folder / "train" / "ash" / "x.jpg").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"x\.jpg cannot be read: No such file"):
        make(image_folder, tmp_path / "made")


def test_image_that_changes_meanwhile_is_an_error(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = shard_writer.read_file
    monkeypatch.setattr(shard_writer, "read_file", lambda path: read(path)[:-1])
    with pytest.raises(DataError, match=r"changed meanwhile, from \d+ to \d+ bytes"):
        make(image_folder, tmp_path / "made")


def test_other_classes_in_validation_are_an_error(tmp_path: Path, image_folder: Path) -> None:
    (image_folder / "val" / "cedar").rename(image_folder / "val" / "elm")
    with pytest.raises(DataError, match=r"cedar is in split train only, .* \(2 classes differ\)"):
        make(image_folder, tmp_path / "made")
    make(image_folder, tmp_path / "made", splits=("train",))
    with pytest.raises(DataError, match="class cedar is in split train only"):
        make(image_folder, tmp_path / "made", splits=("validation",))


def test_classes_in_another_order_are_an_error(made: Path, image_folder: Path) -> None:
    info = json.loads((made / "_info.json").read_text())
    info["splits"]["train"]["classes"] = ["ash", "cedar", "birch", "dogwood"]
    (made / "_info.json").write_text(json.dumps(info))
    message = "class 1 is cedar in split train and birch in validation"
    with pytest.raises(DataError, match=message):
        make(image_folder, made, splits=("validation",))


def test_shard_that_cannot_be_asked_for_is_an_error(made: Path) -> None:
    with pytest.raises(DataError, match=r"x\.tar cannot be read: File name too long"):
        open_shards(made, "x" * 300 + ".tar")


def test_full_disk_is_an_error_that_leaves_no_part(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fail_after(monkeypatch, shard_writer.webdataset.TarWriter, "write", 7, full)
    with pytest.raises(OutputError, match=r"cannot write .*\.tar .*No space left on device"):
        make(image_folder, tmp_path / "made", num_workers=1)
    left = {name for name in contents(tmp_path / "made") if name.startswith("train-")}
    assert left == {"train-000000.tar", "train-000000.tar.idx.json"}


def test_folder_that_is_a_file_is_an_error(tmp_path: Path, image_folder: Path) -> None:
    (tmp_path / "made").write_text("")
    with pytest.raises(OutputError, match=r"SHARD_FOLDER .*made cannot be written: File exists"):
        make(image_folder, tmp_path / "made")


def test_missing_image_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="IMAGE_FOLDER /nowhere is not a folder"):
        make(Path("/nowhere"), tmp_path / "made")


@pytest.mark.parametrize(
    "changes",
    [{"shard_images": 0}, {"num_workers": 0}, {"seed": -1}]
    + [{"splits": splits} for splits in [(), ("train", "train"), ("../train",)]],
)
def test_wrong_options_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must"):
        MakeOptions(images="a", shards="b", **changes)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["make_shards.py", *map(str, arguments)])
    return run_script(script.main)


def test_script_makes_and_verifies(
    tmp_path: Path,
    image_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "made"
    assert run(monkeypatch, image_folder, folder, "--shard-images", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "written 1 of 10 shards"
    assert lines[-3].startswith("train       32 images in 7 shards, 0.00 GB")
    assert lines[-1].startswith("written     44 images in 0:00:0")
    assert run(monkeypatch, image_folder, folder, "--shard-images", "5") == 0
    assert "10 shards were there" in capsys.readouterr().out.splitlines()[-1]
    assert run(monkeypatch, "verify", folder) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all whole: 44 images in 10 shards")
    flip_bit(folder / "train-000003.tar", offset_of(open_shards(folder), 16))
    name = open_shards(folder).name(16).split(": ")[1]
    assert run(monkeypatch, "verify", folder) == 3
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == f"train-000003.tar: 1 bad images: {name}"
    assert output.err.startswith("error: 1 of 10 shards in")
    assert run(monkeypatch, image_folder, folder, "--seeds", "1") == 2
    assert "unrecognized argument --seeds; perhaps you meant --seed" in capsys.readouterr().err


def test_bar_is_shown_on_a_terminal(tmp_path: Path, image_folder: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    options = MakeOptions(images=str(image_folder), shards=str(tmp_path / "made"))
    make_shards(options, console)
    assert "2/2" in console.file.getvalue()
    assert "of 2 shards" not in console.file.getvalue()


# What is verified


def verify(folder: Path) -> list[str]:
    """Return a line per damaged shard."""
    console = Console(file=io.StringIO(), soft_wrap=True, markup=False, highlight=False)
    with pytest.raises(DataError, match=r"of 10 shards in .* are damaged; delete them"):
        verify_shards(VerifyOptions(shards=str(folder), num_workers=2), console)
    lines = console.file.getvalue().splitlines()
    return [line for line in lines if not line.startswith("verified")]


def test_all_damage_is_found(made: Path) -> None:
    source = open_shards(made)
    names = [source.name(index).split(": ")[1] for index in range(source.num_images)]
    flip_bit(made / "train-000000.tar", offset_of(source, 0))
    flip_bit(made / "train-000000.tar", offset_of(source, 4) + 9)
    os.truncate(made / "train-000001.tar", offset_of(source, 8) + 9)
    (made / "train-000002.tar").unlink()
    index_path(made / "train-000003.tar").write_text("{")
    index_path(made / "train-000004.tar").unlink()
    size = (made / "train-000001.tar").stat().st_size
    lines = verify(made)
    assert lines[0] == f"train-000000.tar: 2 bad images: {names[0]}, {names[4]}"
    assert lines[1].startswith(f"train-000001.tar: {size} of ")
    assert lines[1].endswith(f"2 bad images: {names[8]}, {names[9]}")
    assert lines[2] == "train-000002.tar: cannot be read: No such file or directory"
    assert "is not JSON" in lines[3]
    assert "no train-000004.tar.idx.json" in lines[4]
    assert len(lines) == 5


def test_damaged_label_and_wrong_count_are_found(made: Path) -> None:
    path = made / "validation-000000.tar"
    with tarfile.open(path) as tar:
        label = tar.next().offset_data
    flip_bit(path, label)
    index = read_index(made / "validation-000001.tar")
    shard_index.write_index(made / "validation-000001.tar", index.samples[1:], index.stamp)
    assert verify(made) == [
        "validation-000000.tar: keys or labels are not those of its index",
        "validation-000001.tar: 4 images of 5",
    ]


def test_shards_of_others_cannot_be_verified(made: Path, image_shards: Path) -> None:
    with pytest.raises(DataError, match=r"has no _info\.json that names shards"):
        verify_shards(VerifyOptions(shards=str(image_shards)), quiet())
    info = json.loads((made / "_info.json").read_text())
    del info["splits"]["train"]["made_from"]
    (made / "_info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match=r"split train .* was not written by make_shards"):
        verify_shards(VerifyOptions(shards=str(made)), quiet())


# What is read


def test_shards_of_others_are_indexed(image_shards: Path, image_folder: Path) -> None:
    source = open_shards(image_shards, "train-{0..2}.tar")
    assert source.num_images == 32
    assert source.classes is None
    index = read_index(image_shards / "train-1.tar")
    assert {sample.crc32 for sample in index.samples} == {None}
    again = open_shards(image_shards, "train-{0..2}.tar")
    assert again.fingerprint == source.fingerprint
    paths = sorted((image_folder / "train").glob("*/*.jpg"))
    expected = [path.read_bytes() for shard in range(3) for path in paths[shard::3]]
    assert [again.read(i) for i in range(32)] == [source.read(i) for i in range(32)] == expected


def test_made_and_scanned_indexes_agree(made: Path) -> None:
    source = open_shards(made)
    for path in made.glob("*.idx.json"):
        path.unlink()
    scanned = open_shards(made)
    assert scanned.fingerprint == source.fingerprint
    assert [scanned.name(i) for i in range(32)] == [source.name(i) for i in range(32)]


def test_validation_also_finds_val(made: Path) -> None:
    info = json.loads((made / "_info.json").read_text())
    info["splits"]["val"] = info["splits"].pop("validation")
    (made / "_info.json").write_text(json.dumps(info))
    assert open_shards(made, "validation").num_images == 12


@pytest.mark.parametrize("error", [OutputError, OSError])
def test_folder_that_cannot_be_written_is_read_all_the_same(
    image_shards: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise error(f"cannot write {path}")

    monkeypatch.setattr(shard_index, "write_text", refuse)
    assert open_shards(image_shards, "train-{0..2}.tar").num_images == 32
    assert not list(image_shards.glob("*.json"))


def test_index_that_a_killed_process_was_writing_is_removed(image_shards: Path) -> None:
    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def scan() -> None:
        os.replace = kill
        open_shards(image_shards, "train-{0..2}.tar")

    process = multiprocessing.get_context("fork").Process(target=scan)
    process.start()
    process.join()
    left = sorted(path.name for path in image_shards.glob(".*"))
    assert re.fullmatch(rf"\.train-\d\.tar\.idx\.json\.{process.pid}\.tmp", left[0])
    others = [".train-9.tar.idx.json.4194399.tmp", ".train-1.tar.4194399.tmp", ".cache.tmp"]
    for name in others:
        (image_shards / name).write_text("precious")
    living = image_shards / f".train-1.tar.idx.json.{os.getppid()}.tmp"
    living.write_text("half of it")
    open_shards(image_shards, "train-{0..2}.tar")
    assert sorted(path.name for path in image_shards.glob(".*")) == sorted([*others, living.name])


def test_samples_are_grouped_as_webdataset_does_it(tmp_path: Path) -> None:
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
        "u.mask.png": b"no image",
        "t.json": b"{}",
        "bad\nkey.jpg": b"one line",
        "bad\nkey.cls": b"3",
    }
    write_tar(tmp_path / "a.tar", members)
    for _ in range(2):  # scanned, then from the index
        source = open_shards(tmp_path, "a.tar")
        assert [source.read(i) for i in range(2)] == [b"first choice", b"one line"]
        assert source.labels.tolist() == [1, 3]
        assert [source.name(i) for i in range(2)] == ["a.tar: a/x", r"a.tar: bad\nkey"]
        assert source.excluded == [
            "a.tar: a/y: no label",
            "a.tar: b.v/z: label 'cat' is no integer",
            "a.tar: w: no image",
        ]


def test_samples_of_every_kind_of_image_count(tmp_path: Path) -> None:
    members = {
        "a.BMP": b"bitmap",
        "a.txt": b"a caption",
        "b.gif": b"after the next",
        "b.avif": b"by its extension",
        "b.json": b"{}",
        "c.tif": b"after the next",
        "c.webp": b"a usual kind",
        "d.jfif": b"JPEG",
        "e.h5": b"no image",
    }
    labels = {f"{key}.cls": b"1" for key in "abcde"}
    write_tar(tmp_path / "a.tar", dict(sorted((members | labels).items())))
    source = open_shards(tmp_path, "a.tar")
    expected = [b"bitmap", b"by its extension", b"a usual kind", b"JPEG"]
    assert [source.read(i) for i in range(source.num_images)] == expected
    assert source.excluded == ["a.tar: e: no image"]
    write_tar(tmp_path / "b.tar", {"e.h5": b"no image", "e.cls": b"1"})
    with pytest.raises(DataError, match=r"b\.tar holds no images .*its first file is 'e\.h5'"):
        open_shards(tmp_path, "b.tar")


@pytest.mark.parametrize("label", [4, 17, -1, 10**30])
def test_label_that_is_no_class_is_an_error(tmp_path: Path, label: int) -> None:
    write_tar(tmp_path / "a.tar", {"x.jpg": b"1", "x.cls": str(label).encode()})
    message = rf"shard .*a\.tar sample x has label {label}, model\.num_classes is 4"
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            open_shards(tmp_path, "a.tar")


def test_order_is_a_permutation_drawn_from_the_seed(made: Path) -> None:
    source = open_shards(made, shuffle_shards=2)
    orders = [source.order(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert orders[0].dtype == torch.int64
    for order in orders:
        assert sorted(order.tolist()) == list(range(32))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_order_stays_within_windows_of_shards(made: Path) -> None:
    source = open_shards(made, shuffle_shards=2)
    order = source.order(torch.Generator().manual_seed(0)).tolist()
    names = [source.name(index).split(":")[0] for index in order]
    visited = list(dict.fromkeys(names))
    assert sorted(visited) == [f"train-{number:06d}.tar" for number in range(7)]
    assert visited != sorted(visited)
    windows = [visited.index(name) // 2 for name in names]
    assert windows == sorted(windows)
    assert [visited.index(name) for name in names] != sorted(visited.index(n) for n in names)


def test_large_windows_shuffle_all_images(made: Path) -> None:
    source = open_shards(made)
    generator = torch.Generator().manual_seed(0)
    first = [source.order(generator)[:5] // 5 for _ in range(20)]
    assert all(len(set(shards.tolist())) > 1 for shards in first)
    assert len({tuple(shards.tolist()) for shards in first}) == 20


class Contents(Dataset):
    def __init__(self, source: ShardSource) -> None:
        self.source = source

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self.source.read(index), len(self.source._files.descriptors)

    def __len__(self) -> int:
        return self.source.num_images


def test_loader_processes_read_the_same(made: Path) -> None:
    source = open_shards(made)
    expected = [source.read(index) for index in range(32)]
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
    loader = DataLoader(Contents(source), sampler=order, batch_size=None, num_workers=2)
    for _ in range(2):
        read = [content for content, _ in loader]
        assert read == [expected[index] for index in order]
        assert [source.read(index) for index in order] == read


def test_pickled_source_opens_its_own_files(made: Path) -> None:
    source = open_shards(made)
    expected = [source.read(index) for index in range(32)]
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy._files.descriptors) == 0
    assert [copy.read(index) for index in range(32)] == expected
    del copy
    assert [source.read(index) for index in range(32)] == expected


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    for number in range(70):
        write_tar(tmp_path / f"{number:02d}.tar", {"x.jpg": b"%d" % number, "x.cls": b"0"})
    before = len(os.listdir("/proc/self/fd"))
    source = open_shards(tmp_path, "{00..69}.tar")
    assert len(os.listdir("/proc/self/fd")) == before
    for _ in range(2):
        assert [source.read(index) for index in range(70)] == [b"%d" % n for n in range(70)]
        assert len(os.listdir("/proc/self/fd")) == before + shards._MOST_OPEN_FILES
    del source
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_object_is_kept_per_image(made: Path) -> None:
    kept = vars(open_shards(made))
    for value in kept.values():
        assert not isinstance(value, list | tuple | dict) or len(value) <= 7


def test_damaged_image_is_an_error_of_reading(made: Path) -> None:
    source = open_shards(made)
    flip_bit(made / "train-000000.tar", offset_of(source, 2) + 3)
    with pytest.raises(OSError, match="wrong checksum"):
        source.read(2)
    assert source.read(1)


def test_shard_that_is_cut_off_meanwhile_is_an_error_of_reading(made: Path) -> None:
    source = open_shards(made)
    os.truncate(made / "train-000000.tar", offset_of(source, 2) + 3)
    with pytest.raises(OSError, match=r"the shard ends after 3 of the image's \d+ bytes"):
        source.read(2)


def test_file_that_cannot_be_read_is_opened_again(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_shards(made)
    expected = source.read(0)

    def stale(*arguments: int) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", stale)
        with pytest.raises(OSError, match="Stale"):
            source.read(0)
    assert len(source._files.descriptors) == 0
    assert source.read(0) == expected


def test_equal_shards_have_equal_fingerprints_wherever_they_lie(
    tmp_path: Path, made: Path, image_shards: Path
) -> None:
    before = open_shards(made).fingerprint
    assert open_shards(made, "validation").fingerprint != before
    moved = made.rename(tmp_path / "moved")
    assert open_shards(moved).fingerprint == before
    pattern = f"{moved}/train-{{000000..000006}}.tar"
    assert open_shards(tmp_path, pattern).fingerprint == before


def test_other_labels_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for label in (b"0", b"1"):
        folder = tmp_path / label.decode()
        folder.mkdir()
        write_tar(folder / "a.tar", {"x.jpg": b"1", "x.cls": label})
        prints.append(open_shards(folder, "a.tar").fingerprint)
    assert prints[0] != prints[1]


# What is refused


def test_pattern_with_a_count_is_an_error(image_shards: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_split takes no \|"):
        open_shards(image_shards, "train-{0..2}.tar|32")


@pytest.mark.parametrize("pattern", ["train-{0..2.tar", "train-${NONE}.tar"])
def test_malformed_pattern_is_an_error(image_shards: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_split must be a brace pattern"):
        open_shards(image_shards, pattern)


def test_pattern_of_more_shards_than_there_can_be_is_an_error(image_shards: Path) -> None:
    """It would be expanded first."""
    for pattern in ("train-{0..9999999999}.tar", "train-{000..999}-{-5000..4999}.tar"):
        message = r"data\.train_split must name at most 1,000,000 shards, got .* names [\d,]+$"
        with pytest.raises(ConfigError, match=message):
            open_shards(image_shards, pattern)


def test_unknown_split_is_an_error(made: Path, image_shards: Path) -> None:
    with pytest.raises(DataError, match=r"splits of .*_info\.json: train, validation$"):
        open_shards(made, "test")
    with pytest.raises(DataError, match=r"splits of .*_info\.json: none$"):
        open_shards(image_shards)


def test_missing_shards_are_an_error(made: Path) -> None:
    (made / "train-000003.tar").unlink()
    (made / "train-000005.tar").unlink()
    for split in ("train", "train-{000000..000006}.tar"):
        with pytest.raises(DataError, match=r"train-000003\.tar is missing \(2 of 7 are\)"):
            open_shards(made, split)


def test_shard_named_twice_is_an_error(image_shards: Path) -> None:
    with pytest.raises(DataError, match=r"names shard train-1\.tar 2 times"):
        open_shards(image_shards, "train-{0,1,1}.tar")


def test_other_count_than_stated_is_an_error(made: Path) -> None:
    info = json.loads((made / "_info.json").read_text())
    info["splits"]["train"]["shard_lengths"][2] = 7
    (made / "_info.json").write_text(json.dumps(info))
    for split in ("train", "train-000002.tar"):
        with pytest.raises(DataError, match=r"000002\.tar holds 5 images, _info\.json says 7"):
            open_shards(made, split)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"splits": []}',
        '{"splits": {"train": 1}}',
        '{"splits": {"train": {}}}',
        '{"splits": {"train": {"filenames": "a.tar"}}}',
        '{"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": [1, 2]}}}',
        '{"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": ["1"]}}}',
        '{"splits": {"train": {"filenames": ["a.tar"], "classes": [1]}}}',
        '{"splits": {"train": {"filenames": ["a.tar"], "classes": ["a", "a"]}}}',
        '{"splits": {"train": {"filenames": ["a.tar"], "made_from": []}}}',
        "[" * 100_000,
    ],
)
def test_malformed_info_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "_info.json").write_text(content)
    with pytest.raises(DataError, match=r"_info\.json does not describe shards as timm does"):
        open_shards(tmp_path)


def test_info_without_shards_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "_info.json").write_text('{"splits": {"train": {"filenames": []}}}')
    with pytest.raises(DataError, match=r"data\.train_split train in .* names no shards"):
        open_shards(tmp_path)


def test_truncated_shard_is_an_error_with_an_index(made: Path) -> None:
    path = made / "train-000001.tar"
    size = path.stat().st_size
    os.truncate(path, size - 512)
    with pytest.raises(DataError, match=rf"000001\.tar is truncated: {size - 512} of {size} bytes"):
        open_shards(made)
    os.truncate(path, size + 512)
    with pytest.raises(DataError, match=r"index .*000001\.tar\.idx\.json does not belong to"):
        open_shards(made)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, r"is no tar, or not one at its start: empty file"),
        (100, r"is no tar, or not one at its start: truncated header"),
        (512, r"is truncated: it ends within 'a\.jpg'"),
        (600, r"is truncated: it ends within 'a\.jpg'"),
        (512 + 1536 + 700, r"is no tar, or not one after 'a\.cls': unexpected end of data"),
        (512 + 1536 + 512 + 2, r"is no tar, or not one after 'a\.cls': unexpected end of data"),
        (512 + 1536 + 1024, r"is truncated: it ends after 'a\.cls', without a tar's end mark"),
        (512 + 1536 + 1024 + 100, r"it ends after 'a\.cls', without a tar's end mark"),
        (4096 + 512 + 100, r"is truncated: it ends within 'b\.jpg'"),
    ],
)
def test_truncated_shard_is_an_error_without_an_index(
    tmp_path: Path, size: int, message: str
) -> None:
    image = bytes(range(256)) * 5
    path = tmp_path / "a.tar"
    write_tar(path, {"a.jpg": image, "a.cls": b"1", "b.cls": b"1", "b.jpg": image})
    os.truncate(path, size)
    with pytest.raises(DataError, match=message):
        open_shards(tmp_path, "a.tar")


def test_what_is_no_tar_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(DataError, match=r"a\.tar is no tar, or not one at its start"):
        open_shards(tmp_path, "a.tar")


def test_compressed_shard_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x.jpg"))
    with pytest.raises(DataError, match=r"a\.tar is no tar, or not one at its start"):
        open_shards(tmp_path, "a.tar")


def test_damage_amid_a_shard_is_an_error(tmp_path: Path) -> None:
    members = {"a.jpg": b"1", "a.cls": b"1", "b.jpg": b"2", "b.cls": b"2"}
    write_tar(tmp_path / "a.tar", members)
    flip_bit(tmp_path / "a.tar", 2048 + 5)  # the third header
    with pytest.raises(DataError, match=r"damaged, or two in one: after 'a\.cls' is more"):
        open_shards(tmp_path, "a.tar")


def test_shards_in_a_row_are_an_error(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "a.tar", {"a.jpg": b"1", "a.cls": b"1"}).read_bytes()
    (tmp_path / "a.tar").write_bytes(one + one)
    with pytest.raises(DataError, match=r"damaged, or two in one: after 'a\.cls' is more"):
        open_shards(tmp_path, "a.tar")


def test_shard_with_a_hole_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.jpg": b"1", "a.cls": b"1"})
    os.truncate(path, 3 << 20)
    with pytest.raises(DataError, match=r"written in part only: after 'a\.cls' are zeros"):
        open_shards(tmp_path, "a.tar")


def test_shard_without_images_is_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.b.jpg": b"1", "a.cls": b"1"})
    with pytest.raises(DataError, match=r"holds no images \(\.jpg, .*its first file is 'a\.b\.jpg"):
        open_shards(tmp_path, "a.tar")
    write_tar(tmp_path / "a.tar", {})
    with pytest.raises(DataError, match=r"holds no images \(.* that Pillow opens\)$"):
        open_shards(tmp_path, "a.tar")


def test_two_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.jpg": b"1", "a.JPG": b"1"})
    with pytest.raises(DataError, match=r"holds two files 'a\.JPG' in a row"):
        open_shards(tmp_path, "a.tar")


def test_link_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("a.jpg")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"holds 'a\.jpg' as a link or a sparse file"):
        open_shards(tmp_path, "a.tar")


ROW: list[Any] = ["k", 512, 10, 1, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not the index of a shard"),
        ({"size": 10240}, "is not the index of a shard"),
        ({"size": "10240", "samples": []}, "is not the index of a shard"),
        ({"size": 10240, "samples": {}}, "is not the index of a shard"),
        ({"size": 10240, "samples": [ROW[:4]]}, "is not the index of a shard"),
        *(
            ({"size": 10240, "samples": [[*ROW[:place], value, *ROW[place + 1 :]]]}, "is not the")
            for place, value in [
                *((0, None), (1, -1), (1, 1.0), (1, 10240), (2, -1), (2, None), (2, 10**5)),
                *((3, 1.0), (3, True), (4, "5"), (4, -1), (4, 1 << 32)),
            ]
        ),
    ],
)
def test_malformed_index_is_an_error(tmp_path: Path, content: Any, message: str) -> None:
    path = write_tar(tmp_path / "a.tar", {"k.jpg": b"0123456789", "k.cls": b"1"})
    text = content if isinstance(content, str) else json.dumps(content)
    index_path(path).write_text(text)
    with pytest.raises(DataError, match=rf"index .*a\.tar\.idx\.json {message}.*delete it"):
        open_shards(tmp_path, "a.tar")
    index_path(path).write_text(json.dumps({"size": 10240, "samples": [[*ROW[:4], None]]}))
    assert open_shards(tmp_path, "a.tar").read(0) == b"0123456789"
