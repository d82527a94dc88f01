"""The fine-tuning benchmark: a toy run from pre-training to the record, and what is made of records."""

import json
from pathlib import Path

import pytest

pytest.importorskip("numba")

from experiments import finetune, finetune_results
from experiments.comparisons import Paired
from experiments.records import CHOICE_SEED, Row, select

TOY = finetune.Experiment(
    seeds=(0,),
    rates=(5e-4,),
    pretraining=(
        *("--model.num-classes", "4", "--data.images-per-class", "8", "--data.batch-size", "8"),
        *("--schedule.epochs", "1", "--schedule.warmup-epochs", "0"),
    ),
    data=("--data.dataset", "digits", "--data.images-per-class", "2", "--schedule.epochs", "1"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_toy_run_pretrains_chooses_and_reports(tmp_path: Path) -> None:
    finetune.execute(TOY, tmp_path / "finetune.json", tmp_path / "fractals", jobs=1)
    record = json.loads((tmp_path / "finetune.json").read_text())
    assert len(record["settings"]["weights"]) == 16
    rows = record["runs"]
    assert len(select(rows, seed=CHOICE_SEED)) == 2
    found = finetune_results.arms(select(rows, seed=0))
    assert [(arm["start"], arm["lr"], arm["layer_decay"]) for arm in found] == [
        ("fine-tuned", 1e-3, 0.85),
        ("from scratch", 1e-3, 0.85),
        ("fine-tuned", 5e-4, 0.85),
        ("from scratch", 5e-4, None),
    ]
    losses = [select(rows, seed=0, **arm)[0]["loss"] for arm in found]
    assert len(set(losses)) == 4
    assert {row["steps"] for row in rows} == {20 // 8}
    assert {"fractals_top1" in row for row in select(rows, start="from scratch")} == {False}
    again = select(rows, seed=0, **found[0])[0]
    figures = finetune.run(TOY, tmp_path / "fractals", seed=0, **found[0])
    assert figures == {key: again[key] for key in figures}


def rows_of(tops: dict[tuple[str, float, float | None], list[float]]) -> list[Row]:
    keys = ("start", "lr", "layer_decay")
    return [
        {
            **dict(zip(keys, setting, strict=True)),
            "seed": seed,
            "top1": top1,
            "loss": 1 - top1 / 100,
        }
        for setting, values in tops.items()
        for seed, top1 in zip((0, 1, 2, CHOICE_SEED), values, strict=False)
    ]


def test_rate_that_does_best_for_the_unreported_seed_is_reported() -> None:
    runs = finetune.Experiment().search()
    assert {run["seed"] for run in runs} == {CHOICE_SEED}
    rows = [run | {"loss": abs(run["lr"] - 4e-3)} for run in runs]
    reported = finetune.Experiment().reported(rows)
    chosen = [run for run in reported if run["lr"] == 4e-3]
    assert {(run["start"], run["layer_decay"]) for run in chosen} == {
        ("fine-tuned", 0.85),
        ("from scratch", None),
    }
    assert CHOICE_SEED not in {run["seed"] for run in reported}
    assert len(reported) == len({tuple(run.items()) for run in reported}) == 4 * 5


def test_tables_pair_runs_by_seed() -> None:
    rows = rows_of(
        {
            ("fine-tuned", 1e-3, 0.85): [91.0, 82.0, 95.0, 70.0],
            ("from scratch", 1e-3, 0.85): [90.0, 80.0, 92.0, 60.0],
        }
    )
    reported = [row for row in rows if row["seed"] != CHOICE_SEED]
    table = finetune_results.accuracy_table(reported)
    assert "| fine-tuned, rate 0.001 | 89.3 ± 6.7 | 0.107 ± 0.067 |" in table
    table = finetune_results.differences_table(finetune_results.differences(reported))
    names = "fine-tuned, rate 0.001 less from scratch, rate 0.001"
    assert f"| top1: {names} | +2.0 ± 1.0 | 3 of 3 seeds | 0.074 | no |" in table
    assert f"| loss: {names} | -0.020 ± 0.010 | 3 of 3 seeds | 0.074 | no |" in table
    assert "| fine-tuned | 0.300 (70.0) |" in finetune_results.search_table(rows)


def test_paired_test_of_equal_numbers() -> None:
    """By hand: differences 1, 2, 3, standard error 1 / sqrt(3), 2 degrees of freedom: t = 3.4641."""
    assert Paired("", "", "", [1, 2, 3], [0, 0, 0]).p == pytest.approx(0.0742, abs=1e-4)
    assert Paired("", "", "", [1, 2], [1, 2]).p == 1.0
    assert Paired("", "", "", [2, 3], [1, 2]).p == 0.0
