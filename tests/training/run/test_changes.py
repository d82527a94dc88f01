"""Changing one's mind about a run: what may change, that it does, and that all files say so."""

import csv
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.run_files import assert_same, load, rows, signal_at, with_
from vil.training.config import TrainConfig
from vil.training.distributed import World
from vil.training.recipes import read_recipe
from vil.training.run import loop, resume
from vil.training.run.optimizer_state import load_optimizer
from vil.training.run.setup import build_optimizer, build_training
from vil.training.run.state import RunState

ALLOW = "--run.allow-changes"
STEPS = 4  # of an epoch


@pytest.fixture
def stopped(config: TrainConfig, train: Callable[..., int], tmp_path: Path) -> Path:
    """The folder of a run of three epochs that was stopped in the second, after six steps."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 5, 15)
        assert train(config, "--run.output", str(tmp_path / "run")) == 143
    return tmp_path / "run"


@pytest.fixture
def again(config: TrainConfig, train: Callable[..., int], stopped: Path) -> Callable[..., int]:
    """Return a function that runs the stopped run's command with more arguments."""
    return lambda *arguments: train(config, "--run.output", str(stopped), *arguments)


def stop_at(step: int, call: Callable[[], int]) -> None:
    """Run something that SIGTERM stops at a step."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, step, 15)
        assert call() == 143


def recorded(folder: Path) -> list[tuple[str, ...]]:
    """Read changes.csv without its header; check that the checkpoint has the same rows."""
    path = folder / "changes.csv"
    if not path.exists():
        assert load(folder / "last.pt")["run"]["changes"] == []
        return []
    header, *found = list(csv.reader(path.read_text().splitlines()))
    assert header == ["step", "epoch", "setting", "before", "after"]
    kept = load(folder / "last.pt")["run"]["changes"]
    assert [[str(value) for value in row.values()] for row in kept] == found
    return [tuple(row) for row in found]


def step_rows(folder: Path) -> list[dict[str, str]]:
    """Read steps.csv."""
    with (folder / "steps.csv").open() as file:
        return list(csv.DictReader(file))


def groups(folder: Path) -> list[dict[str, Any]]:
    """Return the settings of the optimiser's groups in last.pt."""
    return load(folder / "last.pt")["optimizer"]["param_groups"]


def test_finished_run_is_trained_for_more_epochs(
    config: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder))
    assert train(config, *arguments) == 0
    before = rows(folder)
    more = (*arguments, "--schedule.epochs", "5")
    assert train(config, *more) == 2
    assert "--run.allow-changes lets it go on with these settings" in capsys.readouterr().err
    assert train(config, *more, ALLOW) == 0
    printed = capsys.readouterr().out
    assert "changed  after step 12: schedule.epochs (3 -> 5)\n" in printed
    assert "resumed  after step 0 of epoch 4" in printed
    assert recorded(folder) == [("12", "4", "schedule.epochs", "3", "5")]
    assert rows(folder)[:3] == before
    assert [row["epoch"] for row in rows(folder)] == ["1", "2", "3", "4", "5"]
    assert [int(row["step"]) for row in step_rows(folder)] == list(range(1, 21))
    rates = [1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * e / 5)) for e in (2, 3)]
    assert [float(row["lr"]) for row in rows(folder)[3:]] == pytest.approx(rates)
    assert train(config, *more) == 0  # it is the run's own setting now
    assert "nothing is left to train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (("--optim.lr-base", "0.5"), "initial_lr", 0.5),
        (("--optim.weight-decay", "0.3"), "weight_decay", 0.3),
        (("--optim.opt-betas", "0.5", "0.6"), "betas", (0.5, 0.6)),
        (("--optim.opt-eps", "0.1"), "eps", 0.1),
    ],
    ids=["lr", "decay", "betas", "eps"],
)
def test_optimizer_goes_on_with_other_settings(
    again: Callable[..., int], stopped: Path, arguments: tuple[str, ...], key: str, value: object
) -> None:
    assert groups(stopped)[-1][key] != value
    assert again(*arguments, ALLOW) == 0
    assert groups(stopped)[-1][key] == value
    last = load(stopped / "last.pt")
    assert all(state["step"] == 3 * STEPS for state in last["optimizer"]["state"].values())
    assert [row[:3] for row in recorded(stopped)] == [
        ("6", "2", arguments[0].removeprefix("--").replace("-", "_"))
    ]


