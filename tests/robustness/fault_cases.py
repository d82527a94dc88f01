"""The faults: one function each, which injects it and judges what became of the run.

A function's docstring is the fault's name in the table.
"""

import io
import json
import os
import random
import re
import shutil
import signal
import tarfile
from collections.abc import Callable
from math import nan
from pathlib import Path

import torch
from PIL import Image

from tests.robustness.fault_runs import (
    EPOCHS,
    STEPS,
    Injury,
    Laboratory,
    Result,
    Verdict,
    refused,
    skipped,
)
from tests.robustness.kills_runs import Case, differing, left_alone, make_images, outcome
from tests.robustness.kills_torchrun import EPOCHS as TORCHRUN_EPOCHS
from tests.robustness.kills_torchrun import kill_torchrun
from vil.training.files import LOCK_NAME, lock_folder

Fault = Callable[[Laboratory], Verdict]

# Without repeats an epoch draws every image.
TOLERANT = ("--data.max-bad-images", "0.2", "--data.aug-repeats", "1")


def truncated_jpegs(lab: Laboratory) -> Verdict:
    """4 training JPEGs cut in half"""
    data = lab.copy("folder")
    names = [
        _halve(data / "train" / name / "3.jpg") for name in ("ash", "birch", "cedar", "dogwood")
    ]
    return skipped(lab.run(data, *TOLERANT), 4, *names)


def too_many_truncated_jpegs(lab: Laboratory) -> Verdict:
    """the same, but more than data.max_bad_images allows"""
    data = lab.copy("folder")
    _halve(data / "train" / "ash" / "3.jpg")
    result = lab.run(data, "--data.max-bad-images", "0.01")
    if result.code != 3 or "ash/3.jpg" not in result.error:
        return Verdict(result.printed[-300:], "no word of the fault")
    return Verdict(f"exit 3: {result.error}", "nothing: stopped, told which image and why")


def zero_byte_and_text_files(lab: Laboratory) -> Verdict:
    """a zero-byte file and a text file named .jpg"""
    data = lab.copy("folder")
    (data / "train" / "ash" / "3.jpg").write_bytes(b"")
    (data / "train" / "birch" / "3.jpg").write_text("404 not found")
    return skipped(lab.run(data, *TOLERANT), 2, "ash/3.jpg", "birch/3.jpg")


def vast_image(lab: Laboratory) -> Verdict:
    """a training image of a few kB and 169 million pixels"""
    data = lab.copy("folder")
    Image.new("1", (13_000, 13_000)).save(data / "train" / "ash" / "3.jpg", "PNG")
    return skipped(lab.run(data, *TOLERANT), 1, "ash/3.jpg", "169,000,000 pixels")


def vast_validation_image(lab: Laboratory) -> Verdict:
    """the same in validation"""
    data = lab.copy("folder")
    Image.new("1", (13_000, 13_000)).save(data / "val" / "ash" / "1.jpg", "PNG")
    return refused(lab.run(data), 3, r"image .*val/ash/1\.jpg cannot be read: it has 169,000,000")


def png_named_jpeg(lab: Laboratory) -> Verdict:
    """a PNG named .jpg"""
    return _decodes(lab, "PNG", "RGB")


def cmyk_jpeg(lab: Laboratory) -> Verdict:
    """a CMYK JPEG"""
    return _decodes(lab, "JPEG", "CMYK")


def bad_validation_images(lab: Laboratory) -> Verdict:
    """a truncated validation JPEG"""
    data = lab.copy("folder")
    _halve(data / "val" / "cedar" / "1.jpg")
    return refused(lab.run(data), 3, r"image .*val/cedar/1\.jpg cannot be read: ")


def extra_validation_class(lab: Laboratory) -> Verdict:
    """a class folder in validation only"""
    data = lab.copy("folder")
    shutil.copytree(data / "val" / "ash", data / "val" / "elm")
    return refused(lab.run(data), 3, "class .* is in the validation data only")


