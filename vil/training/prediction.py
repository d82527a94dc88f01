"""Predict the classes of image files, and print them or write them as a CSV table."""

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import tyro
from torch.utils.data import DataLoader
from tqdm import tqdm
from tyro.conf import Positional

from vil.messages import counted, named, printable
from vil.training.distributed import World, connect
from vil.training.errors import ConfigError, DataError, OutputError, log
from vil.training.files import check_target
from vil.training.images import Source
from vil.training.listing import check_found, files_below
from vil.training.loader import EvaluationImages, collate, loader_arguments
from vil.training.passes import ScoringPass
from vil.training.pulse import Pulse
from vil.training.settings import Count, RunConfig, Section, Text, Workers
from vil.training.subject import Subject, load_subject

_FIRST_COLUMNS = ("path", "error")
MAX_NAMED = 5  # unreadable images in the last line; their own lines or rows name all


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Section):
    """Predict the classes of photographs. Prints a line for each, or writes them to --output."""

    model: Annotated[Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A folder of release.py, a checkpoint of train_imagenet.py, or anything else that eval.py takes."""
    images: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE_OR_FOLDER")]
    """Image files, and folders whose images are taken with those of their sub-folders."""
    top: Count = 5
    """Number of classes per image."""
    output: Text | None = None
    """CSV file for the predictions, a row for each image. After an interruption it has the rows so far."""
    img_size: Count | None = None
    """Height and width in pixels; None keeps the size of training."""
    ema: bool = False
    """Use the averaged weights (EMA) of a checkpoint."""
    amp: bool | None = None
    """Autocast to bfloat16; None keeps the setting of training."""
    batch_size: Count = 64
    """Images per step."""
    num_workers: Workers | None = None
    """Data-loading workers; 0 loads in this process. None uses one per core, at most 8."""
    device: Text = "auto"
    """cpu, cuda, ...; auto uses CUDA if available."""
    overwrite: bool = False
    """Replace files that this program did not write."""


class Prediction(NamedTuple):
    """The likeliest classes of an image, or why it has none."""

    path: Path
    error: str = ""
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()


def predict_as(options: PredictConfig) -> None:
    """Predict with the given options, and print or write the results.

    Raises:
        ConfigError: If an option is invalid, or the weights do not exist or do not fit the model.
        DataError: If there are no images, or, after all others are written, if some cannot be read.
        OutputError: If the weights cannot be read, or a file exists or cannot be written.
    """
    paths = _find([Path(name) for name in options.images])
    _check_free(options)
    subject = load_subject(options.model, img_size=options.img_size, ema=options.ema)
    if subject.origin.startswith("RANDOM"):
        raise ConfigError(f"{options.model} has no weights; pass a release or a checkpoint")
    run = subject.run_options(options.device, options.amp)
    with connect(run) as world:
        coming, bad = predictions(subject, paths, options, run, world), []
        if options.output is not None:
            most = min(options.top, subject.model.num_classes)
            coming = _written(coming, options.output, most)
        for one in coming:
            bad += [f"{one.path}: {one.error}"] if one.error else []
            if options.output is None:
                log.info(_line(one))
        count = counted(len(paths), "image")
        log.info(f"{len(paths) - len(bad):,} of {count} read, with {subject.name}")
    if options.output is not None:
        log.info(f"written  {options.output}")
    if bad:
        raise DataError(f"{len(bad)} of {count} cannot be read: {named(bad, MAX_NAMED)}")


def predictions(
    subject: Subject, paths: list[Path], options: PredictConfig, run: RunConfig, world: World
) -> Iterator[Prediction]:
    """Yield the prediction of each image, in order."""
    model = subject.model.to(world.device).eval()
    scoring_pass = ScoringPass(model, run, world.device)
    normalize = subject.images.normalizer(world.device)
    names = subject.weights.label_names or tuple(map(str, range(model.num_classes)))
    loader = DataLoader(
        EvaluationImages(_Photographs(paths), subject.images),
        batch_size=options.batch_size,
        collate_fn=collate,
        **loader_arguments(options.num_workers, world),
    )
    done, pulse = 0, Pulse()
    quiet = options.output is None or not sys.stderr.isatty()  # printed lines show the progress
    with tqdm(total=len(paths), unit=" images", disable=quiet) as bar:
        for images, labels, bad in loader:
            best: Iterator[tuple[list[float], list[int]]] = iter(())
            if len(images):
                with torch.no_grad():
                    logits = scoring_pass(normalize(images)).float()
                top = logits.softmax(1).topk(min(options.top, logits.shape[1]))
                best = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            count = len(labels) + len(bad)
            for index in range(done, done + count):
                if index in bad:
                    yield Prediction(paths[index], bad[index])
                    continue
                shares, places = next(best)
                chosen = tuple(names[place] for place in places)
                yield Prediction(paths[index], "", chosen, tuple(shares))
            bar.update(count)
            done += count
            if bar.disable and options.output is not None:
                pulse.beat(f"predicted {done:,} of {len(paths):,} images")


class _Photographs(Source):
    """Image files without labels."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.labels = paths, np.zeros(len(paths), dtype=np.int64)

    def read(self, index: int) -> bytes:
        return self.paths[index].read_bytes()

    def name(self, index: int) -> str:
        return printable(str(self.paths[index]))


def _find(places: list[Path]) -> list[Path]:
    """Return the given files and the images below the given folders; raise DataError if there are none."""
    paths, others = [], Counter()
    for place in places:
        if place.is_dir():
            paths += files_below(place, others)
        elif place.exists():
            paths.append(place)
        else:
            raise DataError(f"{printable(str(place))} does not exist")
    check_found(paths, others, ", ".join(printable(str(place)) for place in places))
    return paths


def _check_free(options: PredictConfig) -> None:
    """Raise OutputError if the table cannot be written, or would replace another's file."""
    path = Path(options.output or "")
    if options.output is None:
        return
    check_target(path, "--output")
    header = ",".join((*_FIRST_COLUMNS, "class_1", "probability_1")).encode()
    if not options.overwrite and path.exists() and not path.read_bytes().startswith(header):
        raise OutputError(f"{path} exists and is not a file of predict.py; choose another, or pass --overwrite")


def _line(one: Prediction) -> str:
    result = one.error or ", ".join(
        f"{printable(name)} {share:.1%}" for name, share in zip(one.classes, one.probabilities, strict=True)
    )
    return f"{printable(str(one.path))}: {result}"


def _written(predictions: Iterator[Prediction], path: str, most: int) -> Iterator[Prediction]:
    """Yield each prediction after its row is on the disk: path, error, class_1, probability_1, class_2, ..."""
    columns = [name for n in range(1, most + 1) for name in (f"class_{n}", f"probability_{n}")]
    try:
        with open(path, "w", 1, "utf-8", "backslashreplace") as file:  # 1 is one line at a time
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*_FIRST_COLUMNS, *columns))
            for one in predictions:
                pairs = zip(one.classes, one.probabilities, strict=True)
                cells = [cell for name, share in pairs for cell in (name, f"{share:.6f}")]
                cells += [""] * (len(columns) - len(cells))
                writer.writerow((one.path, one.error, *cells))
                yield one
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
