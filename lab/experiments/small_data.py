"""Train small models from scratch on few images, and evaluate them on the same images at twice the side.

    apt-get install dataset-fashion-mnist openclipart-png
    python -m lab.experiments.small_data                     # about an hour on one core
    python -m lab.experiments.tables output/small_data.json --by data model lr --show top1:1 twice:1

1,000 images of Fashion-MNIST with the recipe of ``configs/fashion_mnist.yaml``, and 1,393 of clip art with that of
``configs/scratch.yaml``, at a size for one core. Each model takes the rate with the lowest held-out loss of one more
seed, whose training and held-out images are parts of the training images. "twice" is top-1 on the held-out images
stretched to twice the side, "shrunk" on these images resized to the trained size first. DeiT's position embedding is
resampled. Repeat the command to resume a record.
"""

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

from lab.benchmarks.budget import UNFINISHED, Budget, add_seconds
from lab.experiments import clip_art
from lab.experiments.images import DATA, OUTPUT, WRITE, Images, trained
from lab.experiments.records import Record, Row, product, run_all, select
from lab.experiments.sizes import for_size, images_at, resized, top1
from lab.experiments.statistics import CHOICE_SEED

_COMPARED = {"compared": ("ViL exact, averaged", "DeiT", "ResNet"), "rates": (1e-3, 3e-3, 1e-2), "seeds": 3}
_FASHION = dataclasses.replace(
    DATA["fashion_mnist"],
    arguments=("--data.images-per-class", "100"),
    steps=960,
    choice=None,
    choice_seeds=1,
    every_epoch=False,
    **_COMPARED,
)
_CLIP_ART = Images(
    (
        *("--data.path", str(OUTPUT / "clip_art_images"), "--data.batch-size", "64", "--data.num-workers", "0"),
        *("--model.img-size", "64", "--model.patch-size", "8", "--model.depth", "4", "--run.num-threads", "1"),
    ),
    steps=880,
    recipe="configs/scratch.yaml",
    models={  # about as many parameters as ViL's
        "DeiT": ("--model.name", "deit_tiny_patch16_224", "--model.embed-dim", "78", "--model.args"),
        "ResNet": (
            *("--model.name", "resnet18", "--model.patch-size", "None", "--model.embed-dim", "None"),
            *("--model.depth", "None", "--model.args", "layers=[1,1,1,1]", "channels=[16,32,64,128]"),
        ),
    },
    **_COMPARED,
)


def on(data: Images, folder: str) -> Images:
    """Return the same settings for another folder of images."""
    return dataclasses.replace(data, arguments=(*data.arguments, "--data.path", str(OUTPUT / folder)))


SMALL = {
    "Fashion-MNIST": dataclasses.replace(_FASHION, choice=on(_FASHION, "fashion_mnist_tuning")),
    "clip art": dataclasses.replace(_CLIP_ART, choice=on(_CLIP_ART, "clip_art_tuning")),
}


def run(data: str, model: str, lr: float, seed: int) -> Row:
    """Train one model and evaluate it at both sizes.

    Args:
        data: A key of ``SMALL``.
        model: A name of ``images.MODELS``, with optional changes.
        lr: Peak learning rate for a batch of optim.lr_base_size images.
        seed: Seed of weights, order and augmentation; from ``CHOICE_SEED``, of runs that choose rates.
    """
    chosen = SMALL[data].choice if seed >= CHOICE_SEED else SMALL[data]
    setup, config, row = trained(chosen, model, lr, seed)
    row["seconds"] = row["ms_per_step"] * row["steps"] / 1e3
    if seed >= CHOICE_SEED:
        return row
    net, side = setup.model.eval(), config.model.img_size
    batches = images_at(config, 2 * side)
    shrunk = [(resized(images, side), targets) for images, targets in batches]
    return row | {"twice": top1(for_size(net, 2 * side), batches), "shrunk": top1(net, shrunk)}


def main() -> int:
    """Make the runs that the record lacks, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    parser.add_argument("--output", type=Path, default=OUTPUT / "small_data.json", help="the record")
    add_seconds(parser)
    args = parser.parse_args()
    WRITE["fashion_mnist"]()
    clip_art.unpack()
    record = Record(args.output, {name: dataclasses.asdict(data) for name, data in SMALL.items()})
    budget = Budget(args.seconds)
    trials = [
        {"data": name} | trial
        for name, data in SMALL.items()
        for trial in product(model=data.compared, lr=data.rates, seed=[CHOICE_SEED])
    ]
    if run_all(record, run, trials, args.jobs, budget):
        return UNFINISHED
    runs = []
    for name, data in SMALL.items():
        for seed, model in itertools.product(range(data.seeds), data.compared):
            tried = [row for row in select(record.rows, data=name, model=model) if row["seed"] >= CHOICE_SEED]
            best = min(tried, key=lambda row: row["loss"])
            runs.append({"data": name, "model": model, "lr": best["lr"], "seed": seed})
    return UNFINISHED if run_all(record, run, runs, args.jobs, budget) else 0


if __name__ == "__main__":
    sys.exit(main())
