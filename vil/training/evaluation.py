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

import timm
import torch
import tyro
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn
from tyro.conf import Positional

from vil.backbone import VisionLonghorn
from vil.messages import counted, one_line, printable
from vil.preprocess import image_options
from vil.training.distributed import World, connect, versions
from vil.training.engine import FEW_CLASSES, evaluate, interval
from vil.training.errors import ConfigError, DataError, NonFiniteLossError, OutputError, log
from vil.training.files import check_target, write_text
from vil.training.images import fingerprint
from vil.training.loader import ValData, check_same, described, number_as, open_source
from vil.training.model import build_model
from vil.training.passes import ScoringPass
from vil.training.recipes import from_dict
from vil.training.report import model_size
from vil.training.resolve import choose_exceptions, fill_from_weights, read_source
from vil.training.sampler import seed_everything
from vil.training.settings import (
    Background,
    Count,
    CropPct,
    DataConfig,
    ModelConfig,
    RunConfig,
    Section,
    ShareBelowOne,
    Text,
    TrainConfig,
    Workers,
)
from vil.weights.build import model_with
from vil.weights.sources import Weights, is_model_name, no_weights

_PLACE = ("dataset", "path", "val_split")  # options of data that say where it is
_NAMED_OPTIONS = ("model", "crop_pct", "amp")  # in the name of the result, with those of data
_SAME_RESULT = ("path", "dataset", "validation_batch_size", "num_workers")  # except for these
_BATCH_SIZE = 128  # default if no checkpoint sets it
_MOST_PRINTED = 20  # wrong images, and kinds of mistakes


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
    """Evaluate on the images that training with this fraction holds out; 0 uses val_split. None is 0 for another path
    or val_split than the checkpoint's."""
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
    """Weights: a checkpoint of train_imagenet.py, a folder of release.py, a .safetensors file, a file with
    a state dict (official Vision Mamba weights), local-dir:FOLDER, hf-hub:NAME, or a timm model's name."""
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
    """Also report the top-1 accuracy of each class, the mistakes (a confusion matrix), and the wrong images."""
    device: Text = "auto"
    """cpu, cuda, ...; auto uses CUDA if available."""
    json: Text | None = None
    """File for the result; None names it after the checkpoint and the options, and writes none if SOURCE is a name.
    Only an earlier evaluation is overwritten, never another file."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate and its evaluation settings."""

    model: nn.Module
    config: TrainConfig
    weights: str
    """Description of where the weights come from."""
    source: Weights | None
    """The source of the weights, without its tensors; None if they are random."""
    label_names: tuple[str, ...] | None
    """Names of the classes; None if unknown."""
    own_data: bool = False
    """Whether the data are those of its run, because no option names others."""
    fraction: float = 0.0
    """data.val_fraction of the run, if images are scored that it may have trained on; else 0."""


def load_subject(options: EvalConfig) -> Subject:
    """Build the model with its weights and settings; raises ConfigError or OutputError as in ``evaluate_as``."""
    name = options.checkpoint
    if is_model_name(name) and not timm.is_model_pretrained(name):
        if options.ema or options.model is not None:
            raise ConfigError(f"--ema and --model need weights, but timm has none for {name}")
        config = fill_from_weights(_foreign_config(name), no_weights(name))
        config = _with_options(config, options)
        seed_everything(config.run.seed)  # same random weights on all ranks
        model = build_model(config.model)
        config = config.changed("model", num_classes=model.num_classes)
        return Subject(model, config, "RANDOM (timm has no pretrained weights)", None, None)
    weights = read_source(name, options.ema)
    if weights.config is None:
        if options.model is None and weights.architecture is None:
            raise ConfigError(f"--model is missing: {name} does not name its timm model")
        config = fill_from_weights(_foreign_config(options.model, options.img_size), weights)
        config = config.changed("data", **image_options(weights.pretrained_cfg))
    else:
        config = from_dict(weights.config, f"{name}: ")
    config = _with_options(config, options)
    named = any(getattr(options.data, key) is not None for key in _PLACE)
    scored, held_out = config.data.val_fraction, weights.val_fraction
    chosen = (options.data.val_fraction, options.data.val_split) != (None, None)
    model, line = _model(weights, config, options)
    config = config.changed("model", num_classes=model.num_classes)
    return Subject(
        model,
        config,
        line,
        dataclasses.replace(weights, state_dict={}),
        weights.label_names,
        own_data=weights.config is not None and not named,
        fraction=held_out if scored > held_out or not (scored or chosen) else 0.0,
    )


