"""How runs end: one line and an exit code; repeating the command ends bit-identically."""

import dataclasses
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from timm.optim import list_optimizers
from torch._inductor import config as inductor
from torch._utils import ExceptionWrapper
from torch.multiprocessing import reductions

from tests.training.run_files import assert_same, at_step, load, rows
from vil.preprocess import ImageSpec
from vil.training import engine, loader, report
from vil.training import train as loop
from vil.training.distributed import World
from vil.training.errors import ConfigError, DataError
from vil.training.program import run_script
from vil.training.settings import ModelConfig, TrainConfig
from vil.training.setup import build

ROOT = Path(__file__).parents[2]
STEP = 5  # the second step of the second of two epochs; each has 4 steps
Place = Callable[[pytest.MonkeyPatch, Callable[[], object]], None]


class Way(NamedTuple):
    """An event in a run that has begun a step, and how the run must end."""

    place: Place
    """Where it happens."""
    act: Exception | Callable[[], object]
    """Exception to raise, or function to call."""
    code: int | None
    """Exit code; None if the exception itself propagates, with its traceback."""
    message: str
    """Text of the error, or of a warning."""
    arguments: tuple[str, ...] = ()


def before(owner: Any, name: str) -> Place:
    """Return a place: right before a function does its work."""

    def place(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def acting(*args: Any, **kwargs: Any) -> Any:
            act()
            return original(*args, **kwargs)

        patch.setattr(owner, name, acting)

    return place


def kill_loaders() -> None:
    """Kill the data-loading workers, as the kernel's OOM killer does."""
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)


