"""A run's folder: what is somebody else's stays as it is, and what cannot be read is not damaged."""

import errno
import multiprocessing
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.training.run.test_checkpoint import about, state
from tests.training.run_files import with_
from vil import weights
from vil.training import files
from vil.training.config import TrainConfig
from vil.training.distributed import World
from vil.training.errors import OutputError
from vil.training.files import LOCK_NAME, lock_folder, write_text
from vil.training.run.checkpoint import save_checkpoint
from vil.training.run.resume import RunFolder, open_for_all
from vil.training.run.setup import build_training


@pytest.fixture
def folder(config: TrainConfig, tmp_path: Path) -> Path:
    """A run's, with all three checkpoints: last.pt of epoch 2, the others of epoch 1."""
    folder = tmp_path / "run"
    folder.mkdir()
    training = build_training(config, torch.device("cpu"), World())
    config = with_(config, "run", output=str(folder))
    for scores in ((50.0,), (50.0, 40.0)):
        save_checkpoint(folder, training, about(config), state(*scores))
    return folder


@pytest.fixture
def open_run(config: TrainConfig) -> Callable[[Path], tuple[RunFolder, list[str]]]:
    """Return a function that opens a folder for a run and gives what it found and said."""

    def open_run(folder: Path) -> tuple[RunFolder, list[str]]:
        told: list[str] = []
        with open_for_all(with_(config, "run", output=str(folder)), World(), told.append) as found:
            return found, told

    return open_run


def contents(folder: Path) -> dict[str, bytes | None]:
    """Read everything in a folder; None stands for a folder."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


MINE = (
    *(".precious.tmp", ".d.tmp/file", ".last.pt.tmp", "..1.tmp", ".lock", "log.csv", "curve.png"),
    *("config.yaml", "skipped.txt", "steps.csv", "tensorboard", "best.pt", LOCK_NAME),
)


@pytest.mark.parametrize("name", MINE)
def test_folder_of_others_is_left_alone(name: str, open_run: Callable, tmp_path: Path) -> None:
    """Also where a file has a name that a run would give, as a recipe or weights have."""
    folder = tmp_path / "mine"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("mine: 1\n")
    before = contents(folder)
    with pytest.raises(OutputError, match=r"choose another"):
        open_run(folder)
    after = contents(folder)
    if name == "best.pt":  # only its content tells that it is of no run
        del after[LOCK_NAME]
    assert after == before


def test_own_files_in_the_folder_of_a_run_stay(folder: Path, open_run: Callable) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / ".cache.tmp").write_text("mine")
    (folder / ".notes.txt.12.tmp").write_text("mine")
    (folder / ".d.tmp").mkdir()
    (folder / ".best.pt.3.tmp").mkdir()
    (folder / ".last.pt.4.tmp").symlink_to(folder / "notes.txt")
    (folder / ".last.pt.5.tmp").write_bytes(b"PK")
    before = contents(folder)
    found, told = open_run(folder)
    assert (found.origin, told) == (folder / "last.pt", [])
    after = contents(folder)
    assert before.keys() - after.keys() == {".last.pt.5.tmp"}
    assert after.keys() - before.keys() == {LOCK_NAME}
    assert all(before[name] == after[name] for name in after.keys() - {LOCK_NAME})


def test_folder_is_locked_against_other_processes(tmp_path: Path) -> None:
    def lock_in_another_process() -> None:
        # Forked: what starts anew imports for seconds.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            pool.submit(_lock, tmp_path).result()

    with lock_folder(tmp_path):
        told = re.escape(f"{tmp_path} is in use by process {os.getpid()} on")
        with pytest.raises(OutputError, match=told):
            lock_in_another_process()
    lock_in_another_process()


def _lock(folder: Path) -> None:
    lock_folder(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_disk_without_locks_is_told_and_used(
    number: int, folder: Path, open_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre's, mounted without them."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "lockf", refuse)
    found, told = open_run(folder)
    assert found.origin == folder / "last.pt"
    [line] = told
    assert f"the disk of {folder} has no locks ({os.strerror(number)}): a second process" in line


@pytest.mark.ci
@pytest.mark.parametrize(("number", "fatal"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_disk_that_does_not_sync_folders_is_used(
    number: int, fatal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if fatal:
        with pytest.raises(OutputError, match="cannot write"):
            write_text(tmp_path / "file", "new")
    else:
        write_text(tmp_path / "file", "new")
        assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("reads", [0, 5, 40])
def test_checkpoint_that_cannot_be_read_is_not_damaged(
    number: int,
    reads: int,
    folder: Path,
    open_run: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However far the reading comes, and though zipfile takes errors at the end for no zip file."""
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(weights._Reader, "_remembering", _failing(reads, number))
        told = rf"last\.pt cannot be read: {os.strerror(number)}"
        with pytest.raises(OutputError, match=told):
            open_run(folder)
    after = contents(folder)
    del after[LOCK_NAME]
    assert after == before
    assert open_run(folder)[0].origin == folder / "last.pt"


def _failing(reads: int, number: int) -> Callable:
    """Return how a file is read that fails after a number of reads."""
    original, left = weights._Reader._remembering, iter(range(reads))

    def remembering(self: weights._Reader, read: Callable, *arguments: object) -> object:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return original(self, fail if next(left, None) is None else read, *arguments)

    return remembering


@pytest.mark.ci
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
        OSError(errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_want_of_memory_is_no_damage(
    error: Exception, folder: Path, open_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        with pytest.raises(OutputError, match=r"last\.pt cannot be read: "):
            open_run(folder)
    assert not list(folder.glob("*damaged*"))
    assert open_run(folder)[0].origin == folder / "last.pt"


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_name_of_a_checkpoint_that_leads_to_none_stops_the_run(
    kind: str, folder: Path, open_run: Callable
) -> None:
    """As of a disk that is not mounted: a run must not begin anew there."""
    (folder / "last.pt").unlink()
    if kind == "folder":
        (folder / "last.pt").mkdir()
    else:
        (folder / "last.pt").symlink_to("/nowhere/last.pt")
    message = "cannot be read: Is a directory" if kind == "folder" else "does not exist"
    with pytest.raises(OutputError, match=rf"last\.pt {message}"):
        open_run(folder)


def test_damaged_ones_are_put_aside_only_for_a_whole_one(folder: Path, open_run: Callable) -> None:
    whole = contents(folder)
    for name in whole:
        (folder / name).write_bytes(whole[name][:-100])
    cut = contents(folder)
    with pytest.raises(OutputError, match=r"is whole: .*last\.pt .*previous\.pt .*best\.pt "):
        open_run(folder)
    assert contents(folder).items() >= cut.items()
    (folder / "best.pt").unlink()  # one file with previous.pt
    (folder / "best.pt").write_bytes(whole["best.pt"])
    found, told = open_run(folder)
    assert found.origin == folder / "best.pt"
    assert [line.partition("it is now ")[2] for line in told] == [
        "last.damaged.pt",
        "previous.damaged.pt",
    ]
    assert (folder / "last.damaged.pt").read_bytes() == cut["last.pt"]
