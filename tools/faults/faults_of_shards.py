"""Faults of shards and their indexes.

A function's docstring is the fault's name in the table.
"""

import io
import json
import os
import re
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch

from tools.faults.fault_runs import (
    EPOCHS,
    STEPS,
    TOLERANT,
    Injury,
    Laboratory,
    Verdict,
    equal_logs,
    refused,
    skipped,
)


def truncated_shard(lab: Laboratory) -> Verdict:
    """a training shard cut off"""
    return _damaged_shard(lab, "train", lambda path: os.truncate(path, 5000), "is truncated")


def empty_shard(lab: Laboratory) -> Verdict:
    """an empty training shard"""
    return _damaged_shard(lab, "train", lambda path: os.truncate(path, 0), "is truncated")


def missing_shard(lab: Laboratory) -> Verdict:
    """a training shard missing"""
    return _damaged_shard(lab, "train", Path.unlink, "is missing")


def garbage_shard(lab: Laboratory) -> Verdict:
    """a training shard of random bytes, without an index"""

    def garble(path: Path) -> None:
        path.write_bytes(os.urandom(20_000))
        _index(path).unlink()

    return _damaged_shard(lab, "train", garble, "")


def truncated_validation_shard(lab: Laboratory) -> Verdict:
    """a validation shard cut off"""
    return _damaged_shard(lab, "validation", lambda path: os.truncate(path, 5000), "is truncated")


def cut_shard_without_index(lab: Laboratory) -> Verdict:
    """a training shard cut off that has no index"""

    def cut(path: Path) -> None:
        os.truncate(path, 5000)
        _index(path).unlink()

    return _damaged_shard(lab, "train", cut, "")


def rot_in_shard(lab: Laboratory) -> Verdict:
    """one flipped bit in an image of a shard, which decodes"""
    data = lab.copy("wds")
    shard = sorted(data.glob("train-*.tar"))[0]
    with tarfile.open(shard) as archive:
        member = next(member for member in archive if member.name.endswith(".jpg"))
    content = bytearray(shard.read_bytes())
    content[member.offset_data + member.size - 20] ^= 1
    shard.write_bytes(bytes(content))
    name = f"{shard.name}: {member.name.removesuffix('.jpg')}"
    return skipped(lab.run(data, *TOLERANT, dataset="wds"), 1, name, "checksum")


def unlabelled_samples(lab: Laboratory) -> Verdict:
    """12 % of the samples of the shards without a label, or with the label "cat\""""
    data = _foreign_shards(
        lab, lambda number: None if number % 8 == 0 else "cat" if number == 9 else ""
    )
    return refused(
        lab.run(data, *_PATTERNS, dataset="wds"),
        3,
        "training images have no usable label, the first",
    )


def one_unlabelled_sample(lab: Laboratory) -> Verdict:
    """one sample without a label"""
    data = _foreign_shards(lab, lambda number: None if number == 9 else "")
    return skipped(lab.run(data, *_PATTERNS, *TOLERANT, dataset="wds"), 1, "no label")


def impossible_label(lab: Laboratory) -> Verdict:
    """label 17 of 4 in a shard"""
    data = _foreign_shards(lab, lambda number: "17" if number == 9 else "")
    return refused(
        lab.run(data, *_PATTERNS, dataset="wds"),
        3,
        r"train-\d\.tar .*label 17, model.num_classes is 4",
    )


def rewritten_shard(lab: Laboratory) -> Verdict:
    """a shard of others rewritten with other labels and the same size before going on"""
    data = _foreign_shards(lab, lambda number: "")
    stop = Injury("signal", 12, number=signal.SIGTERM)
    result = lab.run(data, *_PATTERNS, dataset="wds", injury=stop)
    (data / "train-0.tar").write_bytes(_relabelled(data / "train-0.tar"))
    again = lab.run(data, *_PATTERNS, dataset="wds", again=result)
    if again.code != 3 or "the training images are not those" not in again.error:
        return Verdict(again.printed[-300:], "right labels")
    return Verdict(f"exit 3: {again.error}", "nothing: the run is as it was")


def rot_in_index(lab: Laboratory) -> Verdict:
    """a digit of a label changed in the index of a shard"""
    data = lab.copy("wds")
    path = _index(sorted(data.glob("train-*.tar"))[2])
    path.write_text(re.sub(r",[0-3],(\d+\])", r",0,\1", path.read_text()))
    return refused(lab.run(data, dataset="wds"), 3, rf"index .*{path.name} is damaged; delete it")


def repeated_key(lab: Laboratory) -> Verdict:
    """a sample that a shard holds twice, far apart"""
    data = _foreign_shards(lab, lambda number: "")
    with tarfile.open(data / "train-2.tar", "a") as archive:
        _add(archive, "ash10.jpg", b"")
    return refused(
        lab.run(data, *_PATTERNS, dataset="wds"), 3, r"train-2\.tar holds sample 'ash10' twice"
    )


