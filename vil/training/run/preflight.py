"""Everything in the settings that is wrong, told at once and before anything heavy is imported.

What only the model, the device or the files' contents can tell is found later. This module and what it
imports do not import torch.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_type_hints

from vil.forms import misfit
from vil.messages import printable
from vil.training.config import (
    DataConfig,
    ModelConfig,
    TrainConfig,
    data_contradictions,
    other_classes,
    parse_args,
    suitable_batch,
    too_few_images,
)
from vil.training.data.image_files import ImageList, find_split, list_images
from vil.training.data.reading import is_folder
from vil.training.data.shard_info import find_split as find_shards
from vil.training.data.shard_info import read_info
from vil.training.errors import ConfigError, DataError, SettingsError, UserError
from vil.training.run.tracking import missing_package

_OURS = ("vil_", "vim_")  # models whose patches must cover the image
# timm's auto-augment policies and what may follow each after a dash. timm passes over what it does not
# know, or leaves it to an assert, which python -O removes.
_WHOLE, _NUMBER, _SWITCH = r"\d+", r"\d+(\.\d*)?", "[01]"
_MSTD = f"mstd{_NUMBER}"
_POLICIES = {
    "rand": (
        *(_MSTD, f"m{_WHOLE}", f"n{_WHOLE}", f"mmax{_WHOLE}"),
        *(r"p(0(\.\d*)?|1(\.0*)?)", f"inc{_SWITCH}", "t(weights|3a|3aw)"),
    ),
    "augmix": (_MSTD, f"m{_WHOLE}", f"w{_WHOLE}", f"d{_WHOLE}", f"a{_NUMBER}", f"b{_SWITCH}"),
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), (_MSTD,)),
}
_PATCH = 16  # of theirs, where nothing else is said
_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")
_DIGITS = {"training": 1437, "validation": 360}


@dataclass(frozen=True)
class _Split:
    """What is known of a split of the data."""

    num_images: int
    classes: tuple[str, ...] | None
    """Their names, None where the data has none."""
    fewest: tuple[str, int] | None = None
    """The class with the fewest images, and how many those are."""


def check_settings(config: TrainConfig, world_size: int) -> dict[bool, ImageList]:
    """Check the settings with each other, with the data and with what is installed.

    Args:
        config: The settings as asked for, the output folder among them.
        world_size: Number of processes.

    Returns:
        The images of a folder that were listed for that, so that they need not be again: those to train
        on under True, those to validate on under False.

    Raises:
        SettingsError: something is wrong; tells all of it, each with what would be right.
    """
    problems: list[UserError] = [
        *map(ConfigError, _out_of_range(config)),
        *map(ConfigError, _contradictions(config)),
        *map(ConfigError, _missing_weights(config)),
        *map(ConfigError, missing_package(config.run.tracker)),
    ]
    listed, found = _list_folders(config)
    problems += found
    problems += _against_data(config, _splits(config, listed), world_size)
    if problems:
        raise SettingsError(problems)
    return listed


def check_ranges(config: TrainConfig) -> None:
    """Check each setting by itself, where something else than the command line gave some of them.

    Raises:
        SettingsError: some are out of range.
    """
    problems = [*_out_of_range(config)] or [*_other_channels(config)]
    if problems:
        raise SettingsError([*map(ConfigError, problems)])


def _out_of_range(config: TrainConfig) -> Iterator[str]:
    """Check each setting with the type and the range that are declared beside it."""
    for section in fields(config):
        values = getattr(config, section.name)
        for key, form in get_type_hints(type(values), include_extras=True).items():
            wrong = misfit(getattr(values, key), form, f"{section.name}.{key}")
            if wrong is not None:
                yield wrong


def _other_channels(config: TrainConfig) -> Iterator[str]:
    """Check that each channel of the images has a mean and a standard deviation."""
    for name in ("mean", "std"):
        values, channels = getattr(config.data, name), config.model.in_chans
        if None not in (values, channels) and len(values) != channels:
            yield f"data.{name} must have model.in_chans = {channels} values, got {values}"


def _contradictions(config: TrainConfig) -> Iterator[str]:
    """Check settings with each other."""
    model, data, schedule = config.model, config.data, config.schedule
    yield from _unknown_weights(config)
    for word in model.args:
        try:
            parse_args((word,))
        except ConfigError as error:
            yield str(error)
    yield from _uncovered_images(config)
    yield from _unknown_policy(config.augment.aa)
    if schedule.warmup_epochs is not None and schedule.warmup_epochs > schedule.epochs > 0:
        yield (
            f"schedule.warmup_epochs {schedule.warmup_epochs} is longer than the run, schedule.epochs "
            f"{schedule.epochs}: {schedule.epochs // 10}, say"
        )
    yield from _other_channels(config)
    yield from data_contradictions(data, model)
    if config.optim.best == "ema" and config.optim.model_ema_decay is None:
        yield "optim.best ema needs averaged weights, --optim.model-ema-decay 0.9999 say"


def _unknown_policy(policy: str | None) -> Iterator[str]:
    """Check the name of an auto-augment policy and its options."""
    if policy is None:
        return
    name, *options = policy.split("-")
    if name not in _POLICIES:
        yield (
            f"augment.aa must be None or begin with one of {', '.join(_POLICIES)}, such as "
            f"rand-m9-mstd0.5-inc1; got {policy!r}"
        )
        return
    for option in options:
        if not re.fullmatch("|".join(_POLICIES[name]), option):
            yield f"augment.aa {policy}: {name} of timm takes no {option!r}"


def _unknown_weights(config: TrainConfig) -> Iterator[str]:
    """Check what the run starts from."""
    model = config.model
    if ":" in (model.name or ""):
        yield (
            f"model.name names a model and takes no weights, got {model.name}; pass "
            f"--model.pretrained {model.name}"
        )
    if model.pretrained is None:
        if model.name is None:
            yield "model.name is missing: a model of timm, vil_tiny say, or --model.pretrained SOURCE"
        if model.pretrained_ema:
            yield "model.pretrained_ema has no use without model.pretrained"


def _missing_weights(config: TrainConfig) -> Iterator[str]:
    """Check that the weights of a new run exist; one that continues does not need them any more."""
    source = config.model.pretrained
    if source is None or any(Path(config.run.output).glob("*.pt")):
        return
    place = source.removeprefix("local-dir:")
    is_path = place != source or os.sep in place or place.endswith(_WEIGHTS)
    if is_path and not source.startswith("hf-hub:") and not Path(place).exists():
        yield f"model.pretrained {source} does not exist"


def _uncovered_images(config: TrainConfig) -> Iterator[str]:
    """Check that whole patches cover the images, where the settings say both."""
    model = config.model
    of_weights = model.pretrained is not None and model.patch_size is None
    if of_weights or not (model.name or "").startswith(_OURS):
        return
    patch = model.patch_size or _PATCH
    stride = patch if model.patch_stride is None else model.patch_stride
    if stride > patch > 0:
        yield f"model.patch_stride must be at most the patch's {patch} px, got {stride}"
    elif stride > 0 and not _pads(model):
        named = [("data.img_sizes", size) for size in config.data.img_sizes or ()]
        for name, size in [("model.img_size", model.img_size), *named]:
            below = max((size or 0) - patch, 0) // stride * stride + patch
            if (size or 0) > 0 and size != below:
                yield (
                    f"{name} {size} is not covered by patches of {patch} px every {stride} px: {below} "
                    f"or {below + stride} is"
                )


def _pads(model: ModelConfig) -> bool:
    """Tell whether a model of ours pads images to whole patches."""
    words = [word for word in model.args if word.startswith("dynamic_img_pad=")]
    return words[-1].endswith("=True") if words else model.name.endswith("_pyramid")


def _list_folders(config: TrainConfig) -> tuple[dict[bool, ImageList], list[UserError]]:
    """List the images where they lie in folders; also return what is wrong with them."""
    data = config.data
    if data.dataset not in ("folder", "wds") or data.path is None:
        return {}, []
    if not is_folder(Path(data.path)):
        return {}, [DataError(f"data.path {data.path} is not a folder")]
    listed: dict[bool, ImageList] = {}
    problems: list[UserError] = []
    for training in (True, False) if data.dataset == "folder" else ():
        try:
            listed[training] = list_images(find_split(data, training))
        except DataError as error:
            problems.append(error)
    return listed, problems


def _splits(config: TrainConfig, listed: dict[bool, ImageList]) -> dict[str, _Split]:
    """Count images and classes, as far as that is known without reading any."""
    data, model = config.data, config.model
    if data.dataset == "digits":
        names = tuple(map(str, range(10)))
        return {split: _Split(count, names) for split, count in _DIGITS.items()}
    if data.dataset == "fractals" and model.num_classes and (data.images_per_class or 1) > 0:
        return {"training": _Split(model.num_classes * (data.images_per_class or 1000), None)}
    if data.dataset == "wds" and data.path is not None:
        return _splits_of_shards(data)
    splits = {}
    for training, images in listed.items():
        counts = Counter(images.labels)
        label = min(counts, key=counts.__getitem__)
        fewest = (images.classes[label], counts[label])
        split = "training" if training else "validation"
        splits[split] = _Split(len(images.labels), images.classes, fewest)
    return splits


def _splits_of_shards(data: DataConfig) -> dict[str, _Split]:
    """Count what _info.json names; what is wrong with it is told when the shards are opened."""
    try:
        described = read_info(Path(data.path))
    except DataError:
        return {}
    named = {"training": data.train_split, "validation": data.val_split}
    found = {split: find_shards(described, name) for split, name in named.items()}
    return {
        split: _Split(sum(info.lengths), info.classes)
        for split, info in found.items()
        if info is not None and info.lengths is not None
    }


def _against_data(
    config: TrainConfig, splits: dict[str, _Split], world_size: int
) -> Iterator[UserError]:
    """Check the settings with the number of classes and images."""
    model, data = config.model, config.data
    named = {name: split.classes for name, split in splits.items() if split.classes is not None}
    differing = (
        _differing_classes(named["training"], named["validation"]) if len(named) == 2 else None
    )
    if differing is not None:
        yield differing  # how many classes there are is another question then
    for name, classes in named.items() if differing is None else ():
        yield from map(DataError, other_classes(name, len(classes), model))
    batch, train = data.batch_size, splits.get("training")
    if train is not None:
        total = train.num_images
        if (data.images_per_class or 0) > 0 and data.dataset != "fractals":
            if train.fewest is not None:
                yield from map(DataError, too_few_images(data, *train.fewest))
            if train.classes is not None:
                total = min(total, data.images_per_class * len(train.classes))
        fitting = suitable_batch(max(total, 1))
        if batch is not None and batch > total:
            yield DataError(
                f"an epoch has {total} training images, fewer than data.batch_size {batch}; pass "
                f"--data.batch-size {fitting}, say"
            )
        batch = fitting if batch is None else min(batch, fitting) if batch > total else batch
    if batch is not None and batch > 0 and config.run.grad_accum_steps > 0:
        try:
            replace(config, data=replace(data, batch_size=batch)).micro_batch(world_size)
        except ConfigError as error:
            yield error


def _differing_classes(train: tuple[str, ...], val: tuple[str, ...]) -> DataError | None:
    differing = sorted(set(train) ^ set(val))
    if not differing:
        moved = [label for label, name in enumerate(train) if name != val[label]]
        if not moved:
            return None
        first = moved[0]
        return DataError(
            f"class {first} is {printable(train[first])} in the training data and "
            f"{printable(val[first])} in the validation data ({len(moved)} classes differ)"
        )
    where = "training" if differing[0] in train else "validation"
    return DataError(
        f"class {printable(differing[0])} is in the {where} data only ({len(differing)} classes differ)"
    )
