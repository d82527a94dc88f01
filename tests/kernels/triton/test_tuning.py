"""When sequences are cut in segments."""

import pytest
import torch

tuning = pytest.importorskip("vil.kernels.triton.tuning")

H200 = 132  # processors
OVERHEAD = 11.0


def warps(B: int, D: int) -> int:
    """Return the warps of a scan, one channel a lane."""
    return B * D // 32


def test_large_batches_are_not_cut() -> None:
    assert tuning.segments_for(H200, warps(128, 384), 13, OVERHEAD) == (1, 13)
    assert tuning.segments_for(H200, warps(8, 384), 381, OVERHEAD) == (1, 381)


def test_one_long_sequence_is_cut() -> None:
    count, length = tuning.segments_for(H200, warps(1, 384), 381, OVERHEAD)
    assert count > 4 * OVERHEAD
    assert length >= tuning.SHORTEST_SEGMENT


def test_short_sequences_are_not_cut() -> None:
    assert tuning.segments_for(H200, warps(1, 384), 13, OVERHEAD) == (1, 13)
    assert tuning.segments_for(H200, 1, 0, OVERHEAD) == (1, 0)


@pytest.mark.parametrize("overhead", [1.0, 11.0])
@pytest.mark.parametrize("parallel", [0, 1, 12, 100, 10_000])
def test_segments_cover_every_chunk_once(parallel: int, overhead: float) -> None:
    for chunks in range(1, 400):
        count, length = tuning.segments_for(H200, parallel, chunks, overhead)
        assert 1 <= count <= chunks
        assert (count - 1) * length < chunks <= count * length
        assert count == 1 or length >= tuning.SHORTEST_SEGMENT


def test_sequences_are_cut_on_gpus_only() -> None:
    assert tuning.segments(1, 10_000, torch.device("cpu"), 1.0) == (1, 10_000)


def test_narrow_scans_get_narrow_blocks() -> None:
    assert tuning.blocks_for("sm_90", "exact_forward", 384) == (128, 4)
    assert tuning.blocks_for("sm_90", "exact_forward", 40) == (64, 2)
    assert tuning.blocks_for("sm_90", "exact_forward", 8) == (32, 1)
    assert tuning.blocks_for("gfx942", "exact_forward", 8) == (64, 1)  # a warp of 64 lanes


@pytest.mark.parametrize("arch", tuning.BLOCKS)
def test_scans_have_one_channel_per_lane(arch: str) -> None:
    lanes = 64 if arch.startswith("gfx") else 32
    rows = {kernel: row for kernel, row in tuning.BLOCKS[arch].items() if kernel != "conv"}
    assert all(block == lanes * warps for block, warps in rows.values())
