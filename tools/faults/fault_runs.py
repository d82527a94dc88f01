"""Tiny runs of train_imagenet.py into which faults are injected, and how to judge their ends."""

import errno
import multiprocessing
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from tools.faults.kills_runs import CLASSES, CONTEXT, differing, free_port, outcome, processes
from tools.faults.kills_server import train
from vil import weights
from vil.training import files
from vil.training.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from vil.training.data import batches, shared_memory
from vil.training.data.shard_writer import MakeOptions, make_shards
from vil.training.files import write_text
from vil.training.recipes import to_yaml
from vil.training.run import engine, loop, tracking

PATIENCE = 120.0  # seconds after which a run hangs
_ORPHANS = 5.0  # seconds that loader processes may outlive a run
IMAGES = {"train": 16, "val": 3}  # of a class
STEPS = 8  # of an epoch
EPOCHS = 3
# Without repeats an epoch draws every image.
TOLERANT = ("--data.max-bad-images", "0.2", "--data.aug-repeats", "1")


@dataclass(frozen=True)
class Injury:
    """A fault injected into the training process itself."""

    kind: str
    """A name in _INJURIES."""
    step: int = 0
    """When."""
    until: int = 10**9
    """How long, where it lasts."""
    number: int = 0
    """Which signal."""


@dataclass(frozen=True)
class Result:
    """The end of a run."""

    folder: Path
    code: int
    printed: str
    codes: tuple[int, ...] = ()
    """Of all processes."""

    @property
    def error(self) -> str:
        """What was wrong in one line, also if it is several things."""
        told = self.printed.rpartition("error: ")[2] if "error: " in self.printed else ""
        first, *more = told.splitlines() or [""]
        more = [line.removeprefix("  - ") for line in more if line.startswith("  - ")]
        return f"{first} {'; '.join(more)}".strip()

    @property
    def has_trained(self) -> bool:
        """Whether it got so far as to write a checkpoint."""
        return (self.folder / "last.pt").exists()


@dataclass(frozen=True)
class Verdict:
    """What became of a fault."""

    happened: str
    lost: str
    """"nothing" and why, or what."""

    @property
    def nothing_lost(self) -> bool:
        """Whether the run was as good as without the fault, or refused in time."""
        return self.lost.startswith("nothing")


@dataclass
class Laboratory:
    """A folder with images, and runs on them."""

    root: Path
    count: int = 0
    references: dict[tuple, dict[str, str]] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        """Healthy images in folders."""
        root = self.root / "healthy" / "folder"
        for split, images in IMAGES.items():
            for label, name in enumerate(CLASSES):
                (root / split / name).mkdir(parents=True)
                for number in range(images):
                    noise = np.random.default_rng(1000 * label + number).integers(
                        0, 136, (20, 24, 3)
                    )
                    pixels = (40 * label + noise).astype("uint8")
                    Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
        return root

    @cached_property
    def wds(self) -> Path:
        """The same images in shards made by make_shards.py."""
        root = self.root / "healthy" / "wds"
        options = MakeOptions(
            images=str(self.folder), shards=str(root), shard_images=16, num_workers=1
        )
        make_shards(options, Console(quiet=True))
        return root

    def copy(self, dataset: str) -> Path:
        """Return a copy of the images, to be damaged."""
        self.count += 1
        path = self.root / f"data-{self.count}"
        shutil.copytree(getattr(self, dataset), path)
        return path

    def run(
        self,
        data: Path | None = None,
        *arguments: str,
        dataset: str = "folder",
        injury: Injury | None = None,
        again: Result | None = None,
        processes: int = 1,
        copies: tuple[Path, ...] = (),
    ) -> Result:
        """Train.

        Args:
            data: The images; healthy ones if None.
            *arguments: Of train_imagenet.py.
            dataset: "folder" or "wds".
            injury: Fault in the training process, in the last one if there are several.
            again: Run again in the folder of this one.
            processes: How many train together.
            copies: Images of each process, where all see theirs under the same path.

        Raises:
            RuntimeError: a loader process lives on.
        """
        self.count += 1
        folder = self.root / f"run-{self.count}" if again is None else again.folder
        processes = len(copies) or processes
        data = Path() if copies else data or getattr(self, dataset)
        recipe = self._recipe(data, dataset)
        command = ["--config", str(recipe), "--run.output", str(folder), *arguments]
        log = self.root / f"log-{self.count}"
        running = [
            CONTEXT.Process(
                target=_train,
                args=(
                    command,
                    _place(rank, processes, self.count),
                    log,
                    injury if rank == processes - 1 else None,
                    copies[rank] if copies else Path(),
                ),
            )
            for rank in range(processes)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join(PATIENCE)
            if process.exitcode is None:
                process.kill()
                process.join()
        _await_orphans({process.pid for process in running})
        codes = tuple(process.exitcode for process in running)
        return Result(folder, codes[0], log.read_text(errors="replace"), codes)

    def same(self, result: Result, how: str, *arguments: str, dataset: str = "folder") -> Verdict:
        """Compare with a run left alone: it must have ended well, and with the same bits."""
        if result.code != 0:
            return Verdict(f"exit {result.code}: {result.printed[-300:]}", "the run")
        key = (dataset, arguments)
        if key not in self.references:
            self.references[key] = outcome(self.run(None, *arguments, dataset=dataset).folder)
        changed = differing(self.references[key], outcome(result.folder))
        if changed:
            return Verdict(how, f"equality: other {', '.join(changed)}")
        return Verdict(how, "nothing: ends with the same bits as a run left alone")

    def _recipe(self, data: Path, dataset: str) -> Path:
        splits = {"train_split": "train", "val_split": "validation"}
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
            data=DataConfig(dataset=dataset, path=str(data), batch_size=8, num_workers=0, **splits),
            optim=OptimConfig(lr_base=1e-3, lr_base_size=8, model_ema_decay=0.9),
            schedule=ScheduleConfig(epochs=EPOCHS, warmup_epochs=1, warmup_lr=1e-4),
            run=RunConfig(device="cpu", num_threads=1, log_interval=3, save_minutes=0.0),
        )
        path = self.root / f"recipe-{self.count}.yaml"
        write_text(path, to_yaml(config))
        return path


