"""Counters of multiply-adds that others wrote: they find in our operators what ``count_macs`` does."""

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.documents.pages import blocks
from vil.complexity import calflops_hooks, count_macs, fvcore_handles
from vil.kernels import ops

MODELS = ("vil_tiny", "vil_tiny_exact", "vim_tiny")
SIZES = (64, 96)  # other grids than the trained one, and so with an order of the convolution


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return timm.create_model(request.param, depth=2).eval()


def images(size: int) -> Tensor:
    return torch.zeros(1, 3, size, size)


@pytest.fixture
def fvcore(caplog: pytest.LogCaptureFixture):
    """Return fvcore, whose warnings of what it does not know are not printed."""
    caplog.set_level(logging.ERROR)
    return pytest.importorskip("fvcore.nn")


def test_fvcore_counts_what_count_macs_does(model: nn.Module, fvcore) -> None:
    for size in SIZES:
        without = fvcore.FlopCountAnalysis(model, images(size))
        assert without.total() > 0
        assert without.unsupported_ops()["vil::mixer"] == 2
        counted = without.copy().set_op_handle(**fvcore_handles())
        assert counted.total() == count_macs(model, (3, size, size))
        assert counted.by_operator()["mixer"] == counted.total() - without.total() > 0
        assert not any(name.startswith("vil::") for name in counted.unsupported_ops())


def test_fvcore_counts_the_norms_of_pyramids_besides(fvcore) -> None:
    pyramid = timm.create_model("vil_tiny_pyramid", depth=2, features_only=True).eval()
    counted = fvcore.FlopCountAnalysis(pyramid, images(64)).set_op_handle(**fvcore_handles())
    norms = counted.by_operator()["layer_norm"]
    assert counted.total() - norms == count_macs(pyramid, (3, 64, 64))
    assert norms > 0


class Scans(nn.Module):
    """Every function of ``vil.kernels.ops`` with all of its tensors."""

    def forward(self, x: Tensor, q: Tensor, weight: Tensor, D: Tensor, state: Tensor) -> Tensor:
        order = torch.arange(x.shape[1], dtype=torch.int32)[None]
        both = ops.causal_conv1d_bidirectional(x, weight, D, order)
        qs, z = torch.stack((q, q)), x
        y = ops.bidirectional_scan(both, both, None, qs, qs, D, D, z, "longhorn_exact")
        one, _ = torch.ops.vil.scan(y, x, None, q, q, D[0], D[1], state, "longhorn", True)
        return one


def test_fvcore_and_torch_count_scans_alike(fvcore) -> None:
    B, L, D, M, K = 2, 5, 6, 4, 3
    given = (
        *(torch.randn(B, L, D), torch.randn(B, L, M), torch.randn(2, D, K)),
        *(torch.randn(2, D), torch.randn(B, D, M)),
    )
    counted = fvcore.FlopCountAnalysis(Scans(), given).set_op_handle(**fvcore_handles())
    with FlopCounterMode(display=False) as counter:
        Scans()(*given)
    macs = B * L * D * (2 * K + 2 * (3 * M + 1) + 1 + (4 * M + 1))
    assert counted.total() == counter.get_total_flops() // 2 == macs


def test_padding_that_is_cut_off_is_not_counted() -> None:
    model = timm.create_model("vil_tiny", depth=1, img_size=64).eval()
    mask = torch.ones(1, 96, 96)
    mask[:, 64:] = 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images(96), mask)
    counts = counter.get_flop_counts()["Global"]
    whole = FlopCounterMode(display=False)
    with torch.no_grad(), whole:
        model(images(96)[:, :, :64])
    assert counts[torch.ops.vil.mixer] == whole.get_flop_counts()["Global"][torch.ops.vil.mixer]


DOCUMENTED = blocks("measuring")


@pytest.mark.usefixtures("fvcore", "calflops")
@pytest.mark.parametrize("block", DOCUMENTED[1:])
def test_lines_of_the_documents_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1, img_size=64))
    exec((DOCUMENTED[0] + block).replace("224, 224", "64, 64"), {})
    assert "assert" in block


@pytest.fixture
def calflops() -> Iterator:
    package = pytest.importorskip("calflops")
    mapping = pytest.importorskip("calflops.pytorch_ops").MODULE_HOOK_MAPPING
    before = dict(mapping)
    yield package
    mapping.clear()
    mapping.update(before)


def test_calflops_counts_what_count_macs_does(model: nn.Module, calflops) -> None:
    def count(size: int) -> int:
        shape = (1, 3, size, size)
        quiet = {"print_results": False, "output_as_string": False}
        return calflops.calculate_flops(model, shape, **quiet)[1]

    before = count(SIZES[0])
    calflops.pytorch_ops.MODULE_HOOK_MAPPING.update(calflops_hooks())
    for size in SIZES:
        assert count(size) == count_macs(model, (3, size, size))
    assert before < count(SIZES[0])