def renamed_validation_class(lab: Laboratory) -> Verdict:
    """a class with another name in validation"""
    data = lab.copy("folder")
    (data / "val" / "ash").rename(data / "val" / "elm")
    return refused(lab.run(data), 3, "class ash is in the training data only")


def empty_class(lab: Laboratory) -> Verdict:
    """a class folder without images, which would shift the labels"""
    data = lab.copy("folder")
    (data / "train" / "aspen").mkdir()
    return refused(lab.run(data), 3, r"class folder .*train/aspen has no images")


def empty_validation(lab: Laboratory) -> Verdict:
    """an empty validation set"""
    data = lab.copy("folder")
    for path in data.glob("val/*/*.jpg"):
        path.unlink()
    return refused(lab.run(data), 3, r"no images in the sub-folders of .*val")


def data_away(lab: Laboratory) -> Verdict:
    """the data's folder away for a second, as a network's disk can be"""
    return lab.same(lab.run(lab.copy("folder"), injury=Injury("away", 12)), "exit 0")


def pipe_for_an_image(lab: Laboratory) -> Verdict:
    """a pipe named .jpg, which would be waited for"""
    data = lab.copy("folder")
    (data / "train" / "ash" / "3.jpg").unlink()
    os.mkfifo(data / "train" / "ash" / "3.jpg")
    return refused(lab.run(data), 3, r"image .*train/ash/3\.jpg cannot be read: .*regular file")


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


def line_break_in_a_name(lab: Laboratory) -> Verdict:
    """a line break in the name of a validation image that is none"""
    data = lab.copy("folder")
    (data / "val" / "ash" / "3\n4.jpg").write_text("404 not found")
    return refused(lab.run(data), 3, r"image .*/val/ash/3\\n4\.jpg cannot be read: cannot identify")


def fewer_shards_than_workers(lab: Laboratory) -> Verdict:
    """1 shard, 2 loader processes"""
    data = _foreign_shards(lab, lambda number: "", shards=1)
    patterns = ("--data.train-split", "train-0.tar", "--data.val-split", "validation-0.tar")
    runs = [
        lab.run(data, *patterns, "--data.num-workers", workers, dataset="wds")
        for workers in ("0", "2")
    ]
    return _equal_logs(runs, "exit 0, all 8 steps of an epoch")


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


def data_smaller_than_batch(lab: Laboratory) -> Verdict:
    """fewer images than a batch"""
    return refused(lab.run(None, "--data.batch-size", "96"), 3, "64 training images, fewer than")


def nan_for_some_steps(lab: Laboratory) -> Verdict:
    """a loss that is NaN for 2 steps"""
    result = lab.run(injury=Injury("poison", 9, 11))
    if result.code != 0 or "skipped  0 images, 2 steps" not in result.printed:
        return Verdict(result.printed[-300:], "the run")
    state = torch.load(result.folder / "last.pt", weights_only=True)
    named = (result.folder / "skipped.txt").read_text().count(".jpg")
    finite = all(value.isfinite().all() for value in state["state_dict"].values())
    updates = state["optimizer"]["state"][0]["step"]
    if not finite or updates != EPOCHS * STEPS - 2 or named != 16:
        return Verdict(f"{updates} updates, {named} images named", "weights or names")
    return Verdict(
        "exit 0, 2 steps without effect",
        "nothing: no weight touched, their 16 images in skipped.txt",
    )


def nan_for_ever(lab: Laboratory) -> Verdict:
    """a loss that stays NaN"""
    result = lab.run(None, "--optim.max-bad-steps", "3", injury=Injury("poison", 9))
    state = torch.load(result.folder / "last.pt", weights_only=True)
    finite = all(value.isfinite().all() for value in state["state_dict"].values())
    updates = state["optimizer"]["state"][0]["step"]
    if result.code != 4 or not finite or updates != 9 or "images are in" not in result.error:
        return Verdict(result.printed[-300:], "the weights")
    return Verdict(f"exit 4: {result.error}", "nothing: the weights are as before the first NaN")


