"""What int8 by torchao does to a trained model, and to the size and the time of one: on this machine's CPU.

    python -m benchmarks.int8 CHECKPOINT [--model vil_tiny] [--size 224] [--batch 1] [--rounds 15]
        [--threads 1] [--output FILE.json]

The checkpoint of train_imagenet.py is scored on its held-out images in float32, with int8 weights, and with
activations that are rounded to int8 as they come, too. MB are those of the model's state dict in a file. The
time is that of one forward pass of ``--model`` with random weights, in turns as in ``vil.measuring``; the
ratio to float32 is the median of the rounds' ratios.
"""

import argparse
import copy
import io
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import vil  # noqa: F401  (registers the models)
from benchmarks.provenance import environment, processor
from vil.measuring import in_turns, step_of
from vil.training.data.augment import Normalize
from vil.training.data.batches import ValData
from vil.training.distributed import world_from_environment
from vil.training.files import write_text
from vil.training.options import EvalConfig
from vil.training.run.engine import evaluate
from vil.training.run.evaluation import Subject, load_subject


def weights(model: nn.Module) -> None:
    """Store the weights of linear layers in int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def weights_and_activations(model: nn.Module) -> None:
    """The same, and multiply in int8 by activations that are rounded as they come."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "float32": lambda model: None,
    "int8 weights": weights,
    "int8 weights and activations": weights_and_activations,
}


def variants(model: nn.Module) -> dict[str, nn.Module]:
    """Return a copy of a model made by each of the ways."""
    copies = {name: copy.deepcopy(model).eval() for name in WAYS}
    for name, change in WAYS.items():
        change(copies[name])
    return copies


def megabytes(model: nn.Module) -> float:
    """Return the size of a model's state dict as a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell() / 1e6


def scores(subject: Subject) -> list[dict[str, Any]]:
    """Return a row for each way: what a trained model scores on its held-out images."""
    config, device = subject.config, torch.device("cpu")
    data = ValData(config, device, world_from_environment())
    rows = []
    for way, model in variants(subject.model).items():
        [score] = evaluate([model], data, Normalize(config, device), amp=False)
        rows.append({"way": way, **score._asdict(), "MB": megabytes(model)})
    return rows


def costs(name: str, size: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each way: what a model with random weights takes."""
    models = variants(timm.create_model(name, img_size=size))
    images = torch.randn(batch, 3, size, size)
    seconds = in_turns(
        {way: step_of(model, images, "inference") for way, model in models.items()}, rounds
    )
    base = seconds["float32"]
    return [
        {
            "way": way,
            "MB": megabytes(models[way]),
            "ms": 1e3 * statistics.median(times),
            "ratio": statistics.median(t / b for t, b in zip(times, base, strict=True)),
        }
        for way, times in seconds.items()
    ]


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Return rows as a Markdown table of the columns, by the format of each."""
    lines = [f"| {' | '.join(('', *columns))} |", f"|---|{'---|' * len(columns)}"]
    for row in rows:
        cells = (format(row[key], form) for key, form in columns.items())
        lines.append(f"| {' | '.join((row['way'], *cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the tables, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--model", default="vil_tiny")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="the record, JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    import torchao

    subject = load_subject(EvalConfig(checkpoint=args.checkpoint))
    trained = scores(subject)
    print(table(trained, {"top1": ".2f", "loss": ".4f", "MB": ".2f"}) + "\n", flush=True)
    taken = costs(args.model, args.size, args.batch, args.rounds)
    print(table(taken, {"MB": ".1f", "ms": ".1f", "ratio": ".2f"}))
    if args.output:
        protocol = {"processor": processor(), "torchao": torchao.__version__}
        protocol |= {"threads": args.threads, "batch": args.batch, "rounds": args.rounds}
        record = {
            "environment": environment() | protocol,
            "trained": {"model": subject.config.model.name, "dataset": subject.config.data.dataset},
            "scores": trained,
            "costs": [{"model": args.model, "size": args.size, **row} for row in taken],
        }
        write_text(args.output, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
