"""steps.csv and trackers: every step once and in order, whatever happened to the run or to them."""

import csv
import dataclasses
import itertools
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.training.run_files import assert_same, load
from tests.training.run_files import rows as log_rows
from vil.training import report
from vil.training import train as loop
from vil.training.engine import StepResult
from vil.training.loader import Step
from vil.training.model import Trainee
from vil.training.settings import TrainConfig

TIMES = ("images_per_s", "data_wait")


@pytest.fixture
def each_step(config) -> TrainConfig:
    """Three epochs of four steps, whose loss is read at each."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, log_interval=1))


def steps(folder: Path) -> list[dict[str, str]]:
    """Read steps.csv without its times."""
    with (folder / "steps.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """End the run, without a checkpoint, when it has done a number of steps."""
    original = loop.train_step

    def train_step(training: Trainee, images: Step, config: TrainConfig) -> StepResult:
        if images.number == step:
            raise KeyboardInterrupt
        return original(training, images, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        yield


@pytest.mark.parametrize("log_interval", [1, 3])
def test_every_step_has_a_row_also_a_skipped_one(config, log_interval, train, tmp_path) -> None:
    original = loop.train_step

    def train_step(training: Trainee, step: Step, config: TrainConfig) -> StepResult:
        result = original(training, step, config)
        return result._replace(grad_norm=result.grad_norm * (math.inf if step.number == 5 else 1))

    arguments = ("--run.output", str(tmp_path / "run"), "--run.log-interval", str(log_interval))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        assert train(config, *arguments) == 0
    found = steps(tmp_path / "run")
    assert [int(row["step"]) for row in found] == list(range(1, 13))
    assert [int(row["epoch"]) for row in found] == [1] * 4 + [2] * 4 + [3] * 4
    assert [row["grad_norm"] for row in found].index("inf") == 5
    with (tmp_path / "run" / "log.csv").open() as file:
        for epoch in csv.DictReader(file):
            own = [row for row in found if row["epoch"] == epoch["epoch"]]
            losses = [float(row["loss"]) for row in own if row["grad_norm"] != "inf"]
            mean = sum(losses) / len(losses)
            assert mean == pytest.approx(float(epoch["train_loss"]), rel=1e-7)
            assert {float(row["lr"]) for row in own} == {float(epoch["lr"])}
    with (tmp_path / "run" / "steps.csv").open() as file:
        for row in csv.DictReader(file):
            assert float(row["images_per_s"]) > 0
            assert 0 <= float(row["data_wait"]) <= 100


@pytest.mark.parametrize(
    ("moment", "rubbish"),
    [(2, b"9,3,0.12"), (6, b"\0" * 90), (8, b"3,1,1,1,1,1,1\n")],  # as an append that was cut short
    ids=["before-a-checkpoint", "after", "at-one"],
)
def test_killed_run_that_continues_has_each_step_once(
    each_step, moment, rubbish, train, capsys, tmp_path
) -> None:
    assert train(each_step, "--run.output", str(tmp_path / "whole")) == 0
    with killed_at(moment):
        assert train(each_step, "--run.output", str(tmp_path / "parts")) == 130
    path = tmp_path / "parts" / "steps.csv"
    assert len(steps(tmp_path / "parts")) == moment
    path.write_bytes(path.read_bytes() + rubbish)
    assert train(each_step, "--run.output", str(tmp_path / "parts")) == 0
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert "warning" not in capsys.readouterr().out


class FakeWandB:
    """Stands in for wandb: a server that survives runs, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        """Start the server; `fails` names the call that raises."""
        self.fails = fails
        self.begun: list[dict[str, Any]] = []
        self.history: dict[int, dict[str, float]] = {}
        self.finished: list[int] = []
        self.shown: dict[str, float] = {}

    def init(self, **arguments: Any) -> SimpleNamespace:
        """Begin a run, or go on."""
        self.refuse("init")
        self.begun.append(arguments)
        return SimpleNamespace(
            starting_step=max(self.history, default=-1) + 1,
            summary=dict(self.shown),
            log=self.log,
            finish=self.finish,
        )

    def log(self, values: dict[str, float], step: int) -> None:
        """Take values of the last step or a later one, as wandb does."""
        self.refuse("log")
        assert step >= max(self.history, default=0)
        self.history.setdefault(step, {}).update(values)
        self.shown |= values

    def finish(self, exit_code: int) -> None:
        """End."""
        self.refuse("finish")
        self.finished.append(exit_code)

    def refuse(self, call: str) -> None:
        """Raise if told to."""
        if call == self.fails:
            raise ConnectionError(f"{call}: no network\nand more")


