"""The order in which a run draws images, and the seeds of all randomness.

No generator state is saved: every random number depends only on the run's seed and the place in the run
where it is drawn. A run can therefore be resumed at any step and split over any number of processes.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

_REPEAT_ROUND = 256  # DeiT rounds the length of an epoch down to a multiple of this

Order = Callable[[torch.Generator], torch.Tensor]


class SampledIndex(NamedTuple):
    """One image of the training stream."""

    epoch: int
    position: int
    """Position in the epoch, counted over all processes."""
    index: int
    """Index of the image."""
    step: int
    """Step of the run."""


class MicroBatches(Sampler[list[SampledIndex]]):
    """Sampler of one process's draws over a range of steps, one micro-batch at a time.

    The images of a step are consecutive, and each process takes a consecutive part of them. The draws
    of one image under repeated augmentation thus stay together, so the image is decoded once. DeiT
    spreads them over the processes instead; the images of a step are the same.
    """

    def __init__(
        self,
        order: Order,
        num_images: int,
        *,
        repeats: int,
        batch_size: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        steps: range,
    ) -> None:
        """Initialise the sampler.

        ``order`` draws an epoch's order of ``num_images`` images, each of which is drawn ``repeats`` times in a row (0
        is once). ``batch_size`` images of all processes are a step, ``micro_batch`` of this one are a micro-batch.
        ``steps`` are counted from the start of the run.
        """
        self.order = order
        self.repeats = max(repeats, 1)
        self.batch_size = batch_size
        self.micro_batch = micro_batch
        self.rank, self.world_size = rank, world_size
        self.seed = seed
        self.steps = steps
        self.length = epoch_length(num_images, repeats)
        self.steps_per_epoch = self.length // batch_size

    def __iter__(self) -> Iterator[list[SampledIndex]]:
        share = self.batch_size // self.world_size
        drawn, order = -1, torch.empty(0)
        for step in self.steps:
            epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            if epoch != drawn:
                drawn, order = epoch, epoch_order(self.order, self.repeats, self.seed, epoch)
            first = step_in_epoch * self.batch_size + self.rank * share
            for start in range(first, first + share, self.micro_batch):
                stop = start + self.micro_batch
                indices = order[start:stop].tolist()
                yield [SampledIndex(epoch, start + i, index, step) for i, index in enumerate(indices)]

    def __len__(self) -> int:
        return len(self.steps) * (self.batch_size // self.world_size // self.micro_batch)


def epoch_order(order: Order, repeats: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the drawn image indices of an epoch, int64, each repeated ``repeats`` times in a row."""
    generator = torch.Generator().manual_seed(key("order", seed, epoch))
    return order(generator).repeat_interleave(max(repeats, 1))


def epoch_length(num_images: int, repeats: int) -> int:
    """Return the draws per epoch: ``num_images``, but with repeats its largest multiple of 256 if there is one."""
    if repeats <= 1 or num_images < _REPEAT_ROUND:
        return num_images
    return num_images // _REPEAT_ROUND * _REPEAT_ROUND


def image_size_of_step(sizes: Sequence[int], seed: int, step: int) -> int:
    """Draw the image size of a step; it is the same in all processes and after resuming."""
    return sizes[key("image size", seed, step) % len(sizes)]


def key(purpose: str, *place: int) -> int:
    """Hash the purpose of a random number and the place of its draw into a 32-bit seed."""
    digest = hashlib.blake2b(f"{purpose} {place}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


def seed_image(seed: int) -> None:
    """Seed the generators that augment one image: random, NumPy and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  the transforms draw from the global generator
    torch.default_generator.manual_seed(seed)  # much cheaper than torch.manual_seed


def seed_everything(seed: int) -> None:
    """Seed every generator, including those of GPUs."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  Mixup draws from the global generator
    torch.manual_seed(seed)
