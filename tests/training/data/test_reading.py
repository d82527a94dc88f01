"""Files that are none, and disks that are away for a moment."""

import errno
import itertools
import os
import pickle
from pathlib import Path

import pytest
import torch

from vil.training.config import TrainConfig
from vil.training.data import reading
from vil.training.data.base import Source
from vil.training.data.batches import TrainData, ValData
from vil.training.data.reading import PatientReader, read_file
from vil.training.data.shards import ShardSource
from vil.training.distributed import World

CPU = torch.device("cpu")


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Note pauses instead of making them."""
    pauses: list[float] = []
    monkeypatch.setattr(reading.time, "sleep", pauses.append)
    return pauses


class Disk:
    """Fails for some reads."""

    def __init__(self, number: int | None, *fails: bool) -> None:
        self.number, self.fails = number, list(fails)

    def read(self, index: int) -> bytes:
        if self.fails and self.fails.pop(0):
            raise OSError(self.number, "no reason") if self.number else OSError("wrong checksum")
        return b"%d" % index


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.ENOENT, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV]
)
def test_read_that_fails_for_a_moment_is_tried_again(number: int, paused: list[float]) -> None:
    read = PatientReader(Disk(number, True, True, True).read)
    assert [read(5), read(6)] == [b"5", b"6"]
    assert paused == [0.1, 0.2, 0.4]


def test_minute_in_vain_is_not_spent_again(paused: list[float]) -> None:
    read = PatientReader(Disk(errno.EIO, *[True] * 12).read)
    for index in (5, 5, 6):
        with pytest.raises(OSError, match="no reason"):
            read(index)
    assert paused == list(reading.PAUSES)
    assert read(6) == b"6"  # the disk is there again
    assert PatientReader(Disk(errno.EIO, True).read)(6) == b"6"


def test_file_that_is_gone_is_waited_for_a_moment_only(tmp_path: Path, paused: list[float]) -> None:
    """A data set may have a thousand links that lead nowhere."""
    (tmp_path / "1").write_bytes(b"1")
    (tmp_path / "2").symlink_to(tmp_path / "3")
    (tmp_path / "4").symlink_to(tmp_path / "away" / "3")
    read = PatientReader(lambda index: read_file(tmp_path / str(index)))
    with pytest.raises(FileNotFoundError):
        read(2)
    assert paused == [0.1, 0.2, 0.4]
    with pytest.raises(FileNotFoundError):
        read(3)
    assert paused == 2 * [0.1, 0.2, 0.4]
    with pytest.raises(FileNotFoundError):
        read(4)
    assert paused == [*2 * [0.1, 0.2, 0.4], *reading.PAUSES]
    assert read(1) == b"1"


def take_away_at_times(source: Source, folder: Path) -> None:
    """Let a folder be away at every third read, shards of it that are open too."""
    original, calls = source.read, itertools.count()

    def read(index: int) -> bytes:
        if next(calls) % 3 == 1:
            folder.rename(folder.with_name("away"))
            if isinstance(source, ShardSource):
                source._files = pickle.loads(pickle.dumps(source._files))
        return original(index)

    source.read = read


@pytest.mark.parametrize("kind", ["folder", "wds"])
def test_data_that_are_away_for_a_moment_are_waited_for(
    config: TrainConfig,
    shard_config: TrainConfig,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = config if kind == "folder" else shard_config
    folder, waits = Path(chosen.data.path), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        folder.with_name("away").rename(folder)

    monkeypatch.setattr(reading.time, "sleep", wait)
    data, val_data = TrainData(chosen, CPU, World()), ValData(chosen, CPU, World())
    take_away_at_times(data.source, folder)
    take_away_at_times(val_data.source, folder)
    steps = list(data.steps(0))
    assert len(steps) == 12
    assert not any(step.bad_images for step in steps)
    assert sum(len(labels) for _, labels in val_data.batches()) == 12
    assert len(waits) > 10
    assert set(waits) == {0.1}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_is_no_file_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jpg"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"not a regular file|Too many levels"):
        read_file(path)
    assert len(os.listdir("/proc/self/fd")) == before
