"""Training side by side: as many steps for all, and a continuation that is the run itself."""

import json
from pathlib import Path

import pytest

from benchmarks import budget
from experiments import vision_turns


def test_a_run_that_was_stopped_continues_as_if_it_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of every model are the same, and what a stop leaves behind is gone in the end."""
    monkeypatch.setattr(vision_turns, "TIMED", range(1))
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    assert vision_turns.main(["--toy", "--output", str(whole)]) == 0

    class Short(budget.Budget):
        """Is over after a few questions."""

        questions = 5

        @property
        def left(self) -> float:
            self.questions -= 1
            return 1e9 if self.questions > 0 else 0.0

    monkeypatch.setattr(vision_turns, "Budget", Short)
    command = ["--toy", "--output", str(cut)]
    assert vision_turns.main(command) == budget.UNFINISHED
    assert cut.with_suffix(".pt").exists()
    stopped_at = json.loads(cut.read_text())["rows"][-1]["steps"]
    assert 0 < stopped_at < vision_turns.TOY.steps
    monkeypatch.setattr(vision_turns, "Budget", budget.Budget)
    assert vision_turns.main(command) == 0
    assert not cut.with_suffix(".pt").exists()

    def last(path: Path) -> dict[str, float]:
        rows = json.loads(path.read_text())["rows"]
        return {row["model"]: row["loss"] for row in rows if row["steps"] == 8}

    assert last(cut) == last(whole)
    assert set(last(whole)) == set(vision_turns.EXPERIMENT.models)


def test_table_has_a_column_for_every_validation() -> None:
    rows = [
        {"model": name, "steps": steps, "top1": 10.0 * i + steps}
        for steps in (2, 4)
        for i, name in enumerate(("ViL", "DeiT"))
    ]
    assert vision_turns.table(rows).splitlines() == [
        "| top-1 after steps | 2 | 4 |",
        "|---|---|---|",
        "| ViL | 2.0 | 4.0 |",
        "| DeiT | 12.0 | 14.0 |",
    ]
