"""Counters of multiply-adds that others wrote: they find in our operators what ``count_macs`` does."""

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.documents.pages import blocks
from vil.complexity import calflops_hooks, count_macs, fvcore_handles

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


@pytest.mark.ci
def test_fvcore_counts_what_count_macs_does(model: nn.Module, fvcore) -> None:
    for size in SIZES:
        without = fvcore.FlopCountAnalysis(model, images(size))
        assert without.total() > 0
        assert without.unsupported_ops()["vil::mixer"] == 2
        counted = without.copy().set_op_handle(**fvcore_handles())
        assert counted.total() == count_macs(model, (3, size, size))
        assert counted.by_operator()["mixer"] == counted.total() - without.total() > 0
        assert not any(name.startswith("vil::") for name in counted.unsupported_ops())


@pytest.fixture
def calflops() -> Iterator:
    package = pytest.importorskip("calflops")
    mapping = pytest.importorskip("calflops.pytorch_ops").MODULE_HOOK_MAPPING
    before = dict(mapping)
    yield package
    mapping.clear()
    mapping.update(before)


@pytest.mark.ci
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


DOCUMENTED = blocks("speed")


@pytest.mark.ci
@pytest.mark.usefixtures("fvcore", "calflops")
@pytest.mark.parametrize("block", DOCUMENTED[1:])
def test_lines_of_the_documents_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1, img_size=64))
    exec((DOCUMENTED[0] + block).replace("224, 224", "64, 64"), {})
    assert "assert" in block