begins = before(torch.optim.Optimizer, "zero_grad")
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
CPU_OOM = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")
NO_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/x/photo.jpg")
WORKERS = ("--data.num-workers", "2")
reads = before(ImageSpec, "decode")
WAYS = {
    "images gone": Way(reads, OSError(errno.EACCES, "Denied"), 3, "8 training images in a row"),
    "no memory to load": Way(reads, MemoryError(), 2, "too little memory"),
    "a dead loader process": Way(begins, kill_loaders, 6, "worker failed", WORKERS),
    "a loader process that dies as it hands over": Way(
        before(reductions, "rebuild_storage_fd"), ConnectionResetError(), 6, "worker died", WORKERS
    ),
    "validation images gone": Way(before(engine, "_score"), DataError("gone"), 3, "gone"),
    "no memory for a process": Way(begins, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), 2, "too little memory"),
    "no memory for a step": Way(begins, OOM, 2, "Tried to allocate 2 GiB); raise run.grad_accum"),
    "no memory on a CPU": Way(before(engine, "_update"), CPU_OOM, 2, "lower data.validation_batch"),
    "no more files to open": Way(reads, NO_FILES, 2, "limit of open files of this process (ulimit -n)"),
    "no more files on the machine": Way(
        begins,
        OSError(errno.ENFILE, os.strerror(errno.ENFILE), "/x"),
        2,
        "limit of open files of this machine (fs.file-max)",
    ),
    "no more processes": Way(
        begins,
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        2,
        "limit of processes and",
    ),
    "no more threads": Way(begins, RuntimeError("can't start new thread"), 2, "lower data.num_work"),
    "no compiler for the GPU": Way(
        begins,
        RuntimeError("Failed to find C compiler. Please specify"),
        2,
        "install a C++ compiler",
    ),
    "a fault in a step": Way(begins, TypeError("a fault"), None, ""),
    "a disk that is gone": Way(
        before(loop, "save"), OSError(errno.EIO, "I/O error", "/x"), 5, "/x cannot be read or wr"
    ),
    "a curve that fails": Way(before(report, "draw_curve"), ValueError("no font"), 0, "no font; training continues"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Return a cache for the results of the undisturbed run."""
    return {}


@pytest.fixture
def chosen(config, monkeypatch) -> TrainConfig:
    """Return a run of two epochs that draws a curve after each epoch."""
    monkeypatch.setattr(report, "_CURVE_EVERY", -1.0)
    return config.changed("schedule", epochs=2)


def left(folder: Path) -> list[Any]:
    """Return what must be equal between runs: all but the fingerprints of the data."""
    parts = [load(folder / name) for name in ("last.pt", "best.pt")]
    return [rows(folder), *({k: v for k, v in part.items() if k != "data"} for part in parts)]


@pytest.mark.parametrize("name", WAYS)
def test_a_run_ends_in_one_line_and_goes_on_bit_for_bit(name, chosen, train, capsys, outcomes, tmp_path) -> None:
    way, folder, begun = WAYS[name], tmp_path / "run", []
    if not outcomes:
        assert train(chosen, "--run.output", str(tmp_path / "alone")) == 0
        outcomes["alone"] = left(tmp_path / "alone")
    capsys.readouterr()

    def act() -> None:
        if begun:
            if isinstance(way.act, Exception):
                raise way.act
            way.act()

    arguments = ("--run.output", str(folder), *way.arguments)
    with pytest.MonkeyPatch.context() as patch, at_step(STEP, lambda: begun.append(1)):
        way.place(patch, act)
        if way.code is None:
            with pytest.raises(TypeError, match="a fault"):
                train(chosen, *arguments)
        else:
            assert train(chosen, *arguments) == way.code
    told = capsys.readouterr()
    assert way.message in (told.err if way.code else told.out)
    assert told.err.count("\n") == bool(way.code), told.err
    assert load(folder / "last.pt")["run"]["step"] == (4 if way.code != 0 else 8)  # errors: no save
    assert not multiprocessing.active_children()
    assert train(chosen, *arguments) == 0
    assert_same(left(folder), outcomes["alone"])


def test_batch_norm_of_one_value_is_told(config, train, capsys, tmp_path) -> None:
    model = ModelConfig(name="test_resnet", num_classes=4, img_size=16, in_chans=3)
    config = dataclasses.replace(config, model=model).changed("augment", mixup=0.0, cutmix=0.0)
    config = config.changed("data", batch_size=1)
    assert train(config, "--run.output", str(tmp_path / "run")) == 2
    told = capsys.readouterr().err
    assert "one value per channel" in told
    assert "raise data.batch_size or model.img_size" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", [n for n in list_optimizers() if n.startswith(("bnb", "fused"))])
def test_optimizers_of_other_packages_are_told(name, config) -> None:
    with pytest.raises(ConfigError, match=f"cannot create optimizer {name}: .*(APEX|bitsandbytes)"):
        build(config.changed("optim", opt=name), World(), 4)


def test_too_many_bad_images_leave_the_checkpoint_before_them(chosen, image_folder, train, capsys, tmp_path) -> None:
    """Steps on replacement images are discarded."""
    chosen, folder = chosen.changed("data", aug_repeats=0), tmp_path / "run"
    assert train(chosen, "--run.output", str(tmp_path / "alone")) == 0
    away = image_folder / "train" / "ash"

    def blank() -> None:
        for path in away.glob("*.jpg"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
            path.write_bytes(b"")

    with at_step(4, blank):
        assert train(chosen, "--run.output", str(folder)) == 3
    assert "training images are unusable, more than" in capsys.readouterr().err
    assert load(folder / "last.pt")["run"]["step"] == 4
    for path in away.glob("*.jpg"):
        path.write_bytes((tmp_path / path.name).read_bytes())
    assert train(chosen, "--run.output", str(folder)) == 0
    assert_same(left(folder), left(tmp_path / "alone"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU])
def test_signal_to_every_process_of_a_run_stops_it_in_good_order(number, chosen, train, capsys, tmp_path) -> None:
    def send() -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid, number)
        os.kill(os.getpid(), number)

    former = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with at_step(STEP, send):
            assert train(chosen, "--run.output", str(tmp_path / "run"), *WORKERS) == 128 + number
    finally:
        signal.signal(number, former)
    told = f"stopped by {number.name}; the run is saved, and the same command resumes it\n"
    assert capsys.readouterr().err == told
    assert load(tmp_path / "run" / "last.pt")["run"]["step"] == STEP + 1


def test_disk_that_hangs_ends_the_run(chosen, image_folder, train, capsys, monkeypatch, tmp_path) -> None:
    """Nobody writes to the pipes. The timeout is short here; the run must end after one of any length."""
    monkeypatch.setattr(loader, "TIMEOUT", 3)

    def hang() -> None:
        for path in image_folder.glob("train/*/*.jpg"):
            path.unlink()
            os.mkfifo(path)

    with at_step(0, hang):
        assert train(chosen, "--run.output", str(tmp_path / "run"), *WORKERS) == 6
    told = capsys.readouterr().err
    assert "a data-loading worker failed (DataLoader timed out after 3 seconds)" in told
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("error", [NO_FILES, TypeError("a fault")])
def test_what_is_wrong_with_a_worker_is_no_fault_of_its_images(
    error, config, train, capsys, monkeypatch, tmp_path
) -> None:
    """Nor is it reported as a worker that died: that would blame memory."""
    before(ImageSpec, "decode")(monkeypatch, lambda: raise_in_a_worker(error))
    command = (config, "--run.output", str(tmp_path / "run"), *WORKERS)
    if error is NO_FILES:
        assert train(*command) == 2
        told = "the limit of open files of this process (ulimit -n) is reached"
        assert told in capsys.readouterr().err
    else:
        with pytest.raises(TypeError, match="a fault"):
            train(*command)


def raise_in_a_worker(error: Exception) -> None:
    if multiprocessing.parent_process() is not None:
        raise error


def test_an_error_in_a_worker_is_told_as_everywhere_else(capsys) -> None:
    """PyTorch adds the worker's traceback to it."""
    try:
        raise DataError("no image")
    except DataError:
        told = ExceptionWrapper(where="in DataLoader worker process 0")
    assert run_script(told.reraise) == 3
    assert capsys.readouterr().err == "error: no image\n"


def test_a_program_ends_by_sigterm_also_as_the_first_process_of_a_container(capsys) -> None:
    """There the system ignores the signal, unless a program has a handler."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: signal.raise_signal(signal.SIGTERM))
    assert ended.value.code == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_without_sockets_is_told_before_the_workers_start(
    config, train, capsys, monkeypatch, tmp_path
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    assert train(config, "--run.output", str(tmp_path / "run"), *WORKERS) == 2
    assert "set TMPDIR to a writable folder whose path is shorter" in capsys.readouterr().err
    assert train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1") == 0


@pytest.mark.ci
def test_a_model_that_cannot_be_compiled_is_told(config, train, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with inductor.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        assert train(config, "--run.output", str(tmp_path / "run"), "--run.torchcompile") == 2
    told = capsys.readouterr().err
    assert "install a C++ compiler such as g++, or leave out run.torchcompile" in told
    assert told.count("\n") == 1


def test_exit_code_survives_a_full_disk_under_standard_output() -> None:
    program = (
        "import sys; from vil.training.errors import StoppedError, log\n"
        "from vil.training.program import run_script\n"
        "def script(): log.info('a'); raise StoppedError(1)\n"
        "sys.exit(run_script(script))"
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, check=False)
    assert run.returncode == 129


def test_letters_that_the_output_cannot_encode_are_escaped() -> None:
    program = (
        "import sys; from vil.training.errors import DataError, log\n"
        "from vil.training.program import run_script\n"
        "def script(): log.info('class \\u732b\\U0001f408'); raise DataError('no \\U0001f415')\n"
        "sys.exit(run_script(script))"
    )
    env = os.environ | {"PYTHONIOENCODING": "gbk:strict"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, cwd=ROOT, env=env, check=False)
    assert run.stdout == "class \u732b".encode("gbk") + b"\\U0001f408\n"
    assert (run.returncode, run.stderr) == (3, b"error: no \\U0001f415\n")
