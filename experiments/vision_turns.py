"""Train ViL, exact ViL, ViM and DeiT side by side on fractals at 224 px for as long as there is.

    python -m experiments.vision_turns --seconds 300 [--output FILE.json] [--state FILE.pt]

The experiment is vision.py's fractals_large, which takes hours, cut to what fits: the four models take
turns at the same batches, so that they have made equally many steps whenever it ends and the loader
works once for all. How many steps fit is found by timing the first; the learning rate then falls by a
cosine to the last of them. Validation is half-way and at the end. One seed: a difference of a few
points is noise. A run that was stopped continues from its last validation, given the same files.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.budget import UNFINISHED, Budget, add_seconds
from benchmarks.provenance import environment
from experiments.mqar import warmup_cosine
from experiments.vision import EXPERIMENTS, RESULTS, Experiment, configure
from vil.training.config import TrainConfig
from vil.training.data.batches import Step, TrainData, ValData
from vil.training.data.draws import seed_everything
from vil.training.distributed import World
from vil.training.files import write_atomically, write_text
from vil.training.run.engine import train_step
from vil.training.run.setup import Training, build_training, resolve_device

EXPERIMENT = EXPERIMENTS["fractals_large"]
TOY = dataclasses.replace(
    EXPERIMENT,
    steps=8,
    images_per_class=(8,),
    arguments=(
        *("--model.num-classes", "4", "--data.batch-size", "4", "--data.num-workers", "0"),
        *("--model.img-size", "32", "--model.depth", "2", "--augment.mix-size", "None"),
    ),
)
WARMUP = 50  # steps
TIMED = range(10, 30)  # steps that tell how many fit: the ones before compile
VALIDATIONS = 2
RESERVE = 0.2  # of the time, for validation


class Race:
    """The models in training and how far they have come."""

    def __init__(self, experiment: Experiment, state: Path) -> None:
        """Build the models, or continue them.

        Args:
            experiment: What to train.
            state: File of weights and optimisers, which need not exist.
        """
        self.state_path = state
        (size,), (lr,) = experiment.images_per_class, experiment.rates
        configs = [configure(experiment, name, size, lr, seed=0) for name in experiment.models]
        self.configs = dict(zip(experiment.models, map(_without_average, configs), strict=True))
        self.config = configs[0]
        self.device = resolve_device(self.config.run, World())
        self.trainings: dict[str, Training] = {}
        for name, config in self.configs.items():
            seed_everything(0)
            self.trainings[name] = build_training(config, self.device, World())
        self.data = TrainData(self.config, self.device, World())
        self.step, self.steps = 0, 0
        self.losses: dict[str, list[torch.Tensor]] = {name: [] for name in self.trainings}
        if state.exists():
            self._load()

    def advance(self, step: Step, steps: int) -> None:
        """Let every model make a step of a run of so many."""
        share = warmup_cosine(step.number, min(WARMUP, steps // 4 + 1), steps)
        for name, training in self.trainings.items():
            training.model.train()
            for group in training.optimizer.param_groups:
                group["lr"] = self.config.peak_lr * share
            self.losses[name].append(train_step(training, step, self.configs[name]).loss)
        self.step = step.number + 1

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def validate(self) -> list[dict[str, Any]]:
        """Return each model's loss and top-1 in percent, on one pass over the images."""
        sums = {name: torch.zeros(2, device=self.device) for name in self.trainings}
        count = 0
        for images, targets in ValData(self.config, self.device, World()).batches():
            targets = targets.to(self.device)
            count += len(targets)
            for name, training in self.trainings.items():
                training.model.eval()
                with torch.autocast(self.device.type, torch.bfloat16, self.config.run.amp):
                    logits = training.model(training.augment.normalize(images)).float()
                loss = functional.cross_entropy(logits, targets, reduction="sum")
                sums[name] += torch.stack([loss, (logits.argmax(-1) == targets).sum()])
        return [
            {
                "model": name,
                "steps": self.step,
                "images": self.step * self.config.data.batch_size,
                "loss": sums[name][0].item() / count,
                "top1": 100 * sums[name][1].item() / count,
                "train_loss": statistics.fmean(float(x) for x in self.losses[name][-50:]),
            }
            for name in self.trainings
        ]

    def save(self) -> None:
        """Write what a continuation needs."""
        parts = {
            name: (training.model.state_dict(), training.optimizer.state_dict())
            for name, training in self.trainings.items()
        }
        content = {"step": self.step, "steps": self.steps, "parts": parts}
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.state_path, lambda file: torch.save(content, file))

    def _load(self) -> None:
        content = torch.load(self.state_path, map_location=self.device, weights_only=True)
        self.step, self.steps = content["step"], content["steps"]
        for name, (weights, optimizer) in content["parts"].items():
            self.trainings[name].model.load_state_dict(weights)
            self.trainings[name].optimizer.load_state_dict(optimizer)


