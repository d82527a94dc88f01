"""Time the programs by how OpenMP's threads wait, on an idle machine and beside busy processes.

    python -m benchmarks.programs [--policies spinning passive] [--busy 0 1] [--tasks train eval ...] \\
        [--rounds 3] [--output FILE.json]

A thread of OpenMP that has no work spins for a while before it sleeps. ``spinning`` is OpenMP's default, 300,000 turns.
Other policies are values of OMP_WAIT_POLICY, or numbers of turns (GOMP_SPINCOUNT). The policies take turns, and each
run is a new process. ``default``, ``train`` (the second epoch) and ``eval`` do not count the start, ``image-N`` is one
image of 224 px on N threads, and the others are whole commands. The table has the medians of the seconds.
"""

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.provenance import environment
from vil.training.files import write_text

ROOT = Path(__file__).parents[1]
CLASSES, IMAGES = 6, 120
RECIPE = (
    "train_imagenet.py --config configs/scratch.yaml --data.path {photos} --data.val-fraction 0.1"
)
COMMANDS = {
    "default": "train_imagenet.py --run.output {new} --schedule.epochs 2",
    "train": f"{RECIPE} --run.output {{new}} --schedule.epochs 2",
    "eval": "eval.py {run}/best.pt --data.val-split . --json {new}.json",
    "predict": "predict.py {run}/best.pt {photos} --output {new}.csv",
    "release": "release.py {run}/best.pt {new}",
    "make_shards": "make_shards.py {data} {new} --splits train",
    "downstream": "-m downstream.ade20k --model vil_tiny_pyramid --generated 8 --steps 4 --val-steps 4 --img-size 96 "
    "--batch-size 4 --precision 32-true --model-kwargs embed_dim=48 --output {new}",
    "image-1": "-m benchmarks.programs --image 1",
    "image-2": "-m benchmarks.programs --image 2",
    "image-4": "-m benchmarks.programs --image 4",
}


def write_photos(folder: Path) -> None:
    """Write JPEG files of smooth noise, a folder per class."""
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / str(label)).mkdir(parents=True)
        for i in range(IMAGES):
            noise = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            noise[..., label % 3] //= 2 + label // 3
            photo = Image.fromarray(noise).resize((320, 240), Image.Resampling.BICUBIC)
            photo.save(folder / str(label) / f"{i}.jpg")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy within the block."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # ends with this process
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def seconds_of_image(threads: int) -> float:
    """Return the median time of one image through vil_tiny."""
    import timm
    import torch

    import vil  # noqa: F401  registers the models

    torch.set_num_threads(threads)
    model = timm.create_model("vil_tiny").eval()
    image, times = torch.zeros(1, 3, 224, 224), []
    with torch.inference_mode():
        for _ in range(25):
            start = time.perf_counter()
            model(image)
            times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


def variables(policy: str) -> dict[str, str]:
    """Return the environment of a policy."""
    own = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    turns = {"spinning": "300000"}.get(policy, policy)
    name = "GOMP_SPINCOUNT" if turns.isdigit() else "OMP_WAIT_POLICY"
    return own | {name: turns}


def run(command: str, policy: str, **paths: Path) -> tuple[float, str]:
    """Run a command, and return its seconds and output."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command.format(**paths).split()],
        cwd=ROOT,
        env=variables(policy),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command}: exit {done.returncode}: {done.stderr[-1000:]}")
    return time.perf_counter() - start, done.stdout


def seconds(task: str, policy: str, folder: Path) -> float:
    """Run a task once, and return its seconds."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        new = Path(scratch, "new")
        whole, printed = run(
            COMMANDS[task],
            policy,
            data=folder,
            photos=folder / "train",
            run=folder / "run",
            new=new,
        )
        if task in ("default", "train"):
            *_, last = csv.DictReader((new / "log.csv").open())
            return float(last["seconds"])
        if task == "eval":
            result = json.loads(new.with_suffix(".json").read_text())
            return result["num_images"] / result["images_per_s"]
        return float(printed) if task.startswith("image-") else whole


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the medians as a Markdown table: policies and busy processes in columns, tasks in rows."""
    columns = list(dict.fromkeys((row["policy"], row["busy"]) for row in rows))
    lines = [f"| task | {' | '.join(f'{p}, {b} busy' for p, b in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for task in dict.fromkeys(row["task"] for row in rows):
        cells = []
        for policy, others in columns:
            chosen = {"task": task, "policy": policy, "busy": others}
            times = [row["seconds"] for row in rows if chosen.items() <= row.items()]
            cells.append(f"{statistics.median(times):.3g}")
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure as the command line says, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--policies", nargs="+", default=["spinning", "passive"])
    add("--busy", type=int, nargs="+", default=[0, 1], help="numbers of busy processes")
    add("--tasks", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    add("--rounds", type=int, default=3)
    add("--output", type=Path, help="the record, JSON")
    add("--show", type=Path, metavar="RECORD", help="print the table of a record instead")
    add("--image", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.image:
        print(seconds_of_image(args.image))
        return
    if args.show:
        print(table(json.loads(args.show.read_text())["rows"]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_photos(folder / "train")
        run(
            f"{RECIPE} --run.output {{run}} --schedule.epochs 1",
            "passive",
            photos=folder / "train",
            run=folder / "run",
        )
        for _, task, others in product(range(args.rounds), args.tasks, args.busy):
            with busy(others):
                for policy in args.policies:
                    took = seconds(task, policy, folder)
                    rows.append({"task": task, "policy": policy, "busy": others, "seconds": took})
                    print(rows[-1], file=sys.stderr, flush=True)
    if args.output:
        record = {"environment": environment() | {"cores": os.cpu_count()}, "rows": rows}
        write_text(args.output, json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
