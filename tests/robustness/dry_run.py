"""Go through everything that configs/vil_tiny.yaml needs, on generated images of 1,000 classes.

    python -m tests.robustness.dry_run [--batch-size 128] [--epochs 2] [ARGUMENTS of train_imagenet.py]

Writes JPEGs of ImageNet's size into a folder, packs them into shards, trains from the shards, stops by
SIGTERM in the middle of an epoch, continues, evaluates the last checkpoint, and releases it for timm.
Every step must succeed, and eval.py must find the accuracy that training logged. By default the batch
is smaller than the recipe's and there are few images, for a CPU; what remains is the recipe's.
"""

import argparse
import csv
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
CLASSES = 1000


def make_images(root: Path, per_class: int, seed: int) -> None:
    """Write 500 x 375 JPEGs, smooth random fields whose colours are their class's.

    Args:
        root: Receives train and val.
        per_class: Training images of a class; half of them, but at least one, are held out.
        seed: Of all random numbers.
    """
    rng = np.random.default_rng(seed)
    for label in range(CLASSES):
        for split, count in (("train", per_class), ("val", max(per_class // 2, 1))):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(count):
                tint = np.array([label % 10, label // 10 % 10, label // 100]) * 20
                field = rng.integers(0, 76, (12, 16, 3)) + tint
                image = Image.fromarray(field.astype("uint8")).resize((500, 375), Image.BICUBIC)
                image.save(folder / f"{number}.JPEG", quality=90)


def run(*command: str, code: int = 0) -> str:
    """Run a script of this project, show what it prints, and return it.

    Raises:
        SystemExit: it did not end with the expected code.
    """
    print("$ python", *command, flush=True)
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        print("   ", line, end="", flush=True)
    if process.wait() != code:
        sys.exit(f"ended with {process.returncode} instead of {code}")
    return "".join(lines)


def stop_in_epoch(command: list[str], folder: Path, epoch: int) -> None:
    """Train until a step of an epoch is logged, then stop by SIGTERM."""
    print("$ python", *command, "# until SIGTERM", flush=True)
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        print("   ", line, end="", flush=True)
        if line.startswith(f"epoch {epoch}/") and " step " in line:
            process.send_signal(signal.SIGTERM)
    if process.wait() != 143 or not (folder / "last.pt").exists():
        sys.exit(f"ended with {process.returncode} instead of 143")


def main() -> None:
    """Go through it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/vil_tiny.yaml")
    parser.add_argument("--per-class", type=int, default=1, help="training images of a class")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args, more = parser.parse_known_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        images, shards, folder = root / "images", root / "shards", root / "run"
        make_images(images, args.per_class, args.seed)
        run("make_shards.py", str(images), str(shards), "--shard-images", "100")
        run("make_shards.py", "verify", str(shards))
        command = ["train_imagenet.py", "--config", args.config, "--run.output", str(folder)]
        command += ["--data.dataset", "wds", "--data.path", str(shards)]
        command += ["--data.batch-size", str(args.batch_size), "--data.num-workers", "1"]
        command += ["--schedule.epochs", str(args.epochs), "--schedule.warmup-epochs", "1"]
        command += ["--run.log-interval", "1", *more]
        stop_in_epoch(command, folder, args.epochs)
        if "resumed  after step" not in run(*command):
            sys.exit("the run began anew")
        run("eval.py", str(folder / "last.pt"))
        run("release.py", str(folder / "last.pt"), str(root / "released"), "--ema")
        check(folder, args.epochs)
    print(f"train, stop, continue, eval, release: all well in {time.monotonic() - start:.0f} s")


def check(folder: Path, epochs: int) -> None:
    """Compare the evaluation with the log."""
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    result = json.loads((folder / "last-eval.json").read_text())
    top1, loss = float(rows[-1]["top1"]), float(rows[-1]["val_loss"])
    if result["top1"] != top1 or not math.isclose(result["loss"], loss, rel_tol=1e-5):
        sys.exit(f"eval.py found {result['top1']} and {result['loss']}, the log has {top1}, {loss}")
    if len(rows) != epochs or result["num_images"] < CLASSES:
        sys.exit(f"{len(rows)} epochs, {result['num_images']} images")


if __name__ == "__main__":
    main()
