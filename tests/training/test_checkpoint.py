"""Atomic writes, errors for damaged checkpoints, and which checkpoint a run resumes from."""

import dataclasses
import errno
import os
import re
import stat
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest
import timm
import torch

from vil.training.checkpoint import Run, load_checkpoint, load_newest, merged, restore, save
from vil.training.distributed import World
from vil.training.errors import DamagedError, NonFiniteLossError, OutputError, UserError
from vil.training.files import lock_folder, write_atomically, write_text
from vil.training.setup import build
from vil.training.subject import load_subject
from vil.weights.archive import check_finite


@pytest.fixture
def run(config) -> Run:
    """Return a run of four classes before its first step; its average differs from the model."""
    setup = build(config, World(), 4)
    with torch.no_grad():
        setup.ema.module.head.bias.add_(1.0)
    source = SimpleNamespace(fingerprint="1", classes=("ash", "birch", "cedar", "dogwood"))
    return Run(config, config, setup, source, source)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def train(run: Run, top1: float) -> Run:
    """Advance the state of a run by one epoch."""
    run.state.step += 4
    counts = {"skipped_images": 0, "skipped_steps": 0, "images_per_s": 100.0, "seconds": 1.0}
    scores = {"train_loss": 1.0, "val_loss": 1.0, "top1": top1, "top5": 100.0, "val_images": 4}
    run.state.end_epoch({"epoch": len(run.state.history) + 1, "lr": 1e-3} | scores | counts)
    return run


@pytest.fixture
def saved(run, tmp_path) -> Path:
    """Return the last of two checkpoints, saved after one epoch."""
    folder = tmp_path / "run"
    folder.mkdir()
    save(folder, run)
    save(folder, train(run, 50.0))
    return folder / "last.pt"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("torn")])
