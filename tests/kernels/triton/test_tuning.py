"""Which sequences are cut into splits on an H100."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.scans import plan_of, random_args
from vil.kernels.plan import forget_plans

tuning = pytest.importorskip("vil.kernels.triton.tuning")

# Kernel -> fit for which splits are worth their work, and splits that one image has at least.
KERNELS = {
    "exact_forward": (2.5, 64),
    "exact_backward": (2.5, 64),
    "fragments_backward": (2.5, 20),
    "diagonal_forward": (4.0, 64),
}


@pytest.fixture(autouse=True)
def plans_of_this_test() -> Iterator[None]:
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_long_sequences_are_cut_without_a_gap(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "processors", lambda device: 132)

    def splits(warps: int, chunks: int) -> tuple[int, int]:
        return tuning.num_splits(kernel, warps, chunks, torch.device("cuda"), min_fit)

    min_fit, of_one = KERNELS[kernel]
    shortest = tuning.SHORTEST_BACK_SPLIT if kernel == "fragments_backward" else tuning.SHORTEST_SPLIT
    of_one_image = 384 // 32  # warps, with one channel per lane
    for batch, least in ((1, of_one), (8, 8)):
        assert splits(batch * of_one_image, 381)[0] > least
    for batch in (64, 128):  # these fill the device
        assert splits(batch * of_one_image, 381) == (1, 381)
    for warps in (0, 1, 12, 100, 10_000):
        for chunks in range(1, 400):
            count, length = splits(warps, chunks)
            assert 1 <= count <= chunks
            assert (count - 1) * length < chunks <= count * length
            assert count == 1 or length >= shortest


def test_sums_within_a_warp_refuse_more_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps would both write their sums to the same place."""
    backend = pytest.importorskip("vil.kernels.triton.backend")
    monkeypatch.setattr(tuning, "fast", lambda device: 90)
    monkeypatch.setattr(tuning, "blocks", lambda kernel, *_: (32, 2))
    with pytest.raises(ValueError, match=r"diagonal_backward \(32, 1\), got \(32, 2\)"):
        plan_of(backend, random_args("longhorn", (1, 21, 32, 4)), "longhorn")


def test_scans_in_registers_are_for_bfloat16_and_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pytest.importorskip("vil.kernels.triton.backend")
    monkeypatch.setattr(tuning, "fast", lambda device: 90)
    bf16, cases = torch.bfloat16, []
    for shape, dtype in [((1, 5, 32, 4), bf16), ((2, 21, 36, 16), bf16), ((1, 21, 32, 16), torch.float16)]:
        cases.append((random_args("longhorn_exact", shape, dtype=dtype), dtype == bf16))
    for shape in ((1, 21, 37, 16), (1, 21, 32, 17)):
        cases.append((random_args("longhorn_exact", shape, dtype=bf16), False))
    for args, in_registers in cases:
        plan = plan_of(backend, args, "longhorn_exact")
        assert (type(plan).__name__ == "FragmentPlan") == in_registers
    monkeypatch.setattr(tuning, "fast", lambda device: 75)
    forget_plans()
    assert type(plan_of(backend, cases[1][0], "longhorn_exact")).__name__ == "ExactPlan"


def test_scans_in_registers_copy_what_they_cannot_load_in_fours(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pytest.importorskip("vil.kernels.triton.backend")
    monkeypatch.setattr(tuning, "fast", lambda device: 90)
    args = random_args("longhorn_exact", (1, 21, 36, 16), dtype=torch.bfloat16)
    wide = torch.zeros(2, 1, 21, 37, dtype=torch.bfloat16)
    assert plan_of(backend, args._replace(x=wide[..., :36]), "longhorn_exact").copied == ["x"]
    shifted = torch.zeros(2 * 21 * 36 + 1, dtype=torch.bfloat16)[1:].view(2, 1, 21, 36)
    args = args._replace(x=shifted)
    prepared = plan_of(backend, args, "longhorn_exact").prepared(args)
    assert prepared.x.data_ptr() % 8 == 0
    assert torch.equal(prepared.x, shifted)
