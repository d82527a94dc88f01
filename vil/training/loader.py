"""Open and validate the data, load batches, and replace unreadable images."""

import atexit
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from vil.messages import counted, named, printable
from vil.training.distributed import World, versions
from vil.training.errors import SIGNALS, DataError, log
from vil.training.images import (
    DigitSource,
    FolderSource,
    Source,
    Subset,
    decode_for,
    fingerprint,
    is_folder,
    read_patiently,
    reason,
)
from vil.training.program import check_workers, end_loaders
from vil.training.pulse import Pulse
from vil.training.recipes import flat
from vil.training.sampler import (
    MicroBatches,
    SampledIndex,
    epoch_order,
    image_size_of_step,
    key,
    seed_image,
)
from vil.training.settings import DataConfig, ModelConfig, TrainConfig, suitable_batch
from vil.training.shards import ShardSource
from vil.training.transforms import train_transform, val_transform

_MOST_TRIES = 8  # consecutive unreadable images before training stops
_MOST_TOLD = 3  # differences in a message; one extra class folder shifts all later classes
_FEW_IMAGES = 100  # held out, below which an accuracy is uncertain by 10 points and more
_FEW = 5  # held-out images of a class, below which an accuracy says little
_MOST_WORKERS = 8  # default limit
_PATIENCE = 600  # seconds to wait for a batch from a hung disk or a worker that never started
# Settings that may differ between processes, because disk and device are local.
_OWN = ("data.path", "run.device", "run.num_threads", "run.output")


class Step(NamedTuple):
    """Training images of one process for one step."""

    number: int
    """Step of the run."""
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]]
    """Pairs of images, uint8 (B, C, H, W), and class indices (B,)."""
    bad_images: dict[int, str]
    """Unreadable images that were replaced, by index, with the reason."""


def open_splits(
    config: TrainConfig, world: World, exceptions: Sequence[str] = ()
) -> tuple[Source, Source]:
    """Open and validate the training and validation split; every rank must call this.

    ``exceptions`` are those of ``FolderSource``.

    Raises:
        ConfigError: If data.train_split or data.val_split is not a valid shard pattern.
        DataError: If the data is missing, damaged or empty, or differs between processes, or if its
            classes do not match the model or the other split.
    """
    with world.main_first():  # rank 0 writes the shard indexes
        train, val = (
            open_source(config.data, config.model, training, exceptions, not training)
            for training in (True, False)
        )
    number_as(train.classes, val)
    _check_classes(train, val)
    _warn_of_few(val, config.data.val_fraction)
    if val.fingerprint == getattr(train, "source", train).fingerprint:  # also if train is a subset
        log.warning(
            "the validation images are the training images, so the accuracy says nothing about others"
        )
    check_same(world, described(config, {"training": train, "validation": val}))
    return train, val


def open_source(
    data: DataConfig,
    model: ModelConfig,
    training: bool,
    exceptions: Sequence[str] = (),
    other_classes: bool = False,
) -> Source:
    """Open one split and check it against the model, unless named classes may be others; errors as ``open_splits``."""
    split = "training" if training else "validation"
    if data.dataset == "digits":
        source: Source = DigitSource(training)
    elif not is_folder(Path(data.path)):
        raise DataError(f"data.path {data.path} is not a folder")
    elif data.dataset == "folder":
        source = FolderSource(data, training, exceptions)
    else:
        source = ShardSource(data, training, model.num_classes)
    count, share = len(source.excluded), data.max_bad_images if training else 0.0
    if count > share * (source.num_images + count):
        raise DataError(
            f"{count} of {source.num_images + count} {split} images have no usable label, more "
            f"than the allowed fraction {share:g}; the first: {source.excluded[0]}"
        )
    if source.num_images == 0:
        raise DataError(f"the {split} data in {data.path} holds no images")
    found = model.num_classes if source.classes is None else len(source.classes)
    if model.num_classes not in (None, found) and not (other_classes and source.classes):
        raise DataError(
            f"the {split} data has {found} classes, but model.num_classes is {model.num_classes}; "
            f"to train, leave it unset or pass --model.num-classes {found}"
        )
    if training and source.classes is not None:
        _check_present(source)
    if training and data.images_per_class is not None:
        return Subset(source, data.images_per_class, model.num_classes)
    return source


def _check_present(source: Source) -> None:
    """Raise DataError if a class, such as one that only a list of names has, has no image to train on."""
    counts = np.bincount(source.labels, minlength=len(source.classes))
    if len(absent := np.flatnonzero(counts == 0)):
        names = named([source.classes[place] for place in absent])
        raise DataError(f"classes without training images ({len(absent)}): {names}")


