"""Several ranks on one machine, over gloo, compared with a single process."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.training.run_files import rows
from vil.training.distributed import World, connect
from vil.training.errors import ConfigError
from vil.training.recipes import to_yaml
from vil.training.settings import ModelConfig, RunConfig, TrainConfig

ROOT = Path(__file__).parents[2]
LAST_RESORT = 900  # seconds, if processes hang; otherwise they end within 10


@pytest.fixture
def one_step_epochs(config) -> TrainConfig:
    """Return a run of 20 one-step epochs at two image sizes, so that the log has every step's loss."""
    return (
        config.changed("model", drop_path_rate=0.0)
        .changed("data", batch_size=32, img_sizes=(16, 24))
        .changed("augment", mix_size=8)
        .changed("schedule", epochs=20)
    )


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(config: TrainConfig, folder: Path) -> list[subprocess.Popen]:
    """Start the training script in two processes, as a launcher would."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(to_yaml(config))
    command = ["train_imagenet.py", "--config", str(recipe), "--run.output", str(folder)]
    return start_script(command, [Path.cwd()] * 2)


def start_script(command: list[str], places: list[Path]) -> list[subprocess.Popen]:
    """Start a script in several processes, each in a folder, as a launcher would."""
    world_size, port = len(places), free_port()
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(ROOT / command[0]), *command[1:]],
            cwd=places[rank],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def ends(processes: list[subprocess.Popen], codes: list[int]) -> list[tuple[str, str]]:
    """Check the exit codes of processes, and return what each has printed; kill processes that hang."""
    try:
        printed = [process.communicate(timeout=LAST_RESORT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == codes, printed
    return printed


def wait_for(path: Path, processes: list[subprocess.Popen]) -> None:
    """Wait until a run has written a file, or has ended."""
    while not path.exists() and all(process.poll() is None for process in processes):
        time.sleep(0.1)


@pytest.mark.ci
def test_two_processes_equal_one(one_step_epochs, train, tmp_path) -> None:
    divided = one_step_epochs.changed("run", grad_accum_steps=2)
    processes = start(divided, tmp_path / "two")
    assert train(one_step_epochs, "--run.output", str(tmp_path / "one")) == 0
    printed = ends(processes, [0, 0])
    assert "= 2 processes x 2 x 8" in printed[0][0]
    assert printed[1] == ("", "")  # only rank 0 logs
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert len(one) == len(two) == 20
    for left, right in zip(one, two, strict=True):
        for key in ("train_loss", "val_loss", "ema_loss"):
            assert float(left[key]) == pytest.approx(float(right[key]), abs=1e-6)
        assert left["top1"] == right["top1"]
    one, two = rows(tmp_path / "one", "steps.csv"), rows(tmp_path / "two", "steps.csv")
    assert [row["step"] for row in one] == [str(step) for step in range(1, 21)]
    for left, right in zip(one, two, strict=True):
        for key in ("step", "epoch", "lr"):
            assert left[key] == right[key]
        for key in ("loss", "grad_norm"):
            assert float(left[key]) == pytest.approx(float(right[key]), rel=1e-4)


@pytest.mark.ci
def test_batch_norm_of_two_processes_scores_as_saved(config, evaluate, tmp_path) -> None:
    """Ranks see other images, so each has other statistics: those of rank 0 are scored and saved."""
    model = ModelConfig(name="test_resnet", num_classes=4, img_size=32, in_chans=3)
    config = dataclasses.replace(config, model=model).changed("optim", lr_base=1e-2)
    folder = tmp_path / "run"
    ends(start(config, folder), [0, 0])
    row = rows(folder)[-1]
    for prefix, arguments in (("", ()), ("ema_", ("--ema",))):
        result = tmp_path / "result.json"
        assert evaluate(str(folder / "last.pt"), "--json", str(result), *arguments) == 0
        found = json.loads(result.read_text())
        assert float(row[f"{prefix}top1"]) == pytest.approx(found["top1"])
        loss = float(row[f"{prefix or 'val_'}loss"])
        assert loss == pytest.approx(found["loss"], rel=1e-5)
    # A run that was stopped somewhere goes on with the same statistics.
    stopped = config.changed("run", save_minutes=0.0)
    processes = start(stopped, tmp_path / "stopped")
    wait_for(tmp_path / "stopped" / "previous.pt", processes)
    processes[0].send_signal(signal.SIGTERM)
    printed = [process.communicate(timeout=LAST_RESORT) for process in processes]
    assert {process.returncode for process in processes} in ({143}, {0}), printed
    ends(start(stopped, tmp_path / "stopped"), [0, 0])
    keys = ("train_loss", "val_loss", "top1", "ema_loss", "ema_top1")
    expected = [[row[key] for key in keys] for row in rows(folder)]
    assert [[row[key] for key in keys] for row in rows(tmp_path / "stopped")] == expected


@pytest.fixture
def places(image_folder, tmp_path) -> list[Path]:
    """Return the folders of two nodes; each has a copy of the images under the same name."""
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    for node in nodes:
        shutil.copytree(image_folder, node / "images")
    return nodes


@pytest.mark.ci
@pytest.mark.parametrize(
    ("readable", "codes", "message"),
    [
        (True, [3, 3], "number of training images is 31 instead of 32; fingerprint of the"),
        (False, [6, 3], "ash/0.jpg cannot be read"),  # only its own rank can report it
    ],
)
def test_copy_of_the_data_that_differs_ends_the_training_of_all(
    readable, codes, message, config, places, tmp_path
) -> None:
    image = places[1] / "images" / "train" / "ash" / "0.jpg"
    image.unlink()
    if not readable:
        image.symlink_to("nowhere")
    config = config.changed("model", num_classes=None).changed("data", path="images")
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(to_yaml(config))
    command = ["train_imagenet.py", "--config", str(recipe), "--run.output", str(run)]
    (_, first), (_, second) = ends(start_script(command, places), codes)
    assert message in second
    assert not readable or second == f"process 1: {first}"
    assert not (run / "last.pt").exists()


@pytest.mark.ci
def test_copies_of_the_weights_that_differ_end_the_evaluation_of_all(config, train, places, tmp_path) -> None:
    one_epoch = config.changed("schedule", epochs=1, warmup_epochs=0)
    assert train(one_epoch, "--run.output", str(tmp_path / "run")) == 0
    checkpoint = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    for place in places:
        torch.save(checkpoint, place / "best.pt")
        checkpoint["state_dict"]["head.bias"][0] += 1
    processes = start_script(["eval.py", "best.pt", "--data.path", "images"], places)
    assert "Differences (1): weights is " in ends(processes, [3, 3])[0][1]
    assert not list(tmp_path.glob("*/*-eval.json"))


@pytest.mark.ci
def test_signal_to_one_process_stops_all_of_them_at_the_same_step(config, tmp_path) -> None:
    endless = config.changed("schedule", epochs=10_000).changed("run", save_minutes=0.0)
    processes = start(endless, tmp_path / "run")
    wait_for(tmp_path / "run" / "previous.pt", processes)
    processes[1].send_signal(signal.SIGTERM)
    printed = ends(processes, [143, 143])
    told = "stopped by SIGTERM; the run is saved, and the same command resumes it\n"
    assert printed[0][1] == told
    checkpoint = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    optimizer = checkpoint["optimizer"]["state"][0]["step"]
    assert optimizer + len(checkpoint["run"]["bad_steps"]) == checkpoint["run"]["step"]


@pytest.mark.ci
def test_lost_process_ends_the_others_with_one_line(config, tmp_path) -> None:
    endless = config.changed("schedule", epochs=10_000)
    processes = start(endless, tmp_path / "run")
    wait_for(tmp_path / "run" / "last.pt", processes)
    processes[1].kill()
    printed = ends(processes, [6, -signal.SIGKILL])
    assert printed[0][1] == "error: another process of the run died; see its own error message\n"


@pytest.mark.nightly
def test_compiled_model_trains_in_two_processes(config, tmp_path) -> None:
    compiled = config.changed("run", torchcompile=True, amp=True, grad_accum_steps=2)
    ends(start(compiled, tmp_path / "run"), [0, 0])
    losses = [float(row["train_loss"]) for row in rows(tmp_path / "run")]
    assert len(losses) == 3
    assert all(0 < loss < 2 for loss in losses)


def test_environment_of_a_launcher_is_read(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    run = RunConfig(device="cpu")
    with connect(run) as world:
        assert world == World(0, 1)
    before = torch.get_num_threads()
    try:
        with connect(RunConfig(device="cpu", num_threads=before + 1)):
            assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="is missing or not an integer"), connect(run):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="cannot connect at MASTER_ADDR"), connect(run):
        pass


@pytest.mark.nightly
def test_torchrun_says_a_wrong_setting_once_per_attempt(tmp_path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "--max-restarts", "1", str(ROOT / "train_imagenet.py"), "--run.seed", "-1"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 1  # torchrun has no other error code
    assert process.stderr.count("run.seed must be greater than or equal to 0, got -1") == 2
