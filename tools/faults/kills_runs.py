"""Tiny runs of train_imagenet.py that are killed and continued, and what must be equal at their end."""

import csv
import hashlib
import io
import itertools
import multiprocessing
import os
import random
import signal
import socket
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from tools.faults.kills_server import ACTIVITIES, ROOT, train
from vil.training.checkpoint import load_checkpoint
from vil.training.errors import OutputError
from vil.training.files import write_text
from vil.training.recipes import to_yaml
from vil.training.settings import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

CLASSES = ("ash", "birch", "cedar", "dogwood")
TIMES = ("images_per_s", "seconds")  # of an epoch; all else of its row must be equal
SAVE_MINUTES = (0.0, 0.005, 1e6)  # at every step, some times an epoch, after epochs only
MOST_KILLS = 6  # of a run
GRACE = 5.0  # seconds that the others have to end by themselves after one is killed
PATIENCE = 120.0  # seconds after which a process hangs
CONTEXT = multiprocessing.get_context("forkserver")


# ------------------------------------------------------------------------------------------- data


def make_images(root: Path) -> None:
    """Write 128 tiny images to train on, two of them broken, and 19 held out: folders and shards.

    19, so that two processes have unequal shares.
    """
    for split, count in {"train": 32, "val": 5}.items():
        for label, name in enumerate(CLASSES):
            folder = root / "folder" / split / name
            folder.mkdir(parents=True)
            for number in range(count - (split == "val" and label == 0)):
                noise = np.random.default_rng(1000 * label + number).integers(0, 136, (20, 24, 3))
                pixels = (40 * label + noise).astype("uint8")  # brighter from class to class
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
        for path in (root / "folder" / split).glob("[bc]*/31.jpg"):
            path.write_bytes(path.read_bytes()[:300])
        paths = sorted((root / "folder" / split).glob("*/*.jpg"))
        for shard in range(3):
            write_shard(root / "wds" / f"{split}-{shard}.tar", paths[shard::3])


