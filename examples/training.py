"""Code that the examples share: options, batches, the backbone and the training loop.

Examples import this module first, because OpenMP reads how its waiting threads behave when torch is loaded.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other processes cost little (docs/speed.md)

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import timm
import torch
from timm.utils import ParseKwargs
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from tqdm import tqdm

import vil
from description import DESCRIPTION, read_description, write_description
from folders import AnnotatedFolder
from shapes import Shapes
from vil.training.files import csv_text, write_atomically, write_text
from vil.training.program import check_workers
from vil.weights.sources import read_weights

BACKBONE = "vil_tiny_pyramid"
# Arguments of the default backbone: at this size, two cores train it in minutes.
SMALL = {"embed_dim": 128, "depth": 4, "patch_size": 8}
HELD_OUT = 200  # pictures of shapes


def options(description: str, example: str, epochs: int) -> argparse.ArgumentParser:
    """Return the command-line parser of an example.

    Args:
        description: Help text of the example.
        example: Name of the example; by default it writes to output/NAME.
        epochs: Default number of epochs.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.set_defaults(example=example, predict=None)
    add = parser.add_argument
    add("--data", type=path_of, help="folder, laid out as folders.py says; shapes without it")
    add("--backbone", default=BACKBONE, help="timm's name of a model with several strides")
    add("--model-kwargs", nargs="*", default={}, action=ParseKwargs, help="such as depth=8")
    add("--weights", help="of the backbone, whatever vil.load takes")
    add("--img-size", type=int, default=96, help="images become squares of it, in pixels")
    add("--images", type=int, default=1800, help="shapes to learn from in an epoch")
    add("--epochs", type=int, default=epochs)
    add("--batch-size", type=int, default=4)
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="of shapes, order and weights")
    add("--workers", type=int, default=0, help="processes that read images")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=path_of, default=Path("output") / example, help="folder of log, picture and weights")
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, and add to its options what the model still needs.

    With --predict, the model is described by model.json of --output. Otherwise ``model_kwargs`` are completed:
    by those of --weights if the file has any, or by SMALL if neither --model-kwargs nor --weights are given.
    ``mean`` and ``std`` of images are those of --weights, or else those of the backbone.

    Args:
        parser: Parser from ``options``.
        words: Words of the command line; None takes those of this process.

    Raises:
        FileNotFoundError: If weights or model.json are missing.
        ValueError: If weights or model.json cannot be read, or an argument cannot be saved in model.json.
    """
    args = parser.parse_args(words)
    if args.predict:
        given = [key for key, value in vars(args).items() if value != parser.get_default(key)]
        if unused := sorted({*given} - {"predict", "output", "device", "threshold"}):
            named = ", ".join(f"--{key.replace('_', '-')}" for key in unused)
            parser.error(f"--predict takes the model of --output as it was trained; leave out {named}")
        return argparse.Namespace(**vars(args) | read_description(args.output, args.example))
    known, cfg = SMALL if args.backbone == BACKBONE and not args.model_kwargs else {}, {}
    if args.weights:
        weights = read_weights(args.weights)
        known, cfg = weights.model_args if weights.architecture else {}, weights.pretrained_cfg
    known = {key: value for key, value in known.items() if key not in ("img_size", "num_classes")}
    args.model_kwargs = known | args.model_kwargs
    for key in ("mean", "std"):
        setattr(args, key, cfg.get(key) or timm.get_pretrained_cfg_value(args.backbone, key))
    try:
        json.dumps(args.model_kwargs, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--model-kwargs must have values that JSON can save, got {args.model_kwargs}") from error
    return args


def path_of(text: str) -> Path:
    """Return the path that an option names."""
    return Path(text).expanduser()  # shells leave ~ after an equals sign


def batches(
    args: argparse.Namespace, folder: Callable[..., torch.utils.data.Dataset], collate: Callable
) -> tuple[DataLoader, DataLoader]:
    """Return training batches, shuffled and mirrored at random, and held-out batches.

    Args:
        args: Options of the command line.
        folder: Data set class for ``--data``.
        collate: Makes a batch from a list of items: images in 0 to 1, float32, and their targets.

    Raises:
        ValueError: If the batch is larger than the data, or val has a category that train lacks.
    """
    plain = preparation(args.img_size)
    resize, scale = plain.transforms
    mirrored = v2.Compose([resize, v2.RandomHorizontalFlip(), scale])
    if args.data is None:  # seeds of shapes: even for training, odd for held-out data
        train = Shapes(2 * args.seed, args.images, args.img_size, mirrored)
        val = Shapes(2 * args.seed + 1, HELD_OUT, args.img_size, plain)
    else:
        train, val = folder(args.data, "train", mirrored), folder(args.data, "val", plain)
        if isinstance(val, AnnotatedFolder):
            val.number_as(train)
    if len(train) < args.batch_size:
        raise ValueError(f"--batch-size must be at most the {len(train)} training images, got {args.batch_size}")
    check_workers(args.workers)
    common = {"batch_size": args.batch_size, "num_workers": args.workers, "collate_fn": collate}
    return DataLoader(train, shuffle=True, drop_last=True, **common), DataLoader(val, **common)


def preparation(img_size: int) -> v2.Compose:
    """Return the transform of held-out images and photographs: squares of ``img_size`` px, float32, in 0 to 1."""
    return v2.Compose([v2.Resize((img_size,) * 2), v2.ToDtype(torch.float32, scale=True)])


def stack(items: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, Tensor]:
    """Return a batch: images, (B, 3, H, W), in 0 to 1, and class indices, (B, H, W)."""
    return torch.stack([i for i, _ in items]), torch.stack([found["mask"] for _, found in items])


def backbone(args: argparse.Namespace, **arguments: object) -> nn.Module:
    """Return the backbone that the options of ``parse`` ask for; ``arguments`` go to timm."""
    arguments = {"features_only": True, "img_size": args.img_size} | arguments | args.model_kwargs
    create = partial(vil.load, args.weights) if args.weights else vil.timm_models.create
    return create(args.backbone, **arguments)


def fit(
    args: argparse.Namespace,
    model: nn.Module,
    features: nn.Module,
    train: DataLoader,
    loss_of: Callable[..., Tensor],
    evaluate: Callable[[], dict[str, float]],
    classes: Sequence[str] = (),
) -> None:
    """Train a model; print and log a line after every epoch, and save its weights at the end.

    Args:
        args: Options of the command line.
        model: Model, on its device.
        features: Backbone of the model.
        train: Training batches.
        loss_of: Returns the loss of a batch; called with the parts of the batch.
        evaluate: Returns metrics on held-out data.
        classes: Class names; with them, model.json describes the model for --predict.
    """
    whole, own = (sum(p.numel() for p in part.parameters()) for part in (model, features))
    print(f"{args.backbone}: {own:,} parameters, and {whole - own:,} of the head")
    args.output.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(vil.param_groups(model, args.lr))
    steps = args.epochs * len(train)
    # In few steps the warm-up takes more than a tenth: PyTorch divides by zero if it ends at the first step.
    warm_up = min(0.75, max(0.1, 1.5 / steps))
    schedule = OneCycleLR(optimizer, args.lr, steps, pct_start=warm_up, cycle_momentum=False)
    started, rows = time.perf_counter(), []
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = []
        for batch in tqdm(train, f"epoch {epoch} of {args.epochs}", leave=False, disable=None):
            loss = loss_of(*batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        model.eval()
        loss = torch.stack(losses).mean().item()
        row = {"epoch": epoch, "step": epoch * len(train), "loss": loss, **evaluate()}
        row |= {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time()}
        print("  ".join(f"{name} {value:.5g}" for name, value in row.items()))
        rows.append(row)
        write_text(args.output / "log.csv", csv_text(rows))
    (args.output / DESCRIPTION).unlink(missing_ok=True)  # a crash must not leave that of former weights
    write_atomically(args.output / "weights.pt", lambda file: torch.save(model.state_dict(), file))
    if classes:
        write_description(args, classes)
