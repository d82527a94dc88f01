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
from vil.training.files import LOCK_NAME, lock_folder, remove_temporaries, sync, write_text
from vil.training.recipes import to_yaml
from vil.training.run import resume
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


def test_recipe_beside_which_a_run_writes_stays(open_run: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# by hand\nmodel:\n  name: vil_tiny\n")
    with pytest.raises(OutputError, match=r"holds config\.yaml and no run to continue"):
        open_run(tmp_path)


def test_what_an_untrained_run_left_does_not_block_its_folder(
    config: TrainConfig, open_run: Callable, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "skipped.txt").write_text("0 images without a usable label, left out\n")
    (folder / "steps.csv").write_text("step,epoch,loss,grad_norm,lr,images_per_s,data_wait\n")
    (folder / "log.csv").write_text("epoch,lr,train_loss,val_loss,top1\n")
    (folder / "curve.png").write_bytes(b"\x89PNG")
    (folder / "wandb").mkdir()
    (folder / ".last.pt.77.tmp").write_bytes(b"PK")
    (folder / LOCK_NAME).touch()
    assert open_run(folder)[0].checkpoint is None
    assert not (folder / ".last.pt.77.tmp").exists()


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


@pytest.mark.parametrize("kind", ["text", "folder", "link", "pipe"])
def test_lock_that_is_none_of_ours_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    if kind == "text":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "other").write_text("mine")
        path.symlink_to(tmp_path / "other")
    else:
        os.mkfifo(path)
    with pytest.raises(OutputError, match="was not written by this program"):
        lock_folder(tmp_path)
    if kind in ("text", "link"):
        assert path.read_text() == "mine"


def test_lock_says_what_it_is(tmp_path: Path) -> None:
    for content in ("", "Vision Longh"):  # as a kill or a full disk leaves it
        (tmp_path / LOCK_NAME).write_text(content)
        with lock_folder(tmp_path):
            told = (tmp_path / LOCK_NAME).read_text()
        assert told.startswith("Vision Longhorn writes into this folder. Last to do so: process ")


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


def test_file_that_cannot_be_synced_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


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


def test_no_damaged_one_takes_the_place_of_another(folder: Path, open_run: Callable) -> None:
    whole = (folder / "last.pt").read_bytes()
    for name in ("last.damaged.pt", "last.damaged-2.pt", "last.damaged-3.pt"):
        (folder / "last.pt").write_bytes(name.encode())
        _, [told] = open_run(folder)
        assert told.endswith(f"it is now {name}")
        assert (folder / name).read_text() == name
    (folder / "last.pt").write_bytes(whole)
    assert open_run(folder)[1] == []


def test_where_all_are_put_aside_it_is_said_how_to_go_on(folder: Path, open_run: Callable) -> None:
    (folder / "last.pt").rename(folder / "last.damaged.pt")
    (folder / "previous.pt").unlink()
    (folder / "best.pt").unlink()
    told = (
        r"put aside by earlier starts: last\.damaged\.pt; .* its name last\.pt back and run again"
    )
    with pytest.raises(OutputError, match=told):
        open_run(folder)
    (folder / "last.damaged.pt").rename(folder / "last.pt")
    assert open_run(folder)[0].checkpoint["epoch"] == 2


def test_run_of_other_settings_is_not_touched_at_all(
    config: TrainConfig, folder: Path, open_run: Callable
) -> None:
    (folder / "last.pt").write_bytes(b"PK")
    other = with_(with_(config, "run", output=str(folder)), "optim", weight_decay=0.5)
    with pytest.raises(Exception, match="weight_decay"), open_for_all(other, World(), print):
        pass
    assert (folder / "last.pt").read_bytes() == b"PK"


def test_best_that_is_gone_is_told(folder: Path, open_run: Callable) -> None:
    (folder / "best.pt").unlink()
    _, [told] = open_run(folder)
    assert told.endswith("best.pt of epoch 1 is gone; only a better epoch will write it")


@pytest.mark.parametrize("name", ["config.yaml", "changes.csv"])
def test_folder_in_the_place_of_a_file_is_told(
    name: str, config: TrainConfig, folder: Path, open_run: Callable
) -> None:
    (folder / name).mkdir()
    found, _ = open_run(folder)
    with pytest.raises(OutputError, match=rf"cannot (write|replace) .*{re.escape(name)}.*Is a dir"):
        resume._write_settings(folder, found.config, [])
    assert (folder / name).is_dir()


def test_disk_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "replace", gone)
    monkeypatch.setattr(files.shutil, "disk_usage", gone)
    with pytest.raises(OutputError, match=r"cannot write .*file: .*Stale"):
        write_text(tmp_path / "file", "new")


def test_temporaries_of_given_names_are_removed(tmp_path: Path) -> None:
    for name in (
        ".last.pt.123.tmp",
        ".last.pt.tmp",
        ".other.123.tmp",
        "last.pt",
        ".last.pt.1.tmp~",
    ):
        (tmp_path / name).write_text("x")
    remove_temporaries(tmp_path, {"last.pt"})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".last.pt.tmp", ".other.123.tmp", "last.pt", ".last.pt.1.tmp~"}
