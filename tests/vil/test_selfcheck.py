"""The self check passes here, and fails where a backend is wrong."""

import os
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

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


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run child processes here: a fork cannot differentiate once autograd has started threads."""

    def pipe(duplex: bool) -> tuple[SimpleNamespace, SimpleNamespace]:
        sent: deque = deque()

        def recv() -> object:
            if not sent:
                raise EOFError
            return sent.popleft()

        return SimpleNamespace(recv=recv), SimpleNamespace(send=sent.append, close=lambda: None)

    def process(target: Callable, args: tuple) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: target(*args), join=lambda: None, exitcode=0)

    context = SimpleNamespace(Pipe=pipe, Process=process)
    monkeypatch.setattr(selfcheck.multiprocessing, "get_context", lambda method: context)


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


@pytest.mark.parametrize(("end", "code"), [(_crash, 7), (_illegal_access, 1)])
def test_goes_on_after_a_case_that_ends_its_process(
    end: Callable[[], None],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def error(case: selfcheck.Case, dtype: torch.dtype, device: str) -> float:
        if dtype == torch.float32 and case.name == "scan" and case.options == ("mamba", True):
            end()
        return 0.0

    monkeypatch.setattr(selfcheck, "largest_error", error)
    monkeypatch.setattr(selfcheck, "START_METHOD", "fork")  # with what this test changes
    assert selfcheck.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "39 passed, 1 failed"
    (failed,) = (line for line in lines if line.startswith("FAIL"))
    assert failed.split()[1:6] == ["float32", "cpu", "scan", "mamba", "True"]
    assert failed.endswith(f"error inf, ended its process with code {code}")
