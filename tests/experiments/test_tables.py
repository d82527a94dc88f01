"""The tables of docs/records.md equal their records."""

import json
from pathlib import Path

import pytest

from experiments import tables

RUNS = [
    {
        "model": model,
        "lr": lr,
        "seed": seed,
        "loss": loss + seed % 100 * (2 if model == "b" else 1),
        "by": {"x": [seed % 100]},
        "curve": [[0, 0], [2, seed % 100]],
    }
    for model, lr, loss in (("a", 1.0, 8.0), ("a", 2.0, 4.0), ("b", 1.0, 1.0), ("b", 2.0, 2.0))
    for seed in (0, 1, 100)
]


def test_tables_of_the_page_are_what_their_commands_print() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- python -m experiments.tables") == len(tables.BLOCK.findall(page))
    assert tables.rewrite(page) == page, "run python -m experiments.tables --write"


def test_table_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at the rate that seed 100 chose, 2 for a and 1 for b; b less a is -3 and -2."""
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    (tmp_path / "experiments" / "results" / "r.json").write_text(json.dumps({"runs": RUNS}))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    asked = [
        "r",
        "--by",
        "model",
        "lr",
        "--tuned",
        "loss",
        "--show",
        "x=by.x.0*10:1",
        "y=curve@1:2",
        "loss:2",
    ]
    found = tables.table(tables.parse([*asked, "--against", "a, 2.0"])).splitlines()
    assert found[2] == "| a | 2.0 | 2 | 5.0 ± 7.1 | 0.25 ± 0.35 | 4.50 ± 0.71 |  |  |"
    assert found[3].startswith(
        "| b | 1.0 | 2 | 5.0 ± 7.1 | 0.25 ± 0.35 | 2.00 ± 1.41 | -2.50 (-8.85 to +3.85)"
    )
    faster = ["r", "--by", "model", "--where", "lr=1.0", "--show", "loss", "--against", "a"]
    ratio = tables.table(tables.parse([*faster, "--times"])).splitlines()[3]
    assert float(ratio.split(" | ")[3].split()[0]) == 4.9  # the geometric mean of 8 / 1 and 9 / 3
    with pytest.raises(SystemExit, match="expected one of"):
        tables.table(tables.parse([*faster[:-1], "c"]))
