"""Which images are drawn in every rank, step and epoch, and after resuming."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from vil.training.sampler import (
    MicroBatches,
    SampledIndex,
    epoch_length,
    epoch_order,
    image_size_of_step,
)


def shuffled(num_images: int):
    """Return a function that draws an order of that many images."""
    return lambda generator: torch.randperm(num_images, generator=generator)


def stream(
    steps: range, *, repeats: int = 3, micro_batch: int = 16, rank: int = 0, world_size: int = 1
) -> list[list[SampledIndex]]:
    """Return the micro-batches of a small run: 1,000 images, batches of 64."""
    return list(
        MicroBatches(
            shuffled(1000),
            1000,
            repeats=repeats,
            batch_size=64,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            seed=7,
            steps=steps,
        )
    )


def flat(batches: list[list[SampledIndex]]) -> list[SampledIndex]:
    return [draw for batch in batches for draw in batch]


def test_repeats_draw_each_image_three_times_in_a_row() -> None:
    draws = flat(stream(range(12)))  # DeiT rounds 1,000 down to 768: 12 steps
    indices = [draw.index for draw in draws]
    assert {draw.epoch for draw in draws} == {0}
    assert [draw.position for draw in draws] == list(range(768))
    assert set(Counter(indices).values()) == {3}
    assert indices[0::3] == indices[1::3] == indices[2::3]


def test_steps_hold_the_images_that_deit_gives_them() -> None:
    """DeiT's RASampler gives rank r of w the positions r, r + w, ...; a step takes B / w each."""
    order = epoch_order(shuffled(1000), 3, 7, 0)[:768].tolist()
    share = {rank: order[rank::4] for rank in range(4)}
    for step in range(12):
        theirs = [i for rank in range(4) for i in share[rank][16 * step : 16 * (step + 1)]]
        ours = [draw.index for draw in flat(stream(range(step, step + 1)))]
        assert Counter(ours) == Counter(theirs)


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 64), (2, 32), (2, 8), (4, 16), (8, 4)])
def test_a_step_is_the_same_however_it_is_divided(world_size, micro_batch) -> None:
    whole = flat(stream(range(9, 15), micro_batch=64))
    parts = [
        stream(range(9, 15), micro_batch=micro_batch, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert {len(part) for part in parts} == {6 * 64 // world_size // micro_batch}
    together = [
        draw
        for step in range(6)
        for part in parts
        for draw in flat(part)[step * 64 // world_size : (step + 1) * 64 // world_size]
    ]
    assert together == whole


@pytest.mark.parametrize("first", [0, 5, 12, 23])
def test_resumed_stream_is_the_rest_of_the_whole(first) -> None:
    assert stream(range(first, 24)) == stream(range(24))[4 * first :]


def test_sizes_of_steps_follow_from_the_seed_and_are_drawn_alike() -> None:
    sizes = (12, 16, 24, 32)
    drawn = {
        seed: [image_size_of_step(sizes, seed, step) for step in range(2000)] for seed in (0, 1)
    }
    for seed, found in drawn.items():
        assert all(450 < count < 550 for count in Counter(found).values())
        assert set(found) == set(sizes)
        pairs = Counter(pairwise(found))  # no size predicts the next
        assert len(pairs) == 16
        assert min(pairs.values()) > 80
        assert [image_size_of_step(sizes, seed, step) for step in reversed(range(9))] == found[
            8::-1
        ]
    assert drawn[0] != drawn[1]


def test_an_epoch_with_repeats_is_a_multiple_of_256_images_as_deits() -> None:
    assert [epoch_length(n, 3) for n in (255, 256, 300, 1_281_167)] == [255, 256, 256, 1_281_024]
    assert epoch_length(300, 1) == 300
