"""Which sequences are cut into splits."""

import pytest
import torch

tuning = pytest.importorskip("vil.kernels.triton.tuning")

GPU = torch.device("cuda")
EXACT, DIAGONAL = (0.2, 1.0), (0.0, 2.0)  # time for the states that splits start from, work


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "processors", lambda device: 132)


def warps(B: int, D: int) -> int:
    """Return the number of warps of a scan, with one channel per lane."""
    return B * D // 32


@pytest.mark.parametrize("costs", [EXACT, DIAGONAL])
def test_a_batch_that_fills_the_device_is_not_cut(costs: tuple[float, float]) -> None:
    assert tuning.num_splits(warps(128, 384), 13, GPU, *costs) == (1, 13)
    assert tuning.num_splits(warps(64, 384), 381, GPU, *costs) == (1, 381)


@pytest.mark.parametrize("costs", [EXACT, DIAGONAL])
def test_few_long_sequences_are_cut(costs: tuple[float, float]) -> None:
    for B, least in ((1, 64), (8, 8)):
        count, length = tuning.num_splits(warps(B, 384), 381, GPU, *costs)
        assert count > least
        assert length >= tuning.SHORTEST_SPLIT


@pytest.mark.parametrize("costs", [EXACT, DIAGONAL])
@pytest.mark.parametrize("parallel", [0, 1, 12, 100, 10_000])
def test_splits_cover_every_chunk_once(parallel: int, costs: tuple[float, float]) -> None:
    for chunks in range(1, 400):
        count, length = tuning.num_splits(parallel, chunks, GPU, *costs)
        assert 1 <= count <= chunks
        assert (count - 1) * length < chunks <= count * length
        assert count == 1 or length >= tuning.SHORTEST_SPLIT
