"""Which sequences are cut into splits on an H100."""

import pytest
import torch

from tests.kernels.scans import plan_of, random_args

tuning = pytest.importorskip("vil.kernels.triton.tuning")

KERNELS = {"exact_forward": 2.5, "exact_backward": 2.5, "diagonal_forward": 4.0}


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_long_sequences_are_cut_without_a_gap(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "processors", lambda device: 132)

    def splits(warps: int, chunks: int) -> tuple[int, int]:
        return tuning.num_splits(kernel, warps, chunks, torch.device("cuda"), KERNELS[kernel])

    of_one_image = 384 // 32  # warps, with one channel per lane
    for batch, least in ((1, 64), (8, 8)):
        assert splits(batch * of_one_image, 381)[0] > least
    for batch in (64, 128):  # these fill the device
        assert splits(batch * of_one_image, 381) == (1, 381)
    for warps in (0, 1, 12, 100, 10_000):
        for chunks in range(1, 400):
            count, length = splits(warps, chunks)
            assert 1 <= count <= chunks
            assert (count - 1) * length < chunks <= count * length
            assert count == 1 or length >= tuning.SHORTEST_SPLIT


def test_sums_within_a_warp_refuse_more_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps would both write their sums to the same place."""
    backend = pytest.importorskip("vil.kernels.triton.backend")
    monkeypatch.setattr(tuning, "fast", lambda device: 90)
    monkeypatch.setattr(tuning, "blocks", lambda kernel, *_: (32, 2))
    with pytest.raises(ValueError, match=r"diagonal_backward \(32, 1\), got \(32, 2\)"):
        plan_of(backend, random_args("longhorn", (1, 21, 32, 4)), "longhorn")
