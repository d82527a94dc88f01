"""Let file calls of a resumed training run fail, one run per call, and report how each run ends.

    python -m lab.faults.disk_sweep [--every N] [--most N]

A preloaded library (disk_faults.c) sits between Python and the C library. It counts the calls on files in the data
folder and the run folder, by kind. It lets the n-th call fail, once or from then on, as a disk would: no space left,
no locks, an I/O error, or half of the bytes. Each n of each kind is a run of train_imagenet.py on the CPU with a tiny
model, which resumes in the middle of its second epoch. If it does not end as an undisturbed run does, a second run
without the fault follows. A run ends in one of these ways:

- went on: exit 0, bit-identical to an undisturbed run;
- warned: exit 0 and a warning about a file that was not written. Repeating the command writes it, except for rows of
  steps.csv and the weights of a finished epoch;
- stopped: exit 3 (data) or 5 (run) and one line that names the place. Without the fault, repeating the command ends
  bit-identical to an undisturbed run, with the same exceptions for files that the line names;
- lost: anything else. It is printed and makes the exit status 1.

The first three leave no temporary file, set aside no good checkpoint and change no file of the user.
"""

import argparse
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from PIL import Image

from lab.faults import disk_faults, runs
from lab.faults.disk_faults import HALF, Call, DiskFault
from lab.faults.runs import CONTEXT, differing, outcome
from lab.faults.server import train
from vil.training import report
from vil.training import train as loop
from vil.training.files import write_atomically, write_text

PATIENCE = 60.0  # seconds after which a run counts as hung
DISKS = ("data", "run")
EXIT_CODES = {"data": 3, "run": 5}  # documented exit codes for disk errors

# Errors of disks, by kind of call. The last kind, all, is a disk that is gone.
_ERRORS = {
    "open": (errno.ESTALE, errno.EACCES, errno.EINTR),
    "read": (errno.EIO, errno.EINTR, HALF),
    "write": (errno.ENOSPC, errno.EIO, errno.EINTR, HALF),
    "sync": (errno.EIO, errno.EINVAL),
    "close": (errno.EIO,),
    "truncate": (errno.EIO,),
    "rename": (errno.EIO,),
    "link": (errno.EPERM, errno.EMLINK),
    "unlink": (errno.EIO, errno.EACCES),
    "mkdir": (errno.EIO, errno.EACCES),
    "stat": (errno.EIO,),
    "list": (errno.EIO,),
    "lock": (errno.ENOLCK,),
    "all": (errno.EIO,),
}
_ONCE = (errno.EINTR,)
_ALWAYS = (errno.EACCES, errno.EINVAL)  # permissions and a disk's features do not change by waiting

_NAMES = re.compile("|".join((*runs.CLASSES, "[0-9]+")))


class Verdict(NamedTuple):
    """How a run ended."""

    end: str
    """"not reached", "went on", "warned", "stopped" or "lost"."""
    why: str = ""


@dataclass
class Attempt:
    """Exit code, output and calls of a run."""

    code: int | None
    printed: str
    calls: list[Call]

    def lines(self, beginning: str) -> list[str]:
        """Return the remainder of each line that starts with ``beginning``, with its list items."""
        return re.findall(rf"^{beginning}(.*(?:\n  - .*)*)", self.printed, re.MULTILINE)


