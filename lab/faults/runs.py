"""Images, recipes and a fork server for tiny runs of train_imagenet.py, and hashes of their outcomes."""

import csv
import io
import itertools
import json
import multiprocessing
import os
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from lab.faults.server import ROOT
from vil.training.checkpoint import load_checkpoint
from vil.training.files import write_text

CLASSES = ("ash", "birch", "cedar", "dogwood")
TIMES = ("images_per_s", "seconds")  # of an epoch; all other columns of its row must be equal
PATIENCE = 120.0  # seconds after which a process counts as hung
CONTEXT = multiprocessing.get_context("forkserver")
TINY = {"name": "vil_tiny", "num_classes": 4, "img_size": 16, "patch_size": 8}
CPU = {"device": "cpu", "num_threads": 1, "log_interval": 5}


def make_images(root: Path, train: int = 32, val: int = 5, shards: int = 3) -> None:
    """Write images of four classes in root/folder, and the same images in shards in root/wds.

    With 5 held-out images of a class, there is one less of the first, so that two processes get unequal shares.

    Args:
        root: Folder to write to.
        train: Training images of each class; with 32, two of all are broken.
        val: Held-out images of each class.
        shards: Shards of each split.
    """
    for split, count in {"train": train, "val": val}.items():
        for label, name in enumerate(CLASSES):
            folder = root / "folder" / split / name
            folder.mkdir(parents=True)
            for number in range(count - ((split, val, label) == ("val", 5, 0))):
                noise = np.random.default_rng(1000 * label + number).integers(0, 136, (20, 24, 3))
                pixels = (40 * label + noise).astype("uint8")  # brighter from class to class
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
        for path in (root / "folder" / split).glob("[bc]*/31.jpg"):
            path.write_bytes(path.read_bytes()[:300])
        paths = sorted((root / "folder" / split).glob("*/*.jpg"))
        for shard in range(shards):
            write_shard(root / "wds" / f"{split}-{shard}.tar", paths[shard::shards])


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
    def slug(self) -> str:
        """Prefix of its file names: the data set and the numbers of workers and processes."""
        return f"{self.dataset}-{self.workers}-{self.processes}"


CASES = [
    *itertools.starmap(Case, itertools.product(("folder", "wds"), (0, 2), (1, 2))),
    Case("folder", 0, 4),
]


def write_recipe(root: Path, case: Case, epochs: int = 3) -> Path:
    """Write the recipe of a case: 16 steps per epoch, with everything random switched on."""
    shards = {"train_split": "train-{0..2}.tar", "val_split": "val-{0..2}.tar"}
    data = {"dataset": case.dataset, "path": str(root / case.dataset), "num_workers": case.workers}
    data |= {"batch_size": 8, "validation_batch_size": 3, "max_bad_images": 0.1}
    sections = {
        "model": TINY | {"embed_dim": 16, "depth": 2, "drop_path_rate": 0.2},
        "data": data | (shards if case.dataset == "wds" else {}),
        "optim": {"lr_base": 0.2, "model_ema_decay": 0.9},
        "schedule": {"epochs": epochs, "warmup_epochs": 1, "warmup_lr": 1e-4},
        # Folders accumulate gradients with two processes only, shards with one process only.
        "run": CPU | {"grad_accum_steps": 1 + ((case.dataset == "folder") == (case.processes == 2))},
    }
    path = root / f"{case.slug}-{epochs}.yaml"
    write_text(path, json.dumps(sections))  # JSON is YAML
    return path


def outcome(folder: Path) -> dict[str, Any]:
    """Return each part of a finished run that must not depend on interruptions."""
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
    files = sorted(path.name for path in folder.iterdir())
    return {**parts, **tables, "skipped.txt": skipped, "files": files}


def differing(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Name the parts that differ in any bit."""
    return [name for name in expected | found if _bits(expected.get(name)) != _bits(found.get(name))]


def _bits(value: Any) -> str:
    """Return nested dictionaries, lists and tensors as text, with the bytes of tensors."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.contiguous().numpy().tobytes().hex()}"
    if isinstance(value, dict):
        return f"{ {key: _bits(item) for key, item in value.items()} }"
    if isinstance(value, (list, tuple)):
        return f"{[_bits(item) for item in value]}"
    return repr(value)


@contextmanager
def fork_server() -> Iterator[None]:
    """Provide a fork server with all imports done."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    CONTEXT.set_forkserver_preload(["__main__", "lab.faults.runs"])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        warm = CONTEXT.Process(target=int)
        warm.start()
        warm.join()
        yield


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
