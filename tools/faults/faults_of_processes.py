"""Faults of processes: signals, what is killed, hangs or runs out, and disks that go away meanwhile.

A function's docstring is the fault's name in the table.
"""

import random
import signal

import torch

from tools.faults.fault_runs import (
    STEPS,
    Injury,
    Laboratory,
    Verdict,
    equal_logs,
    refused,
)
from tools.faults.kills_runs import Case, left_alone, make_images
from tools.faults.kills_torchrun import EPOCHS as TORCHRUN_EPOCHS
from tools.faults.kills_torchrun import kill_torchrun


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


def hanging_tracker(lab: Laboratory) -> Verdict:
    """a tracker that hangs for ever"""
    shown = ("--run.tracker", "tensorboard")
    result = lab.run(None, *shown, injury=Injury("tracker", 12))
    if result.printed.count("training goes on without: TimeoutError: no answer in 1 s") != 1:
        return Verdict(result.printed[-300:], "the warning")
    return lab.same(result, "a warning; exit 0", *shown)


def hanging_tracker_and_signal(lab: Laboratory) -> Verdict:
    """a tracker that hangs for ever, and SIGTERM"""
    return _stopped(lab, signal.SIGTERM, 12, 143, "--run.tracker", "tensorboard", kind="tracker")


def killed_training_process(lab: Laboratory) -> Verdict:
    """one of 2 training processes killed"""
    injury = Injury("signal", 12, number=signal.SIGKILL)
    result = lab.run(injury=injury, processes=2)
    again = lab.run(again=result, processes=2)
    alone = lab.run(processes=2)
    if result.code == 0 or again.code != 0:
        return Verdict(again.printed[-300:], "the run")
    return equal_logs([again, alone], "the other ends, too; run again: exit 0")


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
    watched = arguments if "--run.tracker" in arguments else ()  # which leaves a folder
    return lab.same(again, f"{how}run again: exit 0", *watched)


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
    verdict = equal_logs([again, lab.run(None, *arguments, processes=processes)], "")
    return Verdict(f"checkpoint, exit {code}: {error}; run again: exit 0", verdict.lost)
