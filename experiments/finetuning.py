"""Fine-tune on clip art with either schedule of ``train_imagenet.py``, and with timm's ``train.py``.

    apt-get install openclipart-png
    python -m experiments.fractals output/fractals_32px --classes 128 --images 100 --size 32
    python train_imagenet.py --config configs/fractals_small.yaml
    python -m experiments.finetuning TIMM/train.py

The images come from Debian's package openclipart-png, on white. Each folder of at least 44 images is a class, except
"unsorted"; larger folders give 120 images. A hash of the file name puts a fifth of the images into validation. All
runs start from the same weights and take the same number of steps, with the settings of ``configs/finetune.yaml``.
"""

import argparse
import csv
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from PIL import Image

from experiments.records import Record, Row, product, run_all

ROOT = Path(__file__).resolve().parents[1]
CLIP_ART = Path("/usr/share/openclipart/png")
FEWEST, MOST = 44, 120  # images of a class
PIXELS = 48  # of the shorter side
EPOCHS, BATCH = 20, 64
TRAINERS = ["by epoch", "by step", "timm", "timm, by step"]
TIMM = (
    *("--model", "vil_tiny", "--img-size", "32", "--opt", "adamw", "--weight-decay", "0.05"),
    *("--model-kwargs", "embed_dim=96", "depth=4", "patch_size=8"),
    *("--lr", "1e-3", "--warmup-lr", "1e-6", "--min-lr", "1e-6", "--layer-decay", "0.85"),
    *("--epochs", f"{EPOCHS}", "--warmup-epochs", f"{EPOCHS // 10}", "--batch-size", f"{BATCH}"),
    *("--drop-path", "0.1", "--aa", "rand-m5-mstd0.5-inc1", "--scale", "0.35", "1.0"),
    *("--train-interpolation", "bicubic", "--interpolation", "bicubic", "--crop-pct", "1.0"),
    *("--val-split", "val", "--workers", "0", "--no-prefetcher", "--device", "cpu"),
)


def write_images(folder: Path) -> None:
    """Write train/<class>/*.png and val/<class>/*.png."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(CLIP_ART.rglob("*.png")):
        found[str(path.parent.relative_to(CLIP_ART)).replace("/", "-")].append(path)
    for name, paths in found.items():
        if len(paths) < FEWEST or name == "unsorted":
            continue
        digests = {path: hashlib.sha256(path.name.encode()).digest() for path in paths}
        for path in sorted(paths, key=digests.__getitem__)[:MOST]:
            target = folder / ("val" if digests[path][-1] % 5 == 0 else "train") / name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(Image.DecompressionBombError):
                on_white(path).save(target)


def on_white(path: Path) -> Image.Image:
    """Read an image, put it on white and shrink it."""
    with Image.open(path) as file:
        image = file.convert("RGBA")
    scale = PIXELS / min(image.size)
    size = [max(round(side * scale), PIXELS) for side in image.size]
    image = image.resize(size, Image.Resampling.BICUBIC)
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def run(images: Path, weights: Path, script: Path, trainer: str, seed: int) -> Row:
    """Train once; return top-1 in percent and loss on the validation images after the last epoch."""
    with tempfile.TemporaryDirectory() as folder:
        if trainer.startswith("timm"):
            command = ["-m", "vil.run", f"{script}", "--data-dir", f"{images}", *TIMM]
            command += ["--num-classes", f"{len(os.listdir(images / 'train'))}"]
            command += ["--pretrained", "--pretrained-path", f"{weights}", "--seed", f"{seed}"]
            command += ["--output", folder, "--experiment", "run"]
            command += ["--sched-on-updates"] if trainer.endswith("by step") else []
            log, names = Path(folder, "run", "summary.csv"), ("eval_top1", "eval_loss")
        else:
            command = ["train_imagenet.py", "--config", "configs/finetune.yaml"]
            command += ["--data.path", f"{images}", "--model.pretrained", f"{weights}"]
            command += ["--schedule.by", trainer.removeprefix("by "), "--run.seed", f"{seed}"]
            command += ["--schedule.epochs", f"{EPOCHS}", "--data.batch-size", f"{BATCH}"]
            command += ["--data.num-workers", "0", "--run.device", "cpu", "--run.num-threads", "1"]
            command += ["--run.output", f"{folder}/run"]
            log, names = Path(folder, "run", "log.csv"), ("top1", "val_loss")
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{trainer}, seed {seed}: {done.stderr[-2000:]}")
        with log.open() as file:
            last = list(csv.DictReader(file))[-1]
    return dict(zip(("top1", "loss"), (float(last[name]) for name in names), strict=True))


def main() -> int:
    """Write the images if they are missing, and make the runs that the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("script", type=Path, help="timm's train.py")
    add("--images", type=Path, default=ROOT / "output" / "clip_art")
    add("--weights", type=Path, default=ROOT / "output" / "fractals_small" / "last.pt")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    add("--output", type=Path, default=ROOT / "output" / "clip_art.json", help="the record")
    args = parser.parse_args()
    if not args.images.exists():
        write_images(args.images)
    count = {split: len([*(args.images / split).glob("*/*")]) for split in ("train", "val")}
    digest = hashlib.sha256(args.script.read_bytes()).hexdigest()
    settings = {"images": count, "epochs": EPOCHS, "batch": BATCH, "train.py": digest, "timm": TIMM}
    record = Record(args.output, settings)
    one = functools.partial(run, args.images, args.weights, args.script)
    return run_all(record, one, product(seed=args.seeds, trainer=TRAINERS), args.jobs)


if __name__ == "__main__":
    sys.exit(main())