def evaluate_as(options: EvalConfig) -> None:
    """Evaluate with the given options, print the result, and write it.

    If a launcher started several processes, each evaluates a part of the images.

    Raises:
        ConfigError: If an option is invalid, or the weights do not exist or do not fit the model.
        DataError: If the data is missing or damaged, or processes have different data or settings. Also if
            the class names of data and model match only partly.
        NonFiniteLossError: If the loss is NaN or infinite.
        OutputError: If the weights cannot be read, or the result cannot be written.
    """
    subject, path = load_subject(options), json_path(options)
    with connect(subject.config.run) as world:
        if world.is_main and path is not None:
            check_target(path, "--json")
            _refuse_others(path, _data_of(subject.config) if options.json is None else {})
        result = run_evaluation(subject, options, world)
    if world.is_main:
        log.info(describe(result))
        if path is not None:
            write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
            log.info(f"written  {path}")


def run_evaluation(subject: Subject, options: EvalConfig, world: World) -> dict[str, Any]:
    """Evaluate the model and return the result to print and write; raises the errors of ``evaluate_as``."""
    config = subject.config
    if config.data.dataset in ("folder", "wds") and config.data.path is None:
        raise ConfigError(
            f"data.dataset {config.data.dataset} needs --data.path, the root folder of the data"
        )
    with world.main_first():
        exceptions = choose_exceptions(config, subject.source)
        source = open_source(config.data, config.model, False, exceptions, other_classes=True)
    if subject.own_data:
        number_as(subject.label_names, source)
    if subject.fraction:
        part, count = config.data.val_fraction, counted(source.num_images, "image")
        which = f"{count}, {part:g}" if part else f"all {count}"
        log.warning(
            f"{which} of {printable(str(config.data.path))} are scored. The run held out {subject.fraction:g} of its "
            f"images; if these are the same, it was trained on the others: --data.val-fraction {subject.fraction:g} "
            f"scores the held-out ones"
        )
    tensors = [value.cpu().reshape(-1) for value in subject.model.state_dict().values()]
    weights = fingerprint(*(value.view(torch.uint8).numpy() for value in tensors))
    check_same(world, described(config, {"validation": source}) | {"weights": weights})
    data, model = ValData(config, source, world), subject.model.to(world.device)
    places = _places(_trained_names(subject, source.classes), source.classes, model.num_classes)
    scored = model if places is None else nn.Sequential(model, _Columns(places).to(world.device))
    count = model.num_classes if places is None else len(places)
    judged: list[torch.Tensor] | None = [] if options.per_class else None
    scoring_pass = ScoringPass(scored, config.run, world.device)
    [score] = evaluate([scoring_pass], data, judged)
    if not math.isfinite(score.loss):
        raise NonFiniteLossError(
            f"the validation loss is {score.loss} with the weights of {options.checkpoint}",
            everywhere=True,
        )
    names = source.classes or subject.label_names or tuple(map(str, range(model.num_classes)))
    low, high = interval(score.top1, score.num_images)
    taken = subject.source
    return {
        "checkpoint": _whole_name(options.checkpoint),
        "model": config.model.name,
        "ema": options.ema,
        "epoch": taken and taken.epoch,
        "steps_after_epoch": taken and taken.steps_after,
        **_data_of(config),
        "img_size": config.model.img_size,
        "crop_pct": config.data.crop_pct,
        "crop_mode": config.data.crop_mode,
        **({} if places is None else {"scored_classes": f"{count} of {model.num_classes}"}),
        "interpolation": config.data.interpolation,
        "amp": config.run.amp,
        "weights": subject.weights,
        **{
            key: value
            for key, value in score._asdict().items()
            if key != "top5" or count > FEW_CLASSES
        },
        "top1_interval": [low, high],
        "unreadable_images": len(data.left_out),
        **({} if judged is None else _by_class(names, judged, data)),
        **model_size(model, config),
        "gmacs_count_scans": True,
        "device": str(world.device),
        "versions": versions(),
    }


