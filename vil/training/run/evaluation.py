"""Evaluate a checkpoint, or a model by name, and record the result as JSON."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vil.backbone import VisionLonghorn
from vil.loading import model_with
from vil.messages import one_line, printable
from vil.training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from vil.training.console import new_console
from vil.training.data.augment import Normalize
from vil.training.data.base import fingerprint
from vil.training.data.batches import ValData
from vil.training.data.draws import seed_everything
from vil.training.data.shared_memory import check_shared_memory
from vil.training.distributed import World, process_group, world_from_environment
from vil.training.errors import ConfigError, DataError, NonFiniteLossError, OutputError
from vil.training.files import write_text
from vil.training.options import EvalConfig
from vil.training.recipes import config_from_dict
from vil.training.run.engine import evaluate
from vil.training.run.preflight import check_ranges
from vil.training.run.report import model_size
from vil.training.run.resolve import fill_from_weights
from vil.training.run.sameness import check_same, described
from vil.training.run.setup import build_model, read_source, resolve_device, versions
from vil.training.run.stopping import opening
from vil.weights import Weights, is_model_name, no_weights

_BATCH_SIZE = 128  # where no checkpoint says


@dataclass(frozen=True)
class Subject:
    """A model to evaluate and the configuration that says how."""

    model: nn.Module
    config: TrainConfig
    weights: str
    """Where the weights come from."""
    epoch: int | None
    label_names: tuple[str, ...] | None
    """Of the classes, None if unknown."""


def load_subject(options: EvalConfig) -> Subject:
    """Build the model with its weights, and the configuration that says how to evaluate it.

    Raises:
        ConfigError: the name is unknown, the weights do not fit it, or an option does not fit.
        OutputError: the source cannot be read.
    """
    name = options.checkpoint
    if is_model_name(name) and not timm.is_model_pretrained(name):
        if options.ema or options.model is not None:
            raise ConfigError(f"--ema and --model need weights, {name} has none")
        config = fill_from_weights(_foreign_config(name), no_weights(name))
        config = _with_options(config, options)
        seed_everything(config.run.seed)  # all processes must draw the same weights
        model = build_model(config.model)
        config = _with_classes(config, model)
        return Subject(model, config, "RANDOM (it has no pretrained ones)", None, None)
    weights = read_source(name, options.ema)
    if weights.config is None:
        if options.model is None and weights.architecture is None:
            raise ConfigError(f"--model is missing: {name} does not say which model it is of")
        config = fill_from_weights(_foreign_config(options.model), weights)
    else:
        config = config_from_dict(weights.config, name)
    config = _with_options(config, options)
    model, line = _model(weights, config, options)
    return Subject(model, _with_classes(config, model), line, weights.epoch, weights.label_names)


def evaluate_as(options: EvalConfig) -> None:
    """Evaluate as the command line says, print the result, and then write it.

    In one of several processes, if a launcher started them: each scores a part of the images.
    """
    world = world_from_environment()
    console = new_console(quiet=not world.is_main)
    subject = load_subject(options)
    path = json_path(subject, options)
    device = resolve_device(subject.config.run, world)
    with process_group(world, device):
        result = run_evaluation(subject, options, device, world, console.print)
    if world.is_main:
        console.print(describe(result))
        if path is not None:
            write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
            console.print(f"written  {path}")


def run_evaluation(
    subject: Subject,
    options: EvalConfig,
    device: torch.device,
    world: World,
    warn: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Score the model and describe what was scored.

    Args:
        subject: The model.
        options: The command line.
        device: What this process computes on.
        world: The processes, connected if there are several.
        warn: Told that the data has other names of classes.

    Returns:
        What is printed and written as JSON.

    Raises:
        DataError: some of the data's classes are the model's, in other places; or processes differ.
        NonFiniteLossError: the loss is NaN or infinite.
    """
    config = subject.config
    with opening(world):
        data = ValData(config, device, world)
        seen = {}
        if world.size > 1:
            tensors = [value.cpu().reshape(-1) for value in subject.model.state_dict().values()]
            weights = fingerprint(*(value.view(torch.uint8).numpy() for value in tensors))
            seen = described({"validation": data.source}, setting=config) | {"weights": weights}
    check_same(world, seen)
    model = subject.model.to(device)
    check_shared_memory(data.shared_bytes, world)
    _check_classes(subject.label_names, data.source.classes, warn)
    by_class = torch.zeros(2, model.num_classes, dtype=torch.float64, device=device)
    normalize = Normalize(config, device)
    [score] = evaluate([model], data, normalize, config.run.amp, by_class=by_class)
    if not math.isfinite(score.loss):
        raise NonFiniteLossError(
            f"the validation loss is {score.loss} with the weights of {options.checkpoint}"
        )
    per_class = {}
    if options.per_class:
        names = data.source.classes or subject.label_names or map(str, range(model.num_classes))
        per_class = {"per_class": _per_class(names, by_class)}
    return {
        **_identity(subject, options),
        "weights": subject.weights,
        **score._asdict(),
        **per_class,
        **model_size(model, config),
        "gmacs_count_scans": True,
        "device": str(device),
        "versions": versions(),
    }


def _identity(subject: Subject, options: EvalConfig) -> dict[str, Any]:
    """Say what is scored on what: evaluations of which this is equal are one that was repeated."""
    config = subject.config
    return {
        "checkpoint": _whole_name(options.checkpoint),
        "model": config.model.name,
        "ema": options.ema,
        "epoch": subject.epoch,
        "dataset": config.data.dataset,
        "path": None if config.data.path is None else _whole_name(config.data.path),
        "split": config.data.val_split,
        "img_size": config.model.img_size,
        "crop_pct": config.data.crop_pct,
        "interpolation": config.data.interpolation,
        "amp": config.run.amp,
    }


