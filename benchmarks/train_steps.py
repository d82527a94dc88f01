"""Train the tiny models for many mixed-precision steps on a GPU: is the loss finite, and how fast?

    python -m benchmarks.train_steps [--models ...] [--steps 1000] [--batch-size 128] [--output FILE]

Every model gets the same random images, a fixed set small enough to be learned by heart, so that a
wrong gradient shows as a loss that does not fall. AdamW, learning rate 1e-3 after a warm-up of a tenth
of the steps, weight decay 0.05, gradients clipped to 1, bfloat16 autocast, float32 parameters. No step
is skipped: a gradient that is not finite would show in the next loss. Throughput is by CUDA events, the
median over the last half of the steps. Exit status 1 if a loss was not finite or did not fall below
half of its start. The same command, with the same output, trains the models that are missing in it.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

import vil
from benchmarks.budget import UNFINISHED, Budget, add_seconds
from benchmarks.provenance import revision
from vil.training.files import write_text

MODELS = ("deit_tiny_patch16_224", "vil_tiny", "vil_tiny_exact", "vim_tiny")
LEARNING_RATE, SEEN, CLASSES = 1e-3, 8, 10
WARMUP = 0.1  # of the steps


@dataclass
class Row:
    """What became of one model."""

    model: str
    first_loss: float
    last_loss: float
    finite_steps: int
    images_per_s: float | None
    peak_gib: float | None

    def passed(self, steps: int) -> bool:
        """Tell whether every loss was finite and the last ones under half of the first."""
        return self.finite_steps == steps and self.last_loss < self.first_loss / 2


def train(
    name: str, steps: int, batch: int, size: int, device: torch.device, seen: int = SEEN
) -> Row:
    """Train one model and return what became of it; stops at the first loss that is not finite.

    Args:
        name: As timm knows it.
        steps: How many.
        batch: Images of a step.
        size: Height and width of them.
        device: Where.
        seen: Different batches.
    """
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, num_classes=CLASSES).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    images = torch.randn(seen, batch, 3, size, size).to(device)
    labels = torch.randint(CLASSES, (seen, batch)).to(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, events = [], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / (WARMUP * steps))
        if on_gpu:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images[step % seen]), labels[step % seen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 49 and not math.isfinite(losses[-1].item()):
            break
    values = torch.stack(losses).float().tolist()
    finite = next((i for i, value in enumerate(values) if not math.isfinite(value)), len(values))
    speed = peak = None
    if on_gpu and len(events) > 3:
        torch.cuda.synchronize()
        half = events[len(events) // 2 :]
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(half)]
        speed = 1e3 * batch / statistics.median(times)
        peak = torch.cuda.max_memory_allocated() / 2**30
    return Row(name, values[0], statistics.mean(values[-seen:]), finite, speed, peak)


def table(rows: list[Row], steps: int) -> str:
    """Return the rows as a Markdown table, speeds relative to the first model's."""
    lines = [
        "| model | first loss | last loss | finite steps | images/s | ratio | peak GiB | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = ratio = peak = "-"
        if row.images_per_s is not None:
            speed, peak = f"{row.images_per_s:.0f}", f"{row.peak_gib:.2f}"
            first = rows[0].images_per_s
            ratio = "-" if first is None else f"{row.images_per_s / first:.2f}"
        verdict = "passed" if row.passed(steps) else "FAILED"
        lines.append(
            f"| {row.model} | {row.first_loss:.3f} | {row.last_loss:.3f} "
            f"| {row.finite_steps} of {steps} | {speed} | {ratio} | {peak} | {verdict} |"
        )
    return "\n".join(lines)


def recorded(path: Path | None, environment: dict) -> list[Row]:
    """Return the rows of a record if it was made in the same environment with the same settings."""
    if path is None or not path.exists():
        return []
    content = json.loads(path.read_text())
    return [Row(**row) for row in content["rows"]] if content["environment"] == environment else []


def main() -> int:
    """Train every model, print a table, write the results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batches", type=int, default=SEEN, help="different ones")
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    add_seconds(parser)
    args = parser.parse_args()
    budget = Budget(args.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "vil": vil.__version__,
        "commit": revision(),
        "batch_size": args.batch_size,
        "img_size": args.img_size,
        "steps": args.steps,
        "batches": args.batches,
    }
    print(", ".join(f"{name} {value}" for name, value in environment.items()), flush=True)
    rows = recorded(args.output, environment)
    missing = [name for name in args.models if name not in {row.model for row in rows}]
    while missing and budget.left:
        name = missing.pop(0)
        try:
            sizes = (args.steps, args.batch_size, args.img_size)
            rows.append(train(name, *sizes, device, args.batches))
        except RuntimeError as error:  # the next model may do better
            print(f"{name}: {error}", file=sys.stderr)
            rows.append(Row(name, math.nan, math.nan, 0, None, None))
        print(table(rows, args.steps).splitlines()[-1], flush=True)
        if args.output:
            results = {"environment": environment, "rows": [asdict(row) for row in rows]}
            write_text(args.output, json.dumps(results, indent=1) + "\n")
    print(table(rows, args.steps))
    if not all(row.passed(args.steps) for row in rows):
        return 1
    return UNFINISHED if missing else 0


if __name__ == "__main__":
    sys.exit(main())