@pytest.mark.ci
@pytest.mark.parametrize("opt", ["adamw", "lamb", "lookahead_adamw"])
@pytest.mark.parametrize("decays", [(None, None), (None, 0.5), (0.5, None)], ids=str)
def test_state_follows_its_parameter(
    config: TrainConfig, opt: str, decays: tuple[float | None, float | None]
) -> None:
    """Also what an optimiser keeps in its groups, and none of its settings."""
    settings = [
        dataclasses.replace(config.optim, opt=opt, layer_decay=decay, weight_decay=weight_decay)
        for decay, weight_decay in zip(decays, (0.1, 0.2), strict=True)
    ]
    model = build_training(config, torch.device("cpu"), World()).model
    before, as_saved = (build_optimizer(model, settings[0], 1e-3) for _ in range(2))
    for _ in range(2):
        model(torch.randn(2, 3, 16, 16)).square().sum().backward()
        before.step()
    after = build_optimizer(model, settings[1], 1e-2)
    load_optimizer(after, before.state_dict(), as_saved)
    old, new = ({id(p): g for g in o.param_groups for p in g["params"]} for o in (before, after))
    moments = getattr(before, "_base_optimizer", before).state
    kept = getattr(after, "_base_optimizer", after).state
    for parameter in model.parameters():
        assert_same(dict(kept[parameter]), dict(moments[parameter]))
        one, other = old[id(parameter)], new[id(parameter)]
        assert other["lr"] == 1e-2
        assert other.get("lr_scale", 1) == 1 or decays[1]
        assert other["weight_decay"] == 2 * one["weight_decay"]
        for key in {"step", "lookahead_step"} & one.keys():
            assert other[key] == one[key] != 0


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("--model.depth", "3"), "model.depth (2 -> 3)"),
        (("--model.embed-dim", "32"), "model.embed_dim (16 -> 32)"),
        (("--data.aug-repeats", "1"), "data.aug_repeats (3 -> 1)"),
        (("--data.batch-size", "16"), "data.batch_size (8 -> 16)"),
        (("--run.seed", "1"), "run.seed (0 -> 1)"),
        (("--optim.opt", "sgd"), "optim.opt (adamw -> sgd)"),
    ],
    ids=["depth", "width", "data", "batch", "seed", "optimizer"],
)
def test_what_makes_another_run_is_refused_with_the_switch_and_without(
    again: Callable[..., int],
    stopped: Path,
    arguments: tuple[str, ...],
    key: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    before = (stopped / "last.pt").read_bytes()
    assert again(*arguments) == 2
    told = capsys.readouterr().err
    assert f"holds a run with other {key}; choose another --run.output" in told
    assert "allow-changes" not in told
    assert again(*arguments, ALLOW) == 2
    assert f"other {key}, which --run.allow-changes does not allow;" in capsys.readouterr().err
    assert again(*arguments, "--optim.lr-base", "0.5", "--run.amp") == 2
    told = capsys.readouterr().err
    assert "optim.lr_base (0.001 -> 0.5)" in told
    assert "lets it go on with optim.lr_base, run.amp, and nothing else of these\n" in told
    assert again(*arguments, "--optim.lr-base", "0.5", ALLOW) == 2
    told = capsys.readouterr().err
    assert f"other {key}, which" in told
    assert "lr_base" not in told
    assert (stopped / "last.pt").read_bytes() == before
    assert recorded(stopped) == []


@pytest.mark.ci
@pytest.mark.parametrize("written", [False, True], ids=["before-files", "after-files"])
def test_change_of_a_run_that_is_killed_at_once_is_kept_once(
    again: Callable[..., int], train: Callable[..., int], stopped: Path, written: bool
) -> None:
    """The checkpoint has it; config.yaml and changes.csv follow."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    where = (loop, "train_step") if written else (resume, "_write_settings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where, die)
        assert again("--optim.lr-base", "0.5", ALLOW) == 130
    assert (stopped / "changes.csv").exists() == written
    assert load(stopped / "last.pt")["run"]["step"] == 6
    if written:
        assert train(read_recipe(stopped / "config.yaml")) == 0
    else:
        assert again("--optim.lr-base", "0.5", ALLOW) == 0
    assert recorded(stopped) == [("6", "2", "optim.lr_base", "0.001", "0.5")]
    assert read_recipe(stopped / "config.yaml").optim.lr_base == 0.5


def test_changed_run_that_is_stopped_ends_with_the_same_bits(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    """With an average that begins, other groups and other settings."""
    first = with_(config, "optim", model_ema_decay=None)
    changed = with_(config, "optim", lr_base=2e-3, layer_decay=0.5, clip_grad=0.1, best="ema")
    changed = with_(with_(changed, "schedule", epochs=4), "model", drop_path_rate=0.4)
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        stop_at(5, lambda folder=folder: train(first, "--run.output", str(folder)))
    whole, parts = (
        lambda *more, folder=folder: train(changed, "--run.output", str(folder), ALLOW, *more)
        for folder in folders
    )
    assert whole() == 0
    for step in (6, 11):
        stop_at(step, parts)
    assert parts() == 0
    assert recorded(folders[1]) == recorded(folders[0])
    assert len(recorded(folders[1])) == 7
    assert rows(folders[1]) == rows(folders[0])
    for name in ("last.pt", "best.pt"):
        assert_same(load(folders[1] / name), load(folders[0] / name))
    kept = [[list(row.values())[:5] for row in step_rows(folder)] for folder in folders]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 4 * STEPS


def test_best_by_the_average_is_what_evaluation_prints(
    config: TrainConfig,
    train: Callable[..., int],
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    assert train(config, "--run.output", str(folder), "--optim.best", "ema") == 0
    printed = capsys.readouterr().out
    command = f"python eval.py {folder / 'best.pt'} --ema\n"
    assert printed.endswith(command)
    averages = [float(row["ema_top1"]) for row in rows(folder)]
    best = load(folder / "best.pt")
    assert (best["epoch"], best["metric"]) == (averages.index(max(averages)) + 1, max(averages))
    assert f"top-1 {max(averages):.2f}% (best, EMA, epoch {best['epoch']})" in printed
    assert evaluate(str(folder / "best.pt"), "--ema", "--device", "cpu") == 0
    assert f"top-1    {max(averages):.2f}%" in capsys.readouterr().out
    assert json.loads((folder / "best-ema-eval.json").read_text())["top1"] == max(averages)


def test_epochs_before_the_average_are_not_best_by_it() -> None:
    state = RunState(best_key="ema_top1")
    for top1, averaged in ((90.0, None), (95.0, None), (50.0, 0.0), (60.0, 0.0)):
        row = {"epoch": len(state.history) + 1, "top1": top1}
        state.end_epoch(row if averaged is None else row | {"ema_top1": averaged})
    assert (state.best_epoch, state.best_top1) == (3, 0.0)
