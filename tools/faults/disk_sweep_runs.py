"""Run train_imagenet.py on failing disks, and judge how each run ends."""

import errno
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from tools.faults.disk_faults import HALF, Call, DiskFault, arm, compile_library, read_calls
from tools.faults.disk_scenarios import DISKS, Scenario, make_data, write_recipe
from tools.faults.runs import CLASSES, CONTEXT, differing, fork_server, outcome
from tools.faults.server import train
from vil.training import report, shards
from vil.training import train as loop
from vil.training.files import write_atomically

PATIENCE = 60.0  # seconds after which a run counts as hung
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

_NAMES = re.compile("|".join((*CLASSES, "[0-9]+")))


class Verdict(NamedTuple):
    """How a run ended."""

    end: str
    """"not reached", "went on", "warned", "stopped" or "lost"."""
    why: str = ""


@dataclass
class Point:
    """A fault in a run, and how the run ended."""

    scenario: Scenario
    fault: DiskFault
    call: Call
    """First call that failed."""
    verdict: Verdict
    printed: str

    def __str__(self) -> str:
        place = f"{self.call.function} {self.call.path}"
        return (
            f"{self.verdict.end}: {self.scenario.name}, {self.fault}, {place}: {self.verdict.why}"
        )


@dataclass
class Attempt:
    """Exit code, output and calls of a run."""

    code: int | None
    printed: str
    calls: list[Call]

    def lines(self, beginning: str) -> list[str]:
        """Return the remainder of each line that starts with ``beginning``, with its list items."""
        return re.findall(rf"^{beginning}(.*(?:\n  - .*)*)", self.printed, re.MULTILINE)


@dataclass
class Sweep:
    """Runs of one scenario."""

    root: Path
    scenario: Scenario
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers for the runs, which several threads may start."""
    calls: list[Call] = field(init=False)
    """Calls of the undisturbed run."""
    outcome: dict[str, str] = field(init=False)
    resumed: list[str] = field(init=False)
    """Where that run resumed."""
    data: dict[str, bytes] = field(init=False)
    """Hash of each data file after that run."""

    def __post_init__(self) -> None:
        """Make the data, and run without faults.

        Raises:
            RuntimeError: If a run without faults fails.
        """
        self.root.mkdir()
        self.original = self.root / "original"
        make_data(self.original / "data", self.scenario.dataset)
        (self.original / "data" / "notes.txt").write_text("mine\n")
        if self.scenario.resumes:
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

    def inject(self, fault: DiskFault) -> Point:
        """Run with a fault, then without it if the user would have to repeat the command."""
        place = self._place()
        try:
            attempt = self._attempt(place, fault)
            failed = [call for call in attempt.calls if call.failed]
            verdict = self._judge(place, fault, attempt) if failed else Verdict("not reached")
            call = failed[0] if failed else Call(fault.disk, fault.kind, "", False, "")
            return Point(
                self.scenario,
                fault,
                call._replace(path=_nameless(call.path, place)),
                verdict._replace(why=_nameless(verdict.why, place)),
                attempt.printed,
            )
        finally:
            shutil.rmtree(place)

    def _judge(self, place: Path, fault: DiskFault, attempt: Attempt) -> Verdict:
        """Judge the end of a run, after resuming it without the fault if it stopped or warned."""
        errors, warnings = attempt.lines("error: "), attempt.lines("warning: ")
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
        elif not any(name in errors[0] for name in _names(attempt, place / DISKS[fault.disk])):
            return Verdict("lost", f"exit {attempt.code}, which names no file: {errors[0]}")
        again = self._attempt(place, None)
        told = "; ".join(errors or warnings)
        if again.code != 0:
            return Verdict("lost", f"{told}; then exit {again.code}: {again.printed[-300:]}")
        if self.scenario.resumes and not again.lines("resumed  "):
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
        if self.scenario.resumes and (not notes.exists() or notes.read_text() != "mine\n"):
            changed.append("notes.txt")
        return ", ".join(changed)

    def _place(self) -> Path:
        """Copy the initial folders of a run and return the path of the copy."""
        return Path(shutil.copytree(self.original, self.root / str(next(self.numbers))))

    def _attempt(self, place: Path, fault: DiskFault | None, die: int = -1) -> Attempt:
        log, calls = place / "log", place / "calls"
        for path in (log, calls):
            path.unlink(missing_ok=True)
        recipe = write_recipe(place, self.scenario)
        arguments = ["--config", str(recipe), "--run.output", str(place / "run")]
        process = CONTEXT.Process(target=_train, args=(arguments, place, fault, die))
        process.start()
        # An exit code can be read once; a thread that starts another process would read this one.
        multiprocessing.process._children.discard(process)
        process.join(PATIENCE)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        printed = log.read_text(errors="replace") if log.exists() else ""
        return Attempt(code, printed, read_calls(calls) if calls.exists() else [])

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
    return sorted(
        p for group in places.values() for p in group[min(every, len(group)) // 2 :: every]
    )


@contextmanager
def faulty_server(folder: Path) -> Iterator[None]:
    """Provide a fork server with all imports done and the library preloaded."""
    os.environ["LD_PRELOAD"] = str(compile_library(folder))
    try:
        with fork_server():
            yield
    finally:
        del os.environ["LD_PRELOAD"]


def _train(arguments: list[str], place: Path, fault: DiskFault | None, die: int) -> None:
    """Run train_imagenet.py on failing disks, in this process."""
    _make_pauses_short()
    # One thread opens the shards, so that the order of the calls is the same in every run.
    shards.ThreadPoolExecutor = lambda _: ThreadPoolExecutor(1)
    report.draw_curve = _write_a_picture
    if die >= 0:
        _die_at_step(die)
    arm([place / disk for disk in DISKS], fault, place / "calls")
    train(arguments, {}, place / "log", CONTEXT.RawArray("b", 8), 0)


def _make_pauses_short() -> None:
    """Make code that waits for a disk to come back wait for no time."""
    time.sleep = lambda seconds: None


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


def _names(attempt: Attempt, disk: Path) -> list[str]:
    """Return the names that an error may give for its place: the disk's folder or a file."""
    return [str(disk), *(Path(call.path).name for call in attempt.calls if call.failed)]


def _contents(folder: Path) -> dict[str, bytes]:
    """Return a hash of each file, leaving out the times and checksums in the indexes of shards."""
    times = re.compile(rb'"(crc32|[mc]time_ns)":"?[0-9a-f]+"?,?')
    return {
        str(path.relative_to(folder)): hashlib.blake2b(times.sub(b"", path.read_bytes())).digest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _nameless(text: str, place: Path) -> str:
    """Replace details that differ from run to run, so that equal messages can be counted."""
    text = " ".join(text.replace(str(place), "").split())
    text = re.sub(r"\(\d+ MiB free\)", "(1234 MiB free)", text)
    text = re.sub(r"process \d+ on \S+", "process 1234 on host", text)
    return re.sub(r"\.(\d+)\.tmp", ".1234.tmp", text)