def _data_of(config: TrainConfig) -> dict[str, str | None]:
    """Return what the result says of its images."""
    data = config.data
    held_out = f"{data.val_fraction:g} of the images"
    return {
        "dataset": data.dataset,
        "path": None if data.path is None else _whole_name(data.path),
        "split": held_out if data.val_fraction else data.val_split,
    }


def _by_class(names: tuple[str, ...], judged: list[torch.Tensor], data: ValData) -> dict[str, Any]:
    """Return accuracy by class, mistakes by class and predicted class, and the wrong images; every rank calls this.

    Names that several classes share get the class index.
    """
    own = torch.cat(judged, 1).cpu().T.tolist() if judged else []
    told = data.world.gather(list(zip(data.indices, own, strict=True)))
    rows = sorted(row for rank in told for row in rank)
    count, labels = Counter(names), []
    for index, name in enumerate(names):
        labels.append(name if count[name] == 1 else f"{name} (class {index})")
    images = Counter(true for _, (true, _) in rows)
    pairs = Counter((true, found) for _, (true, found) in rows)
    confusion: dict[str, dict[str, int]] = {}
    for (true, found), number in sorted(pairs.items()):
        if true != found:
            confusion.setdefault(labels[true], {})[labels[found]] = number
    return {
        "per_class": {
            labels[true]: {"top1": 100 * pairs[true, true] / number, "num_images": number}
            for true, number in sorted(images.items())
        },
        "confusion": confusion,
        "wrong": [
            {"image": data.source.name(place), "class": labels[true], "predicted": labels[found]}
            for place, (true, found) in rows
            if true != found
        ],
    }


def json_path(options: EvalConfig) -> Path | None:
    """Return the path of the result file; its name includes the options of the command that the result depends on."""
    checkpoint = Path(options.checkpoint)
    if options.json is not None:
        return Path(options.json)
    if not checkpoint.is_file():
        return None
    parts = [checkpoint.stem, *(["ema"] if options.ema else [])]
    parts += [] if options.img_size is None else [f"{options.img_size}px"]
    if options.data.path is not None:
        parts.append(Path(options.data.path).resolve().name)
    asked = {key: getattr(options, key) for key in _NAMED_OPTIONS} | dataclasses.asdict(
        options.data
    )
    for key, value in asked.items():  # a sweep over an option keeps all of its results
        if value is not None and key not in _SAME_RESULT:
            parts.append(re.sub(r"[^\w.]+", "-", f"{key}-{value}").strip("-."))
    parts += ["per-class"] if options.per_class else []
    return checkpoint.with_name("-".join([*parts, "eval.json"]))


def _refuse_others(path: Path, result: dict[str, Any]) -> None:
    """Raise OutputError if a path exists and is not an earlier evaluation, on the data that ``result`` states."""
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
        (number, true, found)
        for true, others in result.get("confusion", {}).items()
        for found, number in others.items()
    ]
    lines += [
        f"mistake  {number:,} x {printable(true)} taken for {printable(found)}"
        for number, true, found in sorted(mistakes, key=lambda one: -one[0])[:_MOST_PRINTED]
    ]
    wrong = result.get("wrong", [])
    lines += [
        f"wrong    {one['image']}: {printable(one['predicted'])}" for one in wrong[:_MOST_PRINTED]
    ]
    if len(wrong) > _MOST_PRINTED:
        lines.append(f"wrong    and {len(wrong) - _MOST_PRINTED:,} more images, in the JSON file")
    return "\n".join(lines)


def _whole_name(source: str) -> str:
    """Return the absolute path of a file or folder, and any other source unchanged."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source


def _trained_names(subject: Subject, found: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the model's class names; ImageNet's if it has none, as many classes, and the data has such names."""
    subset = infer_imagenet_subset(subject.model)
    if subject.label_names is not None or subset is None or found is None:
        return subject.label_names
    names = tuple(ImageNetInfo(subset).label_names())
    return names if set(found) <= set(names) else None


