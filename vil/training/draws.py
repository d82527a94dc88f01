"""Which image a run draws when, and the seed of everything random about it.

No generator's state is kept: every random number follows from the run's seed and where in the run it
is drawn. A run can therefore be taken up at any step, and divided among any number of processes.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

_REPEAT_ROUND = 256  # DeiT rounds the length of an epoch down to this many images

Order = Callable[[torch.Generator], torch.Tensor]


class Draw(NamedTuple):
    """One image of the training stream."""

    epoch: int
    position: int
    """Place in the epoch, over all processes."""
    index: int
    """Which image."""
    step: int
    """Step of the run."""


class MicroBatches(Sampler[list[Draw]]):
    """The draws of one process from a given step to the end of the run, one micro-batch at a time.

    A step's images are consecutive; each process takes a consecutive part of them. The draws that
    repeated augmentation makes of an image thus stay together, and it is decoded once. DeiT spreads
    them over the processes instead; the images of a step are the same.
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
        """Describe the stream.

        Args:
            order: Draws an epoch's order of the images.
            num_images: Images in the data set.
            repeats: Draws of each image in a row; 0 and 1 draw each once.
            batch_size: Images of a step, over all processes.
            micro_batch: Images that one process takes at a time.
            rank: This process.
            world_size: Number of processes.
            seed: The run's seed.
            steps: Steps to take, counted over the whole run.
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

    def __iter__(self) -> Iterator[list[Draw]]:
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
                yield [Draw(epoch, start + i, index, step) for i, index in enumerate(indices)]

    def __len__(self) -> int:
        return len(self.steps) * (self.batch_size // self.world_size // self.micro_batch)


def epoch_order(order: Order, repeats: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the images of an epoch, each `repeats` times in a row, as one sequence."""
    generator = torch.Generator().manual_seed(key("order", seed, epoch))
    return order(generator).repeat_interleave(max(repeats, 1))


def epoch_length(num_images: int, repeats: int) -> int:
    """Return how many images an epoch draws; repeats change which, hardly how many."""
    if repeats <= 1 or num_images < _REPEAT_ROUND:
        return num_images
    return num_images // _REPEAT_ROUND * _REPEAT_ROUND


def step_size(sizes: Sequence[int], seed: int, step: int) -> int:
    """Draw the size of a step's images: the same in all processes, and after resuming."""
    return sizes[key("image size", seed, step) % len(sizes)]


def key(purpose: str, *place: int) -> int:
    """Mix what a random number is for and where it is drawn into a 32-bit seed."""
    digest = hashlib.blake2b(f"{purpose} {place}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


def seed_image(seed: int) -> None:
    """Seed what augments one image: random, NumPy and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  the transforms draw from the global generator
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer than all the rest


def seed_everything(seed: int) -> None:
    """Seed every generator, those of GPUs too."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  Mixup draws from the global generator
    torch.manual_seed(seed)