class Sweep:
    """Runs that resume from one and the same folder."""

    def __init__(self, root: Path) -> None:
        """Make the data in a folder, and run without faults.

        Raises:
            RuntimeError: If a run without faults fails.
        """
        self.root = root
        self.original = self.root / "original"
        runs.make_images(self.root, train=4, val=1)
        self.original.mkdir()
        (self.root / "folder").rename(self.original / "data")
        (self.original / "data" / "notes.txt").write_text("mine\n")
        self._stop_in_second_epoch()
        place = self._place()
        alone = self._attempt(place, None)
        if alone.code != 0:
            raise RuntimeError(f"the run left alone failed:\n{alone.printed}")
        self.calls = alone.calls
        self.resumed = alone.lines("resumed  ")
        self.outcome = outcome(place / "run")
        self.data = _contents(place / "data")
        shutil.rmtree(place)

    def faults(self, every: int = 1) -> Iterator[DiskFault]:
        """Yield a fault for each error that a call of the undisturbed run may meet.

        Args:
            every: Take every n-th call of a function on a file, or on similar files; at least one.
        """
        for disk, (kind, errors) in product(range(len(DISKS)), _ERRORS.items()):
            calls = [c for c in self.calls if c.disk == disk and kind in (c.kind, "all")]
            for first in thin([site_of(call) for call in calls], every):
                for error, lasts in product(errors, (False, True)):
                    # Let all calls fail for good only; the other kinds cover single failures.
                    if error not in (_ONCE if lasts else _ALWAYS) and (lasts or kind != "all"):
                        yield DiskFault(disk, kind, error, lasts, first)

    def inject(self, fault: DiskFault) -> Verdict:
        """Run with a fault, then without it if the user would have to repeat the command."""
        place = self._place()
        try:
            attempt = self._attempt(place, fault)
            failed = [call for call in attempt.calls if call.failed]
            if not failed:
                return Verdict("not reached")
            verdict = self._judge(place, fault, attempt)
            where = f"{failed[0].function} {failed[0].path}: ".replace(str(place), "")
            return verdict._replace(why=where + verdict.why)
        finally:
            shutil.rmtree(place)

    def _judge(self, place: Path, fault: DiskFault, attempt: Attempt) -> Verdict:
        """Judge the end of a run, after resuming it without the fault if it stopped or warned."""
        errors, warnings = attempt.lines("error: "), attempt.lines("warning: ")
        failed = [Path(call.path).name for call in attempt.calls if call.failed]
        noise = re.search(r"^(Traceback|Exception|\w*Warning: ).*", attempt.printed, re.MULTILINE)
        if attempt.code is None:
            return Verdict("lost", "hangs")
        if noise:
            where = re.findall(r'File "\S*/(vil/\S+)", line \d+, in (\S+)', attempt.printed)
            place_of_it = ", ".join(where[-1]) if where else "?"
            last = attempt.printed.splitlines()[-1]
            return Verdict("lost", f"{noise[0]} ... {place_of_it}: {last}")
        if attempt.code == 0:
            if attempt.lines("resumed  ") != self.resumed:
                return Verdict("lost", f"continued elsewhere: {attempt.lines('resumed  ')}")
            changed = self._changed(place)
            if not changed:
                return Verdict("went on", "; ".join(warnings))
            if not warnings:
                return Verdict("lost", f"exit 0 without a warning, other {changed}")
        elif attempt.code != EXIT_CODES[DISKS[fault.disk]] or len(errors) != 1:
            return Verdict("lost", f"exit {attempt.code}: {attempt.printed[-300:]}")
        elif not any(name in errors[0] for name in (str(place / DISKS[fault.disk]), *failed)):
            return Verdict("lost", f"exit {attempt.code}, which names no file: {errors[0]}")
        again = self._attempt(place, None)
        told = "; ".join(errors or warnings)
        if again.code != 0:
            return Verdict("lost", f"{told}; then exit {again.code}: {again.printed[-300:]}")
        if not again.lines("resumed  "):
            return Verdict("lost", f"{told}; then anew from the beginning")
        changed = self._changed(place)
        # Rows with a warning and the weights of a finished epoch are not written later.
        tolerated = ["steps.csv"] if "steps.csv" in told else []
        tolerated += ["best ", "files"] if re.search(r"(best|last)\.pt", told) else []
        if changed and not all(part.startswith(tuple(tolerated)) for part in changed.split(", ")):
            return Verdict("lost", f"{told}; then other {changed}")
        return Verdict("stopped" if errors else "warned", told)

    def _changed(self, place: Path) -> str:
        """Name the parts of a finished run that differ from the undisturbed run."""
        try:
            changed = differing(self.outcome, outcome(place / "run"))
        except Exception as error:
            return f"({type(error).__name__}: {error})"
        data, had = _contents(place / "data"), _contents(self.original / "data")
        changed += [name for name in data if data[name] != self.data.get(name)]
        changed += [name for name in had if name not in data]
        notes = place / "run" / "notes.txt"
        if not notes.exists() or notes.read_text() != "mine\n":
            changed.append("notes.txt")
        return ", ".join(changed)

    def _place(self) -> Path:
        """Copy the initial folders of a run and return the path of the copy."""
        return Path(shutil.copytree(self.original, self.root / "run"))

    def _write_recipe(self, place: Path) -> Path:
        """Write the recipe: 2 epochs of 2 steps, with a checkpoint before and after each step."""
        data = {"dataset": "folder", "path": str(place / "data"), "batch_size": 8}
        sections = {
            "model": runs.TINY | {"embed_dim": 8, "depth": 1},
            "data": data | {"aug_repeats": 1, "num_workers": 0},
            "optim": {"lr_base": 1e-3, "lr_base_size": 8},
            "schedule": {"epochs": 2, "warmup_epochs": 1, "warmup_lr": 1e-4},
            "run": runs.CPU | {"log_interval": 1, "save_minutes": 0.0},
        }
        write_text(place / "recipe.yaml", json.dumps(sections))  # JSON is YAML
        return place / "recipe.yaml"

    def _attempt(self, place: Path, fault: DiskFault | None, die: int = -1) -> Attempt:
        log, calls = place / "log", place / "calls"
        for path in (log, calls):
            path.unlink(missing_ok=True)
        recipe = self._write_recipe(place)
        arguments = ["--config", str(recipe), "--run.output", str(place / "run")]
        process = CONTEXT.Process(target=_train, args=(arguments, place, fault, die))
        process.start()
        process.join(PATIENCE)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        printed = log.read_text(errors="replace") if log.exists() else ""
        return Attempt(code, printed, disk_faults.read_calls(calls) if calls.exists() else [])

    def _stop_in_second_epoch(self) -> None:
        """Put a run killed in its second epoch, and a file of the user, into the initial folders."""
        stopped = self._attempt(self.original, None, die=3)
        if stopped.code != -signal.SIGKILL:
            raise RuntimeError(f"the run to be continued failed:\n{stopped.printed}")
        for name in ("log", "calls"):
            (self.original / name).unlink()
        (self.original / "run" / "notes.txt").write_text("mine\n")


