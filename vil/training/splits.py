"""Open both splits of the data, check them, and check that all processes have the same."""

import socket
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from vil.messages import counted, named, printable
from vil.training.distributed import World, versions
from vil.training.errors import DataError, log
from vil.training.images import DigitSource, FolderSource, Source, Subset, fingerprint
from vil.training.listing import is_folder
from vil.training.settings import DataConfig
from vil.training.shards import ShardSource

MAX_DIFFERENCES = 3  # in a message; one extra class folder shifts all later classes
FEW_IMAGES = 100  # held out, below which an accuracy is uncertain by 10 points and more
FEW_OF_A_CLASS = 5  # held-out images of a class, below which an accuracy says little
# Settings that may differ between processes, because disk and device are local.
_LOCAL = ("data.path", "run.device", "run.num_threads", "run.output")


def open_splits(
    data: DataConfig, num_classes: int | None, world: World, exceptions: Sequence[str] = ()
) -> tuple[Source, Source]:
    """Open and validate the training and validation split; every rank must call this.

    Args:
        data: Where the data is, with its limits.
        num_classes: Number of classes that the data must have; None allows any.
        world: Process group.
        exceptions: Same as in ``FolderSource``.

    Raises:
        ConfigError: If data.train_split or data.val_split is not a valid shard pattern.
        DataError: If the data is missing, damaged or empty, or if its classes do not match
            ``num_classes`` or the other split.
    """
    with world.main_first():  # rank 0 writes the shard indexes
        train, val = (open_source(data, num_classes, training, exceptions) for training in (True, False))
    number_as(train.classes, val)
    check_classes({"training data": train.classes, "validation data": val.classes})
    _warn_of_few(val, data.val_fraction)
    if val.fingerprint == getattr(train, "source", train).fingerprint:  # also if train is a subset
        log.warning("the validation images are the training images, so the accuracy says nothing about others")
    return train, val


def open_source(data: DataConfig, num_classes: int | None, training: bool, exceptions: Sequence[str] = ()) -> Source:
    """Open one split; arguments and errors as in ``open_splits``.

    Class names of validation data are left to the caller, which knows those they must be.
    """
    split = "training" if training else "validation"
    if data.dataset == "digits":
        source: Source = DigitSource(training)
    elif not is_folder(Path(data.path)):
        raise DataError(f"data.path {data.path} is not a folder")
    elif data.dataset == "folder":
        source = FolderSource(data, training, exceptions)
    else:
        source = ShardSource(data, training, num_classes)
    count, share = len(source.excluded), data.max_bad_images if training else 0.0
    if count > share * (source.num_images + count):
        raise DataError(
            f"{count} of {source.num_images + count} {split} images have no usable label, more "
            f"than the allowed fraction {share:g}; the first: {source.excluded[0]}"
        )
    if source.num_images == 0:
        raise DataError(f"the {split} data in {data.path} holds no images")
    if training and source.classes is not None:
        if num_classes not in (None, len(source.classes)):
            raise DataError(
                f"the training data has {len(source.classes)} classes, but model.num_classes is "
                f"{num_classes}; to train, leave it unset or pass --model.num-classes "
                f"{len(source.classes)}"
            )
        counts = np.bincount(source.labels, minlength=len(source.classes))
        if len(absent := np.flatnonzero(counts == 0)):  # such as a class that only a list names
            names = named([source.classes[place] for place in absent])
            raise DataError(f"classes without training images ({len(absent)}): {names}")
    if training and data.images_per_class is not None:
        return Subset(source, data.images_per_class, num_classes)
    return source


def described(settings: Mapping[str, Any], splits: Mapping[str, Source]) -> dict[str, str]:
    """Return the settings, data and versions that must match on all ranks, as printable text."""
    seen = {f"version of {name}": v for name, v in versions().items() if name != "python"}
    seen |= {f"setting {name}": v for name, v in settings.items() if name not in _LOCAL}
    for split, source in splits.items():
        seen[f"number of {split} images"] = source.num_images
        seen[f"fingerprint of the {split} images"] = source.fingerprint
        seen |= {f"{split} class {i}": name for i, name in enumerate(source.classes or ())}
    return {name: printable(str(value)) for name, value in seen.items()}


def check_same(world: World, seen: Mapping[str, str]) -> None:
    """Raise DataError if ``seen``, from ``described``, differs between ranks; all ranks call it."""
    if len(set(world.gather(fingerprint(str(seen).encode())))) == 1:
        return
    ranks = world.gather((socket.gethostname(), seen))
    main, expected = ranks[0]
    rank, node, other = next((r, node, s) for r, (node, s) in enumerate(ranks) if s != expected)
    lines = [
        f"{name} is {other.get(name, 'missing')} instead of {expected.get(name, 'missing')}"
        for name in sorted(expected | other, key=lambda name: " class " in name)
        if other.get(name) != expected.get(name)
    ]
    raise DataError(
        f"rank {rank} on node {node} does not match rank 0 on node {main}. "
        f"Differences ({len(lines)}): {'; '.join(lines[:MAX_DIFFERENCES])}",
        everywhere=True,
    )


def number_as(classes: tuple[str, ...] | None, val: Source) -> None:
    """Number the classes of validation as in training, if some lack a folder, in place.

    Warns of classes without images.
    """
    if None in (classes, val.classes):
        return
    present = {*val.classes}
    places = [place for place, name in enumerate(classes) if name in present]
    if len(places) < len(classes) and val.classes == tuple(classes[place] for place in places):
        val.labels, val.classes = np.array(places)[val.labels], classes
    counts = np.bincount(val.labels, minlength=len(val.classes))
    if len(unscored := np.flatnonzero(counts == 0)):
        names = named([val.classes[place] for place in unscored])
        log.warning(f"classes without validation images are not scored ({len(unscored)}): {names}")


def check_classes(classes: Mapping[str, tuple[str, ...] | None]) -> None:
    """Raise DataError if the class names in two places differ in content or order.

    Names that are None are unknown, and not compared.
    """
    (first, one), (second, other) = classes.items()
    if None in (one, other) or one == other:
        return
    if differing := sorted({*one} ^ {*other}):
        where = first if differing[0] in one else second
        raise DataError(f"class {printable(differing[0])} is in the {where} only ({len(differing)} classes differ)")
    pairs = zip_longest(one, other, fillvalue="missing")
    label, (own, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise DataError(f"class {label} is {printable(own)} in the {first} and {printable(theirs)} in the {second}")


def _warn_of_few(val: Source, fraction: float) -> None:
    """Warn of few held-out images, and of classes of which a fraction holds out few."""
    if val.num_images < FEW_IMAGES:
        log.warning(
            f"{counted(val.num_images, 'image')} held out: with so few, the accuracy is uncertain "
            f"by up to {98 / val.num_images**0.5:.0f} points (95 %)"
        )
    if not fraction:
        return
    counts = np.bincount(val.labels, minlength=len(val.classes)).tolist()
    pairs = zip(val.classes, counts, strict=True)
    few = [f"{name} {count}" for name, count in pairs if 0 < count < FEW_OF_A_CLASS]
    if few:
        log.warning(
            f"fewer than {FEW_OF_A_CLASS} images are held out of {len(few)} classes, too few to "
            f"judge them ({named(few)}); raise data.val_fraction"
        )
