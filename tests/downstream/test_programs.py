"""Runs on generated data: repeating the command resumes a run, which ends as if never stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("pycocotools")
pytest.importorskip("torchmetrics")
pytest.importorskip("transformers")

from downstream import ade20k, coco
from downstream.run import Task
from vil.training.errors import ConfigError, NonFiniteLossError, OutputError
from vil.training.files import LOCK_NAME
from vil.training.recipes import parse

SMALL = {
    "model_kwargs": ("embed_dim=16", "depth=4"),
    "img_size": 32,
    "steps": 4,
    "batch_size": 4,
    "generated": 4,
    "num_workers": 0,
    "val_steps": 2,
    "checkpoint_steps": 1,
    "precision": "32-true",
}
SCENES = {**SMALL, "pyramid_blocks": (0, 1, 2, 3), "accumulate": 2}
PROGRAMS = {"ade20k": (ade20k.SceneOptions, SCENES), "coco": (coco.ObjectOptions, SMALL)}
FIGURES = {"ade20k": {"miou"}, "coco": {f"{kind}_ap" for kind in ("box", "mask")}}


def train(program: str, output: Path, **changes: Any) -> dict[str, float]:
    make, values = PROGRAMS[program]
    options = make(**values | {"output": output} | changes)
    return {"ade20k": ade20k, "coco": coco}[program].train(options)


def weights(output: Path) -> dict[str, torch.Tensor]:
    return torch.load(output / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(program, tmp_path / "whole")
    assert whole["step"] == 4
    assert whole.keys() >= FIGURES[program]
    assert json.loads((tmp_path / "whole" / "result.json").read_text()) == whole

    def stop(task: Task, *_: Any) -> None:
        if task.trainer.global_step == 3:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Task, "on_train_batch_end", stop)
        with pytest.raises(InterruptedError):
            train(program, tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert train(program, tmp_path / "stopped") == whole
    ends = [weights(tmp_path / name) for name in ("whole", "stopped")]
    assert ends[0].keys() == ends[1].keys()
    for name in ends[0]:
        assert torch.equal(ends[0][name], ends[1][name]), name
    with pytest.raises(ConfigError, match=r"--lr 0\.000[12], not 0.5"):
        train(program, tmp_path / "stopped", lr=0.5)
    assert train(program, tmp_path / "stopped") == whole  # only validation is left


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--lr -1", "lr must be greater than 0, got -1.0"),
        ("--steps 0", "steps must be greater than or equal to 1, got 0"),
        ("--generated 1", "generated must be greater than or equal to 2, got 1"),
        ("--accumulate 5", "--batch-size must be divisible by 1 processes x 5 micro-batches"),
        ("--data folder", "pass exactly one of --data and --generated"),
    ],
)
def test_options_out_of_their_range_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(ade20k.SceneOptions, ["--output", "out", "--generated", "4", *words.split()])


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = torch.tensor(torch.nan, requires_grad=True)
    monkeypatch.setattr(ade20k.UperNet, "loss", lambda *_: (nothing, nothing))
    with pytest.raises(NonFiniteLossError, match="the loss of step 0 is nan"):
        train("ade20k", tmp_path)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(1)"
    command = [sys.executable, "-c", f"{hold}; sys.stdout.flush(); input()", tmp_path / LOCK_NAME]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(OutputError, match=f"output folder {tmp_path} is in use"):
            train("ade20k", tmp_path)
        other.communicate(b"\n")


SCHEDULES = {
    "ade20k": {0: 1e-6, 750: 0.5 * (1 - 750 / 60_000), 30_000: 0.5},
    "coco": {0: 1e-3, 250: 1, 163_888: 1, 163_889: 0.1, 177_545: 0.1, 177_546: 0.01},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_learning_rates_are_those_published(program: str, tmp_path: Path) -> None:
    make, _ = PROGRAMS[program]
    task = {"ade20k": ade20k.Segmentation, "coco": coco.Detection}[program]
    made = task.__new__(task)
    torch.nn.Module.__init__(made)
    made.options = make(output=tmp_path, generated=2)
    for step, factor in SCHEDULES[program].items():
        assert made.factor(step) == pytest.approx(factor, rel=1e-5)


class Answers(torch.nn.Module):
    """A network that gives the same answer to all images."""

    def forward(self, images: Any) -> Any:
        return self.answer


def answering(program: str, output: Path) -> Task:
    make, values = PROGRAMS[program]
    rates = {"lr": 1.0, "weight_decay": 0.0, "layer_decay": 1.0}
    task = {"ade20k": ade20k.Segmentation, "coco": coco.Detection}[program]
    options = make(**values | {"output": output} | rates)
    return task(options, Answers(), Answers(), range(4), [(number,) for number in range(5)])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_validation_counts_its_own_images_alone(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = answering(program, tmp_path)
    labels, image = torch.zeros(32, 32, dtype=torch.int64), torch.zeros(3, 32, 32)
    wrong, right = (torch.eye(150)[n].view(1, 150, 1, 1).expand(1, 150, 32, 32) for n in (1, 0))
    if program == "coco":
        boxes, masks = torch.tensor([[4.0, 4, 20, 20]]), torch.zeros(1, 32, 32, dtype=torch.bool)
        masks[:, 4:20, 4:20] = True
        labels = {"boxes": boxes, "labels": torch.tensor([1]), "masks": masks}
        right = [labels | {"scores": torch.ones(1), "masks": 0.1 + 0.8 * masks[None]}]  # probabilities
        wrong = [right[0] | {"labels": torch.tensor([2])}]
    monkeypatch.setattr(type(task), "trainer", SimpleNamespace(global_step=3))
    for name in ("log", "log_dict"):
        monkeypatch.setattr(task, name, lambda *_, **__: None)
    for task.network.answer, figure in ((wrong, 0), (right, 100)):
        task.validation_step([[image], [labels]], 0)
        task.on_validation_epoch_end()
        for name in FIGURES[program]:
            assert task.result[name] == pytest.approx(figure)


def test_processes_validate_each_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processes in (1, 2):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        seen, task = [], answering("coco", tmp_path)
        for rank in range(processes):
            monkeypatch.setattr(type(task), "global_rank", rank)
            seen += [number for ((number,),) in task.val_dataloader()]
        assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS)
def test_two_processes_train_and_validate(program: str, tmp_path: Path) -> None:
    _, values = PROGRAMS[program]
    words = []
    others = {"accumulate": 1, "num_workers": 1, "precision": "bf16-mixed"}
    for name, value in (values | {"output": tmp_path} | others).items():
        each = value if isinstance(value, tuple) else (value,)
        words += [f"--{name.replace('_', '-')}", *map(str, each)]
    script = str(Path(__file__).with_name("small_heads.py"))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", script, program, *words]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "result.json").read_text())
    assert figures["step"] == 4
    assert figures.keys() >= FIGURES[program]