def negative_size(lab: Laboratory) -> Verdict:
    """a member of -512 bytes in a shard, which would be read for ever"""
    data = _foreign_shards(lab, lambda number: "")
    member = tarfile.TarInfo("zelkova.jpg")
    member.size = -512
    content = (data / "train-1.tar").read_bytes().rstrip(b"\0")
    content += bytes(-len(content) % 512) + member.tobuf(tarfile.GNU_FORMAT) + bytes(10240)
    (data / "train-1.tar").write_bytes(content)
    return refused(lab.run(data, *_PATTERNS, dataset="wds"), 3, r"train-1\.tar is no tar")


def shards_without_counts(lab: Laboratory) -> Verdict:
    """shards whose number of images nothing states"""
    data = _foreign_shards(lab, lambda number: "")
    result = lab.run(data, *_PATTERNS, dataset="wds")
    steps = f"{EPOCHS} of {STEPS} batches of 8"
    if result.code != 0 or steps not in result.printed or "12 held out" not in result.printed:
        return Verdict(result.printed[-300:], "images")
    return Verdict("exit 0, counted: 64 images, 12 held out", "nothing: every image counts")


def wrong_counts(lab: Laboratory) -> Verdict:
    """_info.json that states ten times the images"""
    data = lab.copy("wds")
    info = json.loads((data / "_info.json").read_text())
    split = info["splits"]["train"]
    split["shard_lengths"] = [10 * length for length in split["shard_lengths"]]
    split["num_samples"] *= 10
    (data / "_info.json").write_text(json.dumps(info))
    return refused(lab.run(data, dataset="wds"), 3, "160")


def other_order_of_classes(lab: Laboratory) -> Verdict:
    """_info.json with the classes in another order in validation"""
    data = lab.copy("wds")
    info = json.loads((data / "_info.json").read_text())
    info["splits"]["validation"]["classes"].reverse()
    (data / "_info.json").write_text(json.dumps(info))
    return refused(lab.run(data, dataset="wds"), 3, "class 0 is ash in the training data and dog")


def fewer_shards_than_workers(lab: Laboratory) -> Verdict:
    """1 shard, 2 loader processes"""
    data = _foreign_shards(lab, lambda number: "", shards=1)
    patterns = ("--data.train-split", "train-0.tar", "--data.val-split", "validation-0.tar")
    runs = [
        lab.run(data, *patterns, "--data.num-workers", workers, dataset="wds")
        for workers in ("0", "2")
    ]
    return equal_logs(runs, "exit 0, all 8 steps of an epoch")


def fewer_shards_than_processes(lab: Laboratory) -> Verdict:
    """3 shards, 2 training processes of 2 loader processes"""
    data = _foreign_shards(lab, lambda number: "", shards=3)
    result = lab.run(data, *_patterns(3), "--data.num-workers", "2", dataset="wds", processes=2)
    if result.code != 0:
        return Verdict(result.printed[-300:], "the run")
    state = torch.load(result.folder / "last.pt", weights_only=True)["run"]
    if state["step"] != EPOCHS * STEPS:
        return Verdict(f"{state['step']} steps", "steps")
    return Verdict(f"exit 0, both make {STEPS} steps an epoch", "nothing: equal steps, every image")


def _index(shard: Path) -> Path:
    return shard.with_name(f"{shard.name}.idx.json")


def _patterns(shards: int) -> tuple[str, ...]:
    last = shards - 1
    return (
        "--data.train-split",
        f"train-{{0..{last}}}.tar",
        "--data.val-split",
        f"validation-{{0..{last}}}.tar",
    )


_PATTERNS = _patterns(4)


def _foreign_shards(lab: Laboratory, label: Callable[[int], str | None], shards: int = 4) -> Path:
    """Write shards as other programs do, without an index.

    Args:
        lab: Gives the images.
        label: Label of the nth training image: None for no label, "" for the right one.
        shards: Number of shards of each split.
    """
    lab.count += 1
    root = lab.root / f"data-{lab.count}"
    root.mkdir()
    for split, name in (("train", "train"), ("val", "validation")):
        paths = sorted((lab.folder / split).glob("*/*.jpg"))
        classes = sorted({path.parent.name for path in paths})
        for shard in range(shards):
            with tarfile.open(root / f"{name}-{shard}.tar", "w") as archive:
                for number, path in enumerate(paths[shard::shards]):
                    place = number * shards + shard
                    given = label(place) if split == "train" else ""
                    _add(archive, f"{path.parent.name}{path.stem}.jpg", path.read_bytes())
                    if given is not None:
                        text = given or str(classes.index(path.parent.name))
                        _add(archive, f"{path.parent.name}{path.stem}.cls", text.encode())
    return root


def _relabelled(shard: Path) -> bytes:
    """Return a shard with labels 3 - y."""
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as archive:
        for member in archive:
            if member.name.endswith(".cls"):
                label = content[member.offset_data] - ord("0")
                content[member.offset_data] = ord("3") - label
    return bytes(content)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _damaged_shard(
    lab: Laboratory, split: str, damage: Callable[[Path], object], message: str
) -> Verdict:
    """Damage the second shard of a split: it must be named before anything is trained."""
    data = lab.copy("wds")
    shard = sorted(data.glob(f"{split}-*.tar"))[-1]
    damage(shard)
    return refused(lab.run(data, dataset="wds"), 3, f"{shard.name}.*{message}")
