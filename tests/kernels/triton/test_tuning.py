"""Which sequences are cut into splits."""

import pytest

tuning = pytest.importorskip("vil.kernels.triton.tuning")

H200 = 132  # processors
OVERHEAD = 11.0


def warps(B: int, D: int) -> int:
    """Return the number of warps of a scan, with one channel per lane."""
    return B * D // 32


def test_large_batches_are_not_cut() -> None:
    assert tuning.splits_for(H200, warps(128, 384), 13, OVERHEAD) == (1, 13)
    assert tuning.splits_for(H200, warps(8, 384), 381, OVERHEAD) == (1, 381)


def test_one_long_sequence_is_cut() -> None:
    count, length = tuning.splits_for(H200, warps(1, 384), 381, OVERHEAD)
    assert count > 4 * OVERHEAD
    assert length >= tuning.SHORTEST_SPLIT


@pytest.mark.parametrize("overhead", [1.0, 11.0])
@pytest.mark.parametrize("parallel", [0, 1, 12, 100, 10_000])
def test_splits_cover_every_chunk_once(parallel: int, overhead: float) -> None:
    for chunks in range(1, 400):
        count, length = tuning.splits_for(H200, parallel, chunks, overhead)
        assert 1 <= count <= chunks
        assert (count - 1) * length < chunks <= count * length
        assert count == 1 or length >= tuning.SHORTEST_SPLIT
