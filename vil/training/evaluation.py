"""Evaluate a checkpoint or a named model, and write the result as JSON."""

import dataclasses
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.conf import Positional

from vil.messages import counted, printable
from vil.training.distributed import World, connect, versions
from vil.training.engine import FEW_CLASSES, evaluate, interval
from vil.training.errors import ConfigError, DataError, NonFiniteLossError, OutputError, log
from vil.training.files import check_target, write_text
from vil.training.images import Source, fingerprint
from vil.training.listing import choose_exceptions
from vil.training.loader import ValData
from vil.training.passes import ScoringPass
from vil.training.report import model_size
from vil.training.settings import (
    Background,
    Count,
    CropPct,
    DataConfig,
    RunConfig,
    Section,
    ShareBelowOne,
    Text,
    Workers,
)
from vil.training.splits import check_classes, check_same, described, number_as, open_source
from vil.training.subject import Subject, load_subject

_PLACE = ("dataset", "path", "val_split")  # options of data that say where it is
_IMAGES = ("background", "exif_rotation", "decoder", "max_pixels")  # options of an ImageSpec
_NAMED_OPTIONS = ("model", "crop_pct", "amp")  # in the name of the result, with those of data
_SAME_RESULT = ("path", "dataset", "validation_batch_size", "num_workers")  # except for these
BATCH_SIZE = 128  # default if no checkpoint sets it
MAX_PRINTED = 20  # wrong images, and kinds of mistakes


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig(Section):
    """Validation data; None keeps the value of the checkpoint."""

    dataset: Literal["digits", "folder", "wds"] | None = None
    """scikit-learn's digits, one folder per class, or webdataset shards."""
    path: Text | None = None
    """Root folder of the data."""
    val_split: Text | None = None
    """Sub-folder (folder), or shards (wds), of the images."""
    val_fraction: ShareBelowOne | None = None
    """Evaluate on the images that training with this fraction holds out; 0 uses val_split. None is
    0 for another path or val_split than the checkpoint's."""
    validation_batch_size: Count | None = None
    """Images per process and step."""
    max_pixels: Count | None = None
    """Maximum pixels of an image."""
    max_bad_images: ShareBelowOne | None = None
    """Maximum fraction of unreadable images, which are left out."""
    background: Background | None = None
    """Colour behind transparent pixels."""
    exif_rotation: bool | None = None
    """Apply the EXIF orientation of photographs."""
    decoder: Literal["torchvision", "pillow"] | None = None
    """Package that decodes and resizes JPEG files."""
    num_workers: Workers | None = None
    """Number of data-loading workers."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluate a vision model."""

    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Weights: a checkpoint of train_imagenet.py, a folder of release.py, a .safetensors file, a
    file with a state dict (official Vision Mamba weights), local-dir:FOLDER, hf-hub:NAME, or a timm
    model's name."""
    model: Text | None = None
    """timm model that the weights belong to, if SOURCE does not name it."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    img_size: Count | None = None
    """Height and width in pixels; None keeps the size of training."""
    crop_pct: CropPct | None = None
    """Resize to img_size / crop_pct and crop the centre; None keeps the value of training."""
    ema: bool = False
    """Evaluate the averaged weights (EMA) instead of the raw ones."""
    amp: bool | None = None
    """Autocast to bfloat16; None keeps the setting of training."""
    cuda_graphs: bool = True
    """On a GPU, record the model in CUDA graphs, one for each shape of a batch."""
    per_class: bool = False
    """Also report the top-1 accuracy of each class, the mistakes (a confusion matrix), and the
    wrong images."""
    device: Text = "auto"
    """cpu, cuda, ...; auto uses CUDA if available."""
    json: Text | None = None
    """File for the result; None names it after the checkpoint and the options, and writes none if
    SOURCE is a name. Only an earlier evaluation is overwritten, never another file."""


def evaluate_as(options: EvalConfig) -> None:
    """Evaluate with the given options, print the result, and write it.

    If a launcher started several processes, each evaluates a part of the images.

    Raises:
        ConfigError: If an option is invalid, or the weights do not exist or do not fit the model.
        DataError: If the data is missing or damaged, processes have different data or settings, or
            the class names of data and model differ.
        NonFiniteLossError: If the loss is NaN or infinite.
        OutputError: If the weights cannot be read, or the result cannot be written.
    """
    subject = load_subject(
        options.checkpoint,
        options.model,
        options.img_size,
        options.ema,
        crop_pct=options.crop_pct,
        **{key: getattr(options.data, key) for key in _IMAGES},
    )
    trained_on = DataConfig(validation_batch_size=BATCH_SIZE)
    if subject.settings is not None:
        trained_on = subject.settings.data
    data = place_of_data(trained_on, options.data)
    run = subject.run_options(options.device, options.amp, options.cuda_graphs)
    place, path = describe_place(data), json_path(options)
    with connect(run) as world:
        if world.is_main and path is not None:
            check_target(path, "--json")
            _refuse_others(path, place if options.json is None else {})
        source = open_data(subject, data, world)
        held_out, fraction = subject.weights.val_fraction, data.val_fraction
        chosen = (options.data.val_fraction, options.data.val_split) != (None, None)
        if held_out and (fraction > held_out or not (fraction or chosen)):
            count = counted(source.num_images, "image")
            which = f"{count}, {fraction:g}" if fraction else f"all {count}"
            log.warning(
                f"{which} of {printable(str(data.path))} are scored. The run held out "
                f"{held_out:g} of its images; if these are the same, it was trained on the others: "
                f"--data.val-fraction {held_out:g} scores the held-out ones"
            )
        result = {
            "checkpoint": _whole_name(options.checkpoint),
            "model": subject.name,
            "ema": options.ema,
            "epoch": subject.weights.epoch,
            "steps_after_epoch": subject.weights.steps_after,
            **place,
            **score(subject, source, data, run, world, options.per_class),
        }
    if world.is_main:
        log.info(describe(result))
        if path is not None:
            write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
            log.info(f"written  {path}")


def place_of_data(trained_on: DataConfig, options: EvalDataConfig) -> DataConfig:
    """Return where the images to score are, with limits: what the options state, else the run's.

    If an option names another place than the run's, all images of a split there are scored.
    """
    stated = {key: v for key, v in dataclasses.asdict(options).items() if v is not None}
    chosen = {key: value for key, value in stated.items() if key not in _IMAGES}
    if chosen.get("dataset") == trained_on.dataset:
        del chosen["dataset"]
    paths = {path and Path(path).resolve() for path in (trained_on.path, options.path)}
    if "dataset" not in chosen and len(paths) == 1:
        chosen.pop("path", None)  # the run's own folder, whose val_fraction applies
    if "dataset" in chosen:
        chosen = {"path": None} | chosen  # the path of another data set does not apply
    dataset = chosen.get("dataset", trained_on.dataset)
    if "path" in chosen and dataset == "folder" and "val_split" not in chosen:
        names = [trained_on.val_split, "val"]
        if not any(Path(chosen["path"], name).is_dir() for name in names):
            chosen["val_split"] = "."  # the classes are in the folder itself
    if chosen.keys() & {*_PLACE}:
        chosen = {"val_fraction": 0.0} | chosen  # all images of a split that is named
    data = dataclasses.replace(trained_on, **chosen)
    if data.dataset != "digits" and data.path is None:
        raise ConfigError(f"data.dataset {data.dataset} needs --data.path, the root folder of the data")
    return data


def open_data(subject: Subject, data: DataConfig, world: World) -> Source:
    """Open the images to score; raise DataError unless their classes are the model's."""
    names, num_classes = subject.weights.label_names, subject.model.num_classes
    with world.main_first():  # rank 0 writes the shard indexes
        exceptions = choose_exceptions(data, subject.weights)
        source = open_source(data, num_classes, False, exceptions)
    own = None if subject.settings is None else subject.settings.data
    if own is not None and all(getattr(own, key) == getattr(data, key) for key in _PLACE):
        number_as(names, source)  # a class of the run may lack held-out images
    check_classes({"model": names, "data": source.classes})
    if source.classes is not None and len(source.classes) != num_classes:
        raise DataError(
            f"the data has {len(source.classes)} classes and the model, whose class names are unknown, {num_classes}",
            everywhere=True,
        )
    return source


