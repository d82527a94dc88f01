"""Which sequences are cut into splits."""

import pytest
import torch

tuning = pytest.importorskip("vil.kernels.triton.tuning")

GPU = torch.device("cuda")
KERNELS = {"exact_forward": 2.5, "exact_backward": 2.5, "recurrent_forward": 4.0}


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "processors", lambda device: 132)


def splits(kernel: str, warps: int, chunks: int) -> tuple[int, int]:
    return tuning.num_splits(kernel, warps, chunks, GPU, KERNELS[kernel])


def warps(B: int, D: int) -> int:
    """Return the number of warps of a scan, with one channel per lane."""
    return B * D // 32


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_batch_that_fills_the_device_is_not_cut(kernel: str) -> None:
    assert splits(kernel, warps(128, 384), 13) == (1, 13)
    assert splits(kernel, warps(64, 384), 381) == (1, 381)


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_long_sequences_are_cut(kernel: str) -> None:
    for B, least in ((1, 64), (8, 8)):
        count, length = splits(kernel, warps(B, 384), 381)
        assert count > least
        assert length >= tuning.SHORTEST_SPLIT


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("parallel", [0, 1, 12, 100, 10_000])
def test_splits_cover_every_chunk_once(parallel: int, kernel: str) -> None:
    for chunks in range(1, 400):
        count, length = splits(kernel, parallel, chunks)
        assert 1 <= count <= chunks
        assert (count - 1) * length < chunks <= count * length
        assert count == 1 or length >= tuning.SHORTEST_SPLIT