@pytest.fixture
def install(monkeypatch) -> Callable[[FakeWandB], FakeWandB]:
    """Return a function that installs a FakeWandB as the package."""

    def install(fake: FakeWandB) -> FakeWandB:
        module = ModuleType("wandb")
        module.__spec__ = ModuleSpec("wandb", None, origin="here")
        module.init = fake.init
        module.Settings = lambda **settings: settings
        monkeypatch.setitem(sys.modules, "wandb", module)
        return fake

    return install


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_tracker_that_fails_is_told_once_and_stops_nothing(
    each_step, call, train, install, capsys, tmp_path
) -> None:
    install(FakeWandB(fails=call))
    assert train(each_step, "--run.output", str(tmp_path / "run"), "--run.tracker", "wandb") == 0
    told = capsys.readouterr().out
    assert told.count("warning") == 1
    assert (
        "warning: run.tracker wandb fails, training goes on without: "
        f"ConnectionError: {call}: no network and more\n"
    ) in told
    assert len(steps(tmp_path / "run")) == 12


@pytest.mark.ci
def test_tensorboard_shows_each_step_once(each_step, train, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder), "--run.tracker", "tensorboard")
    for moment in (2, 6, 10):  # before the first checkpoint, and after it and the second
        with killed_at(moment):
            assert train(each_step, *arguments) == 130
    assert train(each_step, *arguments) == 0
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("loss", "grad_norm", "lr"):
        shown = events.Scalars(f"step/{name}")
        assert [event.step for event in shown] == list(range(1, 13))
        for event, row in zip(shown, steps(folder), strict=True):
            assert event.value == pytest.approx(float(row[name]), rel=1e-6)
    with (folder / "log.csv").open() as file:
        logged = [float(row["top1"]) for row in csv.DictReader(file)]
    shown = [(event.step, event.value) for event in events.Scalars("epoch/top1")]
    assert shown == [
        (4, pytest.approx(logged[0])),
        (8, pytest.approx(logged[1])),
        (12, pytest.approx(logged[2])),
    ]
    text = events.Tensors("config/text_summary")
    assert {event.step for event in text} == {1, 5}  # where what is shown again begins
    assert b"lr_base: 0.001" in text[0].tensor_proto.string_val[0]


LAST_RESORT = 600.0  # seconds until a call that hangs ends: the run must not have waited for it
CALLS = [
    ("wandb", "log"),
    ("tensorboard", "__init__"),
    ("tensorboard", "close"),
    *(
        pytest.param(*call, marks=pytest.mark.ci)
        for call in (
            ("wandb", "init"),
            ("wandb", "finish"),
            ("tensorboard", "add_text"),
            ("tensorboard", "add_scalar"),
            ("tensorboard", "flush"),
        )
    ),
]


@pytest.fixture
def hang(install, monkeypatch) -> Iterator[Callable[..., contextmanager]]:
    """Return a function that lets a call of a tracker's package hang until the test ends.

    The run fails the test if it waits for the call instead.
    """
    server, test_ended, waited = install(FakeWandB()), threading.Event(), []
    monkeypatch.setattr(report, "_LIMIT", 0.5, raising=False)

    @contextmanager
    def hanging(package: str, name: str, nth: int, act: Callable[[], object]) -> Iterator[None]:
        owner: Any = server
        if package == "tensorboard":
            pytest.importorskip("tensorboard")
            from torch.utils.tensorboard import SummaryWriter as owner
        original, calls = getattr(owner, name), itertools.count(1)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == nth:
                act()
                if not test_ended.wait(LAST_RESORT):
                    waited.append(name)
            return original(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, call)
            if name == "init":  # was handed out before
                patch.setattr(sys.modules["wandb"], "init", call)
            yield
        assert not waited

    yield hanging
    test_ended.set()


def nth_call(package: str, name: str) -> int:
    """Draw which call of a run hangs."""
    return random.Random(f"{package} {name}").randint(
        1, {"log": 15, "add_scalar": 90, "flush": 3}.get(name, 1)
    )


@pytest.mark.parametrize(("package", "name"), CALLS)
def test_tracker_that_hangs_is_left_out_and_changes_nothing(
    package, name, hang, each_step, train, capsys, tmp_path
) -> None:
    nth = nth_call(package, name)
    assert train(each_step, "--run.output", str(tmp_path / "alone")) == 0
    capsys.readouterr()
    with hang(package, name, nth, lambda: None):
        arguments = ("--run.output", str(tmp_path / "run"), "--run.tracker", package)
        assert train(each_step, *arguments) == 0
    told = capsys.readouterr().out
    assert told.count("warning") == 1, told
    assert (
        f"warning: run.tracker {package} fails, training goes on without: "
        "TimeoutError: no answer in 0.5 s\n"
    ) in told
    for file in ("last.pt", "best.pt"):
        assert_same(load(tmp_path / "run" / file), load(tmp_path / "alone" / file))
    assert log_rows(tmp_path / "run") == log_rows(tmp_path / "alone")
    assert steps(tmp_path / "run") == steps(tmp_path / "alone")