def score(
    subject: Subject,
    source: Source,
    data: DataConfig,
    run: RunConfig,
    world: World,
    per_class: bool = False,
) -> dict[str, Any]:
    """Evaluate the model; return the scores and what they depend on, for ``evaluate_as``."""
    images, model = subject.images, subject.model.to(world.device)
    tensors = [value.cpu().reshape(-1) for value in model.state_dict().values()]
    settings = {
        f"{name}.{key}": value
        for name, part in (("images", images), ("data", data), ("run", run))
        for key, value in dataclasses.asdict(part).items()
    }
    weights = fingerprint(*(value.view(torch.uint8).numpy() for value in tensors))
    check_same(world, described(settings, {"validation": source}) | {"weights": weights})
    val_data = ValData(source, images, data, world)
    judged: list[torch.Tensor] | None = [] if per_class else None
    [total] = evaluate([ScoringPass(model, run, world.device)], val_data, judged)
    if not math.isfinite(total.loss):
        raise NonFiniteLossError(
            f"the validation loss is {total.loss} with the weights {subject.origin}",
            everywhere=True,
        )
    names = source.classes or subject.weights.label_names
    height, width = images.img_size
    scores = total._asdict()
    if model.num_classes <= FEW_CLASSES:
        del scores["top5"]
    return {
        "img_size": height if height == width else [height, width],
        "crop_pct": images.crop_pct,
        "crop_mode": images.crop_mode,
        "interpolation": images.interpolation,
        "amp": run.amp,
        "weights": subject.origin,
        **scores,
        "top1_interval": [*interval(total.top1, total.num_images)],
        "unreadable_images": len(val_data.left_out),
        **({} if judged is None else _by_class(names, model.num_classes, judged, val_data)),
        **model_size(model, images),
        "gmacs_count_scans": True,
        "device": str(world.device),
        "versions": versions(),
    }