def test_failed_write_leaves_the_old_file(tmp_path, error) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half of the new")
        raise error

    with pytest.raises(OutputError, match=r"cannot write .*file \(\d+ MiB free\)"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_contents_are_on_the_disk_before_their_name(tmp_path, monkeypatch) -> None:
    """Otherwise the new name would belong to an empty file after a power loss in between."""
    calls = []

    def note(name: str) -> None:
        original = getattr(os, name)

        def noted(*arguments: object) -> object:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            calls.append("fsync of the folder" if is_folder else name)
            return original(*arguments)

        monkeypatch.setattr(os, name, noted)

    note("fsync")
    note("replace")
    write_text(tmp_path / "file", "new")
    assert calls == ["fsync", "replace", "fsync of the folder"]


def test_folder_has_one_writer_and_nothing_of_dead_ones(tmp_path) -> None:
    (tmp_path / ".last.pt.123.tmp").write_bytes(b"half")
    (tmp_path / ".mine").write_text("mine")
    child = (
        "import sys; from pathlib import Path; from vil.training.files import lock_folder\n"
        f"with lock_folder(Path({str(tmp_path)!r})): pass"
    )
    with lock_folder(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".mine", ".vision-longhorn.lock"}
        assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", child) == 1
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", child) == 0


def test_the_checkpoint_before_and_the_best_are_kept(saved, run) -> None:
    def epochs() -> list[int]:
        names = ("last.pt", "previous.pt", "best.pt")
        return [load_checkpoint(saved.with_name(name))["epoch"] for name in names]

    assert epochs() == [1, 0, 1]
    for top1, expected in ((40.0, [2, 1, 1]), (60.0, [3, 2, 3])):
        save(saved.parent, train(run, top1))
        assert epochs() == expected
    run.state = dataclasses.replace(run.state, step=13, loss_sum=1.0, loss_count=1)
    run.setup.model.head.bias.data += 1  # within an epoch, best.pt is not renewed
    save(saved.parent, run)
    steps = [load_checkpoint(saved.with_name(f"{n}.pt"))["run"]["step"] for n in ("last", "best")]
    assert steps == [13, 12]


def test_of_epochs_with_one_top1_the_best_has_the_lowest_loss(run) -> None:
    for top1, loss in ((80.0, 0.288), (80.0, 0.3), (80.0, 0.223), (79.0, 0.1), (80.0, 0.223)):
        run.state.end_epoch({"top1": top1, "val_loss": loss, "ema_top1": top1, "ema_loss": 1.0})
    assert run.state.best_epoch == 3


def test_timm_reads_the_averaged_weights(saved, run) -> None:
    sizes = {"num_classes": 4, "img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2}
    model = timm.create_model("vil_tiny", checkpoint_path=str(saved), **sizes)
    assert torch.equal(model.head.bias, run.setup.ema.module.head.bias)
    assert not torch.equal(model.head.bias, run.setup.model.head.bias)


def test_flipped_bit_is_detected(saved, run) -> None:
    content = bytearray(saved.read_bytes())
    weight = run.setup.model.head.weight.detach().numpy().tobytes()
    content[content.index(weight) + 10] ^= 1
    saved.write_bytes(bytes(content))
    torch.load(saved, weights_only=True)  # torch.load does not notice
    with pytest.raises(OutputError, match=r"last\.pt is damaged .*: wrong checksum in "):
        load_checkpoint(saved)


def test_pickled_code_is_not_run(tmp_path) -> None:
    torch.save({"state_dict": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(DamagedError, match=r"code\.pt .* files that could execute code are not"):
        load_checkpoint(tmp_path / "code.pt")


ABSENT = object()
WRONG: tuple[tuple[str, Any], ...] = (
    *(("config", []), ("config.schedule", []), ("config.schedule.epochs", "three")),
    *(("config.augment.scale", [0.1]), ("asked", "x"), ("asked.run.seed", -1)),
    *(("state_dict", []), ("state_dict.head\nbias", 1), ("state_dict_ema", {"head.bias": 1.0})),
    *(("state_dict.head.bias", torch.zeros(5)), ("state_dict.head.bias", torch.zeros(4).int())),
    *(("optimizer", "adamw"), ("optimizer.param_groups", {})),
    *(("optimizer.param_groups.0.params", ["a"]), ("optimizer.state.0.exp_avg", "x")),
    *(("run", []), ("run.best_epoch", "x"), ("run.step", "x"), ("run.history", {})),
    *(("run.history.0", "row"), ("run.bad_images", [1]), ("run", ABSENT)),
    *(("data", ABSENT), ("data", "x"), ("config", ABSENT), ("optimizer", ABSENT)),
    ("state_dict.huge", torch.zeros(1).expand(1 << 40)),  # a few bytes can claim terabytes
    ("state_dict.sparse", torch.zeros(3).to_sparse()),
    ("optimizer.state.0.exp_avg", torch.zeros(1).expand(1 << 40)),
    ("state_dict.head.bias", torch.full((4,), torch.nan)),
)


def replaced(content: Any, path: str, value: object) -> Any:
    """Return nested dictionaries and lists with another value at ``path``; ABSENT removes it."""
    key, _, rest = path.partition(".")
    if isinstance(content, dict) and key == "state_dict" and rest:
        return content | {key: content[key] | {rest: value}}
    place: Any = int(key) if isinstance(content, list) or key.isdigit() else key
    changed = content.copy()
    if rest:
        changed[place] = replaced(content[place], rest, value)
    elif value is ABSENT:
        del changed[place]
    else:
        changed[place] = value
    return changed


def go_on(saved: Path, run: Run) -> None:
    """Use a checkpoint as a run does that resumes from it."""
    found = load_checkpoint(saved) | {"origin": str(saved)}
    merged(found, run.asked)
    restore(run, found)


def test_content_of_another_form_is_one_line_and_no_traceback(saved, run) -> None:
    """Its checksums are right nevertheless."""
    content = torch.load(saved, weights_only=True)
    content["optimizer"]["state"] = {0: {"exp_avg": torch.zeros(2)}}
    for path, value in WRONG:
        torch.save(replaced(content, path, value), saved)
        with pytest.raises(UserError) as caught:
            go_on(saved, run)
        assert "\n" not in str(caught.value), path
        assert len(str(caught.value)) < 1000, path
    for key in ("arch", "model_args", "config", "pretrained_cfg"):
        torch.save(content | {key: 5}, saved)  # as eval.py and release.py read it
        with pytest.raises(UserError):
            load_subject(str(saved))


def test_archive_that_torch_does_not_write_is_refused(saved) -> None:
    """If compressed, it could unpack to a thousand times its size; with overlaps, to any size."""
    with zipfile.ZipFile(saved) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(saved, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(DamagedError, match=r"is damaged .* compressed, overlapping or repeated"):
        load_checkpoint(saved)
    with zipfile.ZipFile(saved, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
        archive.infolist().extend([archive.infolist()[-1]] * 10_000)
    with pytest.raises(DamagedError, match=r"is damaged .* compressed, overlapping or repeated"):
        load_checkpoint(saved)


def test_limits_may_be_infinite() -> None:
    """timm's gemma4_vit has such limits."""
    check_finite({"input_max": torch.tensor(torch.inf), "index": torch.tensor(3)}, "it")
    for value in (torch.tensor(torch.nan), torch.tensor([torch.inf])):
        with pytest.raises(ValueError, match=r"it: input_max is not finite$"):
            check_finite({"bias": torch.zeros(2), "input_max": value}, "it")


@pytest.mark.parametrize("ema", [False, True])
def test_weights_that_are_not_finite_are_not_saved(ema, saved, run, tmp_path) -> None:
    model = run.setup.ema.module if ema else run.setup.model
    model.head.bias.data[2] = torch.nan
    for folder, kept in ((tmp_path, "none"), (saved.parent, "last.pt, previous.pt, best.pt")):
        before = contents(saved.parent)
        told = f"after step 4: head.bias is not finite; checkpoints from before .* in .*: {kept}$"
        with pytest.raises(NonFiniteLossError, match=told):
            save(folder, run)
        assert contents(saved.parent) == before


# Which checkpoint a run resumes from


def test_damaged_ones_are_put_aside_only_for_a_whole_one(saved, run, caplog) -> None:
    folder = saved.parent
    save(folder, train(run, 40.0))
    whole = contents(folder)
    for name in whole:
        (folder / name).unlink()
        (folder / name).write_bytes(whole[name][:-100])
    cut = contents(folder)
    with pytest.raises(OutputError, match=r"are damaged: .*last\.pt .*previous\.pt .*best\.pt "):
        load_newest(folder)
    assert contents(folder) == cut
    (folder / "best.pt").write_bytes(whole["best.pt"])
    assert load_newest(folder)["origin"] == str(folder / "best.pt")
    assert [line.partition("renamed it to ")[2] for line in caplog.messages] == [
        "last.damaged.pt",
        "previous.damaged.pt",
    ]
    assert (folder / "last.damaged.pt").read_bytes() == cut["last.pt"]


def test_what_a_killed_save_left_undone_is_done(saved) -> None:
    saved.with_name("best.pt").unlink()
    assert load_newest(saved.parent)["epoch"] == 1
    assert saved.with_name("best.pt").read_bytes() == saved.read_bytes()


def test_checkpoint_that_cannot_be_read_is_not_damaged(saved, monkeypatch) -> None:
    before = contents(saved.parent)
    failure = OSError(errno.EIO, os.strerror(errno.EIO))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=failure))
        with pytest.raises(OutputError, match=r"last\.pt cannot be read: Input/output error"):
            load_newest(saved.parent)
    assert contents(saved.parent) == before


def test_name_of_a_checkpoint_that_leads_to_none_stops_the_run(saved) -> None:
    """The disk may not be mounted, for example: a run must not start again from scratch there."""
    saved.unlink()
    saved.symlink_to("/nowhere/last.pt")
    with pytest.raises(OutputError, match=r"last\.pt does not exist"):
        load_newest(saved.parent)


def test_only_a_folder_without_a_checkpoint_refuses_other_files(saved, tmp_path) -> None:
    saved.with_name("notes.txt").write_text("mine")
    assert load_newest(saved.parent)["epoch"] == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / ".vision-longhorn.lock").touch()
    assert load_newest(other) is None
    (other / "config.yaml").touch()
    with pytest.raises(OutputError, match=re.escape(f"{other} contains config.yaml, but no")):
        load_newest(other)