def _without_average(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(
        config, optim=dataclasses.replace(config.optim, model_ema_decay=None)
    )


def run(race: Race, budget: Budget, save: Any, most: int) -> bool:
    """Train until the end of the schedule or of the time.

    Args:
        race: The models, continued where they are.
        budget: The time; it also sets the length of the schedule, if that is not set yet.
        save: Called with the rows of each validation.
        most: Steps of the experiment.

    Returns:
        Whether the schedule came to its end.
    """
    first = race.step
    start = time.perf_counter()
    for step in itertools.islice(race.data.steps(first), most - first):
        race.advance(step, race.steps or most)
        if race.steps == 0 and step.number == min(TIMED[0], most - 1):
            race.wait()
            start = time.perf_counter()
        if race.steps == 0 and step.number == min(TIMED[-1], most - 1):
            race.wait()
            seconds = max(time.perf_counter() - start, 1e-6) / len(TIMED)
            fits = race.step + int(min((1 - RESERVE) * budget.left / seconds, most))
            race.steps = min(most, fits)
            print(f"{seconds:.3f} s a step of all models: {race.steps} steps", flush=True)
        ended, over = race.step == race.steps, not budget.left
        due = race.steps and race.step % max(race.steps // VALIDATIONS, 1) == 0
        if ended or due or over:
            save(race.validate())
            race.save()
        if ended or over:
            return ended
    return True


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return top-1 by steps as a Markdown table."""
    steps = sorted({row["steps"] for row in rows})
    lines = [
        f"| top-1 after steps | {' | '.join(map(str, steps))} |",
        f"|---|{'---|' * len(steps)}",
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        found = {row["steps"]: row["top1"] for row in rows if row["model"] == name}
        lines.append(f"| {name} | {' | '.join(f'{found[step]:.1f}' for step in steps)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "vision_turns.json")
    parser.add_argument("--state", type=Path, help="default: beside the output")
    parser.add_argument(
        "--toy", action="store_true", help="tiny images; its accuracy means nothing"
    )
    add_seconds(parser)
    args = parser.parse_args(arguments)
    args.state = args.state or args.output.with_suffix(".pt")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, validate, print a table, and return the exit status."""
    args = parse(arguments)
    budget = Budget(args.seconds)
    experiment = TOY if args.toy else EXPERIMENT
    head = {"environment": environment() | {"toy": args.toy}}
    head["settings"] = json.loads(json.dumps(dataclasses.asdict(experiment)))
    rows: list[dict[str, Any]] = []
    if args.output.exists() and args.state.exists():
        content = json.loads(args.output.read_text())
        if all(content[part] == head[part] for part in head):
            rows = content["rows"]
    if not rows:
        args.state.unlink(missing_ok=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    def save(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        write_text(args.output, json.dumps(head | {"rows": rows}, indent=1) + "\n")
        print(table(rows), flush=True)

    race = Race(experiment, args.state)
    rows[:] = [row for row in rows if row["steps"] <= race.step]
    ended = run(race, budget, save, experiment.steps)
    if ended:
        args.state.unlink(missing_ok=True)
    return 0 if ended else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