def describe_place(data: DataConfig) -> dict[str, str | None]:
    """Return what a result says of its images: dataset, path and split."""
    held_out = f"{data.val_fraction:g} of the images"
    return {
        "dataset": data.dataset,
        "path": None if data.path is None else _whole_name(data.path),
        "split": held_out if data.val_fraction else data.val_split,
    }


def _by_class(
    names: tuple[str, ...] | None, num_classes: int, judged: list[torch.Tensor], data: ValData
) -> dict[str, Any]:
    """Return accuracy by class, mistakes by class and predicted class, and the wrong images.

    Every rank calls this. Names that several classes share get the class index.
    """
    own = torch.cat(judged, 1).cpu().T.tolist() if judged else []
    ranks = data.world.gather(list(zip(data.indices, own, strict=True)))
    rows = sorted(row for rank in ranks for row in rank)
    names = names or tuple(map(str, range(num_classes)))
    count = Counter(names)
    labels = [n if count[n] == 1 else f"{n} (class {i})" for i, n in enumerate(names)]
    images = Counter(true for _, (true, _) in rows)
    pairs = Counter((true, predicted) for _, (true, predicted) in rows)
    confusion: dict[str, dict[str, int]] = {}
    for (true, predicted), number in sorted(pairs.items()):
        if true != predicted:
            confusion.setdefault(labels[true], {})[labels[predicted]] = number
    return {
        "per_class": {
            labels[true]: {"top1": 100 * pairs[true, true] / number, "num_images": number}
            for true, number in sorted(images.items())
        },
        "confusion": confusion,
        "wrong": [
            {"image": data.source.name(place), "class": labels[true], "predicted": labels[predicted]}
            for place, (true, predicted) in rows
            if true != predicted
        ],
    }


