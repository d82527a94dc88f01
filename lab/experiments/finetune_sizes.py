"""Fine-tune small models at another patch grid than they were trained at, with each value of ``grid_aware``.

    python -m lab.experiments.finetune_sizes
    python -m lab.experiments.tables output/finetune_sizes.json --by dataset grid grid_aware --show top1:1 --tuned loss

ViL is trained as in ``images.py`` and then fine-tuned on the same images, head included, for whole epochs of about 80
steps: at 1.75 times the side, or with patches at half the stride. "start" is top-1 before fine-tuning. Each value has
the rate with the lowest loss with a seed that is not reported. Repeat the command to resume.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from timm.models import save_for_hf

from lab.benchmarks.budget import UNFINISHED, Budget, add_seconds
from lab.experiments.images import DATA, OUTPUT, WRITE, trained
from lab.experiments.records import Record, Row, product, run_all
from lab.experiments.sizes import images_at, top1
from lab.experiments.statistics import CHOICE_SEED
from vil.weights.build import load

STEPS = 80
PRETRAINING_RATE = 2e-3
RATES = (5e-4, 2e-3)
SIDE, PATCH = {"digits": 16, "fractals": 64}, {"digits": 4, "fractals": 8}
GRIDS = {
    "1.75 x": lambda data: ("--model.img-size", str(SIDE[data] * 7 // 4)),
    "half the stride": lambda data: ("--model.patch-stride", str(PATCH[data] // 2)),
}


def pretrained(dataset: str, seed: int) -> Path:
    """Return a folder with a trained model; train it if it does not exist."""
    folder = OUTPUT / "finetune_sizes" / f"{dataset}_{seed}"
    if not folder.exists():
        setup, config, _ = trained(DATA[dataset], "ViL", PRETRAINING_RATE, seed)
        unfinished = folder.with_suffix(".part")
        save_for_hf(setup.model, unfinished, model_args=config.model.arguments)
        unfinished.rename(folder)
    return folder


def run(dataset: str, grid: str, grid_aware: str, lr: float, seed: int) -> Row:
    """Fine-tune a trained model at another grid.

    Args:
        dataset: A key of ``SIDE``.
        grid: A key of ``GRIDS``.
        grid_aware: Value of the model's argument, as text.
        lr: Peak learning rate for a batch of optim.lr_base_size images.
        seed: Seed of both trainings.

    Returns:
        The figures of ``images.trained``, and "start", top-1 in percent before fine-tuning.
    """
    folder = pretrained(dataset, seed)
    arguments = ("--model.pretrained", f"local-dir:{folder}", *GRIDS[grid](dataset))
    arguments += ("--model.args", f"grid_aware={grid_aware}")
    data = DATA[dataset]
    data = dataclasses.replace(data, arguments=(*data.arguments, *arguments), steps=STEPS)
    _, config, row = trained(data, "ViL", lr, seed)
    start = load(f"local-dir:{folder}", **config.model.arguments).eval()
    return row | {"start": top1(start, images_at(config, config.model.img_size))}


def main() -> int:
    """Make the runs that the record lacks, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    add_seconds(parser)
    args = parser.parse_args()
    OUTPUT.mkdir(exist_ok=True)
    WRITE["fractals"]()
    record, budget = Record(OUTPUT / "finetune_sizes.json", {"steps": STEPS}), Budget(args.seconds)
    axes = {"dataset": list(SIDE), "grid": list(GRIDS), "grid_aware": ["True", "'dt'", "False"]}
    runs = product(seed=[CHOICE_SEED], lr=RATES, **axes) + product(seed=range(3), lr=RATES, **axes)
    return UNFINISHED if run_all(record, run, runs, args.jobs, budget) else 0


if __name__ == "__main__":
    sys.exit(main())
