"""steps.csv and trackers have every step once and in order, also if a run or a tracker fails."""

import csv
import itertools
import re
import sys
import time
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from tests.training.run_files import at_step, die, poisoned, rows
from vil.training.report import draw_curve
from vil.training.settings import TrainConfig


@pytest.fixture
def each_step(config) -> TrainConfig:
    """Return a run of three epochs of four steps, which reads the loss at each step."""
    return config.changed("run", log_interval=1)


def test_a_long_run_is_never_silent(config, train, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(time, "monotonic", partial(next, itertools.count(0.0, 100.0)))
    assert train(config, "--run.output", str(tmp_path / "run")) == 0
    told = capsys.readouterr().out
    assert re.search(r"^read 12 of 12 held-out images", told, re.MULTILINE)
    assert told.count("epoch 1/3 step ") == 3  # all but the last, which the epoch's line follows
    assert re.search(r"^epoch 1/3 step 2/4  loss \d", told, re.MULTILINE)
    assert re.search(r"^scored 12 of 12 validation images", told, re.MULTILINE)


def test_every_step_has_a_row_also_a_skipped_one(config, train, tmp_path) -> None:
    """The losses are read every three steps."""
    with poisoned({5}):
        assert train(config, "--run.output", str(tmp_path / "run")) == 0
    found = rows(tmp_path / "run", "steps.csv")
    assert [int(row["step"]) for row in found] == list(range(1, 13))
    assert [int(row["epoch"]) for row in found] == [1] * 4 + [2] * 4 + [3] * 4
    assert [row["grad_norm"] for row in found].index("nan") == 5
    for epoch in rows(tmp_path / "run"):
        own = [row for row in found if row["epoch"] == epoch["epoch"]]
        losses = [float(row["loss"]) for row in own if row["loss"] != "nan"]
        mean = sum(losses) / len(losses)
        assert mean == pytest.approx(float(epoch["train_loss"]), rel=1e-7)
        assert {float(row["lr"]) for row in own} == {float(epoch["lr"])}
    with (tmp_path / "run" / "steps.csv").open() as file:
        for row in csv.DictReader(file):
            assert float(row["images_per_s"]) > 0
            assert 0 <= float(row["data_wait"]) <= 100


@pytest.mark.parametrize(
    ("moment", "rubbish"),
    [(2, b"9,3,0.12"), (6, b"\0" * 90), (8, b"3,1,1,1,1,1,1\n")],  # as if an append was cut short
    ids=["before-a-checkpoint", "after", "at-one"],
)
def test_killed_run_that_continues_has_each_step_once(each_step, moment, rubbish, train, capsys, tmp_path) -> None:
    assert train(each_step, "--run.output", str(tmp_path / "whole")) == 0
    with at_step(moment, die):
        assert train(each_step, "--run.output", str(tmp_path / "parts")) == 130
    path = tmp_path / "parts" / "steps.csv"
    assert len(rows(tmp_path / "parts", "steps.csv")) == moment
    path.write_bytes(path.read_bytes() + rubbish)
    assert train(each_step, "--run.output", str(tmp_path / "parts")) == 0
    assert rows(tmp_path / "parts", "steps.csv") == rows(tmp_path / "whole", "steps.csv")
    assert {*re.findall("warning: (.*?):", capsys.readouterr().out)} == {"12 images held out"}


@pytest.mark.parametrize("call", ["SummaryWriter", "add_scalar", "close"])
def test_tracker_that_fails_is_told_once_and_stops_nothing(
    each_step, call, train, capsys, monkeypatch, tmp_path
) -> None:
    def calling(name: str, *arguments: object, **options: object) -> None:
        if name == call:
            raise ConnectionError(f"{name}: no disk\nand more")

    names = ("add_text", "add_scalar", "close")
    writer = SimpleNamespace(**{name: partial(calling, name) for name in names})
    module, package = ModuleType("torch.utils.tensorboard"), ModuleType("tensorboard")
    module.SummaryWriter = lambda *_, **__: calling("SummaryWriter") or writer
    package.__spec__ = ModuleSpec("tensorboard", None, origin="here")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    folder = tmp_path / "run"
    assert train(each_step, "--run.output", str(folder), "--run.tracker", "tensorboard") == 0
    told = capsys.readouterr().out
    assert told.count("warning: run") == 1
    assert (
        "warning: run.tracker tensorboard failed; training continues untracked: "
        f"ConnectionError: {call}: no disk and more\n"
    ) in told
    assert len(rows(folder, "steps.csv")) == 12


@pytest.mark.ci
def test_tensorboard_shows_each_step_once(each_step, train, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder), "--run.tracker", "tensorboard")
    for moment in (2, 6, 10):  # before the first checkpoint, after it, and after the second
        with at_step(moment, die):
            assert train(each_step, *arguments) == 130
    assert train(each_step, *arguments) == 0
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("loss", "grad_norm", "lr"):
        shown = events.Scalars(f"step/{name}")
        assert [event.step for event in shown] == list(range(1, 13))
        for event, row in zip(shown, rows(folder, "steps.csv"), strict=True):
            assert event.value == pytest.approx(float(row[name]), rel=1e-6)
    logged = [float(row["top1"]) for row in rows(folder)]
    shown = [(event.step, event.value) for event in events.Scalars("epoch/top1")]
    assert [step for step, _ in shown] == [4, 8, 12]
    assert [top1 for _, top1 in shown] == pytest.approx(logged)
    text = events.Tensors("config/text_summary")
    assert {event.step for event in text} == {1, 5}  # where the values shown again begin
    assert b"lr_base: 0.001" in text[0].tensor_proto.string_val[0]


@pytest.mark.parametrize(("low", "high"), [(1.05, 1.12), (0.5, 0.9), (0.02, 3.0), (2.0, 2.0)])
def test_the_axis_of_losses_has_several_labels(low, high, tmp_path, monkeypatch) -> None:
    shown = []

    def savefig(figure, file, **options) -> None:
        figure.draw_without_rendering()
        axes = figure.axes[0]
        bottom, top = axes.get_ylim()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        shown.extend(label.get_text() for place, label in ticks if bottom <= place <= top)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    row = {"epoch": 1, "top1": 50.0}
    history = [
        row | {"train_loss": high, "val_loss": high},
        row | {"epoch": 2, "train_loss": low, "val_loss": low},
    ]
    draw_curve(tmp_path / "curve.png", history, 1)
    assert 3 <= len({*shown}) <= 12, shown