def described(config: TrainConfig, splits: Mapping[str, Source]) -> dict[str, str]:
    """Return the settings, data and versions that must match on all ranks, as printable text."""
    seen = {f"version of {name}": v for name, v in versions().items() if name != "python"}
    seen |= {f"setting {name}": v for name, v in flat(config).items() if name not in _OWN}
    for split, source in splits.items():
        seen[f"number of {split} images"] = source.num_images
        seen[f"fingerprint of the {split} images"] = source.fingerprint
        seen |= {f"{split} class {i}": name for i, name in enumerate(source.classes or ())}
    return {name: printable(str(value)) for name, value in seen.items()}


def check_same(world: World, seen: Mapping[str, str]) -> None:
    """Raise DataError if ``seen`` differs between ranks, such as their data; every rank must call this."""
    if len(set(world.gather(fingerprint(str(seen).encode())))) == 1:
        return
    told = world.gather((socket.gethostname(), seen))
    main, expected = told[0]
    rank, node, found = next((r, node, s) for r, (node, s) in enumerate(told) if s != expected)
    lines = [
        f"{name} is {found.get(name, 'missing')} instead of {expected.get(name, 'missing')}"
        for name in sorted(expected | found, key=lambda name: " class " in name)
        if found.get(name) != expected.get(name)
    ]
    raise DataError(
        f"rank {rank} on node {node} does not match rank 0 on node {main}. Differences ({len(lines)}): "
        f"{'; '.join(lines[:_MOST_TOLD])}",
        everywhere=True,
    )


class TrainData:
    """Training images, step by step; all randomness depends only on the seed and the step."""

    def __init__(self, config: TrainConfig, source: Source, world: World) -> None:
        """Initialise; raise DataError if an epoch has no full step, ConfigError for invalid options."""
        self.micro_batch = config.micro_batch(world.size)
        self.source, self.config, self.world = source, config, world
        self._images = _TrainImages(source, config)
        stream = self._stream(range(0))
        self.steps_per_epoch = stream.steps_per_epoch
        self.num_steps = self.steps_per_epoch * config.schedule.epochs
        if self.steps_per_epoch == 0:
            raise DataError(
                f"an epoch has {stream.length} training images, fewer than data.batch_size "
                f"{config.data.batch_size}; try --data.batch-size {suitable_batch(stream.length)}",
                everywhere=True,
            )

    @property
    def num_images(self) -> int:
        """Number of distinct training images."""
        return self.source.num_images

    def steps(self, first: int) -> Iterator[Step]:
        """Yield the steps from ``first`` to the end of the run; DataError after 8 bad images in a row."""
        loader = DataLoader(
            self._images,
            batch_sampler=self._stream(range(first, self.num_steps)),
            collate_fn=_collate,
            **loader_arguments(self.config.data.num_workers, self.world),
        )
        batches = _loaded(loader)
        for number in range(first, self.num_steps):
            loaded = list(islice(batches, self.config.run.grad_accum_steps))
            bad = {index: reason for _, _, images in loaded for index, reason in images.items()}
            yield Step(number, [(images, targets) for images, targets, _ in loaded], bad)

    def names(self, step: int) -> list[str]:
        """Return the names of the images of a step, over all processes."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        data = self.config.data
        order = epoch_order(self.source.order, data.aug_repeats, self.config.run.seed, epoch)
        first = step_in_epoch * data.batch_size
        return [self.source.name(i) for i in order[first : first + data.batch_size].tolist()]

    def _stream(self, steps: range) -> MicroBatches:
        data = self.config.data
        return MicroBatches(
            self.source.order,
            self.source.num_images,
            repeats=data.aug_repeats,
            batch_size=data.batch_size,
            micro_batch=self.micro_batch,
            rank=self.world.rank,
            world_size=self.world.size,
            seed=self.config.run.seed,
            steps=steps,
        )


class ValData:
    """Validation images, each exactly once over all processes."""

    def __init__(self, config: TrainConfig, source: Source, world: World) -> None:
        """Same arguments as ``TrainData``."""
        self.source, self.config, self.world = source, config, world
        self.left_out: Mapping[int, str] | None = None
        """Unreadable images that the run goes on without, by index, with the reason. The first pass, if this is None,
        finds up to the fraction data.max_bad_images of them."""
        share = config.data.batch_size // (world.size * config.run.grad_accum_steps)
        self.batch_size = config.data.validation_batch_size or max(share, 1)
        self._loader: DataLoader | None = None
        self._bad: dict[int, str] = {}

    @property
    def num_images(self) -> int:
        """Number of validation images, over all processes, without those that are left out."""
        return self.source.num_images - len(self.left_out or ())

    @property
    def indices(self) -> list[int]:
        """Indices of the images of this process."""
        share = range(self.world.rank, self.source.num_images, self.world.size)
        return [index for index in share if index not in (self.left_out or ())]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield images of this process, uint8 (B, C, H, W), with class indices (B,); ``settle`` must follow."""
        if self._loader is None:  # keep the workers, so none is forked later in the run
            self._loader = DataLoader(
                torch.utils.data.Subset(_ValImages(self.source, self.config), self.indices),
                batch_size=self.batch_size,
                collate_fn=_collate_readable,
                **loader_arguments(self.config.data.num_workers, self.world),
            )
        for images, targets, bad in _loaded(self._loader):
            self._bad |= bad
            if len(targets):
                yield images, targets

    def verify(self, pulse: Pulse | None = None) -> None:
        """Decode every image once, and ``settle``; if no line was printed for long, the pulse prints one."""
        pulse, read = pulse or Pulse(), 0
        for _, targets in self.batches():
            read += len(targets) * self.world.size
            told = min(read, self.num_images)
            pulse.beat(f"read {told:,} of {self.num_images:,} held-out images to find damaged ones")
        self.settle()

    def settle(self) -> None:
        """Raise DataError if a pass could not read too many images, or others than before; every rank must call this.

        A later score would else be of other images than the scores it is compared with.
        """
        found = {index: why for rank in self.world.gather(self._bad) for index, why in rank.items()}
        known, share = self.left_out, self.config.data.max_bad_images
        new = sorted(found.keys() - (known or {}).keys())
        self.left_out = (known or {}) | found
        if not new:
            return
        listed = named([f"{self.source.name(i)}: {found[i]}" for i in new])
        told = f"{len(new)} of {counted(self.source.num_images, 'image')} cannot be read"
        if known is not None:
            raise DataError(f"{told} any more: {listed}", everywhere=True)
        if len(new) > share * self.source.num_images:
            cure = "repair or delete them, or raise data.max_bad_images"
            told = f"{told}, more than data.max_bad_images {share:g}: {listed}; {cure}"
            raise DataError(told, everywhere=True)
        if self.world.is_main:
            log.warning(f"{told}, left out: {listed}")


