"""The self check passes here, and fails where a backend is wrong."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from vil import selfcheck
from vil.kernels.args import ScanArgs

cpu = pytest.importorskip("vil.kernels.cpu.backend")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "SMALL", (2, 9, 10, 4))
    monkeypatch.setattr(selfcheck, "MODEL", (1, 11, 12, 4))
    monkeypatch.setattr(selfcheck, "available_backends", lambda: {"cpu": "cpu"})


class InThisProcess:
    """Calls functions here: a fork cannot differentiate once autograd has started threads."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, function: Callable, *arguments: object) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self) -> None: ...


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "ProcessPoolExecutor", InThisProcess)


@pytest.mark.ci
@pytest.mark.usefixtures("in_this_process")
def test_passes_and_counts_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck.main() == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed.splitlines()[0]
    # 16: a convolution and 3 scans both ways, in 4 dtypes. 20: the small size in 2 of them, with each
    # scan also one way, twice. 4: a mixer at another grid, in these 2 dtypes at both sizes.
    assert printed.splitlines()[-1] == "40 passed, 0 failed"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("wrong", [2.0, float("nan")])
def test_fails_on_a_wrong_gradient(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cpu.ScanPlan.backward

    def backward(*arguments: object, **options: object) -> ScanArgs:
        grads = right(*arguments, **options)
        return grads if grads.z is None else grads._replace(z=grads.z * wrong)

    monkeypatch.setattr(cpu.ScanPlan, "backward", backward)
    assert selfcheck.main() == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "22 passed, 18 failed"
    assert "FAIL  bfloat16  cpu bidirectional_scan mamba" in printed


def _crash() -> None:
    os._exit(7)


def _illegal_access() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (_crash, "BrokenProcessPool: A process in the process pool was terminated abruptly"),
        (_illegal_access, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_goes_on_after_a_case_that_ends_its_process(
    end: Callable[[], None],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def error(case: selfcheck.Case, dtype: torch.dtype, device: str) -> float:
        if dtype == torch.float32 and case.name == "scan" and case.options == ("mamba", True):
            end()
        return 0.0

    monkeypatch.setattr(selfcheck, "largest_error", error)
    fork = get_context("fork")  # with what this test changes
    monkeypatch.setattr(selfcheck, "ProcessPoolExecutor", lambda *_: ProcessPoolExecutor(1, fork))
    assert selfcheck.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "39 passed, 1 failed"
    (failed,) = (line for line in lines if line.startswith("FAIL"))
    assert failed.split()[1:6] == ["float32", "cpu", "scan", "mamba", "True"]
    assert f"error inf, {told}" in failed
