"""Complete the settings of a run: what the user left unset comes from weights and data."""

from dataclasses import asdict, replace

from vil.messages import one_line
from vil.preprocess import ImageSpec
from vil.timm_models import is_own
from vil.training.errors import ConfigError, DataError, OutputError
from vil.training.images import Source
from vil.training.recipes import from_dict
from vil.training.settings import (
    IMAGE_OPTIONS,
    MODEL_SIZES,
    TrainConfig,
    parse_args,
    suitable_batch,
)
from vil.weights.sources import Weights, read_weights


def read_source(source: str, ema: bool) -> Weights:
    """Read weights; same arguments as ``vil.weights.sources.read_weights``.

    Raises ConfigError if the source or its averaged weights do not exist, OutputError if it is
    unreadable.
    """
    try:
        return read_weights(source, ema)
    except (FileNotFoundError, LookupError) as error:
        raise ConfigError(one_line(error)) from error
    except (OSError, MemoryError) as error:
        raise OutputError(f"{source} cannot be read: {one_line(error)}") from error
    except ValueError as error:
        raise OutputError(one_line(error)) from error


def complete(
    asked: TrainConfig, weights: Weights | None, train: Source, val: Source, world_size: int = 1
) -> TrainConfig:
    """Return complete settings; nothing is filled in after this.

    A value that is still None afterwards switches something off, keeps the default of the named
    model, or is left to the machine (workers, threads).

    Args:
        asked: What the user wrote. None stands for what weights, data or defaults decide.
        weights: Weights of model.pretrained; None without any, or for a run that is resumed.
        train: Training images.
        val: Validation images.
        world_size: Number of processes, which share a batch.

    Raises:
        ConfigError: If no model is named, the image size is not square, a value from the weights is
            out of range, the processes cannot share a batch, or the learning rate begins or ends
            above its peak for this batch size.
        DataError: If there is one class only, or the data has class indices without names and
            model.num_classes is not set.
    """
    described = {} if weights is None else weights.pretrained_cfg
    model, data, schedule = asked.model, asked.data, asked.schedule
    name = model.name or (weights and weights.architecture)
    if not name:
        raise ConfigError(
            "model.name is missing"
            + (f": {weights.origin} does not name its model" if weights else "")
            + "; pass a timm model, for example --model.name vil_tiny"
        )
    size = None if model.img_size is None else (model.img_size, model.img_size)
    try:
        stated = {key: getattr(data, key) for key in IMAGE_OPTIONS}
        stated["decoder"] = data.decoder or "torchvision"  # the decoder of the weights is slower
        images = ImageSpec.of(described, in_chans=model.in_chans, img_size=size, **stated)
    except ValueError as error:
        origin = "" if weights is None else f"{weights.origin}: "
        raise ConfigError(f"{origin}{one_line(error)}") from error
    height, width = images.img_size
    if height != width:
        raise ConfigError(
            f"model.img_size is missing: {weights.origin} has images of {height} x {width} px, which are not square"
        )
    num_classes = model.num_classes
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

    args = {} if weights is None else weights.model_args
    sizes = {key: args[key] for key in MODEL_SIZES if isinstance(args.get(key), int)}
    own_options = {"num_classes", "in_chans", "img_size", *sizes}
    others = {key: value for key, value in args.items() if key not in own_options}
    size_of_weights = described.get("input_size", (3, 224, 224))[1]
    if is_own(name) and (data.img_sizes or (weights and height != size_of_weights)):
        # The model must not resize training images internally to the size of the weights.
        others["resize_below_scale"] = 0
    own_args = parse_args(model.args)
    others = [f"{key}={value!r}" for key, value in others.items() if key not in own_args]
    batch, warmup = data.batch_size, schedule.warmup_epochs
    settings = replace(
        asked,
        model=replace(
            model,
            name=name,
            num_classes=num_classes,
            in_chans=images.in_chans,
            img_size=height,
            args=(*model.args, *others),
            **{key: value for key, value in sizes.items() if getattr(model, key) is None},
        ),
        data=replace(
            data,
            batch_size=suitable_batch(train.num_images) if batch is None else batch,
            **{key: getattr(images, key) for key in IMAGE_OPTIONS},
        ),
        schedule=replace(schedule, warmup_epochs=min(schedule.epochs // 10, 5) if warmup is None else warmup),
    )
    settings = from_dict(asdict(settings), "")  # the values of weights may be out of range
    for problem in settings.rising_rates():
        raise ConfigError(problem, everywhere=True)
    validation_batch = data.validation_batch_size or settings.micro_batch(world_size)
    return settings.changed("data", validation_batch_size=validation_batch)
