"""Every command line of the documentation runs: page by page, in order, in one folder.

A command that needs a GPU, days or another data set runs up to the one error that names the missing data or
weights. Commands that take minutes get arguments that shorten them. Commands that other tests run are left out.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm
from PIL import Image
from timm.models import save_for_hf

import vil  # noqa: F401  registers the models
from tests.documents.pages import ROOT, blocks, commands, read
from vil.training.settings import TrainConfig

PAGES = ["README", "downstream/README", *sorted(path.stem for path in (ROOT / "docs").glob("*.md"))]
# Skipped commands: run by other tests, measure speed, install packages or write to the repository.
ELSEWHERE = (
    "git clone",
    "apt-get install",
    "python -m vil.run",
    "pytest -n auto",
    "python -m vil.selfcheck",
    "python -m lab.benchmarks.loader",
    "python -m lab.benchmarks.models MODELS",
    "python -m lab.benchmarks.models deit_tiny",
    "python -m lab.benchmarks.scans",
    "pip install mambapy",
    "python examples/serve.py",
    "python examples/segment.py",
    "python examples/detect.py",
    "python examples/masked.py",
    "python -m downstream.ade20k --generated",
    "python -m downstream.coco --generated",
)
BRIEF = "--data.num-workers 0 --schedule.epochs 1 --schedule.warmup-epochs 0"
SMALL = f"{BRIEF} --model.embed-dim 16 --model.depth 1"
SHORTER = {
    "python train_imagenet.py": SMALL,
    "python train_imagenet.py --config configs/finetune.yaml": BRIEF,
    "python train_imagenet.py --config configs/scratch.yaml": BRIEF,
    "python examples/fractals.py output/fractals_images": "--classes 2 --images 8 --size 32",
    "python examples/language_model.py": "--characters 5 --steps 2",
    "python examples/fractals.py output/fractals_32px": "--classes 2 --images 40 --size 32",
    "python train_imagenet.py --config configs/fractals.yaml": f"{SMALL} --model.num-classes 2 "
    "--model.img-size 32 --data.batch-size 8 --augment.mix-size 8 --schedule.min-lr 0",
    "python train_imagenet.py --config configs/fashion_mnist.yaml": f"{SMALL} --data.path photos "
    "--data.val-fraction 0.5 --model.num-classes 2 --data.batch-size 8",
    "python train_imagenet.py --config configs/fashion_mnist.yaml --run.output": f"{BRIEF} --data.path photos "
    "--data.val-fraction 0.5 --model.num-classes 2 --data.batch-size 8",
    "python train_imagenet.py --config configs/fractals_small.yaml": f"{SMALL} --model.num-classes 2",
    "python -m downstream.ade20k --model": "--generated 4 --steps 2 --val-steps 2 --img-size 64 --batch-size 2 "
    "--num-workers 0 --precision 32-true --model-kwargs embed_dim=16 depth=4 --pyramid-blocks 0 1 2 3",
}
# Data that no test machine has, and weights trained on it.
ABSENT = re.compile(r"/data/\w+|output/vil_tiny/\w+\.pt|vil_tiny_in1k")
LAUNCHER = re.compile(r"^torchrun .*?(?=\w+\.py|-m downstream)")  # one rank per GPU


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like a checkout, with weights in SOURCE and two classes in photos/."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("output", "site"):
            (folder / path.name).symlink_to(path)
    model = timm.create_model("vil_tiny", num_classes=5, img_size=32, embed_dim=16, depth=1)
    model.pretrained_cfg["input_size"] = (3, 32, 32)
    sizes = {"img_size": 32, "embed_dim": 16, "depth": 1}
    save_for_hf(model, folder / "SOURCE", model_args=sizes, safe_serialization=True)
    for label, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        (folder / "photos" / label).mkdir(parents=True)
        for i in range(16):
            image = Image.new("RGB", (40, 30), colour)
            image.putpixel((i, 3), (0, 255, 0))
            image.save(folder / "photos" / label / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """Return the set of commands that pages ran before."""
    return set()


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_of_a_page_run(page: str, checkout: Path, ran: set[str]) -> None:
    for command in commands(page):
        if command.startswith((*ELSEWHERE, "export ")):
            continue
        single = LAUNCHER.sub("python ", command)
        absent = ABSENT.findall(single)
        if any((checkout / path).exists() for path in absent):
            continue  # this machine has the data, so the command would really start
        more = max((begin for begin in SHORTER if single.startswith(begin)), key=len, default=None)
        if more and not absent:
            single = f"{single} {SHORTER[more]}"
        if single in ran:
            continue
        ran.add(single)
        done = run(single, checkout)
        if absent:
            assert done.returncode != 0, single
            assert any(path in done.stderr for path in absent), (single, done.stderr)
            assert "Traceback" not in done.stderr or " -c " in single, (single, done.stderr)
        else:
            assert done.returncode == 0, (single, done.stderr)


@pytest.mark.parametrize("page", PAGES)
def test_scripts_of_a_page_are_bash(page: str) -> None:
    """This includes scripts for clusters, which are not run."""
    for block in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_settings_named_on_a_page_exist(page: str) -> None:
    """This includes options in text and tables."""
    named = set(re.findall(r"--(model|data|augment|optim|schedule|run)\.([a-z-]+)", read(page)))
    sections = {field.name: field.default_factory() for field in fields(TrainConfig)}
    for section, setting in named:
        option = setting.removeprefix("no-").replace("-", "_")
        assert hasattr(sections[section], option), f"--{section}.{setting}"


DOCUMENTS = sorted(  # of named folders: pytest's cache and a user's output have documents, too
    path
    for folder in (
        "",
        ".ci",
        "docs",
        "downstream",
        "lab",
        "lab/benchmarks",
        "lab/emulator",
        "lab/experiments",
        "vil/kernels",
    )
    for path in (ROOT / folder).glob("*.md")
    if path.name != "PLAN.md"  # committed before its runs; it names programs of its time
)
PATH = re.compile(r"`((?:kernels|vil|configs|tests|docs|examples|downstream|lab)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_modules_named_in_a_document_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    modules = re.findall(r"python -m ((?:vil|lab|downstream|tests)[\w.]*)", text)
    missing = [name for name in set(modules) if find_spec(name.rstrip(".")) is None]
    scripts = re.findall(r"python ([\w/]+\.py)", text)
    named = {name for name in PATH.findall(text) if "/results/" not in name}  # some are yet to come
    missing += [name for name in {*scripts, *named} if not (ROOT / name).exists()]
    assert not missing
