"""Which images are drawn in every rank, step and epoch, and after resuming."""

from collections import Counter
from itertools import pairwise

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


def stream(steps: range) -> list[SampledIndex]:
    """Return the draws of a small run: 1,000 images, batches of 64."""
    division = {"micro_batch": 16, "rank": 0, "world_size": 1}
    draws = {"repeats": 3, "batch_size": 64, "seed": 7, "steps": steps}
    batches = MicroBatches(shuffled(1000), 1000, **draws, **division)
    return [draw for batch in batches for draw in batch]


def test_repeats_draw_each_image_three_times_in_a_row() -> None:
    draws = stream(range(12))  # DeiT rounds 1,000 down to 768: 12 steps
    indices = [draw.index for draw in draws]
    assert {draw.epoch for draw in draws} == {0}
    assert [draw.position for draw in draws] == list(range(768))
    assert set(Counter(indices).values()) == {3}
    assert indices[0::3] == indices[1::3] == indices[2::3]
    assert indices != [draw.index for draw in stream(range(12, 24))]  # of the next epoch


def test_steps_hold_the_images_that_deit_gives_them() -> None:
    """DeiT's RASampler gives rank r of w the positions r, r + w, ...; a step takes B / w each."""
    order = epoch_order(shuffled(1000), 3, 7, 0)[:768].tolist()
    share = {rank: order[rank::4] for rank in range(4)}
    for step in range(12):
        theirs = [i for rank in range(4) for i in share[rank][16 * step : 16 * (step + 1)]]
        ours = [draw.index for draw in stream(range(step, step + 1))]
        assert Counter(ours) == Counter(theirs)


def test_sizes_of_steps_follow_from_the_seed_and_are_drawn_alike() -> None:
    sizes = (12, 16, 24, 32)
    drawn = {seed: [image_size_of_step(sizes, seed, step) for step in range(2000)] for seed in (0, 1)}
    for seed, found in drawn.items():
        assert all(450 < count < 550 for count in Counter(found).values())
        assert set(found) == set(sizes)
        pairs = Counter(pairwise(found))  # no size predicts the next
        assert len(pairs) == 16
        assert min(pairs.values()) > 80
        assert [image_size_of_step(sizes, seed, step) for step in reversed(range(9))] == found[8::-1]
    assert drawn[0] != drawn[1]


def test_an_epoch_with_repeats_is_a_multiple_of_256_images_as_deits() -> None:
    assert [epoch_length(n, 3) for n in (255, 256, 300, 1_281_167)] == [255, 256, 256, 1_281_024]
    assert epoch_length(300, 1) == 300