@pytest.mark.parametrize(("package", "name"), CALLS)
def test_signal_ends_a_run_whose_tracker_hangs_with_its_state_saved(
    package, name, hang, each_step, train, monkeypatch, tmp_path
) -> None:
    nth, trained = nth_call(package, name), []
    monkeypatch.setattr(report, "_LIMIT", 1e6, raising=False)
    monkeypatch.setattr(report, "_LIMIT_AT_SIGNAL", 0.5, raising=False)
    original = loop.train_step

    def train_step(*given: Any) -> Any:
        trained.append(given[1].number)
        return original(*given)

    def terminate() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(loop, "train_step", train_step)
    folder = tmp_path / "run"
    arguments = ("--run.output", str(folder), "--run.tracker", package)
    with hang(package, name, nth, terminate):
        code = train(each_step, *arguments)
    if name in ("finish", "close"):  # nothing was left to do
        assert (code, len(trained)) == (0, 12)
    else:
        assert (code, len(trained) < 12) == (143, True)
    if trained:
        assert load(folder / "last.pt")["run"]["step"] == len(trained)
    assert train(each_step, "--run.output", str(folder)) == 0
    assert train(each_step, "--run.output", str(tmp_path / "alone")) == 0
    assert_same(load(folder / "last.pt"), load(tmp_path / "alone" / "last.pt"))
    assert log_rows(folder) == log_rows(tmp_path / "alone")
    assert steps(folder) == steps(tmp_path / "alone")


def test_checkpoint_of_an_epoch_is_written_before_the_epoch_is_told(
    each_step, train, install, monkeypatch, tmp_path
) -> None:
    server, folder, saved = install(FakeWandB()), tmp_path / "run", []

    def note(where: str, epoch: float | None) -> None:
        if epoch is not None:
            path = folder / "last.pt"
            saved.append((where, epoch, load(path)["epoch"] if path.exists() else 0))

    log, write, draw = server.log, report.Report._write_log, report.draw_curve
    patches = {
        (server, "log"): lambda values, step: (
            note("wandb", values.get("epoch/epoch")),
            log(values, step),
        ),
        (report.Report, "_write_log"): lambda self: (
            note("log", len(self.run.state.history)),
            write(self),
        ),
        (report, "draw_curve"): lambda path, history: (
            note("curve", len(history)),
            draw(path, history),
        ),
        (report, "_CURVE_EVERY"): -1.0,
    }
    for (owner, name), replacement in patches.items():
        monkeypatch.setattr(owner, name, replacement)
    assert train(each_step, "--run.output", str(folder), "--run.tracker", "wandb") == 0
    assert {where for where, *_ in saved} == {"wandb", "log", "curve"}
    assert [epoch for where, epoch, _ in saved if where == "wandb"] == [1, 2, 3]
    assert all(epoch == there for _, epoch, there in saved), saved


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.ci) for n in (2, 3))])
def test_run_killed_between_a_checkpoint_and_its_records_tells_each_epoch_once(
    seed, each_step, train, monkeypatch, tmp_path
) -> None:
    """At random epochs, and again in the next one. Only a tracker may lack the last epoch of a run."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    draw, folder, record = random.Random(seed), tmp_path / "run", report.Report.epoch
    arguments = ("--run.output", str(folder), "--run.tracker", "tensorboard")
    assert train(each_step, "--run.output", str(tmp_path / "alone")) == 0
    kills = sorted(draw.sample((1, 2, 3), draw.randint(1, 3)))
    for epoch in kills:

        def at_epoch(self: report.Report, epoch: int = epoch) -> None:
            if len(self.run.state.history) == epoch:
                raise KeyboardInterrupt
            record(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report.Report, "epoch", at_epoch)
            patch.setattr(report.Tracking, "finish", lambda self, failed: None)
            assert train(each_step, *arguments) == 130
            assert load(folder / "last.pt")["epoch"] == epoch
        if epoch < 3 and draw.random() < 0.7:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(report.Tracking, "finish", lambda self, failed: None)
                with killed_at(4 * epoch + draw.randrange(4)):
                    assert train(each_step, *arguments) == 130
            assert log_rows(folder) == log_rows(tmp_path / "alone")[:epoch], f"seed {seed}"
    assert train(each_step, *arguments) == 0
    assert log_rows(folder) == log_rows(tmp_path / "alone"), f"seed {seed}"
    assert steps(folder) == steps(tmp_path / "alone")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 13))
    shown = [event.step for event in events.Scalars("epoch/top1")]
    assert shown == ([4, 8] if 3 in kills else [4, 8, 12]), f"seed {seed}"
