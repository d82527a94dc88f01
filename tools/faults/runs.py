"""Images, recipes and a fork server for tiny runs of train_imagenet.py, and hashes of their outcomes."""

import csv
import hashlib
import io
import itertools
import multiprocessing
import os
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tools.faults.server import ROOT
from vil.training.checkpoint import load_checkpoint
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
TIMES = ("images_per_s", "seconds")  # of an epoch; all other columns of its row must be equal
PATIENCE = 120.0  # seconds after which a process counts as hung
CONTEXT = multiprocessing.get_context("forkserver")


def make_images(root: Path) -> None:
    """Write 128 training images, two of them broken, and 19 held-out images, in folders and shards.

    Two processes get unequal shares of 19 images.
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
    """A configuration of the training."""

    dataset: str
    workers: int
    processes: int

    @property
    def equals(self) -> tuple[str, int]:
        """Key of the cases that must have the same outcome."""
        return self.dataset, self.processes

    @property
    def slug(self) -> str:
        """Prefix of its file names."""
        return f"{self.dataset}-{self.workers}-{self.processes}"

    def __str__(self) -> str:
        return f"{self.dataset}, {self.workers} workers, {self.processes} processes"


CASES = [
    *itertools.starmap(Case, itertools.product(("folder", "wds"), (0, 2), (1, 2))),
    Case("folder", 0, 4),
]


def write_recipe(root: Path, case: Case, epochs: int = 3) -> Path:
    """Write the recipe of a case: 16 steps per epoch, with everything random switched on."""
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
            # Folders accumulate gradients with two processes only, shards with one process only.
            grad_accum_steps=1 + ((case.dataset == "folder") == (case.processes == 2)),
            log_interval=5,
        ),
    )
    path = root / f"{case.slug}-{epochs}.yaml"
    write_text(path, to_yaml(config))
    return path


def outcome(folder: Path) -> dict[str, str]:
    """Hash each part of a finished run that must not depend on interruptions."""
    last = load_checkpoint(folder / "last.pt")
    best = load_checkpoint(folder / "best.pt") if (folder / "best.pt").exists() else {}
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
    parts |= {f"best {key}": best.get(key) for key in ("state_dict", "state_dict_ema", "epoch")}
    parts |= {**tables, "skipped.txt": skipped}
    parts["files"] = sorted(path.name for path in folder.iterdir())
    return {name: _digest(value) for name, value in parts.items()}


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(value):
        digest.update(leaf + b"\0")
    return digest.hexdigest()


def _leaves(value: Any) -> Iterator[bytes]:
    """Yield the bytes of nested dictionaries, lists and tensors; the repr of a float is exact."""
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


@contextmanager
def fork_server() -> Iterator[None]:
    """Provide a fork server with all imports done."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    added = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    CONTEXT.set_forkserver_preload(["__main__", "tools.faults.runs"])
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-30:])


def processes() -> Iterator[tuple[int, list[str]]]:
    """Yield the ID of each process with its state, parent, group, session and further fields."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()