def refused(result: Result, code: int, message: str) -> Verdict:
    """Judge a run that must end before its first step, with a line that names the fault."""
    if result.code != code or not re.search(message, result.error):
        return Verdict(f"exit {result.code}: {result.printed[-300:]}", "no word of the fault")
    if result.has_trained:
        return Verdict(result.error, "time: it had begun to train")
    return Verdict(f"exit {code}: {result.error}", "nothing: refused before the first step")


def skipped(result: Result, images: int, *names: str) -> Verdict:
    """Judge a run that must have trained to its end without some images, and told which."""
    if result.code != 0:
        return Verdict(f"exit {result.code}: {result.printed[-300:]}", "the run")
    if f"skipped  {images} images, 0 steps" not in result.printed:
        return Verdict(result.printed[-300:], "the count of what was skipped")
    told = (result.folder / "skipped.txt").read_text()
    silent = [name for name in names if name not in told]
    if silent:
        return Verdict(told, f"the names {silent}")
    return Verdict(
        f"exit 0, {images} images skipped",
        "nothing: named with their reasons in skipped.txt, replaced by others, counted in log.csv",
    )


def _place(rank: int, processes: int, number: int) -> dict[str, str]:
    """Return what a launcher would set."""
    if processes == 1:
        return {}
    if rank == 0:
        _PORTS[number] = free_port()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORTS[number]}
    return {name: str(value) for name, value in place.items()}


_PORTS: dict[int, int] = {}


def _await_orphans(sessions: set[int]) -> None:
    """Wait until nothing is left of some sessions but what has died.

    Raises:
        RuntimeError: something is, for long.
    """
    deadline = time.monotonic() + _ORPHANS
    while True:
        left = [
            pid
            for pid, (state, _, _, session, *_) in processes()
            if int(session) in sessions and state != "Z"
        ]
        if not left:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} outlive the run")
        time.sleep(0.02)


def _train(
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    injury: Injury | None,
    place: Path,
) -> None:
    """Be train_imagenet.py with a fault, in a folder."""
    os.chdir(place)
    if injury is not None:
        _INJURIES[injury.kind](injury)
    train(arguments, environment, log, CONTEXT.RawArray("b", 8), int(environment.get("RANK", 0)))


def _at_step(act: Callable[[], None]) -> Callable[[Injury], None]:
    """Return an injury that does something when the run reaches a step."""

    def injure(injury: Injury) -> None:
        original = loop.train_step

        @wraps(original)
        def train_step(training: Any, step: Any, config: Any) -> Any:
            if step.number == injury.step:
                act(injury)
            return original(training, step, config)

        loop.train_step = train_step

    return injure


def _signal_self(injury: Injury) -> None:
    os.kill(os.getpid(), injury.number)


def _signal_all(injury: Injury) -> None:
    for child in multiprocessing.active_children():
        os.kill(child.pid, injury.number)
    os.kill(os.getpid(), injury.number)


def _kill_loader_process(injury: Injury) -> None:
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def _take_data_away(injury: Injury) -> None:
    """Rename the data's folder after a step, and back a second later: a step reads sooner."""
    original = loop.train_step

    def train_step(training: Any, step: Any, config: Any) -> Any:
        result = original(training, step, config)
        if step.number == injury.step:
            folder = Path(config.data.path)
            away = folder.rename(folder.with_name(f"{folder.name}-away"))
            threading.Timer(1.0, away.rename, [folder]).start()
        return result

    loop.train_step = train_step


