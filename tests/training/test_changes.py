"""Changing options of a run: what may change, that it takes effect, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.run_files import assert_same, at_step, load, rows, terminate
from vil.training.recipes import read_recipe
from vil.training.settings import TrainConfig

ALLOW = "--run.allow-changes"


@pytest.fixture
def stopped(config, train, tmp_path) -> Path:
    """Return the folder of a run of three epochs, stopped in the second epoch, after six steps."""
    with at_step(5, terminate):
        assert train(config, "--run.output", str(tmp_path / "run")) == 143
    return tmp_path / "run"


@pytest.fixture
def again(config, train, stopped) -> Callable[..., int]:
    """Return a function that runs the stopped run's command with more arguments."""
    return lambda *arguments: train(config, "--run.output", str(stopped), *arguments)


def test_finished_run_is_trained_for_more_epochs_at_another_rate(config, train, capsys, tmp_path) -> None:
    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder))
    assert train(config, *arguments) == 0
    before = rows(folder)
    more = (*arguments, "--schedule.epochs", "5", "--optim.lr-base", "2e-3", "--run.amp")
    assert train(config, *more) == 2
    told = capsys.readouterr().err
    assert "optim.lr_base (0.001 -> 0.002), run.amp (False -> True), schedule.epochs (3" in told
    assert "; --run.allow-changes resumes it with these changes\n" in told
    assert train(config, *more, ALLOW) == 0
    assert "resumed  after step 0 of epoch 4" in capsys.readouterr().out
    assert rows(folder)[:3] == before
    assert [row["epoch"] for row in rows(folder)] == ["1", "2", "3", "4", "5"]
    rates = [1e-5 + 0.5 * (2e-3 - 1e-5) * (1 + math.cos(math.pi * e / 5)) for e in (2, 3)]
    assert [float(row["lr"]) for row in rows(folder)[3:]] == pytest.approx(rates)
    last = load(folder / "last.pt")
    assert all(state["step"] == 20 for state in last["optimizer"]["state"].values())
    written = read_recipe(folder / "config.yaml")
    assert (written.schedule.epochs, written.optim.lr_base, written.run.amp) == (5, 2e-3, True)
    assert not written.run.allow_changes  # it held for that start only
    fewer = [word.replace("5", "4") if word == "5" else word for word in more]
    assert train(config, *fewer, ALLOW) == 2
    assert "schedule.epochs must be at least 5, which the run in" in capsys.readouterr().err
    assert train(config, *more) == 0  # they are the run's own settings now
    assert "nothing is left to train" in capsys.readouterr().out


def test_what_makes_another_run_is_refused_with_the_switch_and_without(again, stopped, capsys) -> None:
    before = (stopped / "last.pt").read_bytes()
    for words, key in (
        (("--model.depth", "3"), "model.depth (2 -> 3)"),
        (("--data.aug-repeats", "1"), "data.aug_repeats (3 -> 1)"),
        (("--data.batch-size", "16"), "data.batch_size (8 -> 16)"),
        (("--run.seed", "1"), "run.seed (0 -> 1)"),
        (("--optim.opt", "sgd"), "optim.opt (adamw -> sgd)"),
        (("--augment.reprob", "0.5"), "augment.reprob (0.25 -> 0.5)"),
    ):
        capsys.readouterr()
        for more in ((), (ALLOW,), (ALLOW, "--optim.lr-base", "0.5")):
            assert again(*words, *more) == 2
            told = capsys.readouterr().err
            assert f"run in {stopped / 'last.pt'}: {key}; choose another --run.output" in told
            assert "allow-changes" not in told
            assert told.count("\n") == 1
    assert (stopped / "last.pt").read_bytes() == before


def test_what_is_free_and_what_was_filled_in_is_no_change(config, train, tmp_path) -> None:
    """The original command and the run's own config.yaml both resume the run, in any order."""
    open_ = config.changed("schedule", warmup_epochs=None).changed("model", num_classes=None)
    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder))
    assert train(open_, *arguments, "--schedule.epochs", "1", "--optim.max-bad-steps", "3") == 0
    epoch = ("--schedule.epochs", "1", "--data.num-workers", "2")
    assert train(read_recipe(folder / "config.yaml"), *epoch) == 0
    assert train(open_, *arguments, *epoch) == 0
    assert train(read_recipe(folder / "config.yaml"), *arguments, "--run.save-minutes", "1") == 0


def test_changed_run_that_is_stopped_ends_with_the_same_bits(config, train, tmp_path) -> None:
    changed = config.changed("optim", lr_base=2e-3).changed("schedule", epochs=4, min_lr=1e-4)
    folders = [tmp_path / name for name in ("whole", "parts")]

    def stop_at(step: int, chosen: TrainConfig, folder: Path, *more: str) -> None:
        with at_step(step, terminate):
            assert train(chosen, "--run.output", str(folder), *more) == 143

    for folder in folders:
        stop_at(5, config, folder)
    assert train(changed, "--run.output", str(folders[0]), ALLOW) == 0
    for step in (6, 11):
        stop_at(step, changed, folders[1], ALLOW)
    assert train(changed, "--run.output", str(folders[1]), ALLOW) == 0
    assert rows(folders[1]) == rows(folders[0])
    for name in ("last.pt", "best.pt"):
        assert_same(load(folders[1] / name), load(folders[0] / name))


def test_best_by_the_average_is_what_evaluation_prints(config, train, evaluate, capsys, tmp_path) -> None:
    folder = tmp_path / "run"
    assert train(config, "--run.output", str(folder), "--optim.best", "ema") == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"python eval.py {folder / 'best.pt'} --ema\n")
    averages = [float(row["ema_top1"]) for row in rows(folder)]
    best = load(folder / "best.pt")
    assert (best["epoch"], best["metric"]) == (averages.index(max(averages)) + 1, max(averages))
    assert f"top-1 {max(averages):.2f}% (best, EMA, epoch {best['epoch']})" in printed
    assert evaluate(str(folder / "best.pt"), "--ema", "--device", "cpu") == 0
    assert f"top-1    {max(averages):.2f}%" in capsys.readouterr().out
    assert json.loads((folder / "best-ema-eval.json").read_text())["top1"] == max(averages)
