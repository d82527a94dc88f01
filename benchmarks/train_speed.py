"""Time the trainer's own step on this machine, and tell what 300 epochs of ImageNet would take.

    python -m benchmarks.train_speed [--models ...] [--batch-size 128] [--amp] [--compile]

Every model is trained by the recipe of configs/vil_tiny.yaml (mixup, cutmix, erasing, average of the
weights, AdamW) through the functions that train_imagenet.py calls, on the same random bytes, which are
in memory: what the loader can deliver is ``loader.py``'s question. The models take turns, round
by round; a model's speed is the median over rounds, and so is its ratio to the first model's.
"""

import argparse
import dataclasses
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import timm
import torch

import vil
from benchmarks.provenance import revision
from vil.training.data.batches import Step
from vil.training.distributed import World
from vil.training.files import write_text
from vil.training.recipes import read_recipe
from vil.training.run.engine import train_step
from vil.training.run.resolve import fill_from_weights
from vil.training.run.setup import build_training, resolve_device

MODELS = ("deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny", "vil_small")
RECIPE = Path(__file__).parent.parent / "configs" / "vil_tiny.yaml"
IMAGES = 300 * 1281167 // 256 * 256  # that 300 epochs train on, as the recipe counts them


@dataclasses.dataclass
class Row:
    """A model's speed."""

    model: str
    images_per_s: float
    ratio: float
    """To the first model, above 1 is faster."""
    peak_gib: float | None
    """Most memory in use on the GPU, for this model alone."""

    @property
    def hours(self) -> float:
        """For 300 epochs of ImageNet-1k on one such device."""
        return IMAGES / self.images_per_s / 3600


class Contestant:
    """A model in training."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        """Build it and train the first steps, which compile it and tell how much memory it takes."""
        recipe = read_recipe(RECIPE)
        self.name = name
        model = dataclasses.replace(
            recipe.model, name=name, num_classes=1000, img_size=args.img_size
        )
        config = dataclasses.replace(
            recipe,
            model=model,
            data=dataclasses.replace(recipe.data, batch_size=args.batch_size),
            augment=dataclasses.replace(recipe.augment, mix_size=None),
            run=dataclasses.replace(recipe.run, amp=args.amp, torchcompile=args.compile),
        )
        self.config = fill_from_weights(config, None)
        self.device = resolve_device(self.config.run, World())
        on_gpu = self.device.type == "cuda"
        others = torch.cuda.memory_allocated() if on_gpu else 0
        self.training = build_training(self.config, self.device, World())
        self.training.set_epoch(0)
        self.training.model.train()
        generator = torch.Generator().manual_seed(0)
        size = (args.batch_size, 3, args.img_size, args.img_size)
        images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        targets = torch.randint(1000, (args.batch_size,), generator=generator)
        self.batch = [(images, targets)]
        self.steps = 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.run(args.steps)
        peak = torch.cuda.max_memory_allocated() - others if on_gpu else None
        self.peak_gib = None if peak is None else peak / 2**30

    def run(self, steps: int) -> float:
        """Train some steps and return the images per second."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            result = train_step(self.training, Step(self.steps, self.batch, {}), self.config)
            self.steps += 1
        loss = result.loss.item()  # waits for the device
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            raise RuntimeError(f"{self.name}: the loss is {loss} after {self.steps} steps")
        return steps * self.config.data.batch_size / seconds


def measure(contestants: list[Contestant], rounds: int, steps: int) -> list[Row]:
    """Let the models take turns."""
    speeds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant in contestants:
            speeds[contestant.name].append(contestant.run(steps))
    first = speeds[contestants[0].name]
    return [
        Row(
            contestant.name,
            statistics.median(speeds[contestant.name]),
            statistics.median(a / b for a, b in zip(speeds[contestant.name], first, strict=True)),
            contestant.peak_gib,
        )
        for contestant in contestants
    ]


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| model | images/s | ratio | peak GiB | hours for 300 epochs |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        lines.append(
            f"| {row.model} | {row.images_per_s:.4g} | {row.ratio:.2f} | {peak} | {row.hours:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps of a model in a round")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    environment = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "vil": vil.__version__,
        "commit": revision(),
    }
    settings = {k: v for k, v in vars(args).items() if k not in ("models", "output")}
    print(", ".join(f"{name} {value}" for name, value in (environment | settings).items()))
    rows = measure([Contestant(name, args) for name in args.models], args.rounds, args.steps)
    print(table(rows))
    if args.output:
        figures = {"environment": environment, "settings": settings}
        figures["rows"] = [dataclasses.asdict(row) | {"hours": row.hours} for row in rows]
        write_text(args.output, json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
