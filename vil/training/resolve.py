"""What a run's settings leave open, filled in from the weights it starts with and from its data.

A setting that is None asks for that; after this the configuration of a run says everything.
"""

from dataclasses import asdict, replace
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from vil.messages import one_line
from vil.training.errors import ConfigError, DataError, OutputError
from vil.training.images import Source
from vil.training.recipes import from_dict
from vil.training.settings import (
    MODEL_ARGUMENTS,
    MODEL_SIZES,
    ModelConfig,
    TrainConfig,
    parse_args,
    suitable_batch,
)
from vil.weights.files import Weights, is_own, read_weights

_PREPROCESSING = {
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "interpolation": "bicubic",
    "crop_pct": 0.875,
}


def read_pretrained(config: ModelConfig) -> Weights | None:
    """Read the weights that a new run starts from, if it names some."""
    if config.pretrained is None:
        return None
    return read_source(config.pretrained, config.pretrained_ema)


def read_source(source: str, ema: bool) -> Weights:
    """Read weights; arguments as of vil.weights.files.read_weights."""
    try:
        return read_weights(source, ema)
    except (FileNotFoundError, LookupError) as error:
        raise ConfigError(one_line(error)) from error
    except (OSError, MemoryError) as error:
        raise OutputError(f"{source} cannot be read: {one_line(error)}") from error
    except ValueError as error:
        raise OutputError(one_line(error)) from error


def fill_from_weights(config: TrainConfig, weights: Weights | None) -> TrainConfig:
    """Fill in what the weights say of their model and of its images, and the defaults where none do.

    Args:
        config: The settings as asked for.
        weights: What model.pretrained is, or None.

    Raises:
        ConfigError: no model is named, a size is not one number, or what the weights say is out of range.
    """
    model, described = config.model, {} if weights is None else weights.pretrained_cfg
    name = model.name or (weights and weights.architecture)
    if not name:
        raise ConfigError(
            "model.name is missing: "
            + (f"{weights.origin} does not say it" if weights else "name a model of timm")
        )
    channels, height, width = described.get("input_size", (3, 224, 224))
    if height != width and model.img_size is None:
        raise ConfigError(
            f"model.img_size is missing: {weights.origin} is of {height} x {width} px"
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
        # Sizes that a run trains at are not to be resized to that of the weights inside the model.
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
                value = _per_channel(tuple(value), model.in_chans)
            data = replace(data, **{key: value})
    config = from_dict(asdict(replace(config, model=model, data=data)), "")
    for problem in config.other_channels():
        raise ConfigError(problem, everywhere=True)
    return config


def fill_from_data(config: TrainConfig, train: Source, val: Source) -> TrainConfig:
    """Fill in the number of classes, and the batch and the warm-up that suit the number of images.

    Args:
        config: As of fill_from_weights.
        train: The training images.
        val: The validation images.

    Raises:
        DataError: the data holds bare class indices, so that their number has to be stated.
    """
    num_classes = config.model.num_classes
    if num_classes is None:
        if train.classes is None:
            largest = max(int(source.labels.max()) for source in (train, val))
            raise DataError(
                f"model.num_classes is missing: the data holds class indices without names, up to "
                f"{largest}; pass --model.num-classes {largest + 1} if that is all"
            )
        num_classes = len(train.classes)
    batch, warmup = config.data.batch_size, config.schedule.warmup_epochs
    if batch is None:
        batch = suitable_batch(train.num_images)
    if warmup is None:
        warmup = min(config.schedule.epochs // 10, 5)
    return replace(
        config,
        model=replace(config.model, num_classes=num_classes),
        data=replace(config.data, batch_size=batch),
        schedule=replace(config.schedule, warmup_epochs=warmup),
    )


def model_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments that make timm's entry point build the model."""
    given = {key: getattr(model, key) for key in MODEL_ARGUMENTS if getattr(model, key) is not None}
    return given | parse_args(model.args)


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Give every channel a value: grey has the mean of the colours', as in timm."""
    if len(values) == channels:
        return values
    return (sum(values) / len(values),) * channels