def site_of(call: Call) -> str:
    """Return the function and the path of a call, with class names and numbers replaced by *."""
    return f"{call.function} {_NAMES.sub('*', call.path)}"


def thin(sites: list[str], every: int) -> list[int]:
    """Return the indices of every n-th call of each site, and of at least one."""
    places = defaultdict(list)
    for place, site in enumerate(sites):
        places[site].append(place)
    return sorted(p for group in places.values() for p in group[min(every, len(group)) // 2 :: every])


def _train(arguments: list[str], place: Path, fault: DiskFault | None, die: int) -> None:
    """Run train_imagenet.py on failing disks, in this process."""
    time.sleep = lambda seconds: None  # code that waits for a disk to come back must not wait
    report.draw_curve = _write_a_picture
    if die >= 0:
        _die_at_step(die)
    disk_faults.arm([place / disk for disk in DISKS], fault, place / "calls")
    train(arguments, {}, place / "log")


def _write_a_picture(path: Path, state: object) -> None:
    """Replace the curve, which takes half of a run's time to draw; write the file in the same way."""
    picture = Image.new("RGB", (1080, 420))
    write_atomically(path, lambda file: picture.save(file, format="png"))


def _die_at_step(number: int) -> None:
    original: Callable = loop.train_step

    def train_step(training: object, step: object, config: object) -> object:
        if step.number == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(training, step, config)

    loop.train_step = train_step


def _contents(folder: Path) -> dict[str, bytes]:
    """Return a hash of each file."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).digest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def main() -> int:
    """Print losses and the number of runs per ending; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of calls alike every N-th only")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="runs, drawn among all")
    args = parser.parse_args()
    if disk_faults.COMPILER is None:
        parser.error("a C compiler named cc is needed")
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        preloaded = {"LD_PRELOAD": str(disk_faults.compile_library(root))}
        with mock.patch.dict(os.environ, preloaded), runs.fork_server():
            sweep = Sweep(root)
            faults = list(sweep.faults(args.every))
            if len(faults) > args.most:
                faults = random.Random(0).sample(faults, args.most)
            for fault in faults:
                verdict = sweep.inject(fault)
                ends[verdict.end] += 1
                if verdict.end in ("lost", "not reached"):
                    print(f"{verdict.end}: {fault}, {verdict.why}", flush=True)
    print(f"{ends.total()} runs: {', '.join(f'{n} {end}' for end, n in ends.most_common())}")
    return 1 if ends["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
