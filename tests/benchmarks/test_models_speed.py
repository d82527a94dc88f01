"""The benchmark of whole models: what it refuses to time, what it says then, and that it continues."""

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import budget, models_speed
from benchmarks.models_speed import Cell, Runner

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", models_speed.MODES)
@pytest.mark.parametrize("pass_name", models_speed.PASSES)
def test_models_take_turns_and_are_compared_with_deit(mode: str, pass_name: str) -> None:
    rows = models_speed.measure(Cell(mode, "small", 32, pass_name, 2), CPU, rounds=2, toy=True)
    assert [row.model for row in rows] == list(models_speed.FAMILIES["small"])
    assert [row.status for row in rows] == ["ok"] * 3
    assert rows[0].ratio == 1.0
    assert all(row.images_per_s > 0 for row in rows)


def test_what_fails_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deit there are no ratios, and the rest is timed all the same."""
    original = Runner.__init__

    def init(self: Runner, name: str, *arguments: object) -> None:
        if name.startswith("deit"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        if name == "vil_tiny":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        if name == "vil_tiny_exact":
            time.sleep(5)
        original(self, name, *arguments)

    monkeypatch.setattr(Runner, "__init__", init)
    cell = Cell("eager", "tiny", 32, "inference", 1)
    rows = models_speed.measure(cell, CPU, rounds=2, toy=True, limit_s=4)
    assert [row.status for row in rows] == [
        "out of memory",
        "failed: RuntimeError: operation not permitted when stream is capturing",
        "failed: TimeLimitError: not compiled within 4 s",
        "ok",
    ]
    assert rows[3].images_per_s > 0
    assert rows[3].ratio is None


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


def test_the_same_command_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    measured = []

    def measure(cell: Cell, *_: object) -> list[models_speed.Row]:
        measured.append((cell.mode, cell.pass_name))
        row = models_speed.Row(**vars(cell), model="vil_tiny", status="ok", images_per_s=2.0)
        return [row]

    monkeypatch.setattr(models_speed, "measure", measure)
    path = tmp_path / "models.json"
    command = ["--toy", "--families", "tiny", "--sizes", "32", "--output", str(path)]
    assert models_speed.main([*command, "--seconds", "0"]) == budget.UNFINISHED
    assert models_speed.main([*command, "--modes", "eager"]) == 0
    assert models_speed.main([*command, "--modes", "eager", "graphs"]) == 0
    assert measured == [(m, p) for m in ("eager", "graphs") for p in models_speed.PASSES]
    assert len(json.loads(path.read_text())["rows"]) == 4
    assert "| 32, 2 | training | graphs | vil_tiny | 2 | - | - | - |" in capsys.readouterr().out
