"""The benchmark of whole models refuses to time what computes something else."""

from pathlib import Path

import pytest
import torch

from benchmarks import models

CELL = {
    "models": ["vil_tiny"],
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "clock": "cpu",
    "rounds": 1,
    "size": 32,
    "batch": 1,
    "pass": "inference",
    "way": "onnx",
    "memory": False,
}


@pytest.mark.parametrize(
    ("result", "message"),
    [(torch.full((1, 1000), float("nan")), "not finite"), (torch.ones(1, 1000), "disagrees")],
)
def test_what_computes_something_else_is_not_timed(
    result: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "onnx_runtime", lambda name, cell, folder: lambda images: result)
    with pytest.raises(RuntimeError, match=message):
        models.step_by("vil_tiny", CELL, Path())


def test_a_model_that_fails_leaves_the_others_their_times() -> None:
    cell = CELL | {"models": ["vil_tiny", "no_such_model", "vim_tiny"], "way": "eager"}
    first, failed, last = models.measure(cell)
    assert failed["error"]
    assert "seconds" not in failed
    assert first["seconds_ratio"] == 1
    assert last["seconds_ratio"] > 0