def _hang_loaders(injury: Injury) -> None:
    """Stop the loader processes for good, and send a signal that does not come from one of them."""
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (os.getpid(), injury.number)).start()


def _lose_images(injury: Injury) -> None:
    """Make all images unreadable that this process itself reads from now on."""

    def decode(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    batches.decode = decode


def _lose_validation_images(injury: Injury) -> None:
    """The same, of those to validate on only."""
    original = batches.ValData._load

    def load(*arguments: Any) -> Any:
        _lose_images(injury)
        return original(*arguments)

    batches.ValData._load = load


def _exhaust_memory(injury: Injury) -> None:
    """Let the step have too little memory."""

    def accumulate(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine._accumulate = accumulate


def _hang_tracker(injury: Injury) -> None:
    """Let TensorBoard hang once a run has done some steps, and send a signal if there is one."""
    original = tracking.TensorBoard.log

    def log(self: tracking.TensorBoard, rows: list[tracking.Shown]) -> None:
        if rows[-1][0] > injury.step:
            if injury.number:
                threading.Timer(0.5, os.kill, (os.getpid(), injury.number)).start()
            threading.Event().wait()
        original(self, rows)

    tracking.TensorBoard.log = log
    tracking._LIMIT, tracking._LIMIT_AT_SIGNAL = (1e6 if injury.number else 1.0), 1.0


def _fill_output(injury: Injury) -> None:
    """Let standard output be a file on a full disk."""
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), 1)


def _shrink_shared_memory(injury: Injury) -> None:
    """Have as much of it as fits into a few pages."""
    original = shared_memory.shutil.disk_usage
    shared_memory.shutil = SimpleNamespace(
        disk_usage=lambda path: original(path)._replace(free=injury.number)
    )


def _poison(injury: Injury) -> None:
    """Make the loss NaN from one step until another."""
    original = loop.train_step

    def train_step(training: Any, step: Any, config: Any) -> Any:
        if injury.step <= step.number < injury.until:
            loss = training.criterion
            training = replace(training, criterion=lambda *given: loss(*given) * float("nan"))
        return original(training, step, config)

    loop.train_step = train_step


def _fill_disk(injury: Injury) -> None:
    """Let the system refuse long files during some of the saves."""
    original, saves = loop.save_checkpoint, iter(range(10**9))

    def save_checkpoint(*arguments: Any) -> None:
        full = injury.step <= next(saves) < injury.until
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            original(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    loop.save_checkpoint = save_checkpoint


def _kill_while_saving(injury: Injury) -> None:
    """Die when the nth file is about to be synced to disk."""
    original, calls = os.fsync, iter(range(10**9))

    def fsync(descriptor: Any) -> None:
        if next(calls) == injury.step:
            os.kill(os.getpid(), signal.SIGKILL)
        original(descriptor)

    os.fsync = fsync


def _fail_to_read(injury: Injury) -> None:
    """Let the disk fail after some reads of checkpoints."""
    original, reads = weights._Reader._remembering, iter(range(10**9))

    def remembering(self: weights._Reader, read: Callable, *arguments: Any) -> Any:
        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return original(self, fail if next(reads) >= injury.step else read, *arguments)

    weights._Reader._remembering = remembering


def _have_no_locks(injury: Injury) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    files.fcntl.lockf = refuse


_INJURIES = {
    "signal": _at_step(_signal_self),
    "signal to all": _at_step(_signal_all),
    "loader process": _at_step(_kill_loader_process),
    "away": _take_data_away,
    "hanging loaders": _at_step(_hang_loaders),
    "images": _at_step(_lose_images),
    "validation images": _at_step(_lose_validation_images),
    "memory": _at_step(_exhaust_memory),
    "tracker": _hang_tracker,
    "output": _at_step(_fill_output),
    "shared memory": _shrink_shared_memory,
    "poison": _poison,
    "disk": _fill_disk,
    "saving": _kill_while_saving,
    "reading": _fail_to_read,
    "no locks": _have_no_locks,
}


def halve(path: Path) -> str:
    """Cut a file in half and return its last two names."""
    os.truncate(path, path.stat().st_size // 2)
    return f"{path.parent.name}/{path.name}"


def equal_logs(runs: list[Result], how: str) -> Verdict:
    """Compare what two runs ended with."""
    if any(run.code for run in runs):
        return Verdict(runs[-1].printed[-300:], "the run")
    changed = differing(*(outcome(run.folder) for run in runs))
    if changed:
        return Verdict(how, f"equality: other {', '.join(changed)}")
    return Verdict(how, "nothing: ends with the same bits")
