"""The self check passes here, and fails where a backend is wrong."""

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


@pytest.mark.ci
def test_passes_and_counts_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck.main() == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed.splitlines()[0]
    # 16: a convolution and 3 scans both ways, in 4 dtypes. 20: the small size in 2 of them, with each
    # scan also one way, twice. 4: a mixer at another grid, in these 2 dtypes at both sizes.
    assert printed.splitlines()[-1] == "40 passed, 0 failed"


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