def write_shard(path: Path, images: list[Path]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for image in images:
            label = str(CLASSES.index(image.parent.name)).encode()
            for suffix, content in (("jpg", image.read_bytes()), ("cls", label)):
                member = tarfile.TarInfo(f"{image.parent.name}{image.stem}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@dataclass(frozen=True)
class Case:
    """A way to run the training."""

    dataset: str
    workers: int
    processes: int

    @property
    def equals(self) -> tuple[str, int]:
        """Cases that have this in common must end alike."""
        return self.dataset, self.processes

    @property
    def slug(self) -> str:
        """Beginning of the names of its files."""
        return f"{self.dataset}-{self.workers}-{self.processes}"

    def __str__(self) -> str:
        return f"{self.dataset}, {self.workers} workers, {self.processes} processes"


CASES = [
    *itertools.starmap(Case, itertools.product(("folder", "wds"), (0, 2), (1, 2))),
    Case("folder", 0, 4),
]


def write_recipe(root: Path, case: Case, epochs: int = 3) -> Path:
    """Write the recipe of a case, with everything random switched on: 16 steps per epoch."""
    shards = {"train_split": "train-{0..2}.tar", "val_split": "val-{0..2}.tar"}
    config = TrainConfig(
        model=ModelConfig(
            name="vil_tiny",
            num_classes=4,
            img_size=16,
            patch_size=8,
            embed_dim=16,
            depth=2,
            drop_path_rate=0.2,
        ),
        data=DataConfig(
            dataset=case.dataset,
            path=str(root / case.dataset),
            **(shards if case.dataset == "wds" else {}),
            batch_size=8,
            validation_batch_size=3,
            num_workers=case.workers,
            max_bad_images=0.1,
        ),
        optim=OptimConfig(lr_base=0.2, model_ema_decay=0.9),
        schedule=ScheduleConfig(epochs=epochs, warmup_epochs=1, warmup_lr=1e-4),
        run=RunConfig(
            device="cpu",
            num_threads=1,
            # One process of a folder trains without, two do with; of shards the other way round.
            grad_accum_steps=1 + ((case.dataset == "folder") == (case.processes == 2)),
            log_interval=5,
        ),
    )
    path = root / f"{case.slug}-{epochs}.yaml"
    write_text(path, to_yaml(config))
    return path


# ---------------------------------------------------------------------------------------- outcome


def outcome(folder: Path) -> dict[str, str]:
    """Hash each part of what a finished run left that must not depend on interruptions."""
    last, best = (load_checkpoint(folder / name) for name in ("last.pt", "best.pt"))
    for row in last["run"]["history"]:
        for name in TIMES:
            del row[name]
    tables = {}
    for table in ("log.csv", "steps.csv"):
        with (folder / table).open() as file:
            rows = list(csv.DictReader(file))
        timed = (*TIMES, "data_wait")
        tables[table] = [{k: v for k, v in row.items() if k not in timed} for row in rows]
    told = folder / "skipped.txt"
    skipped = told.read_text().replace(str(folder.parent), "") if told.exists() else ""
    parts = {key: last[key] for key in last if key not in ("config", "asked", "versions")}
    parts |= {f"best {key}": best[key] for key in ("state_dict", "state_dict_ema", "epoch")}
    parts |= {**tables, "skipped.txt": skipped}
    parts["files"] = sorted(path.name for path in folder.iterdir())
    return {name: _digest(value) for name, value in parts.items()}


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(value):
        digest.update(leaf + b"\0")
    return digest.hexdigest()


def _leaves(value: Any) -> Iterator[bytes]:
    """Walk through dictionaries, lists and tensors; repr of a float is exact."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for item in value:
            yield from _leaves(item)
    else:
        yield repr(value).encode()


def differing(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Name the parts that differ."""
    return [name for name in expected | found if expected.get(name) != found.get(name)]


# ---------------------------------------------------------------------------------------- attempts


@contextmanager
def fork_server() -> Iterator[None]:
    """Have a process with all imports made, which children are forked from."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    added = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    CONTEXT.set_forkserver_preload(["__main__", "tools.faults.kills_runs"])
    try:
        warm = CONTEXT.Process(target=int)
        warm.start()
        warm.join()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@dataclass
class Moment:
    """When to kill."""

    seconds: float
    """After the start, or after the event."""
    event: str | None = None
    """The main process begins one of ACTIVITIES, or has "replaced" last.pt."""
    count: int = 0
    """Which time."""


def draw_moment(rng: random.Random, duration: float) -> Moment:
    """Draw when to kill.

    Args:
        rng: Random numbers.
        duration: Seconds of the run when it is left alone.
    """
    kind = rng.random()
    if kind < 0.5:
        return Moment(rng.uniform(0, duration))
    if kind < 0.65:
        return Moment(rng.uniform(0, 0.003), "replaced", rng.randint(1, 3))
    if kind < 0.8:
        return Moment(rng.uniform(0, 0.02), "saving", rng.randint(1, 4))
    return Moment(rng.uniform(0, 0.03), "evaluating", rng.randint(1, 3))


class Attempt:
    """The processes of a run, started once."""

    sessions: ClassVar[set[int]] = set()
    """Of all processes ever started; their loader processes belong to them."""

    def __init__(self, case: Case, recipe: Path, folder: Path, save_minutes: float) -> None:
        """Start them.

        Args:
            case: Says how many.
            recipe: The recipe.
            folder: The run's folder; their output goes to a file beside it.
            save_minutes: Minutes between checkpoints.
        """
        self.last, self.log = folder / "last.pt", folder.with_suffix(".log")
        self.activities = CONTEXT.RawArray("b", case.processes)
        arguments = ["--config", str(recipe), "--run.output", str(folder)]
        arguments += ["--run.save-minutes", str(save_minutes)]
        port = str(free_port())
        self.processes = []
        for rank in range(case.processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {k: str(v) for k, v in place.items()} if case.processes > 1 else {}
            rest = (arguments, environment, self.log, self.activities, rank)
            self.processes.append(CONTEXT.Process(target=train, args=rest))
        self.start = time.monotonic()
        for process in self.processes:
            process.start()
            self.sessions.add(process.pid)

    @property
    def running(self) -> list[Any]:
        """Processes that have not ended."""
        return [process for process in self.processes if process.exitcode is None]

    def wait(self, seconds: float) -> bool:
        """Wait until one has failed or all have ended, or for some seconds; tell whether it is so."""
        deadline = time.monotonic() + seconds
        while self.running:
            if any(process.exitcode for process in self.processes):
                return True
            if not wait([p.sentinel for p in self.running], max(deadline - time.monotonic(), 0)):
                return False
        return True

    def kill(self, moment: Moment, rank: int) -> str | None:
        """Kill one process at a moment.

        Returns:
            What it was doing, or None if the run ended before.
        """
        if moment.event is not None and not self._await(moment.event, moment.count):
            return None
        since = self.start if moment.event is None else time.monotonic()
        if self.wait(max(since + moment.seconds - time.monotonic(), 0)):
            return None
        victim = self.processes[rank]
        victim.kill()
        activity = ACTIVITIES[self.activities[rank]]
        victim.join()
        return activity if victim.exitcode == -signal.SIGKILL else None

    def settle(self) -> list[str]:
        """Wait for all to end once one has, as torchrun would, and kill the others.

        Returns:
            What those were doing.
        """
        deadline = time.monotonic() + GRACE
        while self.running and time.monotonic() < deadline:
            wait([process.sentinel for process in self.running], deadline - time.monotonic())
        left = []
        for rank, process in enumerate(self.processes):
            if process.exitcode is None:
                left.append(ACTIVITIES[self.activities[rank]])
                process.kill()
                process.join()
        return left

    def _await(self, event: str, count: int) -> bool:
        """Wait until something happens for the nth time; False if a process ends before."""
        before = self._state(event)
        while len(self.running) == len(self.processes):
            now = self._state(event)
            count -= bool(now) and now != before
            if count == 0:
                return True
            before = now
            if time.monotonic() - self.start > PATIENCE:
                return False
            time.sleep(0.0002)
        return False

    def _state(self, event: str) -> int:
        """Return what changes to another number, not 0, with each event."""
        if event == "replaced":
            return self.last.stat().st_ino if self.last.exists() else 0
        return int(self.activities[0] == ACTIVITIES.index(event))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -------------------------------------------------------------------------------------------- runs


@dataclass
class Tally:
    """What happened to the runs of a case."""

    case: str
    reference: dict[str, str]
    """Outcome of the run left alone."""
    seconds: float = 0.0
    """Of that run."""
    runs: int = 0
    kills: int = 0
    resumes: int = 0
    """Starts that found a checkpoint and steps left to do."""
    at: Counter = field(default_factory=Counter)
    """What the killed processes were doing."""
    without: int = 0
    """Kills before there was a checkpoint."""
    survivors: Counter = field(default_factory=Counter)
    """What processes were doing that did not end by themselves after another was killed."""
    problems: list[str] = field(default_factory=list)

    def count(self, activity: str, left: list[str], folder: Path) -> None:
        """Add a kill and look at what it left.

        Args:
            activity: What the process was doing.
            left: What others were doing that had to be killed, too.
            folder: The run's folder.
        """
        self.kills += 1
        self.at[activity] += 1
        self.survivors.update(left)
        self.without += not (folder / "last.pt").exists()
        self.problems += [f"{folder.name}: {fault}" for fault in faults(folder)]

    @property
    def verdict(self) -> str:
        """The last word of its line."""
        return "different" if self.problems else "equal"


def left_alone(root: Path, case: Case, epochs: int = 3) -> Tally:
    """Run a case without kills.

    Raises:
        RuntimeError: it failed.
    """
    folder = root / f"{case.slug}-alone-{epochs}"
    recipe = write_recipe(root, case, epochs)
    attempt = Attempt(case, recipe, folder, 1e6)
    ended = attempt.wait(PATIENCE)
    seconds = time.monotonic() - attempt.start
    attempt.settle()
    if not ended or any(process.exitcode for process in attempt.processes):
        raise RuntimeError(f"{case}: the run left alone failed:\n{tail(attempt.log)}")
    return Tally(str(case), outcome(folder), seconds)


def kill_run(root: Path, case: Case, tally: Tally, rng: random.Random, most: int) -> None:
    """Kill a run, continue it until it ends, and compare.

    Args:
        root: Holds the data; the run's folder is made there.
        case: How to run.
        tally: Added to.
        rng: Draws everything about the kills.
        most: Kills after which it is left alone.
    """
    folder = root / f"{case.slug}-{tally.runs}"
    recipe, log = write_recipe(root, case), folder.with_suffix(".log")
    save_minutes = SAVE_MINUTES[tally.runs % len(SAVE_MINUTES)]
    tally.runs += 1
    for _ in range(most):
        attempt = Attempt(case, recipe, folder, save_minutes)
        activity = attempt.kill(draw_moment(rng, tally.seconds), rng.randrange(case.processes))
        if activity is None:
            break
        tally.count(activity, attempt.settle(), folder)
    else:
        attempt = Attempt(case, recipe, folder, save_minutes)
    ended = attempt.wait(PATIENCE)
    attempt.settle()
    printed = log.read_text()
    tally.resumes += printed.count("resumed  after")
    # Of several, others fail when one is killed; so do loader processes whose parent is.
    if (case.processes, case.workers) == (1, 0) and "Traceback" in printed:
        tally.problems.append(f"{folder.name}: failed\n{tail(log)}")
    codes = [process.exitcode for process in attempt.processes]
    if any(codes):
        how = f"ended with {codes}" if ended else "hung"
        tally.problems.append(f"{folder.name}: {how}\n{tail(log)}")
        return
    found = differing(tally.reference, outcome(folder))
    if found:
        tally.problems.append(f"{folder.name}: other {', '.join(found)}")


def faults(folder: Path) -> list[str]:
    """Say what is wrong with a killed run's folder: a checkpoint that is there must load."""
    found = []
    for name in ("last.pt", "previous.pt", "best.pt"):
        try:
            if (folder / name).exists():
                load_checkpoint(folder / name)
        except OutputError as error:
            found.append(str(error))
    if (folder / "previous.pt").exists() and not (folder / "last.pt").exists():
        found.append("previous.pt without last.pt")
    return found


def kill_case(root: Path, case: Case, kills: int, seed: int) -> Tally:
    """Kill runs of a case until a number of kills has hit."""
    tally = left_alone(root, case)
    while tally.kills < kills and len(tally.problems) < 3:
        rng = random.Random(f"{seed} {case} {tally.runs}")
        kill_run(root, case, tally, rng, min(rng.randint(1, MOST_KILLS), kills - tally.kills))
    return tally


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-30:])


def orphans(seconds: float = 10.0) -> list[str]:
    """Wait for the loader processes of killed processes to notice, and name those that do not."""
    deadline = time.monotonic() + seconds
    while True:
        sessions = {pid: int(stat[3]) for pid, stat in processes()}
        left = [str(pid) for pid, session in sessions.items() if session in Attempt.sessions]
        if not left or time.monotonic() > deadline:
            return [f"loader processes are left: {', '.join(left)}"] if left else []
        time.sleep(0.2)


def processes() -> Iterator[tuple[int, list[str]]]:
    """List all processes with state, parent, group and session, and more."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()
