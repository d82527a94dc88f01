"""Segmentation and detection by the scripts of examples/: our pyramid, from one block or four, and peers.

    python -m experiments.dense --jobs 2

Every backbone trains on the same generated images with the same head, from scratch, for as many steps. Its
learning rate is chosen in segmentation, in half the epochs and by a seed that is not reported. Four blocks
are compared with one in segmentation alone. The record can be continued.
"""

import argparse
import csv
import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.records import CHOICE_SEED, Record, Row, product, run_all, select

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "experiments" / "results" / "dense.json"
TASKS = {"segment": "miou", "detect": "ap50"}
SEARCHED = "segment"
OURS = "ViL, last block"
FOUR = "ViL, four blocks"
# The size that examples/ give our models; DeiT's channels make it as large.
SMALL = ("depth=4", "patch_size=8")
DEIT, RESNET = "DeiT, same pyramid", "ResNet-18"
BACKBONES = {
    OURS: ("vil_tiny_pyramid", "embed_dim=128", *SMALL),
    FOUR: ("vil_tiny_pyramid", "embed_dim=128", *SMALL, "pyramid_blocks=(0,1,2,3)"),
    DEIT: ("deit_pyramid", "embed_dim=105", *SMALL),
    RESNET: ("resnet18",),
}


@dataclass(frozen=True)
class Experiment:
    """The runs."""

    rates: tuple[float, ...] = (1e-3, 3e-3)
    search_epochs: int = 2
    seeds: tuple[int, ...] = (0, 1, 2)

    def search(self) -> list[Row]:
        """Return the runs that choose rates; that of one block holds for four, too."""
        searched = [name for name in BACKBONES if name != FOUR]
        axes = {"task": [SEARCHED], "backbone": searched, "lr": self.rates}
        return product(**axes, seed=[CHOICE_SEED], epochs=[self.search_epochs])

    def reported(self, rows: Sequence[Row]) -> list[Row]:
        """Return the runs to report, given those of the search."""
        runs = []
        for task, backbone in itertools.product(TASKS, BACKBONES):
            if backbone == FOUR and task != SEARCHED:
                continue
            tried = select(rows, backbone=OURS if backbone == FOUR else backbone, seed=CHOICE_SEED)
            rate = max(tried, key=lambda row: row[TASKS[SEARCHED]])["lr"]
            runs += product(task=[task], backbone=[backbone], lr=[rate], seed=self.seeds)
        return runs


def run(
    arguments: Sequence[str],
    task: str,
    backbone: str,
    lr: float,
    seed: int,
    epochs: int | None = None,
) -> Row:
    """Run a script and return the last row of its log.

    Args:
        arguments: More of the script's.
        task: Key of TASKS, the script's name.
        backbone: Key of BACKBONES.
        lr: Learning rate.
        seed: Of data, weights and order.
        epochs: The script's own if None.

    Returns:
        Steps, training loss, the metrics, CPU seconds, and the parameters of backbone and head.
    """
    name, *model = BACKBONES[backbone]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.dense_peers", task, "--backbone", name]
        command += ["--lr", str(lr), "--seed", str(seed), "--device", "cpu", "--output", folder]
        command += ["--epochs", str(epochs)] if epochs else []
        command += [*arguments, *(["--model-kwargs", *model] if model else [])]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"COLUMNS": "1000"},
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        with (Path(folder) / "log.csv").open() as file:
            last = list(csv.DictReader(file))[-1]
    sizes = re.search(r": ([\d,]+) parameters, and ([\d,]+) of the head", done.stdout).groups()
    figures = {"step", "loss", "ap", "cpu_seconds", *TASKS.values()} & last.keys()
    row = {key: float(last[key]) for key in sorted(figures)}
    parameters, head = (int(size.replace(",", "")) for size in sizes)
    return row | {"parameters": parameters, "head_parameters": head}


def main() -> None:
    """Run the experiment, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    experiment = Experiment()
    record = Record(args.output, dataclasses.asdict(experiment) | {"backbones": BACKBONES})
    one = functools.partial(run, ())
    run_all(record, one, experiment.search(), args.jobs)
    run_all(record, one, experiment.reported(record.rows), args.jobs)


if __name__ == "__main__":
    main()
