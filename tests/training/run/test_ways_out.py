"""Ways out of a run: where the weights are good a checkpoint is written, and the same command goes on."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.run_files import assert_same, load, rows, with_
from vil.training.config import TrainConfig
from vil.training.data import batches
from vil.training.distributed import World
from vil.training.errors import DataError
from vil.training.run import engine, loop, report

ROOT = Path(__file__).parents[3]
STEP = 5  # the second of the second epoch of two


@dataclass(frozen=True)
class Way:
    """An exception, and how a run has to end by it."""

    place: Callable[[pytest.MonkeyPatch, Exception], None]
    """Makes it come up."""
    error: Exception
    code: int | None
    """Exit code; None where the exception itself comes out, with its traceback."""
    step: int
    """Steps done in the checkpoint that is left, 4 being an epoch."""
    message: str = ""
    """Of the error, or of a warning."""


def at_step(place: Callable[[pytest.MonkeyPatch, Callable[[], None]], None], step: int = STEP):
    """Let an exception come up in a place once the run has begun a step."""

    def inject(patch: pytest.MonkeyPatch, error: Exception) -> None:
        begun = []
        train_step = loop.train_step

        def note(training: Any, given: Any, config: TrainConfig) -> Any:
            begun.append(given.number)
            return train_step(training, given, config)

        def fail() -> None:
            if begun and begun[-1] >= step:
                raise error

        patch.setattr(loop, "train_step", note)
        place(patch, fail)

    return inject


def before(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    """Return a place: right before a function does its work."""

    def place(patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def failing(*args: Any, **kwargs: Any) -> Any:
            fail()
            return original(*args, **kwargs)

        patch.setattr(owner, name, failing)

    return place


loading = at_step(before(batches, "decode"))
scoring = at_step(before(engine, "_score"))
augmenting = at_step(before(torch.optim.Optimizer, "zero_grad"))  # what each step begins with
updating = at_step(before(engine, "_update"))
validating = at_step(before(batches._ValImages, "__getitem__"))
drawing = at_step(before(report, "draw_curve"))
logging = at_step(before(report.StepLog, "append"))
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
CPU_OOM = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

WAYS = {
    # The step at hand is trained, and the one after it when its images were there already.
    "images gone": Way(
        loading, OSError(errno.ESTALE, "Stale file handle"), 3, STEP + 2, "8 training"
    ),
    "a fault in the loader": Way(loading, TypeError("a fault"), None, STEP + 2),
    "no memory to load": Way(loading, MemoryError(), 2, STEP + 2, "lower data.num_workers"),
    "validation images gone": Way(validating, DataError("gone"), 3, 8, "gone"),
    "no memory to score": Way(scoring, OOM, 2, 8, "pass --data.validation-batch-size 4"),
    "a fault in scoring": Way(scoring, TypeError("a fault"), None, 8),
    "no memory for a step": Way(augmenting, OOM, 2, STEP, "pass --run.grad-accum-steps 2, which"),
    "no memory on a CPU": Way(augmenting, CPU_OOM, 2, STEP, "8 training images at a time"),
    "a wrong label": Way(augmenting, DataError("label 9"), 3, STEP, "label 9"),
    # The weights may be half of the step before and half of this one.
    "no memory to update": Way(updating, OOM, 2, 4, "too little memory for the optimiser"),
    "a fault in a step": Way(augmenting, TypeError("a fault"), None, 4),
    # Nothing that shows a run ends it.
    "a curve that fails": Way(drawing, ValueError("no font"), 0, 8, "no font; training goes on"),
    "a log that fails": Way(logging, ValueError("a fault"), 0, 8, "a fault; training goes on"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What the run that is left alone leaves."""
    return {}


