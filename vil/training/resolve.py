"""Fill in settings that are None, from the pretrained weights and from the data.

Afterwards the configuration of a run is complete.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from vil.messages import one_line
from vil.timm_models import by_channel, is_own
from vil.training.errors import ConfigError, DataError, OutputError
from vil.training.images import Source, exceptions_to_hash, is_folder
from vil.training.recipes import from_dict
from vil.training.settings import (
    MODEL_ARGUMENTS,
    MODEL_SIZES,
    ModelConfig,
    TrainConfig,
    parse_args,
    suitable_batch,
)
from vil.weights.sources import Weights, read_weights

_PREPROCESSING = {
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def read_pretrained(config: ModelConfig) -> Weights | None:
    """Return the weights of model.pretrained, or None if it is not set; errors as in ``read_source``."""
    if config.pretrained is None:
        return None
    return read_source(config.pretrained, config.pretrained_ema)


def read_source(source: str, ema: bool) -> Weights:
    """Read weights; same arguments as ``vil.weights.sources.read_weights``.

    Raises ConfigError if the source or its averaged weights do not exist, OutputError if it is unreadable.
    """
    try:
        return read_weights(source, ema)
    except (FileNotFoundError, LookupError) as error:
        raise ConfigError(one_line(error)) from error
    except (OSError, MemoryError) as error:
        raise OutputError(f"{source} cannot be read: {one_line(error)}") from error
    except ValueError as error:
        raise OutputError(one_line(error)) from error


def fill_from_weights(config: TrainConfig, weights: Weights | None) -> TrainConfig:
    """Fill in model and preprocessing settings from the weights of model.pretrained, or from defaults.

    Raises:
        ConfigError: If no model is named, the image size is not square, or a value from the weights is out of range.
    """
    model, described = config.model, {} if weights is None else weights.pretrained_cfg
    name = model.name or (weights and weights.architecture)
    if not name:
        raise ConfigError(
            "model.name is missing: "
            + (f"{weights.origin} does not name its model; " if weights else "")
            + "pass a timm model, for example --model.name vil_tiny"
        )
    channels, height, width = described.get("input_size", (3, 224, 224))
    if height != width and model.img_size is None:
        raise ConfigError(
            f"model.img_size (eval.py: --img-size) is missing: {weights.origin} has images of "
            f"{height} x {width} px, which are not square"
        )
    args = {} if weights is None else weights.model_args
    sizes = {key: args[key] for key in MODEL_SIZES if isinstance(args.get(key), int)}
    others = {
        key: value
        for key, value in args.items()
        if key not in MODEL_ARGUMENTS or key in MODEL_SIZES
    }
    stated = parse_args(model.args)
    if is_own(name) and (
        config.data.img_sizes or (weights and model.img_size not in (None, height))
    ):
        # The model must not resize training images internally to the size of the weights.
        others["resize_below_scale"] = 0
    others = {k: v for k, v in others.items() if k not in sizes and k not in stated}
    model = replace(
        model,
        name=name,
        in_chans=model.in_chans or channels,
        img_size=model.img_size or height,
        args=(*model.args, *(f"{key}={value!r}" for key, value in others.items())),
        **{key: value for key, value in sizes.items() if getattr(model, key) is None},
    )
    data = config.data
    for key, default in _PREPROCESSING.items():
        if getattr(data, key) is None:
            value = described.get(key, default)
            if isinstance(value, tuple | list):
                value = by_channel(value, model.in_chans)
            data = replace(data, **{key: value})
    data = replace(data, decoder=data.decoder or "torchvision")
    config = from_dict(asdict(replace(config, model=model, data=data)), "")
    for problem in config.other_channels():
        raise ConfigError(problem, everywhere=True)
    return config


def choose_exceptions(config: TrainConfig, weights: Weights | None) -> tuple[str, ...]:
    """Choose the ``exceptions`` of ``FolderSource`` for the images that a new run holds out with data.val_fraction.

    If the weights come from a run with the same fraction, its images stay on the side where they were. Raises
    DataError as in ``vil.training.images.list_images``.
    """
    data = config.data
    if not data.val_fraction or data.path is None or not is_folder(Path(data.path)):
        return ()  # if the folder is missing, open_splits says so
    exceptions = exceptions_to_hash(data)
    if weights is not None and weights.config and weights.val_fraction == data.val_fraction:
        known = {*(weights.label_names or ())}
        new = [name for name in exceptions if name.partition("/")[0] not in known]
        exceptions = (*weights.val_exceptions, *new)
    return exceptions


def fill_from_data(config: TrainConfig, train: Source, val: Source) -> TrainConfig:
    """Fill in the number of classes, the batch size for the number of images, and the warm-up.

    Raises:
        DataError: If there is one class only, or model.num_classes is not set and the data has class indices without
            names.
        ConfigError: If the schedule begins or ends above its peak rate for this batch size.
    """
    num_classes = config.model.num_classes
    if num_classes is None:
        if train.classes is None:
            largest = max(int(source.labels.max()) for source in (train, val))
            raise DataError(
                f"model.num_classes is missing: the data has class indices without names, up to "
                f"{largest}; pass --model.num-classes {largest + 1} if there are no other classes"
            )
        num_classes = len(train.classes)
    if num_classes == 1:
        raise DataError("there is one class, which every image belongs to; training needs two")
    batch, warmup = config.data.batch_size, config.schedule.warmup_epochs
    if batch is None:
        batch = suitable_batch(train.num_images)
    if warmup is None:
        warmup = min(config.schedule.epochs // 10, 5)
    config = config.changed("model", num_classes=num_classes).changed("data", batch_size=batch)
    config = config.changed("schedule", warmup_epochs=warmup)
    for problem in config.rising_rates():
        raise ConfigError(problem, everywhere=True)
    return config


def model_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments for timm's model entry point."""
    given = {key: getattr(model, key) for key in MODEL_ARGUMENTS if getattr(model, key) is not None}
    return given | parse_args(model.args)
