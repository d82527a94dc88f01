"""A released folder gives timm and transformers the same model and the same preprocessing."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config
from timm.models import _hub, push_to_hf_hub, save_for_hf

import release as release_script
import vil
from vil.training.config import TrainConfig
from vil.training.errors import ConfigError, OutputError, run_script
from vil.training.run.release import ReleaseConfig, release


@pytest.fixture
def checkpoint(config: TrainConfig, train: Callable[..., int], tmp_path: Path) -> Path:
    """The last checkpoint of a short run."""
    train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1")
    return tmp_path / "run" / "last.pt"


@pytest.mark.parametrize("ema", [False, True])
def test_timm_loads_what_was_released(checkpoint: Path, ema: bool, tmp_path: Path) -> None:
    folder = tmp_path / "released"
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder), ema=ema))
    files = {"model.safetensors", "config.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == files
    saved = torch.load(checkpoint, weights_only=True)["state_dict_ema" if ema else "state_dict"]
    assert load_file(folder / "model.safetensors").keys() == saved.keys()
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    data = resolve_model_data_config(model)
    assert (data["input_size"], data["crop_pct"]) == ((3, 16, 16), 0.875)
    assert (data["interpolation"], tuple(data["mean"])) == ("bicubic", (0.485, 0.456, 0.406))
    assert create_transform(**data) is not None


def test_script_says_how_to_load(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    capsys.readouterr()
    arguments = ["release.py", str(checkpoint), str(tmp_path / "released")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert run_script(release_script.main) == 0
    assert f"local-dir:{tmp_path / 'released'}" in capsys.readouterr().out
    assert run_script(release_script.main) == 5
    assert "released exists; choose another folder" in capsys.readouterr().err


def test_failure_leaves_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(model: torch.nn.Module, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vil.training.run.release.save_for_hf", fail)
    options = ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "released"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OutputError, match="No space left on device"):
        release(options)
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_killed_release_left_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    numbers = {"killed": gone.pid, "another's": gone.pid, "at work": os.getppid()}
    left = {}
    for kind, number in numbers.items():
        left[kind] = tmp_path / f".{kind}.{number}.tmp"
        left[kind].mkdir()
        (left[kind] / "model.safetensors").write_bytes(b"half")
    (left["another's"] / "notes.txt").write_text("mine")
    for kind in numbers:
        release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / kind)))
    assert [kind for kind, path in left.items() if path.exists()] == ["another's", "at work"]


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
CLASSES = ["ash", "birch", "cedar", "dogwood"]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IMAGES)


def edited(checkpoint: Path, path: Path, **changes: Any) -> str:
    """Write a checkpoint with other entries; dictionaries are merged."""
    content = torch.load(checkpoint, weights_only=True)
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    torch.save(content, path)
    return str(path)


@pytest.fixture
def released(checkpoint: Path, tmp_path: Path) -> Path:
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "small")))
    return tmp_path / "small"


def test_release_gives_the_logits_of_the_checkpoint(checkpoint: Path, released: Path) -> None:
    expected = logits(vil.load(checkpoint))
    assert torch.equal(logits(vil.load(released)), expected)
    other = timm.create_model(f"local-dir:{released}", pretrained=True, num_classes=2)
    assert other.head.out_features == 2
    described = json.loads((released / "config.json").read_text())
    assert described["label_names"] == CLASSES
    assert described["architecture"] == "vil_tiny"
    assert "num_classes" not in described["model_args"]
    model = timm.create_model(f"local-dir:{released}", pretrained=True)
    assert model.pretrained_cfg["label_names"] == CLASSES


@pytest.mark.parametrize("route", ["save", "push"])
def test_round_trip_through_the_hub(
    released: Path, route: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = tmp_path / "hub"

    class Api:
        def __init__(self, **_: object) -> None: ...

        def create_repo(self, repo_id: str, **_: object) -> SimpleNamespace:
            return SimpleNamespace(repo_id=repo_id)

        def file_exists(self, **_: object) -> bool:
            return False

        def upload_folder(self, folder_path: str, **_: object) -> None:
            shutil.copytree(folder_path, hub)

    def download(repo_id: str, filename: str, **_: object) -> str:
        return str(hub / filename)

    monkeypatch.setattr(_hub, "HfApi", Api)
    monkeypatch.setattr(_hub, "hf_hub_download", download)
    model = timm.create_model(f"local-dir:{released}", pretrained=True)
    if route == "push":
        push_to_hf_hub(model, "me/small", safe_serialization=True)
    else:
        save_for_hf(model, hub, safe_serialization=True)
    expected = logits(model)
    for again in (
        timm.create_model("hf-hub:me/small", pretrained=True),
        vil.load("hf-hub:me/small"),
        vil.load(hub),
    ):
        assert torch.equal(logits(again), expected)
        assert again.pretrained_cfg["label_names"] == CLASSES
        assert again.pretrained_cfg["crop_pct"] == 0.875
    cfg, name, _ = timm.models.load_model_config_from_hf("me/small")
    assert (name, cfg["num_classes"], tuple(cfg["input_size"])) == ("vil_tiny", 4, (3, 16, 16))


def test_transformers_load_what_was_released(
    released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = transformers.AutoModelForImageClassification.from_pretrained(released)
    assert model.config.id2label == dict(enumerate(CLASSES))
    with torch.no_grad():
        given = model.eval()(IMAGES).logits
    assert (given - logits(vil.load(released))).abs().max() < 1e-6
    processor = transformers.AutoImageProcessor.from_pretrained(released)
    image = Image.new("RGB", (24, 20), (200, 100, 50))
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    data = resolve_model_data_config(vil.load(released))
    assert torch.equal(pixels[0], create_transform(**data)(image))
    assert pixels.shape == (1, 3, 16, 16)


@pytest.mark.parametrize("ema", [False, True])
def test_card_has_the_metrics_of_the_log(checkpoint: Path, ema: bool, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    release(
        ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder), ema=ema, license="cc-by-4.0")
    )
    card = (folder / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)
    described = yaml.safe_load(front)
    assert described["license"] == "cc-by-4.0"
    assert described["library_name"] == "timm"
    assert described["pipeline_tag"] == "image-classification"
    assert "vision-longhorn" in described["tags"]
    config = json.loads((folder / "config.json").read_text())
    assert config["pretrained_cfg"]["license"] == "cc-by-4.0"
    with (checkpoint.parent / "log.csv").open() as file:
        (row,) = csv.DictReader(file)
    values = [
        float(row[key])
        for key in (("ema_top1", "ema_top5", "ema_loss") if ema else ("top1", "top5", "val_loss"))
    ]
    assert "| {:.2f} | {:.2f} | {:.4f} |".format(*values) in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["model"]["embed_dim"] == 16
    assert recipe["schedule"]["epochs"] == 1


def test_a_folder_of_any_name_is_released(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        '"; import os #',
        "line\n# Title",
        "*a* [b](c) <d>",
        "\x1b[31mred",
        "```",
        "{name}",
    ):
        release(ReleaseConfig(checkpoint=str(checkpoint), folder=name))
        card = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        (title,) = [line for line in card.splitlines() if line.startswith("# ")]
        assert not re.search(r"(?<!\\)[*\[\]()<>`]", title)
        assert "\x1b" not in card
        usage = (
            card.split("```python\n")[1].split("\n```")[0].replace("import timm\nimport vil  ", "")
        )
        create, load = Mock(), Mock()
        exec(usage, {"timm": Mock(create_model=create), "vil": Mock(load=load)})
        create.assert_called_once_with(f"local-dir:{name}", pretrained=True)
        load.assert_called_once_with(name, num_classes=3)
        metadata = yaml.safe_load(card.split("---\n")[1])
        assert metadata["license"] == "other"  # nobody said which


def test_class_names_do_not_break_the_card(checkpoint: Path, tmp_path: Path) -> None:
    names = ["a|b", "line\nbreak\n---\n# Title", "\"quoted\" 'it' <b>`x`", "Ahorn 楓 [x](y)"]
    source = edited(checkpoint, tmp_path / "odd.pt", pretrained_cfg={"label_names": names})
    folder = tmp_path / "small"
    release(ReleaseConfig(checkpoint=source, folder=str(folder)))
    card = (folder / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in card.splitlines() if line.startswith("- **Classes:**")]
    assert line == (
        "- **Classes:** 4: a\\|b, line break --- \\# Title, \"quoted\" 'it' "
        "\\<b\\>\\`x\\`, Ahorn 楓 \\[x\\]\\(y\\)"
    )
    assert [line for line in card.splitlines() if line.startswith("# ")] == [
        "# Model card for small"
    ]
    assert json.loads((folder / "config.json").read_text())["label_names"] == names
    assert vil.load(folder).pretrained_cfg["label_names"] == names


@pytest.mark.parametrize(
    ("pretrained", "said"),
    [
        ("/home/alice/secret/weights.pth", "weights.pth"),
        ("/weights.pth", "weights.pth"),
        ("local-dir:/home/alice/secret/vil_tiny_in1k", "vil\\_tiny\\_in1k"),
        ("hf-hub:me/vil", "hf-hub:me/vil"),
        ("resnet18.a1_in1k", "resnet18.a1\\_in1k"),
    ],
)
def test_no_path_of_the_author_is_released(
    pretrained: str, said: str, checkpoint: Path, tmp_path: Path
) -> None:
    config = torch.load(checkpoint, weights_only=True)["config"]
    config["model"]["pretrained"] = pretrained
    config["data"] |= {"path": "/home/alice/secret/images", "train_split": "/home/alice/secret/a"}
    source = edited(checkpoint, tmp_path / "own.pt", config=config)
    folder = tmp_path / "small"
    release(ReleaseConfig(checkpoint=source, folder=str(folder)))
    for path in folder.iterdir():
        content = path.read_bytes()
        for word in (b"alice", b"secret", str(tmp_path).encode()):
            assert word not in content, path
    assert f"fine-tuned from {said}." in (folder / "README.md").read_text(encoding="utf-8")


def test_what_timm_says_of_its_own_weights_is_left_out(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    arguments = ("--model.name", "test_vit", "--run.output", str(tmp_path / "vit"))
    plain = TrainConfig(
        data=config.data, schedule=config.schedule, run=config.run, optim=config.optim
    )
    assert train(plain, *arguments, "--schedule.epochs", "1", "--model.img-size", "32") == 0
    folder = tmp_path / "small"
    release(ReleaseConfig(checkpoint=str(tmp_path / "vit" / "last.pt"), folder=str(folder)))
    described = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    assert not {"tag", "origin_url", "paper_ids", "url", "hf_hub_id", "file"} & described.keys()
    assert described["crop_mode"] == "center"
    assert described["input_size"] == [3, 32, 32]


@pytest.mark.parametrize("license", ["", "MIT and: more", "a\nb: c", "../x"])
def test_licence_is_a_name_of_the_hub(license: str, checkpoint: Path, tmp_path: Path) -> None:
    options = {"checkpoint": str(checkpoint), "folder": str(tmp_path / "small")}
    with pytest.raises(ConfigError, match="--license must be a name of the hub's"):
        release(ReleaseConfig(**options, license=license))
    assert not (tmp_path / "small").exists()


def test_what_cannot_be_released_is_refused(
    checkpoint: Path,
    released: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    unknown = edited(checkpoint, tmp_path / "unknown.pt", arch="nonesuch")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    other = edited(checkpoint, tmp_path / "other.pt", model_args={"depth": 3})
    torch.save(state, tmp_path / "bare.pt")
    capsys.readouterr()
    for source, code, message in (
        (unknown, 5, "nonesuch, which is no model of timm"),
        (other, 5, "model_args has depth 3, and its weights 2"),
        (str(tmp_path / "bare.pt"), 2, "was not written by train_imagenet.py"),
        (str(released), 2, "was not written by train_imagenet.py"),
        (str(tmp_path / "none.pt"), 2, "none.pt is no file, no folder"),
        (str(checkpoint.parent), 5, "is the folder of a run; name its checkpoint"),
    ):
        monkeypatch.setattr(sys, "argv", ["release.py", source, str(tmp_path / "new")])
        assert run_script(release_script.main) == code, source
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "new").exists()


def test_what_is_in_the_way_stays(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    in_the_way = tmp_path / f".small.{os.getpid()}.tmp"
    in_the_way.mkdir()
    (in_the_way / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"cannot create .*\.tmp: File exists"):
        release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder)))
    assert (in_the_way / "notes.txt").read_text() == "mine"
    folder.symlink_to("/nowhere")
    with pytest.raises(OutputError, match="small exists; choose another folder"):
        release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder)))


def test_full_disk_is_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As safetensors does it, in an error of its own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*small: .*[Ff]ile"):
            release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "small")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, original)
    assert not list(tmp_path.glob("*small*"))
    assert not list(tmp_path.glob(".*small*"))


def test_card_of_an_average_that_was_not_scored_has_no_metrics(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As of one that has begun since the last epoch."""
    content = torch.load(checkpoint, weights_only=True)
    for row in content["run"]["history"]:
        for key in ("ema_loss", "ema_top1", "ema_top5"):
            del row[key]
    torch.save(content, checkpoint)
    options = ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "small"), ema=True)
    release(options)
    assert "## Metrics" not in (tmp_path / "small" / "README.md").read_text()


def test_log_of_another_form_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    del content["run"]["history"][0]["top5"]
    torch.save(content, checkpoint)
    with pytest.raises(OutputError, match=r"the checkpoint\.run\.history\[0\] lacks top5"):
        release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "small")))