@pytest.fixture
def chosen(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Two epochs, of which each draws its curve."""
    monkeypatch.setattr(report, "_CURVE_EVERY", -1.0)
    return with_(config, "schedule", epochs=2)


def left(folder: Path) -> list[Any]:
    """Return what must be equal."""
    return [rows(folder), load(folder / "last.pt"), load(folder / "best.pt")]


def without_path(outcome: list[Any]) -> list[Any]:
    """Drop what says where the images lie, in another folder for each test."""
    return [outcome[0], *({k: v for k, v in part.items() if k != "data"} for part in outcome[1:])]


@pytest.mark.parametrize("name", WAYS)
def test_what_is_good_is_kept_and_goes_on_bit_for_bit(
    name: str,
    chosen: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    outcomes: dict[str, Any],
    tmp_path: Path,
) -> None:
    way, folder = WAYS[name], tmp_path / "run"
    if not outcomes:
        assert train(chosen, "--run.output", str(tmp_path / "alone")) == 0
        outcomes["alone"] = left(tmp_path / "alone")
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        way.place(patch, way.error)
        if way.code is None:
            with pytest.raises(type(way.error), match=str(way.error)):
                train(chosen, "--run.output", str(folder))
        else:
            assert train(chosen, "--run.output", str(folder)) == way.code
    told = capsys.readouterr()
    assert way.message in (told.err if way.code else told.out)
    assert told.err.count("\n") == bool(way.code)
    assert load(folder / "last.pt")["run"]["step"] == way.step
    assert train(chosen, "--run.output", str(folder)) == 0
    assert_same(without_path(left(folder)), without_path(outcomes["alone"]))


@pytest.mark.ci
def test_too_many_bad_images_leave_the_checkpoint_before_them(
    chosen: TrainConfig,
    image_folder: Path,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """What was trained on in their place is given up: nothing of it is left once they are back."""
    chosen, folder = with_(chosen, "data", aug_repeats=0), tmp_path / "run"
    assert train(chosen, "--run.output", str(tmp_path / "alone")) == 0
    with pytest.MonkeyPatch.context() as patch:
        away = image_folder / "train" / "ash"

        def blank() -> None:
            for path in away.glob("*.jpg"):
                (tmp_path / path.name).write_bytes(path.read_bytes())
                path.write_bytes(b"")

        at_first(patch, 4, blank)
        assert train(chosen, "--run.output", str(folder)) == 3
    assert "training images are no good, more than" in capsys.readouterr().err
    assert load(folder / "last.pt")["run"]["step"] == 4
    for path in away.glob("*.jpg"):
        path.write_bytes((tmp_path / path.name).read_bytes())
    assert train(chosen, "--run.output", str(folder)) == 0
    assert_same(left(folder), left(tmp_path / "alone"))


def at_first(patch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Do something when the run begins a step."""
    original = loop.train_step

    def train_step(training: Any, given: Any, config: TrainConfig) -> Any:
        if given.number == step:
            act()
        return original(training, given, config)

    patch.setattr(loop, "train_step", train_step)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGUSR2, 140), (signal.SIGXCPU, 152)]
)
def test_signals_of_terminals_and_schedulers_stop_in_good_order(
    number: signal.Signals,
    code: int,
    chosen: TrainConfig,
    train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Also where every process of the run gets them."""
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.MonkeyPatch.context() as patch:
            signal_all_at(patch, STEP, number)
            arguments = ("--run.output", str(tmp_path / "run"), "--data.num-workers", "2")
            assert train(chosen, *arguments) == code
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == f"error: stopped by {number.name}\n"
    assert load(tmp_path / "run" / "last.pt")["run"]["step"] == STEP + 1


def signal_all_at(patch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Let a signal arrive at the run and its loader processes when it begins a step."""

    def send() -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid, number)
        os.kill(os.getpid(), number)

    at_first(patch, step, send)


def test_no_process_leaves_before_the_checkpoint_is_written(
    chosen: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    done = []
    with pytest.MonkeyPatch.context() as patch:
        signal_all_at(patch, STEP, signal.SIGTERM)
        for owner, name in ((loop, "save_checkpoint"), (World, "gather")):
            patch.setattr(owner, name, noted(getattr(owner, name), done))
        assert train(chosen, "--run.output", str(tmp_path / "run")) == 143
    assert done[-2:] == ["save_checkpoint", "gather"]


def noted(function: Callable[..., Any], done: list[str]) -> Callable[..., Any]:
    """Have a function add its name when it is done."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        done.append(function.__name__)
        return result

    return noting


@pytest.mark.ci
def test_exit_code_survives_a_full_disk_under_standard_output() -> None:
    program = (
        "import sys; from vil.training.console import new_console; "
        "from vil.training.errors import StoppedError, run_script\n"
        "def script(): new_console().print('a'); raise StoppedError(1)\n"
        "sys.exit(run_script(script))"
    )
    command = [sys.executable, "-c", f"SETTINGS_FIRST = True\n{program}"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, check=False)
    assert run.returncode == 129
