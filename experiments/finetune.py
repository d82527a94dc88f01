"""Fine-tune weights that were pre-trained on fractals to a few digits, against training from scratch.

    python -m experiments.finetune --jobs 2

The weights are those of configs/fractals_small.yaml, for all runs the same; what is missing of them is
trained first, by train_imagenet.py. From them configs/finetune.yaml trains on 8 digits of each class, and
the 360 held-out digits are scored at its end. From scratch, the same model trains on the same images in
the same order for the same steps. Both do so by the recipe as it is, and at the rate that does best for a
seed that is not reported, from scratch without layer decay, which has no weights to keep there.
The same command again continues an interrupted experiment.
"""

import argparse
import dataclasses
import functools
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments import vision
from experiments.records import CHOICE_SEED, Record, Row, product, run_all, select
from vil.training.data.batches import TrainData, ValData
from vil.training.data.draws import seed_everything
from vil.training.data.sources import open_source
from vil.training.distributed import World
from vil.training.recipes import load_config, read_recipe
from vil.training.run.engine import evaluate
from vil.training.run.resolve import fill_from_data, fill_from_weights
from vil.training.run.setup import build_training, read_pretrained
from vil.weights import read_weights

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "experiments" / "results" / "finetune.json"
PRETRAINING, RECIPE = ROOT / "configs" / "fractals_small.yaml", ROOT / "configs" / "finetune.yaml"
FINE_TUNED, SCRATCH = STARTS = ("fine-tuned", "from scratch")


@dataclass(frozen=True)
class Experiment:
    """What the runs share."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of the runs that are reported."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)
    """Values of optim.lr_base to choose from."""
    pretraining: tuple[str, ...] = ()
    """Arguments of train_imagenet.py on top of the recipe of pre-training."""
    data: tuple[str, ...] = (
        *("--data.dataset", "digits", "--data.images-per-class", "8"),
        *("--augment.hflip", "0"),  # a mirrored digit is none
    )
    """On top of the recipe of fine-tuning."""

    def search(self) -> list[Row]:
        """Return the runs that choose rates."""
        runs = product(start=STARTS, lr=self.rates, seed=[CHOICE_SEED])
        return [{**run, "layer_decay": layer_decay(run["start"])} for run in runs]

    def reported(self, rows: Sequence[Row]) -> list[Row]:
        """Return the runs to report, given those of the search."""
        settings = [{"start": start, **as_stated()} for start in STARTS]
        for start in STARTS:
            best = min(select(rows, start=start, seed=CHOICE_SEED), key=lambda row: row["loss"])
            own = {key: best[key] for key in settings[0]}
            settings += [own] if own not in settings else []
        return [{**values, "seed": seed} for values in settings for seed in self.seeds]


def as_stated() -> Row:
    """Return what the recipe says."""
    recipe = read_recipe(RECIPE).optim
    return {"lr": recipe.lr_base, "layer_decay": recipe.layer_decay}


def layer_decay(start: str) -> float | None:
    """Return the layer decay that a rate is chosen with."""
    return as_stated()["layer_decay"] if start == FINE_TUNED else None


def pretrain(experiment: Experiment, folder: Path) -> str:
    """Train the weights, or what is left of it, by the script itself; return their digest."""
    command = [sys.executable, str(ROOT / "train_imagenet.py"), "--config", str(PRETRAINING)]
    command += ["--run.output", str(folder), "--run.device", "cpu", *experiment.pretraining]
    subprocess.run(command, check=True)
    digest = hashlib.blake2b(digest_size=8)
    for value in read_weights(folder / "last.pt").state_dict.values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def run(
    experiment: Experiment,
    folder: Path,
    start: str,
    lr: float,
    layer_decay: float | None,
    seed: int,
) -> Row:
    """Train one model on the digits and return its figures.

    Args:
        experiment: Names the data.
        folder: Of the weights; from scratch, too, the model and its images are as theirs.
        start: FINE_TUNED or SCRATCH.
        lr: Value of optim.lr_base.
        layer_decay: Value of optim.layer_decay.
        seed: Of new weights, order and augmentation.

    Returns:
        Validation loss, top-1 in percent, steps, and the top-1 on fractals that the weights ended with.
    """
    arguments = ["--config", str(RECIPE), *experiment.data, "--data.num-workers", "0"]
    arguments += ["--model.pretrained", str(folder / "last.pt")]
    arguments += ["--optim.lr-base", str(lr), "--optim.layer-decay", str(layer_decay)]
    config = load_config([*arguments, "--run.seed", str(seed)], RECIPE)
    weights = read_pretrained(config.model)
    config = fill_from_weights(config, weights)
    sources = [open_source(config.data, config.model, training) for training in (True, False)]
    config = fill_from_data(config, *sources)
    device, world = torch.device("cpu"), World()
    seed_everything(seed)
    starting = weights if start == FINE_TUNED else None
    training = build_training(config, device, world, starting, sources[0].classes)
    losses, _ = vision.train(training, TrainData(config, device, world, sources[0]), config)
    held_out = ValData(config, device, world, sources[1])
    [score] = evaluate([training.model], held_out, training.augment.normalize, config.run.amp)
    row = {"loss": score.loss, "top1": score.top1, "steps": len(losses)}
    return row | ({"fractals_top1": weights.history[-1]["top1"]} if starting else {})


def execute(experiment: Experiment, output: Path, folder: Path, jobs: int) -> None:
    """Do what the record lacks.

    Args:
        experiment: The runs.
        output: The record.
        folder: Of the run that trains the weights.
        jobs: Runs at a time.
    """
    weights = {"weights": pretrain(experiment, folder)}
    record = Record(output, dataclasses.asdict(experiment) | weights)
    train_and_score = functools.partial(run, experiment, folder)
    run_all(record, train_and_score, experiment.search(), jobs)
    run_all(record, train_and_score, experiment.reported(record.rows), jobs)


def main() -> None:
    """Run the experiment, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    execute(Experiment(), args.output, ROOT / "output" / "fractals_small", args.jobs)


if __name__ == "__main__":
    main()