def json_path(subject: Subject, options: EvalConfig) -> Path | None:
    """Return where the result goes, having checked that nothing else is there.

    Raises:
        OutputError: the file exists and is not an evaluation of the same, or tells more of it.
    """
    checkpoint = Path(options.checkpoint)
    if options.json is not None:
        path = Path(options.json)
    elif checkpoint.is_file():
        path = checkpoint.with_name(f"{checkpoint.stem}{'-ema' if options.ema else ''}-eval.json")
    else:
        return None
    if os.path.lexists(path):
        try:
            earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError, RecursionError):
            earlier = None
        identity = _identity(subject, options)
        if not isinstance(earlier, dict) or earlier.get("checkpoint") != identity["checkpoint"]:
            raise OutputError(
                f"{path} exists and is not an evaluation of {checkpoint}; choose another --json"
            )
        differing = [
            f"{key} ({earlier.get(key)} -> {value})"
            for key, value in identity.items()
            if earlier.get(key) != value
        ]
        if "per_class" in earlier and not options.per_class:
            differing.append("per_class, which this one does not tell")
        if differing:
            raise OutputError(
                f"{path} is an evaluation with other {', '.join(differing)}; choose another --json"
            )
    return path


def describe(result: dict[str, Any]) -> str:
    """Put the result into words."""
    installed = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"model    {result['model']} at {result['img_size']} px\n"
        f"weights  {result['weights']}\n"
        f"top-1    {result['top1']:.2f}%   top-5 {result['top5']:.2f}%   "
        f"loss {result['loss']:.4f}   on {result['num_images']:,} images\n"
        f"cost     {result['params']:,} parameters, {result['gmacs']:.4g} GMACs with scans, "
        f"{result['images_per_s']:,.0f} images/s on {result['device']}\n"
        f"versions {installed}" + _class_lines(result.get("per_class", {}))
    )


def _per_class(names: Iterable[str], by_class: torch.Tensor) -> dict[str, dict[str, float]]:
    """Return top-1 in percent and the number of images, of each class that has any."""
    return {
        name: {"top1": 100 * hits / images, "num_images": int(images)}
        for name, hits, images in zip(names, *by_class.tolist(), strict=False)
        if images
    }


def _class_lines(per_class: dict[str, dict[str, float]]) -> str:
    """Put the classes into lines, the worst first."""
    rows = sorted(per_class.items(), key=lambda item: item[1]["top1"])
    return "".join(
        f"\nclass    {row['top1']:6.2f}%   of {row['num_images']:,} images   {printable(name)}"
        for name, row in rows
    )


def _whole_name(source: str) -> str:
    """Return the whole path of a file or folder, and any other source as it is."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source


def _check_classes(
    trained: tuple[str, ...] | None,
    found: tuple[str, ...] | None,
    warn: Callable[[str], object],
) -> None:
    """Refuse images of which some classes are the model's, and others not or in another order.

    Other names altogether may be other words for the same, which only who gave them can tell.
    """
    if None in (trained, found) or trained == found:
        return
    pairs = enumerate(zip_longest(found, trained, fillvalue="missing"))
    first, differing = next((i, pair) for i, pair in pairs if len(set(pair)) > 1)
    one, other = map(printable, differing)
    if set(trained) & set(found):
        raise DataError(f"class {first} is {one} in the data and {other} in the model")
    warn(
        f"warning: no class of the data has a name of the model's, as class {first}, {one} in the data "
        f"and {other} in the model: the scores are right only if these are other words for the same"
    )


def _model(weights: Weights, config: TrainConfig, options: EvalConfig) -> tuple[nn.Module, str]:
    """Build the model; its head must come from the weights, too."""
    size = {} if options.img_size is None else {"img_size": options.img_size}
    try:
        model, line = model_with(weights, options.model, **size)
        if size and _is_resized(model):  # to where the weights have positions of their own
            model, line = model_with(weights, options.model)
    except ValueError as error:
        raise ConfigError(f"cannot evaluate {options.checkpoint}: {one_line(error)}") from error
    if "; new " in line:
        raise ConfigError(f"{options.checkpoint} has no head for {config.model.name}: {line}")
    return model, line


def _is_resized(model: nn.Module) -> bool:
    """Tell whether a model takes images of any size and resizes those of its ``img_size``."""
    if not isinstance(model, VisionLonghorn) or not model.dynamic_img_size:
        return False
    return model.grid_inside(model.patch_embed.img_size) != model.patch_embed.grid_size


def _foreign_config(name: str | None) -> TrainConfig:
    """Return the settings of a model that was not trained here."""
    return TrainConfig(
        model=ModelConfig(name=name), data=DataConfig(validation_batch_size=_BATCH_SIZE)
    )


def _with_classes(config: TrainConfig, model: nn.Module) -> TrainConfig:
    """Note how many classes the model tells apart."""
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_classes=model.num_classes)
    )


def _with_options(config: TrainConfig, options: EvalConfig) -> TrainConfig:
    """Merge the command line into the configuration.

    Raises:
        SettingsError: values are out of their range.
    """
    chosen = {k: v for k, v in dataclasses.asdict(options.data).items() if v is not None}
    if chosen.get("dataset", config.data.dataset) != config.data.dataset:
        chosen = {"path": None} | chosen  # that of the other data is of no use
    if options.crop_pct is not None:
        chosen["crop_pct"] = options.crop_pct
    amp = config.run.amp if options.amp is None else options.amp
    size = config.model.img_size if options.img_size is None else options.img_size
    merged = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, img_size=size),
        data=dataclasses.replace(config.data, **chosen),
        run=RunConfig(device=options.device, amp=amp, num_threads=config.run.num_threads),
    )
    check_ranges(merged)
    return merged