def diverged_weights(lab: Laboratory) -> Verdict:
    """learning rate 1e20"""
    result = lab.run(None, "--optim.lr-base", "1e20")
    best = torch.load(result.folder / "best.pt", weights_only=True)
    if result.code != 4 or best["epoch"] > 2:  # which train at warmup_lr
        return Verdict(result.printed[-300:], "the best weights")
    return Verdict(f"exit 4: {result.error}", "nothing: best.pt is from before")


def full_disk_for_a_while(lab: Laboratory) -> Verdict:
    """a disk that is full during 3 saves"""
    result = lab.run(injury=Injury("disk", 5, 8))
    told = result.printed.count("training goes on without")
    verdict = lab.same(result, f"exit 0, {told} warnings")
    return verdict if told == 3 else Verdict(result.printed[-300:], "the warnings")


def full_disk(lab: Laboratory) -> Verdict:
    """a disk that stays full"""
    result = lab.run(injury=Injury("disk", 5))
    left = [path.name for path in result.folder.iterdir() if path.suffix == ".tmp"]
    if result.code != 5 or left or "cannot write" not in result.error:
        return Verdict(result.printed[-300:], "the reason, or space")
    error = result.error
    return lab.same(lab.run(again=result), f"exit 5: {error}; run again: exit 0")


