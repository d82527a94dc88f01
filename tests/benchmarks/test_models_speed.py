"""The benchmark of whole models refuses to time what computes something else."""

import pytest
import torch

from benchmarks.models_speed import Cell, Runner

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("result", "message"),
    [(torch.full((1, 1000), float("nan")), "not finite"), (torch.ones(1, 1000), "disagrees")],
)
def test_what_computes_something_else_is_not_timed(
    result: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = lambda self, compiler: (self.step, result)  # noqa: E731
    monkeypatch.setattr(Runner, "_prepared", prepared)
    with pytest.raises(RuntimeError, match=message):
        Runner("vil_tiny", Cell("graphs", "tiny", 32, "inference", 1), CPU, toy=True)
