"""Segment images larger than the crops of training, in several ways, without training for them.

    python -m experiments.dense_sizes --jobs 2

Each backbone learns to segment letters (``letter_scenes.py``) from random crops of 64 pixels. Without
further training it then segments larger images of validation scenes. They show more, at the same scale:

    whole     the image at once, at its size
    plain     the same by a scan with ``grid_aware=False``
    steps     the same by a scan with ``grid_aware="steps"``
    shrunk    the image resized to the size of the crops, and the logits resized back
    windows   overlapping windows of the size of the crops, and the mean of their logits

At every size the images are the tiles of the same scenes, so that all scores are of the same pixels and
letters. The learning rate is chosen with a seed that is not reported. The record can be continued, and
trained weights stay in output/dense_sizes.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from experiments import letter_scenes
from experiments.dense_peers import EXAMPLES
from experiments.letter_scenes import MARGIN, Scenes, Split
from experiments.records import CHOICE_SEED, Record, Row, product, run_all, select
from vil.training.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "experiments" / "results" / "dense_sizes.json"
CACHE = ROOT / "output" / "dense_sizes"
OURS, DEIT, RESNET = "ViL", "DeiT", "ResNet-18, narrow"
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("vil_tiny_pyramid", {"embed_dim": 128, "depth": 4, "patch_size": 8}),
    DEIT: ("deit_pyramid", {"embed_dim": 105, "depth": 4, "patch_size": 8}),
    RESNET: ("resnet18", {"channels": (16, 32, 64, 128)}),
}
WHOLE, PLAIN, STEPS, SHRUNK, WINDOWS = "whole", "plain", "steps", "shrunk", "windows"
WAYS = (WHOLE, PLAIN, STEPS, SHRUNK, WINDOWS)
SMALL = 16  # letters of less than this height in pixels, two patches, are small


@dataclass(frozen=True)
class Experiment:
    """The runs, and what they share."""

    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 1400
    batch: int = 4
    crop: int = 64
    """Height and width of the crops of training in pixels."""
    sizes: tuple[int, ...] = (96, 128, 192, 384)
    """Heights and widths of the images that are evaluated, beside that of the crops."""
    stride: int = 32
    """Distance of windows in pixels."""
    scenes: Scenes = field(default_factory=Scenes)

    def search(self) -> list[Row]:
        """Return the runs that choose rates."""
        return product(backbone=list(BACKBONES), lr=self.rates, seed=[CHOICE_SEED])

    def reported(self, rows: Sequence[Row]) -> list[Row]:
        """Return the runs to report, given those of the search."""
        runs = []
        for backbone in BACKBONES:
            tried = select(rows, backbone=backbone, seed=CHOICE_SEED)
            rate = max(tried, key=lambda row: row["scores"][str(self.crop)][WHOLE]["miou"])["lr"]
            runs += product(backbone=[backbone], lr=[rate], seed=self.seeds)
        return runs


# ---------------------------------------------------------------------------------------- training


def segmenter(settings: Experiment, backbone: str) -> nn.Module:
    """Return a new model of examples/segment.py.

    Args:
        settings: Of crops and classes.
        backbone: Key of BACKBONES.
    """
    name, kwargs = BACKBONES[backbone]
    args = argparse.Namespace(
        backbone=name, model_kwargs=kwargs, img_size=settings.crop, weights=None
    )
    return _example().segmenter(args, settings.scenes.classes)


def _example() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("segment")


def crops(rng: np.random.Generator, data: Split, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return random crops of random scenes.

    Args:
        rng: Source of randomness.
        data: Scenes.
        count: Number of crops B.
        size: Height and width.

    Returns:
        Images (B, 3, size, size), 0 to 1, and the classes of their pixels, int64 (B, size, size).
    """
    images, classes = [], []
    for _ in range(count):
        scene = rng.integers(len(data.images))
        y, x = rng.integers(0, data.images.shape[1] - size + 1, 2)
        where = np.s_[scene, y : y + size, x : x + size]
        images.append(data.images[where])
        classes.append(data.classes[where])
    return as_images(np.stack(images)), torch.from_numpy(np.stack(classes)).long()