def torn_checkpoint(lab: Laboratory) -> Verdict:
    """last.pt cut in half"""
    return _damaged_checkpoint(lab, lambda content: content[: len(content) // 2])


def zeroed_checkpoint(lab: Laboratory) -> Verdict:
    """4 KB of last.pt zeroed"""

    def zero(content: bytes) -> bytes:
        start = len(content) // 2
        return content[:start] + bytes(4096) + content[start + 4096 :]

    return _damaged_checkpoint(lab, zero)


def flipped_bit_in_checkpoint(lab: Laboratory) -> Verdict:
    """one bit of a weight in last.pt flipped"""

    def flip(content: bytes) -> bytes:
        weights = torch.load(io.BytesIO(content), weights_only=True)["state_dict"]
        place = content.index(weights["head.weight"].numpy().tobytes()) + 10
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    return _damaged_checkpoint(lab, flip)


def code_in_checkpoint(lab: Laboratory) -> Verdict:
    """last.pt replaced by a pickle that runs code"""
    trap = lab.root / "sprung"
    file = io.BytesIO()
    torch.save({"state_dict": _Trap(trap)}, file)
    verdict = _damaged_checkpoint(lab, lambda content: file.getvalue())
    return Verdict("it ran the code", "safety") if trap.exists() else verdict


def other_content_in_checkpoint(lab: Laboratory) -> Verdict:
    """last.pt with a list for its log, its checksums right"""
    return _changed_checkpoint(lab, lambda content: content["run"].update(history=[1]))


def nan_in_checkpoint(lab: Laboratory) -> Verdict:
    """a weight in last.pt that is NaN, its checksums right"""
    return _changed_checkpoint(lab, lambda content: content["state_dict"]["head.bias"].fill_(nan))


def unreadable_checkpoint(lab: Laboratory) -> Verdict:
    """a disk that fails while last.pt is read"""
    result = lab.run(injury=Injury("signal", 12, number=signal.SIGKILL))
    errors = []
    for reads in (0, 3, 20):
        failed = lab.run(again=result, injury=Injury("reading", reads))
        if failed.code != 5 or list(result.folder.glob("*damaged*")):
            return Verdict(failed.printed[-300:], "the checkpoints' names")
        errors.append(failed.error)
    return lab.same(lab.run(again=result), f"exit 5: {errors[0]}; run again: exit 0")


def best_checkpoint_deleted(lab: Laboratory) -> Verdict:
    """best.pt deleted, the command of the finished run once more"""
    result = lab.run()
    epoch = torch.load(result.folder / "best.pt", weights_only=True)["epoch"]
    if epoch == EPOCHS:  # last.pt is it then
        return Verdict("the last epoch is the best", "the case")
    (result.folder / "best.pt").unlink()
    again = lab.run(again=result)
    told = re.search(r"best\.pt of epoch \d+ is gone", again.printed)
    if again.code != 0 or not told or not again.printed.endswith("last.pt\n"):
        return Verdict(again.printed[-300:], "a word of it")
    return Verdict(
        "a warning; exit 0, the command to evaluate names last.pt", "nothing but what was deleted"
    )


def two_damaged_checkpoints(lab: Laboratory) -> Verdict:
    """last.pt and previous.pt cut in half"""
    result = lab.run(injury=Injury("signal", 12, number=signal.SIGKILL))
    for name in ("last.pt", "previous.pt"):
        _halve(result.folder / name)
    again = lab.run(again=result)
    told = all(f"it is now {name}.damaged.pt" in again.printed for name in ("last", "previous"))
    for path in result.folder.glob("*.damaged.pt"):
        path.unlink()
    verdict = lab.same(again, "two warnings, best.pt is used; exit 0")
    return verdict if told else Verdict(again.printed[-300:], "the warnings")


def killed_while_saving(lab: Laboratory) -> Verdict:
    """SIGKILL while a checkpoint is written, 5 times"""
    result = lab.run(injury=Injury("saving", 2))
    for call in (0, 5, 14, 23):
        result = lab.run(again=result, injury=Injury("saving", call))
    return lab.same(lab.run(again=result), "run again: exit 0")


def killed_within_an_epoch(lab: Laboratory) -> Verdict:
    """SIGKILL in the middle of an epoch"""
    return _stopped(lab, signal.SIGKILL, 12, -signal.SIGKILL, "--run.save-minutes", "1e6")


def killed_between_epochs(lab: Laboratory) -> Verdict:
    """SIGKILL between two epochs"""
    return _stopped(lab, signal.SIGKILL, STEPS, -signal.SIGKILL)


def terminated(lab: Laboratory) -> Verdict:
    """SIGTERM"""
    return _stopped(lab, signal.SIGTERM, 12, 143)


def terminated_with_loader_processes(lab: Laboratory) -> Verdict:
    """SIGTERM to every process, as from a scheduler"""
    workers = ("--data.num-workers", "2")
    return _stopped(lab, signal.SIGTERM, 12, 143, *workers, kind="signal to all")


def user_signal(lab: Laboratory) -> Verdict:
    """SIGUSR1"""
    return _stopped(lab, signal.SIGUSR1, 12, 138)


def hang_up(lab: Laboratory) -> Verdict:
    """SIGHUP to every process, as from a terminal that is closed"""
    workers = ("--data.num-workers", "2")
    return _stopped(lab, signal.SIGHUP, 12, 129, *workers, kind="signal to all")


def interrupted(lab: Laboratory) -> Verdict:
    """Ctrl-C"""
    return _stopped(lab, signal.SIGINT, 12, 130)


def killed_loader_process(lab: Laboratory) -> Verdict:
    """a loader process killed, for want of memory say"""
    workers = ("--data.num-workers", "2")
    return lab.same(lab.run(None, *workers, injury=Injury("loader process", 12)), "exit 0")


def hanging_loader_processes(lab: Laboratory) -> Verdict:
    """loader processes that hang for ever, and SIGTERM"""
    workers = ("--data.num-workers", "2")
    return _stopped(lab, signal.SIGTERM, 12, 143, *workers, kind="hanging loaders")


def hanging_loader_processes_of_one(lab: Laboratory) -> Verdict:
    """loader processes of one of 2 training processes that hang for ever, and SIGTERM"""
    injury = Injury("hanging loaders", 12, number=signal.SIGTERM)
    return _goes_on(lab, injury, 143, "stopped by SIGTERM", 2, "--data.num-workers", "2")


def images_gone(lab: Laboratory) -> Verdict:
    """the disk of the images goes away in the middle of an epoch"""
    return _goes_on(lab, Injury("images", 12), 3, "Stale file handle", 1)


def images_gone_from_one(lab: Laboratory) -> Verdict:
    """the disk of the images goes away for one of 2 training processes"""
    return _goes_on(lab, Injury("images", 12), 3, "Stale file handle", 2)


def validation_images_gone(lab: Laboratory) -> Verdict:
    """a validation image that cannot be read any more"""
    return _goes_on(lab, Injury("validation images", 12), 3, "Stale file handle", 1)


def validation_images_gone_from_one(lab: Laboratory) -> Verdict:
    """a validation image that one of 2 training processes cannot read any more"""
    return _goes_on(lab, Injury("validation images", 12), 3, "Stale file handle", 2)


def no_memory(lab: Laboratory) -> Verdict:
    """too little memory for a step"""
    return _goes_on(lab, Injury("memory", 12), 2, "grad-accum-steps 2, which keeps the batch", 1)


def full_output(lab: Laboratory) -> Verdict:
    """standard output in a file on a full disk"""
    return lab.same(lab.run(injury=Injury("output", 12)), "exit 0")


def little_shared_memory(lab: Laboratory) -> Verdict:
    """a container with too little shared memory for loader processes"""
    injury = Injury("shared memory", number=9 << 10)
    return refused(lab.run(None, "--data.num-workers", "2", injury=injury), 2, "--shm-size")


def killed_training_process(lab: Laboratory) -> Verdict:
    """one of 2 training processes killed"""
    injury = Injury("signal", 12, number=signal.SIGKILL)
    result = lab.run(injury=injury, processes=2)
    again = lab.run(again=result, processes=2)
    alone = lab.run(processes=2)
    if result.code == 0 or again.code != 0:
        return Verdict(again.printed[-300:], "the run")
    return _equal_logs([again, alone], "the other ends, too; run again: exit 0")


def killed_worker_of_torchrun(lab: Laboratory) -> Verdict:
    """one of 2 workers of torchrun --max-restarts killed"""
    root = lab.root / "torchrun"
    make_images(root)
    case = Case("folder", 0, 2)
    row = kill_torchrun(root, case, left_alone(root, case, TORCHRUN_EPOCHS), 0, random.Random(0))
    if row["problem"] or not row["hit"]:
        return Verdict(str(row), "the run")
    return Verdict(
        f"{row['restarts']} restart, which continues; exit 0",
        "nothing: ends with the same bits as a run left alone",
    )


def second_run_in_the_folder(lab: Laboratory) -> Verdict:
    """a second run in the folder of a running one"""
    result = lab.run(injury=Injury("signal", 12, number=signal.SIGTERM))
    before = {path.name: path.read_bytes() for path in result.folder.iterdir()}
    with lock_folder(result.folder):
        second = lab.run(again=result)
    after = {path.name: path.read_bytes() for path in result.folder.iterdir()}
    changed = [name for name in before if name != LOCK_NAME and before[name] != after[name]]
    if second.code != 5 or "is in use by process" not in second.error or changed:
        return Verdict(second.printed[-300:], f"files of the first: {changed}")
    return Verdict(f"exit 5: {second.error}", "nothing: the first goes on")


def folder_of_another_run(lab: Laboratory) -> Verdict:
    """the folder of a run with other settings"""
    result = lab.run(injury=Injury("signal", 12, number=signal.SIGTERM))
    return _left_alone(lab, result, "--optim.weight-decay", "0.5", message="weight_decay .* -> 0.5")


def changed_config(lab: Laboratory) -> Verdict:
    """a batch size changed before going on"""
    result = lab.run(injury=Injury("signal", 12, number=signal.SIGTERM))
    return _left_alone(lab, result, "--data.batch-size", "16", message="batch_size .8 -> 16.")


def changed_data(lab: Laboratory) -> Verdict:
    """a training image removed before going on"""
    data = lab.copy("folder")
    result = lab.run(data, injury=Injury("signal", 12, number=signal.SIGTERM))
    (data / "train" / "ash" / "3.jpg").unlink()
    before = (result.folder / "last.pt").read_bytes()
    again = lab.run(data, again=result)
    if again.code != 3 or before != (result.folder / "last.pt").read_bytes():
        return Verdict(again.printed[-300:], "exactness")
    return Verdict(f"exit 3: {again.error}", "nothing: the run is as it was")


def overwritten_data(lab: Laboratory) -> Verdict:
    """all training images overwritten under their names before going on"""
    data = lab.copy("folder")
    result = lab.run(data, injury=Injury("signal", 12, number=signal.SIGTERM))
    for path in data.glob("train/*/*.jpg"):
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    before = (result.folder / "last.pt").read_bytes()
    again = lab.run(data, again=result)
    if again.code != 3 or before != (result.folder / "last.pt").read_bytes():
        return Verdict(again.printed[-300:], "exactness")
    return Verdict(f"exit 3: {again.error}", "nothing: the run is as it was")


def folder_of_something_else(lab: Laboratory) -> Verdict:
    """a folder with other files"""
    folder = lab.root / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    result = lab.run(None, "--run.output", str(folder))
    if (folder / "thesis.tex").read_text() != "precious" or len(list(folder.iterdir())) > 2:
        return Verdict(result.printed[-300:], "other files")
    return refused(result, 5, "holds thesis.tex and no run to continue")


def folder_of_something_else_with_our_names(lab: Laboratory) -> Verdict:
    """a folder with other files that have names as of this program's"""
    folder = lab.root / "theirs"
    names = (".precious.tmp", ".lock", "config.yaml", LOCK_NAME)
    for name in names:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / name).write_text("precious")
        result = lab.run(None, "--run.output", str(folder))
        left = {path.name: path.read_text() for path in folder.iterdir()}
        if result.code != 5 or left != {name: "precious"}:
            return Verdict(result.printed[-300:], f"{name}, or a word of it")
    return Verdict(f"exit 5, as with {names[0]}, {names[1]}", "nothing: not a file is touched")


def disk_without_locks(lab: Laboratory) -> Verdict:
    """a disk that has no locks"""
    result = lab.run(injury=Injury("no locks"))
    verdict = lab.same(result, "a warning; exit 0")
    told = result.printed.count("has no locks (No locks available)")
    return verdict if told == 1 else Verdict(result.printed[-300:], "the warning")


def finished_run_again(lab: Laboratory) -> Verdict:
    """the command of a finished run once more"""
    return lab.same(lab.run(again=lab.run()), "exit 0, nothing is trained")


def one_log_after_going_on(lab: Laboratory) -> Verdict:
    """going on in the same folder, where log and best could be begun anew"""
    result = lab.run(injury=Injury("signal", 2 * STEPS + 1, number=signal.SIGTERM))
    again = lab.run(again=result)
    lines = (result.folder / "log.csv").read_text().splitlines()
    if len(lines) != 1 + EPOCHS or sum(line.startswith("epoch,") for line in lines) != 1:
        return Verdict("\n".join(lines), "the log")
    return lab.same(again, f"exit 0, one log of {EPOCHS} epochs")


def repeats_in_one_process(lab: Laboratory) -> Verdict:
    """repeated augmentation with one process"""
    return _runs(lab, "--data.aug-repeats", "3")


def no_loader_processes(lab: Laboratory) -> Verdict:
    """no loader processes"""
    return _runs(lab, "--data.num-workers", "0")


def other_image_size(lab: Laboratory) -> Verdict:
    """another image size on the command line"""
    return _runs(lab, "--model.img-size", "24")


def gloo(lab: Laboratory) -> Verdict:
    """2 processes without GPUs"""
    result = lab.run(processes=2)
    if result.code != 0:
        return Verdict(result.printed[-300:], "the run")
    return Verdict("exit 0", "nothing: it works")


FAULTS: tuple[Fault, ...] = (
    truncated_jpegs,
    too_many_truncated_jpegs,
    zero_byte_and_text_files,
    vast_image,
    vast_validation_image,
    png_named_jpeg,
    cmyk_jpeg,
    bad_validation_images,
    extra_validation_class,
    renamed_validation_class,
    empty_class,
    empty_validation,
    data_away,
    pipe_for_an_image,
    line_break_in_a_name,
    truncated_shard,
    cut_shard_without_index,
    empty_shard,
    missing_shard,
    garbage_shard,
    truncated_validation_shard,
    rot_in_shard,
    unlabelled_samples,
    one_unlabelled_sample,
    impossible_label,
    rewritten_shard,
    rot_in_index,
    repeated_key,
    negative_size,
    shards_without_counts,
    wrong_counts,
    other_order_of_classes,
    fewer_shards_than_workers,
    fewer_shards_than_processes,
    data_smaller_than_batch,
    nan_for_some_steps,
    nan_for_ever,
    diverged_weights,
    full_disk_for_a_while,
    full_disk,
    torn_checkpoint,
    zeroed_checkpoint,
    flipped_bit_in_checkpoint,
    code_in_checkpoint,
    other_content_in_checkpoint,
    nan_in_checkpoint,
    two_damaged_checkpoints,
    unreadable_checkpoint,
    best_checkpoint_deleted,
    killed_while_saving,
    killed_within_an_epoch,
    killed_between_epochs,
    terminated,
    terminated_with_loader_processes,
    user_signal,
    hang_up,
    interrupted,
    images_gone,
    images_gone_from_one,
    validation_images_gone,
    validation_images_gone_from_one,
    no_memory,
    little_shared_memory,
    full_output,
    hanging_loader_processes,
    hanging_loader_processes_of_one,
    killed_loader_process,
    killed_training_process,
    killed_worker_of_torchrun,
    second_run_in_the_folder,
    folder_of_another_run,
    changed_config,
    changed_data,
    overwritten_data,
    folder_of_something_else,
    folder_of_something_else_with_our_names,
    disk_without_locks,
    finished_run_again,
    one_log_after_going_on,
    repeats_in_one_process,
    no_loader_processes,
    other_image_size,
    gloo,
)


class _Trap:
    """Unpickled carelessly, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.path),))


def _halve(path: Path) -> str:
    """Cut a file in half and return its last two names."""
    os.truncate(path, path.stat().st_size // 2)
    return f"{path.parent.name}/{path.name}"


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


def _decodes(lab: Laboratory, form: str, mode: str) -> Verdict:
    """Train with one file of another form or colour: it must be read."""
    data = lab.copy("folder")
    path = data / "train" / "ash" / "3.jpg"
    Image.open(path).convert(mode).save(path, form)
    result = lab.run(data, "--data.max-bad-images", "0")
    if result.code != 0 or "skipped  0 images" not in result.printed:
        return Verdict(result.printed[-300:], "the image")
    return Verdict("exit 0, decoded by content and converted", "nothing: the image is trained on")


def _damaged_shard(
    lab: Laboratory, split: str, damage: Callable[[Path], object], message: str
) -> Verdict:
    """Damage the second shard of a split: it must be named before anything is trained."""
    data = lab.copy("wds")
    shard = sorted(data.glob(f"{split}-*.tar"))[-1]
    damage(shard)
    return refused(lab.run(data, dataset="wds"), 3, f"{shard.name}.*{message}")


def _damaged_checkpoint(lab: Laboratory, damage: Callable[[bytes], bytes]) -> Verdict:
    """Damage last.pt of a killed run: the one before must be used, loudly."""
    result = lab.run(injury=Injury("signal", 12, number=signal.SIGKILL))
    path = result.folder / "last.pt"
    path.write_bytes(damage(path.read_bytes()))
    again = lab.run(again=result)
    told = "it is now last.damaged.pt" in again.printed
    (result.folder / "last.damaged.pt").unlink(missing_ok=True)
    verdict = lab.same(again, "a warning, previous.pt is used; exit 0")
    return verdict if told else Verdict(again.printed[-300:], "the warning")


def _changed_checkpoint(lab: Laboratory, change: Callable[[dict], object]) -> Verdict:
    """Change what last.pt of a killed run holds, and write it as it should be written."""

    def rewrite(content: bytes) -> bytes:
        checkpoint = torch.load(io.BytesIO(content), weights_only=True)
        change(checkpoint)
        file = io.BytesIO()
        torch.save(checkpoint, file)
        return file.getvalue()

    return _damaged_checkpoint(lab, rewrite)


def _stopped(
    lab: Laboratory,
    number: signal.Signals,
    step: int,
    code: int,
    *arguments: str,
    kind: str = "signal",
) -> Verdict:
    """Send a signal at a step, run again, and compare with a run left alone."""
    result = lab.run(None, *arguments, injury=Injury(kind, step, number=number))
    if result.code != code:
        return Verdict(f"exit {result.code}: {result.printed[-300:]}", "the code")
    again = lab.run(None, *arguments, again=result)
    if "resumed  after" not in again.printed:
        return Verdict(again.printed[-300:], "the work before")
    how = "" if code < 0 else f"checkpoint, exit {code}; "
    return lab.same(again, f"{how}run again: exit 0")


def _goes_on(
    lab: Laboratory, injury: Injury, code: int, message: str, processes: int, *arguments: str
) -> Verdict:
    """Injure a run of one or more processes, run again, and compare with a run left alone."""
    arguments = ("--run.save-minutes", "1e6", *arguments)
    result = lab.run(None, *arguments, injury=injury, processes=processes)
    error = result.error
    if result.code != code or message not in error:
        return Verdict(f"exit {result.code}: {result.printed[-300:]}", "the code, or the error")
    kept = torch.load(result.folder / "last.pt", weights_only=True)["run"]["step"]
    if kept < injury.step:
        return Verdict(f"a checkpoint of step {kept}", "the work before")
    again = lab.run(None, *arguments, again=result, processes=processes)
    verdict = _equal_logs([again, lab.run(None, *arguments, processes=processes)], "")
    return Verdict(f"checkpoint, exit {code}: {error}; run again: exit 0", verdict.lost)


def _left_alone(lab: Laboratory, result: Result, *arguments: str, message: str) -> Verdict:
    """Run with other settings in the folder of a run: it must be refused, and the run unharmed."""
    other = lab.run(None, *arguments, again=result)
    if other.code != 2 or not re.search(message, other.error):
        return Verdict(other.printed[-300:], "no word of the fault")
    return lab.same(lab.run(again=result), f"exit 2: {other.error}")


def _runs(lab: Laboratory, *arguments: str) -> Verdict:
    """Run to the end."""
    result = lab.run(None, *arguments)
    if result.code != 0:
        return Verdict(f"exit {result.code}: {result.printed[-300:]}", "the run")
    return Verdict("exit 0", "nothing: it works")


def _equal_logs(runs: list[Result], how: str) -> Verdict:
    """Compare what two runs ended with."""
    if any(run.code for run in runs):
        return Verdict(runs[-1].printed[-300:], "the run")
    changed = differing(*(outcome(run.folder) for run in runs))
    if changed:
        return Verdict(how, f"equality: other {', '.join(changed)}")
    return Verdict(how, "nothing: ends with the same bits")
