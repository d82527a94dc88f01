"""Faults of losses, weights, checkpoints and the disk that they are written to.

A function's docstring is the fault's name in the table.
"""

import io
import os
import re
import signal
from collections.abc import Callable
from math import nan
from pathlib import Path

import torch

from tools.faults.fault_runs import (
    EPOCHS,
    STEPS,
    Injury,
    Laboratory,
    Verdict,
    halve,
)


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
        halve(result.folder / name)
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


class _Trap:
    """Unpickled carelessly, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.path),))


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