def as_images(pixels: np.ndarray) -> Tensor:
    """Return uint8 pixels (B, H, W, 3) as images (B, 3, H, W) of 0 to 1."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def train(
    settings: Experiment, data: Split, backbone: str, lr: float, seed: int
) -> tuple[nn.Module, Row]:
    """Train a segmenter on random crops.

    Args:
        settings: Steps, batch and crops.
        data: Scenes to train on.
        backbone: Key of BACKBONES.
        lr: Highest learning rate.
        seed: Of weights and crops.

    Returns:
        The model in evaluation mode, and its figures.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model, loss_of = segmenter(settings, backbone), _example().loss_of
    optimizer = create_optimizer_v2(model, "adamw", lr=lr, weight_decay=0.05)
    schedule = OneCycleLR(optimizer, lr, settings.steps, pct_start=0.1, cycle_momentum=False)
    losses, began = [], time.process_time()
    for _ in range(settings.steps):
        loss = loss_of(model, *crops(rng, data, settings.batch, settings.crop))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(len(losses) // 10, 1) :]
    whole, own = (sum(p.numel() for p in part.parameters()) for part in (model, model[1].encoder))
    return model.eval(), {
        "loss": sum(last) / len(last),
        "train_seconds": time.process_time() - began,
        "parameters": own,
        "head_parameters": whole - own,
    }


def trained(
    settings: Experiment, scenes: Path, backbone: str, lr: float, seed: int
) -> tuple[nn.Module, Row]:
    """Return what ``train`` does, or read it if the same model was trained before.

    Args:
        settings: Steps, batch and crops.
        scenes: File of the scenes; weights are kept beside it.
        backbone: Key of BACKBONES.
        lr: Highest learning rate.
        seed: Of weights and crops.
    """
    told = [scenes.name, settings.steps, settings.batch, settings.crop, BACKBONES[backbone]]
    key = hashlib.sha256(json.dumps([*told, backbone, lr, seed]).encode()).hexdigest()[:12]
    path = scenes.parent / f"weights-{key}.pt"
    if path.exists():
        saved = torch.load(path)
        model = segmenter(settings, backbone).eval()
        model.load_state_dict(saved["model"])
        return model, saved["row"]
    model, row = train(settings, letter_scenes.load(scenes, "train"), backbone, lr, seed)
    saved = {"model": model.state_dict(), "row": row}
    write_atomically(path, lambda file: torch.save(saved, file))
    return model, row


# -------------------------------------------------------------------------------------------- ways


def whole(model: nn.Module, images: Tensor) -> Tensor:
    """Return logits (B, classes, H, W) of images (B, 3, H, W), each at once."""
    return model(images)


def shrunk(model: nn.Module, images: Tensor, crop: int) -> Tensor:
    """Return logits of images resized to ``crop`` pixels, resized back to (B, classes, H, W)."""
    small = F.interpolate(images, (crop, crop), mode="bilinear", antialias=True)
    return F.interpolate(model(small), images.shape[-2:], mode="bilinear")


def windows(model: nn.Module, images: Tensor, crop: int, stride: int) -> Tensor:
    """Return the mean logits (B, classes, H, W) of windows that overlap.

    Args:
        model: Segmenter.
        images: (B, 3, H, W), at least as large as a window.
        crop: Height and width of the windows.
        stride: Distance of windows; the last ones end where the image does.
    """
    height, width = images.shape[-2:]
    corners = [(y, x) for y in _starts(height, crop, stride) for x in _starts(width, crop, stride)]
    parts = torch.stack([images[..., y : y + crop, x : x + crop] for y, x in corners])
    logits = model(parts.flatten(0, 1)).unflatten(0, parts.shape[:2])
    total = images.new_zeros(len(images), logits.shape[2], height, width)
    count = images.new_zeros(height, width)
    for part, (y, x) in zip(logits, corners, strict=True):
        total[..., y : y + crop, x : x + crop] += part
        count[y : y + crop, x : x + crop] += 1
    return total / count


def _starts(length: int, crop: int, stride: int) -> list[int]:
    return sorted({*range(0, length - crop, stride), length - crop})


def ways(
    model: nn.Module, settings: Experiment, size: int
) -> dict[str, Callable[[nn.Module, Tensor], Tensor]]:
    """Return what gives logits of images of a size, by way.

    Args:
        model: Segmenter; only a scan has the ways ``plain`` and ``steps``.
        settings: Of crops and windows.
        size: Height and width of the images.
    """
    found = {WHOLE: whole}
    if size == settings.crop:
        return found
    if any(hasattr(part, "grid_aware") for part in model.modules()):
        found |= {PLAIN: whole, STEPS: whole}
    found[SHRUNK] = functools.partial(shrunk, crop=settings.crop)
    found[WINDOWS] = functools.partial(windows, crop=settings.crop, stride=settings.stride)
    return found


def measure(model: nn.Module, way: str) -> None:
    """Let a scan measure the grid as a way asks for; other models stay as they are."""
    for scan in model.modules():
        if hasattr(scan, "grid_aware"):
            scan.grid_aware = way != PLAIN
            scan.measured_taps = way not in (PLAIN, STEPS)


# -------------------------------------------------------------------------------------- evaluation


def tiles(scene: np.ndarray, size: int) -> np.ndarray:
    """Cut a scene (N, N, ...) into tiles (N^2 / size^2, size, size, ...), row by row."""
    count = len(scene) // size
    cut = scene.reshape(count, size, count, size, *scene.shape[2:])
    return cut.swapaxes(1, 2).reshape(count**2, size, size, *scene.shape[2:])


def assembled(parts: np.ndarray) -> np.ndarray:
    """Undo ``tiles`` of classes: (T, size, size) to (N, N)."""
    count, size = round(len(parts) ** 0.5), parts.shape[1]
    return parts.reshape(count, count, size, size).swapaxes(1, 2).reshape([count * size] * 2)


@dataclass
class Score:
    """What predictions of scenes are worth; a scene is added at a time."""

    confusion: np.ndarray
    """Pixels by true and by predicted class."""
    small: list[float] = field(default_factory=list)
    """Intersection over union of each small letter."""
    large: list[float] = field(default_factory=list)
    """Of each other one."""
    seconds: float = 0.0
    """CPU time of the predictions."""

    def add(self, predicted: np.ndarray, data: Split, scene: int) -> None:
        """Add the predicted classes (N, N) of a scene."""
        true, count = data.classes[scene], len(self.confusion)
        pairs = true.astype(np.int64) * count + predicted
        self.confusion += np.bincount(pairs.ravel(), minlength=count**2).reshape(count, count)
        for number, iou in object_ious(predicted, true, data.objects[scene]).items():
            size = self.small if data.heights[scene, number] < SMALL else self.large
            size.append(iou)

    def figures(self, images: int) -> Row:
        """Return the scores in percent, and CPU milliseconds for each of some images."""
        right = self.confusion.diagonal()
        union = self.confusion.sum(0) + self.confusion.sum(1) - right
        return {
            "miou": 100 * float(np.mean(right / np.maximum(union, 1))),
            "small": 100 * float(np.mean(self.small)),
            "large": 100 * float(np.mean(self.large)),
            "ms": 1000 * self.seconds / images,
        }


def object_ious(predicted: np.ndarray, true: np.ndarray, objects: np.ndarray) -> dict[int, float]:
    """Return the intersection over union of each letter, by its number.

    The prediction that is compared with a letter's mask is that of its class within the letter's box
    and MARGIN pixels around it, where no other letter is.

    Args:
        predicted: Classes, (N, N).
        true: Classes, (N, N).
        objects: Number of the letter of each pixel, 0 for none, (N, N).
    """
    found = {}
    for number, box in enumerate(ndimage.find_objects(objects), 1):
        if box is None:
            continue
        around = tuple(slice(max(s.start - MARGIN, 0), s.stop + MARGIN) for s in box)
        mask = objects[around] == number
        claimed = predicted[around] == true[around][mask][0]
        found[number] = float((mask & claimed).sum() / (mask | claimed).sum())
    return found


@torch.inference_mode()
def evaluate(model: nn.Module, data: Split, settings: Experiment, size: int) -> dict[str, Row]:
    """Return the figures of images of a size, by way.

    Args:
        model: Segmenter in evaluation mode.
        data: Scenes, whose tiles the images are.
        settings: Of crops and windows.
        size: Height and width of the images.
    """
    count = settings.scenes.classes
    predict = ways(model, settings, size)
    scores = {way: Score(np.zeros((count, count), np.int64)) for way in predict}
    for scene, pixels in enumerate(data.images):
        images = as_images(tiles(pixels, size))
        for way, score in scores.items():
            began = time.process_time()
            measure(model, way)
            classes = predict[way](model, images).argmax(1)
            score.seconds += time.process_time() - began
            score.add(assembled(classes.numpy()), data, scene)
    number = len(data.images) * (data.images.shape[1] // size) ** 2
    return {way: score.figures(number) for way, score in scores.items()}


# -------------------------------------------------------------------------------------------- runs


def run(settings: Experiment, scenes: Path, backbone: str, lr: float, seed: int) -> Row:
    """Train a model, or read its weights, and evaluate it.

    Args:
        settings: What the runs share.
        scenes: File of the scenes.
        backbone: Key of BACKBONES.
        lr: Highest learning rate.
        seed: Of weights and crops; with CHOICE_SEED only images of the crops' size are evaluated.

    Returns:
        The figures of ``train``, and those of ``evaluate`` by size and way.
    """
    model, row = trained(settings, scenes, backbone, lr, seed)
    data = letter_scenes.load(scenes, "val")
    sizes = (settings.crop, *(() if seed == CHOICE_SEED else settings.sizes))
    return row | {"scores": {str(size): evaluate(model, data, settings, size) for size in sizes}}


def main() -> None:
    """Run the experiment, or what is missing of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    settings = Experiment()
    scenes = letter_scenes.cached(CACHE, settings.scenes)
    about = {"backbones": BACKBONES, "pixels": letter_scenes.fingerprint(scenes)}
    record = Record(args.output, dataclasses.asdict(settings) | about)
    one = functools.partial(run, settings, scenes)
    run_all(record, one, settings.search(), args.jobs)
    run_all(record, one, settings.reported(record.rows), args.jobs)


if __name__ == "__main__":
    main()
