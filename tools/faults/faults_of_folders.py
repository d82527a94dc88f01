"""A run in a folder that holds something already, and settings that are no fault at all.

A function's docstring is the fault's name in the table.
"""

import re
import shutil
import signal

from PIL import Image

from tools.faults.fault_runs import (
    EPOCHS,
    STEPS,
    Injury,
    Laboratory,
    Result,
    Verdict,
    refused,
)
from vil.training.files import LOCK_NAME, lock_folder


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
