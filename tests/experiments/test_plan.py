"""The plan: its runs are pairs, its tables are those of PLAN.md, and verdicts follow the tests."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from benchmarks.budget import Budget
from experiments import plan, plan_answers, plan_results, power, vision
from experiments.comparisons import SignFlip
from experiments.plan import Cell, Curve, Pair
from experiments.records import Record, Row, select

PLAN = vision.ROOT / "experiments" / "PLAN.md"
SPEEDS = {"longhorn_exact": 100, "longhorn": 400, "longhorn+silu": 50}


def invented(contestant: str, lr: float, seed: int) -> Row:
    """Leave after some steps, sooner nearer to a rate of 4e-3; by how much the seed adds."""
    steps = SPEEDS.get(contestant, 800) * (1 + abs(lr - 4e-3)) + seed * (contestant == "longhorn")
    return {"steps": steps, "left": steps < 600, "train_loss": 1.0, "cpu_seconds": 1.0}


def images(contestant: str, lr: float, seed: int) -> Row:
    """Lose what depends on the steps, for ViL as much as DeiT at three times."""
    times = int(contestant.partition(plan.TIMES)[2] or 3)
    return {"loss": 1 / times + abs(lr - 2e-3) + seed / 1000, "train_loss": 0.5, "top1": 90.0}


def run_all(
    record: Record, function: Callable[..., Row], runs: list[Row], jobs: int, budget: Budget
) -> int:
    """As ``records.run_all``, here and unwritten."""
    missing = record.missing(runs)
    while missing and budget.left:
        run = missing.pop(0)
        record.rows.append(run | function(**run))
    return len(missing)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Record]:
    """Records of tasks that take no time."""
    monkeypatch.setattr(plan.vision, "RESULTS", tmp_path)
    monkeypatch.setattr(plan, "run_all", run_all)
    for name, task in plan.TASKS.items():
        run = images if name == "fractals" else invented
        monkeypatch.setitem(plan.TASKS, name, dataclasses.replace(task, run=run))
    return {name: plan.open_record(name) for name in plan.TASKS}


def answer(question: str, records: dict[str, Record], budget: Budget | None = None) -> int:
    own = {name: records[name] for name in plan.tasks_of(question)}
    return plan.execute(question, own, jobs=1, budget=budget or Budget(None))


# ------------------------------------------------------------------------------------------- plan


def test_plan_has_the_tables_of_the_power_analysis() -> None:
    text = PLAN.read_text()
    for table in power.tables().split("\n\n"):
        assert table in text, "run python -m experiments.power"
    commands = re.findall(r"python -m experiments\.plan (\w+)", text)
    assert set(commands) == set(plan.QUESTIONS)
    assert len(plan.QUESTIONS) <= 6


def test_averaged_tokens_are_an_option_of_the_library() -> None:
    """What the plan compares is what ``class_token=False, global_pool="avg"`` gives."""
    _, name = plan.IMAGES.models["ViL, averaged tokens"]
    sizes = {"embed_dim": 16, "depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 3}
    torch.manual_seed(0)
    compared = timm.create_model(name, **sizes).eval()
    torch.manual_seed(0)
    option = timm.create_model("vil_tiny", class_token=False, global_pool="avg", **sizes).eval()
    assert option.state_dict().keys() == compared.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(option(images), compared(images))


def test_everybody_compared_is_tuned_and_no_tuning_seed_is_reported() -> None:
    for question, parts in plan.QUESTIONS.items():
        for part in parts:
            for name in plan.tasks_of(question):
                task = plan.TASKS[name]
                assert not set(part.seeds) & set(task.tuning_seeds)
                known = {plan.base(contestant) for contestant in task.contestants}
                assert {part.first, part.second} - {plan.BEST_CHANGE} <= known


def test_power_is_the_level_without_an_effect_and_grows_with_it() -> None:
    level = 0.05
    for numbers in (power.loss_differences, power.steps_differences):
        arguments = (10,) if numbers is power.loss_differences else (["short", "long"], 10)
        assert power.power(numbers(0.0, *arguments), level) == pytest.approx(level, abs=0.015)
        assert power.power(numbers(2.0, *arguments), level) > 0.95
    part = plan.QUESTIONS["averaging"][0]
    more = dataclasses.replace(part, seeds=range(40))
    # By formula: the deviation of the mean times the sum of the normal quantiles of level and power.
    expected = power.LOSS_DEVIATION / 40**0.5 * (2.69 + 0.84)
    assert power.smallest_effect(more) == pytest.approx(expected, rel=0.2)
    assert power.smallest_effect(more) < power.smallest_effect(part)


# ------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.parametrize("contestant", ["ViL, averaged tokens", "DeiT x 2"])
def test_images_are_trained_on_for_a_multiple_of_the_steps(
    contestant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = dataclasses.replace(plan.IMAGES, steps=2, images_per_class=(4,))
    monkeypatch.setattr(plan, "IMAGES", tiny)
    row = plan.train_images(contestant, 1e-3, 0)
    assert row["steps"] == (4 if contestant.endswith("2") else 2)
    assert row["loss"] > 0
    assert row["parameters"] == pytest.approx(320_000, rel=0.03)


def test_a_loss_that_is_not_finite_is_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"loss": float("nan"), "train_loss": 1.0, "top1": 6.25}
    monkeypatch.setattr(plan.vision, "train_and_score", lambda *arguments: figures)
    row = plan.train_images("ViL", 1.0, 0)
    assert row == {"loss": None, "train_loss": 1.0, "top1": 6.25}
    assert plan.TASKS["fractals"].score([row]) == (float("inf"), 1.0)


def test_runs_are_pairs_of_equal_seeds_at_chosen_rates(records: dict[str, Record]) -> None:
    assert answer("exact", records) == 0
    rows = records["short"].rows
    trials = select(rows, seed=plan.CHOICE_SEED)
    counts = {
        name: len(select(trials, contestant=name)) for name in plan.TASKS["short"].contestants
    }
    assert len(set(counts.values())) == 1
    for seed in plan.QUESTIONS["exact"][0].seeds:
        own = [(row["contestant"], row["lr"]) for row in select(rows, seed=seed)]
        assert sorted(own) == [("longhorn", 4e-3), ("longhorn_exact", 4e-3)]
    made = len(rows)
    assert answer("exact", records) == 0
    assert len(rows) == made


def test_a_question_is_continued(records: dict[str, Record]) -> None:
    assert answer("peers", records, Budget(0)) > 0
    assert records["short"].rows == []

    class Some(Budget):
        questions = 300

        @property
        def left(self) -> float:
            self.questions -= 1
            return float(self.questions > 0)

    assert answer("peers", records, Some(None)) > 0
    assert records["short"].rows
    table = plan_results.verdict_table({name: record.rows for name, record in records.items()})
    assert "decided" in table
    assert " is better" not in table
    assert answer("peers", records) == 0


def test_pairs_at_one_rate_meet_in_the_geometric_middle() -> None:
    rates = {"short": {"a": 1e-3, "b": 4e-3}}
    pair = Pair("a", "b", (Cell("short", "middle"),), range(1))
    runs = pair.runs(plan.Tuned(rates, None), pair.cells[0], 7)
    assert runs == [{"contestant": name, "lr": 2e-3, "seed": 7} for name in "ab"]


def test_rates_are_not_chosen_before_the_tuning_is_over(records: dict[str, Record]) -> None:
    with pytest.raises(ValueError, match="no rates are chosen yet of longhorn"):
        plan.TASKS["long"].chosen([])
    assert plan_results.tuned_of("exact", {name: [] for name in plan.TASKS}) is None


# --------------------------------------------------------------------------------------- verdicts


def test_verdicts_follow_the_tests(records: dict[str, Record]) -> None:
    for question in plan.QUESTIONS:
        answer(question, records)
    rows = {name: record.rows for name, record in records.items()}
    table = plan_results.verdict_table(rows)
    lines = {line.split(" | ")[1]: line for line in table.splitlines()[2:]}
    line = lines["longhorn_exact against longhorn"]  # 4 times and the mean of the seeds over 100
    assert (
        "| 24 of 24 | 4.11 times as fast (4.08 to 4.14) | 0.0001 | longhorn_exact is better |"
        in line
    )
    line = lines["longhorn+silu against longhorn"]
    assert "| 32 of 32 | 8.31 times" in line
    line = lines["longhorn against mamba"]
    assert "longhorn is better" in line
    line = lines["ViL against ViM"]
    assert "| 10 of 10 | +0.000 of loss (+0.000 to +0.000) | 1 | no |" in line
    assert "| 6 of 6 | 3.2 times (all 6 seeds) |" in table
    assert "| longhorn_exact | 0.004 | 24 | 24 | 100 | 1.000 |" in plan_results.runs_table(
        rows, "short"
    )
    assert "| mamba | 0.004 | 24 | 0 |" in plan_results.runs_table(rows, "short")
    assert re.search(
        r"\| longhorn \|.* 501 .*\| 0.004 \|", plan_results.tuning_table(rows, "short")
    )
    rows["short"] = [
        row for row in rows["short"] if (row["contestant"], row["seed"]) != ("mamba", 3)
    ]
    assert "| longhorn against mamba | 23 of 24 |  |  | not all run yet |" in (
        plan_results.verdict_table(rows)
    )


def test_what_is_not_finished_shows_no_effect(records: dict[str, Record]) -> None:
    """No difference before all pairs are there, and no rate before all are tuned."""
    nothing = {name: [] for name in plan.TASKS}
    assert plan_results.runs_text(nothing) == "None was made yet."
    assert plan_results.verdict_table(nothing).count("not run yet |") == 8
    task = plan.TASKS["fractals"]
    trials = [run | task.run(**run) | {"device": "a", "commit": "b"} for run in task.trials([])]
    text = plan_results.runs_text(nothing | {"fractals": trials})
    assert f"Rates tried in `fractals`, losses; {len(trials)} runs" in text
    assert "on a at commit b:" in text
    assert "Reported" not in text
    assert "| ViM | 0.435 | 0.434 |" in text
    half = plan_results.runs_text(nothing | {"fractals": trials[:-1]})
    assert text.count("not yet") == 0
    assert half.count("| not yet |") == 4
    answer("averaging", records)
    part = [row | {"device": "a", "commit": "b"} for row in records["fractals"].rows[:-1]]
    assert "Reported" not in plan_results.runs_text(nothing | {"fractals": part})
    rows = nothing | {
        "fractals": [row | {"device": "a", "commit": "b"} for row in records["fractals"].rows]
    }
    table = plan_results.verdict_table(rows)
    assert "| ViL against ViM | 0 of 10 |  |  | not run yet |" in table
    line = next(line for line in table.splitlines() if "averaging" in line)
    assert "| ViL, averaged tokens against ViL | 10 of 10 | +0.000 of loss" in line
    assert line.endswith("| 1 | open |")
    assert "| ViL | 0.002 | 10 |" in plan_results.runs_text(rows)


# --------------------------------------------------------------------------------------- answers


def test_answers_follow_the_verdicts(records: dict[str, Record], tmp_path: Path) -> None:
    """What a test found is said first, with its picture; the rest is a list; the better one is named first."""
    for question in ("exact", "vim", "deit", "averaging"):
        answer(question, records)
    rows = {name: record.rows for name, record in records.items()}
    found = plan_answers.answers(rows)
    decided, rest = plan_answers.decided_text(found), plan_answers.undecided_text(found)
    assert decided.startswith(
        "The exact form leaves recall's plateau 4.11 times as fast as Longhorn as the paper has it "
        "(95 %: 4.08 to 4.14; 24 pairs, p 0.0001).\n\n![exact: longhorn_exact and longhorn]"
    )
    assert "DeiT needs 3.2 times the steps of ViL for its held-out loss (all 6 seeds; an" in decided
    assert "- ViL has a held-out loss lower by 0.000 than ViM (95 %: 0.000" in rest
    assert "10 pairs, p 1), which chance may do." in rest
    assert "- Longhorn as the paper has it and Mamba: 0 of 24 pairs." in rest
    plan_answers.draw_all(rows, tmp_path)
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == {"plan_exact", "plan_vim", "plan_deit", "plan_averaging"}
    assert plan_answers.undecided_pictures(found).count("![") == 2
    nothing = plan_answers.answers({name: [] for name in plan.TASKS})
    assert plan_answers.decided_text(nothing) == "Nothing yet."
    assert plan_answers.undecided_text(nothing).count("\n") == 7
    assert plan_answers.undecided_pictures(nothing) == ""


def test_the_better_of_a_pair_is_named_first(records: dict[str, Record]) -> None:
    answer("peers", records)
    rows = {name: record.rows for name, record in records.items()}
    for row in (row for own in rows.values() for row in own):
        if row["contestant"] == "mamba" and row["seed"] < plan.CHOICE_SEED:
            row["steps"] = 50
    found = [a.sentence for a in plan_answers.answers(rows) if "Mamba" in a.sentence]
    (sentence,) = (said for said in found if "exact" not in said)
    assert sentence.startswith("Mamba leaves recall's plateau 8.2")
    assert "as fast as Longhorn as the paper has it (95 %: 8.17" in sentence


def test_what_is_better_has_the_lower_loss_and_a_loss_not_reached_needs_more(
    records: dict[str, Record],
) -> None:
    answer("vim", records)
    answer("deit", records)
    rows = {name: record.rows for name, record in records.items()}
    for row in rows["fractals"]:
        if row["seed"] < plan.CHOICE_SEED:
            row["loss"] -= (0.2 + row["seed"] / 100) * (row["contestant"] == "ViM")
    said = [answer.sentence for answer in plan_answers.answers(rows)]
    start = "ViM has a held-out loss lower by 0.245 than ViL (95 %: 0.22"
    assert sum(sentence.startswith(start) for sentence in said) == 1
    for row in rows["fractals"]:
        row["loss"] += row["contestant"].startswith("DeiT") and row["seed"] in (1, 2, 3, 4)
    table = plan_results.verdict_table(rows)
    said = [answer.sentence for answer in plan_answers.answers(rows)]
    span = "(median of 6 seeds, from 3.2 to more than 8; an estimate, and no test)."
    start = "DeiT needs more than 8 times the steps of ViL for its held-out loss"
    assert f"{start} {span}" in said
    for row in rows["fractals"]:
        row["loss"] += row["contestant"].startswith("DeiT")
    said = [answer.sentence for answer in plan_answers.answers(rows)]
    assert f"{start} (all 6 seeds; an estimate, and no test)." in said
    assert "| more than 8 times (median of 6 seeds, from 3.2 to more than 8) |" in table


@pytest.mark.parametrize(
    ("losses", "octaves"),
    [
        ({1: 0.9, 2: 0.6, 4: 0.4, 8: 0.1}, 1.5),
        ({1: 0.4, 2: 0.3}, 0.0),
        ({1: 0.9, 2: 0.8, 4: 0.7}, 2.0),  # not reached: the highest
        ({1: float("inf"), 2: 0.3}, 1.0),
    ],
)
def test_multiple_is_interpolated_between_those_that_were_run(
    losses: dict[int, float], octaves: float
) -> None:
    assert plan_results.multiple_needed(0.5, losses) == pytest.approx(octaves)


def test_sign_flips_by_hand() -> None:
    """Of four equal signs' 16 patterns two are as far from zero; a zero has either sign."""
    assert SignFlip("", "", "", [1.0, 2, 3, 4], [0.0] * 4).p == pytest.approx(2 / 16)
    assert SignFlip("", "", "", [1.0, 2, 3, 0], [0.0] * 4).p == pytest.approx(4 / 16)
    assert SignFlip("", "", "", [1.0, 1], [1.0, 1]).p == 1.0
    many = SignFlip("", "", "", [1.0] * 30, [0.0] * 30)
    assert many.p == SignFlip("", "", "", [1.0] * 30, [0.0] * 30).p == 1e-4
    # By hand: mean 2, standard error 1 / sqrt(3), t of 2 degrees of freedom 4.303.
    low, high = SignFlip("", "", "", [1.0, 2, 3], [0.0] * 3).interval
    assert (low, high) == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)


def test_curves_are_no_tests() -> None:
    parts = [part for parts in plan.QUESTIONS.values() for part in parts]
    assert power.tests() == len(parts) - sum(isinstance(part, Curve) for part in parts) == 7