def _places(
    trained: tuple[str, ...] | None, found: tuple[str, ...] | None, num_classes: int
) -> list[int] | None:
    """Return the model's outputs for the classes of the data, matched by name; None for all outputs in their order.

    If no name matches, only warn: the names may be synonyms, which only the user can know. Raises DataError if names match
    only partly, a name occurs twice in the model, or no name and no number matches.
    """
    if None in (trained, found) or trained == found:
        if found is not None and len(found) != num_classes:
            raise DataError(
                f"the data has {len(found)} classes and the model, whose class names are unknown, "
                f"{num_classes}",
                everywhere=True,
            )
        return None
    common = set(trained) & set(found)
    if not common and len(found) == num_classes:
        log.warning(
            f"no class name of the data occurs in the model: class 0 is {printable(found[0])} in the "
            f"data and {printable(trained[0])} in the model; the scores are valid only if these names "
            f"are synonyms"
        )
        return None
    strange = [name for name in found if trained.count(name) != 1]
    if strange:
        occurs = "occurs twice" if strange[0] in common else "does not occur"
        raise DataError(
            f"class {printable(strange[0])} of the data {occurs} in the model, which has "
            f"{num_classes} classes; {len(strange)} of the {len(found)} classes do not match by name",
            everywhere=True,
        )
    log.info(
        f"classes  {len(found)} of the model's {num_classes}, matched by name; others are ignored"
    )
    return [trained.index(name) for name in found]


class _Columns(nn.Module):
    """Select outputs of a model."""

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor(places, dtype=torch.int64))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, self.places]


def _model(weights: Weights, config: TrainConfig, options: EvalConfig) -> tuple[nn.Module, str]:
    """Build the model; raise ConfigError unless the weights include its head."""
    size = {} if options.img_size is None else {"img_size": options.img_size}
    try:
        model, line = model_with(weights, options.model, **size)
        # If the model accepts any size and resizes these images, keep the weights' own grid and positions.
        if size and isinstance(model, VisionLonghorn) and model.dynamic_img_size:
            embed = model.patch_embed
            if model.grid_inside(embed.img_size) != embed.grid_size:
                model, line = model_with(weights, options.model)
    except ValueError as error:
        raise ConfigError(f"cannot evaluate {options.checkpoint}: {one_line(error)}") from error
    if "; new " in line:
        raise ConfigError(f"{options.checkpoint} has no head for {config.model.name}: {line}")
    return model, line


def _foreign_config(name: str | None, img_size: int | None = None) -> TrainConfig:
    """Return the settings for a model that this package did not train."""
    data = DataConfig(validation_batch_size=_BATCH_SIZE, decoder="pillow")
    return TrainConfig(model=ModelConfig(name=name, img_size=img_size), data=data)


def _with_options(config: TrainConfig, options: EvalConfig) -> TrainConfig:
    """Merge the command line into the configuration."""
    chosen = {k: v for k, v in dataclasses.asdict(options.data).items() if v is not None}
    own = config.data
    if chosen.get("dataset") == own.dataset:
        del chosen["dataset"]
    paths = {path and Path(path).resolve() for path in (own.path, options.data.path)}
    if "dataset" not in chosen and len(paths) == 1:
        chosen.pop("path", None)  # the run's own folder, whose val_fraction applies
    if chosen.get("dataset", config.data.dataset) != config.data.dataset:
        chosen = {"path": None} | chosen  # the path of another data set does not apply
    if "path" in chosen and chosen.get("dataset", config.data.dataset) == "folder":
        names = [chosen.get("val_split", config.data.val_split), "val"]
        if "val_split" not in chosen and not any(Path(chosen["path"], n).is_dir() for n in names):
            chosen["val_split"] = "."  # the classes are in the folder itself
    if chosen.keys() & {*_PLACE}:
        chosen = {"val_fraction": 0.0} | chosen  # all images of a split that is named
    if options.crop_pct is not None:
        chosen["crop_pct"] = options.crop_pct
    amp = config.run.amp if options.amp is None else options.amp
    size = config.model.img_size if options.img_size is None else options.img_size
    run = RunConfig(
        device=options.device,
        amp=amp,
        cuda_graphs=options.cuda_graphs,
        num_threads=config.run.num_threads,
    )
    config = config.changed("model", img_size=size).changed("data", **chosen)
    return from_dict(dataclasses.asdict(dataclasses.replace(config, run=run)), "")