def json_path(options: EvalConfig) -> Path | None:
    """Return the path of the result file, named after the options that the result depends on."""
    checkpoint = Path(options.checkpoint)
    if options.json is not None:
        return Path(options.json)
    if not checkpoint.is_file():
        return None
    parts = [checkpoint.stem, *(["ema"] if options.ema else [])]
    parts += [] if options.img_size is None else [f"{options.img_size}px"]
    if options.data.path is not None:
        parts.append(Path(options.data.path).resolve().name)
    asked = {key: getattr(options, key) for key in _NAMED_OPTIONS} | dataclasses.asdict(options.data)
    for key, value in asked.items():  # a sweep over an option keeps all of its results
        if value is not None and key not in _SAME_RESULT:
            parts.append(re.sub(r"[^\w.]+", "-", f"{key}-{value}").strip("-."))
    parts += ["per-class"] if options.per_class else []
    return checkpoint.with_name("-".join([*parts, "eval.json"]))


def _refuse_others(path: Path, result: dict[str, Any]) -> None:
    """Raise OutputError unless a path is free, or an evaluation on the data of ``result``."""
    if not os.path.lexists(path):
        return
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        earlier = None
    if not isinstance(earlier, dict) or not earlier.keys() >= {"checkpoint", "top1", "versions"}:
        raise OutputError(f"{path} exists and is not an evaluation; choose another --json")
    for key in ("dataset", "path", "split"):
        if key in result and earlier.get(key) != result[key]:
            raise OutputError(
                f"{path} has the evaluation of other data ({key} {earlier.get(key)}); choose another --json"
            )


def describe(result: dict[str, Any]) -> str:
    """Format the result as text."""
    installed = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    low, high = result["top1_interval"]
    top5 = f"top-5 {result['top5']:.2f}%   " if "top5" in result else ""
    lines = [
        f"model    {result['model']} at {result['img_size']} px",
        f"weights  {result['weights']}",
        f"data     {printable(result['path'] or result['dataset'])}, "
        f"{'all images' if result['split'] == '.' else result['split']}",
        f"top-1    {result['top1']:.2f}% (95% interval {low:.2f} to {high:.2f})   {top5}"
        f"loss {result['loss']:.4f}   on {counted(result['num_images'], 'image')}",
        f"cost     {result['params']:,} parameters, {result['gmacs']:.4g} GMACs with scans, "
        f"{result['images_per_s']:,.0f} images/s on {result['device']}",
        f"versions {installed}",
    ]
    rows = sorted(result.get("per_class", {}).items(), key=lambda item: item[1]["top1"])
    lines += [
        f"class    {row['top1']:6.2f}%   of {counted(row['num_images'], 'image')}   {printable(name)}"
        for name, row in rows  # worst class first
    ]
    mistakes = [
        (number, true, predicted)
        for true, others in result.get("confusion", {}).items()
        for predicted, number in others.items()
    ]
    lines += [
        f"mistake  {number:,} x {printable(true)} taken for {printable(predicted)}"
        for number, true, predicted in sorted(mistakes, key=lambda one: -one[0])[:MAX_PRINTED]
    ]
    wrong = result.get("wrong", [])
    lines += [f"wrong    {one['image']}: {printable(one['predicted'])}" for one in wrong[:MAX_PRINTED]]
    if len(wrong) > MAX_PRINTED:
        lines.append(f"wrong    and {len(wrong) - MAX_PRINTED:,} more images, in the JSON file")
    return "\n".join(lines)


def _whole_name(source: str) -> str:
    """Return the absolute path of a file or folder, and any other source unchanged."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source
