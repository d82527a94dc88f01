"""Evaluate a checkpoint, or a model by name, and record the result as JSON."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vil.loading import model_with
from vil.messages import one_line
from vil.training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from vil.training.console import new_console
from vil.training.data.augment import Normalize
from vil.training.data.batches import ValData
from vil.training.data.shared_memory import check_shared_memory
from vil.training.distributed import World, process_group, world_from_environment
from vil.training.errors import ConfigError, DataError, OutputError, SettingsError
from vil.training.files import write_text
from vil.training.options import EvalConfig
from vil.training.recipes import config_from_dict, flat_dict
from vil.training.run.engine import evaluate
from vil.training.run.preflight import out_of_range
from vil.training.run.report import model_size
from vil.training.run.resolve import fill_from_weights
from vil.training.run.setup import build_model, read_source, resolve_device, versions
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
    path = json_path(options)
    subject = load_subject(options)
    device = resolve_device(subject.config.run, world)
    with process_group(world, device):
        result = run_evaluation(subject, options, device, world)
    if world.is_main:
        console = new_console()
        console.print(describe(result))
        if path is not None:
            write_text(path, json.dumps(result, indent=2) + "\n")
            console.print(f"written  {path}")


def run_evaluation(
    subject: Subject, options: EvalConfig, device: torch.device, world: World
) -> dict[str, Any]:
    """Score the model and describe what was scored.

    Args:
        subject: The model.
        options: The command line.
        device: What this process computes on.
        world: The processes, connected if there are several.

    Returns:
        What is printed and written as JSON.
    """
    config = subject.config
    model = subject.model.to(device)
    with world.main_first():
        data = ValData(config, device, world)
    check_shared_memory(data.shared_bytes, world)
    _check_classes(subject.label_names, data.source.classes)
    by_class = torch.zeros(2, model.num_classes, dtype=torch.float64, device=device)
    normalize = Normalize(config, device)
    [score] = evaluate([model], data, normalize, config.run.amp, by_class=by_class)
    per_class = {}
    if options.per_class:
        names = data.source.classes or subject.label_names or map(str, range(model.num_classes))
        per_class = {"per_class": _per_class(names, by_class)}
    return {
        "checkpoint": _whole_name(options.checkpoint),
        "model": config.model.name,
        "weights": subject.weights,
        "epoch": subject.epoch,
        **score._asdict(),
        **per_class,
        **model_size(model, config),
        "gmacs_count_scans": True,
        "img_size": config.model.img_size,
        "crop_pct": config.data.crop_pct,
        "interpolation": config.data.interpolation,
        "dataset": config.data.dataset,
        "path": config.data.path,
        "device": str(device),
        "amp": config.run.amp,
        "versions": versions(),
    }


def json_path(options: EvalConfig) -> Path | None:
    """Return where the result goes, having checked that nothing else is there.

    Raises:
        OutputError: the file exists and is not an evaluation of the same checkpoint.
    """
    checkpoint = Path(options.checkpoint)
    if options.json is not None:
        path = Path(options.json)
    elif checkpoint.is_file():
        path = checkpoint.with_name(f"{checkpoint.stem}-eval.json")
    else:
        return None
    if path.exists():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            earlier = None
        whole = _whole_name(options.checkpoint)
        if not isinstance(earlier, dict) or earlier.get("checkpoint") != whole:
            raise OutputError(
                f"{path} exists and is not an evaluation of {checkpoint}; choose another --json"
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
        f"\nclass    {row['top1']:6.2f}%   of {row['num_images']:,} images   {name}"
        for name, row in rows
    )


def _whole_name(source: str) -> str:
    """Return the whole path of a file or folder, and any other source as it is."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source


def _check_classes(trained: tuple[str, ...] | None, found: tuple[str, ...] | None) -> None:
    """Refuse images of which some classes are the model's, and others not or in another order."""
    if None in (trained, found) or trained == found or not set(trained) & set(found):
        return  # other names may be other words for the same
    pairs = enumerate(zip_longest(found, trained, fillvalue="missing"))
    first, (one, other) = next((i, pair) for i, pair in pairs if len(set(pair)) > 1)
    raise DataError(f"class {first} is {one} in the data and {other} in the model")


def _model(weights: Weights, config: TrainConfig, options: EvalConfig) -> tuple[nn.Module, str]:
    """Build the model; its head must come from the weights, too."""
    size = {} if options.img_size is None else {"img_size": options.img_size}
    try:
        model, line = model_with(weights, options.model, **size)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"cannot evaluate {options.checkpoint}: {one_line(error)}") from error
    if "; new " in line:
        raise ConfigError(f"{options.checkpoint} has no head for {config.model.name}: {line}")
    return model, line


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
    problems = [ConfigError(line) for line in out_of_range(flat_dict(merged))]
    if problems:
        raise SettingsError(problems)
    return merged
