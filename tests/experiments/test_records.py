"""Records of experiments: continued by the same command, refused for other settings."""

import json
import sys
from pathlib import Path

import pytest

import vil
from experiments import records


def double(number: int, seed: int) -> records.Row:
    return {"doubled": 2 * number + seed}


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/checkout/experiments/some.py", "--jobs", "2"])


@pytest.mark.usefixtures("in_this_process")
def test_the_same_command_runs_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    runs = records.product(number=(1, 2), seed=(0, 1))
    first = records.Record(path, {"steps": 3})
    first.add(runs[0] | {"doubled": -1})
    again = records.Record(path, {"steps": 3})
    assert again.missing(runs) == runs[1:]
    records.run_all(again, double, runs, jobs=1)
    content = json.loads(path.read_text())
    assert content["command"] == "python -m experiments.some --jobs 2"
    assert all(run["commit"] and run["device"] for run in content["runs"])
    found = {(run["number"], run["seed"]): run["doubled"] for run in content["runs"]}
    assert found == {(1, 0): -1, (1, 1): 3, (2, 0): 4, (2, 1): 5}


@pytest.mark.parametrize("part", ["settings", "environment"])
def test_other_settings_or_versions_are_refused(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    records.Record(path, {"steps": 3}).add({"seed": 0})
    if part == "environment":
        monkeypatch.setattr(vil, "__version__", "another")
    with pytest.raises(SystemExit, match=f"has {part}"):
        records.Record(path, {"steps": 3 if part == "environment" else 4})