def loader_arguments(num_workers: int | None, world: World) -> dict[str, Any]:
    """Return the DataLoader arguments for worker processes.

    ``num_workers=None`` uses one worker per core of this process's share, at most 8. Workers are forked on
    Linux, PyTorch's traditional default; the default of Python 3.14 would re-import PyTorch in each worker. Raises
    ConfigError as in ``check_workers``.
    """
    if num_workers is None:
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        cores = len(usable(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_workers = max(min(cores, _MOST_WORKERS), 1)
    arguments: dict[str, Any] = {"pin_memory": world.device.type == "cuda"}
    if num_workers == 0:
        return arguments
    check_workers(num_workers)
    _end_loaders_at_exit()
    return arguments | {
        "num_workers": num_workers,
        "persistent_workers": True,
        "multiprocessing_context": "fork" if sys.platform == "linux" else None,
        "worker_init_fn": _leave_signals_to_parent,
        "timeout": _PATIENCE,
    }


def _loaded(loader: DataLoader) -> Iterator[Any]:
    """Yield batches; report a worker that dies while it sends a batch like any dead worker."""
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(f"DataLoader worker died: {type(error).__name__}") from error


@cache
def _end_loaders_at_exit() -> None:
    """Kill remaining workers at exit; they ignore SIGTERM, so Python would wait for them."""
    atexit.register(end_loaders)


def _leave_signals_to_parent(worker: int) -> None:
    """Ignore signals that schedulers send to every process; the run needs its workers to reach a checkpoint."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def number_as(classes: tuple[str, ...] | None, val: Source) -> None:
    """Number the classes of validation as in training, if some lack a folder, and warn of those without images."""
    if None in (classes, val.classes):
        return
    found = {*val.classes}
    places = [place for place, name in enumerate(classes) if name in found]
    if len(places) < len(classes) and val.classes == tuple(classes[place] for place in places):
        val.labels, val.classes = np.array(places)[val.labels], classes
    counts = np.bincount(val.labels, minlength=len(val.classes))
    if len(unscored := np.flatnonzero(counts == 0)):
        names = named([val.classes[place] for place in unscored])
        log.warning(f"classes without validation images are not scored ({len(unscored)}): {names}")


def _warn_of_few(val: Source, fraction: float) -> None:
    """Warn of fewer than 100 held-out images, and of classes of which a fraction holds out fewer than 5."""
    if val.num_images < _FEW_IMAGES:
        log.warning(
            f"{counted(val.num_images, 'image')} held out: with so few, the accuracy is uncertain by up to "
            f"{98 / val.num_images**0.5:.0f} points (95 %)"
        )
    if not fraction:
        return
    counts = np.bincount(val.labels, minlength=len(val.classes))
    few = [
        f"{name} {count}"
        for name, count in zip(val.classes, counts.tolist(), strict=True)
        if 0 < count < _FEW
    ]
    if few:
        log.warning(
            f"fewer than {_FEW} images are held out of {len(few)} classes, too few to judge them "
            f"({named(few)}); raise data.val_fraction"
        )


def _check_classes(train: Source, val: Source) -> None:
    """Raise DataError if the class names of the splits differ in content or order; skip splits without names."""
    if None in (train.classes, val.classes) or train.classes == val.classes:
        return
    differing = sorted(set(train.classes) ^ set(val.classes))
    if differing:
        where = "training" if differing[0] in train.classes else "validation"
        raise DataError(
            f"class {printable(differing[0])} is in the {where} data only ({len(differing)} classes differ)"
        )
    pairs = enumerate(zip(train.classes, val.classes, strict=True))
    label, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    raise DataError(
        f"class {label} is {printable(one)} in the training data and {printable(other)} in the validation data"
    )


class _Images(Dataset):
    """Dataset that reads and decodes the images of a source."""

    def __init__(self, source: Source, config: TrainConfig) -> None:
        self.source, self.config = source, config

    def decoded(self, index: int) -> Image.Image | torch.Tensor:
        return decode_for(read_patiently(self.source.read, index), self.config)


class _TrainImages(_Images):
    """Augmented training images; an unreadable image is replaced by another one.

    The replacement depends only on the seed, so a resumed run uses the same one.
    """

    def __init__(self, source: Source, config: TrainConfig) -> None:
        super().__init__(source, config)
        self.transforms = {size: train_transform(config, size) for size in config.train_sizes}
        # Cache the last decoded image, because repeated augmentation requests it again at once.
        self.last: tuple[Any, ...] = (None,)

    def __getitem__(self, draw: SampledIndex) -> tuple[torch.Tensor, int, dict[int, str]]:
        if self.last[0] != (draw.epoch, draw.index):
            self.last = ((draw.epoch, draw.index), *self._decode(draw))
        _, image, label, bad = self.last
        seed = self.config.run.seed
        seed_image(key("image", seed, draw.epoch, draw.position))
        return (
            self.transforms[image_size_of_step(list(self.transforms), seed, draw.step)](image),
            label,
            bad,
        )

    def _decode(self, draw: SampledIndex) -> tuple[Any, int, dict[int, str]]:
        """Return an image, its label, and the unreadable images tried before it with reasons."""
        bad: dict[int, str] = {}
        index = draw.index
        for attempt in range(_MOST_TRIES):
            try:
                return self.decoded(index), int(self.source.labels[index]), bad
            except (ValueError, OSError) as error:
                bad[index] = reason(error)
            place = (self.config.run.seed, draw.epoch, draw.index, attempt)
            index = key("replacement", *place) % self.source.num_images
        last, why = list(bad.items())[-1]
        raise DataError(
            f"{_MOST_TRIES} training images in a row cannot be read, the last: {self.source.name(last)}: {why}"
        )


class _ValImages(_Images):
    """Validation images, uint8 (C, H, W), with label and index; why it cannot be read instead of an unreadable one."""

    def __init__(self, source: Source, config: TrainConfig) -> None:
        super().__init__(source, config)
        self.transform = val_transform(config)

    def __getitem__(self, index: int) -> tuple[torch.Tensor | str, int, int]:
        try:
            image: torch.Tensor | str = self.transform(self.decoded(index))
        except (ValueError, OSError) as error:
            image = reason(error)
        return image, int(self.source.labels[index]), index


def _collate_readable(
    items: list[tuple[torch.Tensor | str, int, int]],
) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
    """Stack the images that could be read, and their labels; return the reasons of the others, by index."""
    read = [(image, label) for image, label, _ in items if not isinstance(image, str)]
    bad = {index: image for image, _, index in items if isinstance(image, str)}
    images, labels = default_collate(read) if read else (torch.empty(0), torch.empty(0))
    return images, labels, bad


def _collate(
    items: list[tuple[torch.Tensor, int, dict[int, str]]],
) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
    """Stack images and labels, and merge the reports of bad images."""
    images, labels = default_collate([(image, label) for image, label, _ in items])
    return images, labels, {index: why for _, _, bad in items for index, why in bad.items()}
