"""A released folder gives timm and transformers the same model and the same preprocessing."""

import csv
import io
import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config
from timm.models import _hub, push_to_hf_hub, save_for_hf

import vil
from tests.strategies import encoded
from vil.profile import count_parameters
from vil.training.errors import OutputError
from vil.training.evaluation import EvalConfig, load_subject
from vil.training.images import decode_for
from vil.training.release import ReleaseConfig, release
from vil.training.transforms import val_transform


@pytest.fixture
def checkpoint(config, train, tmp_path) -> Path:
    """Return the last checkpoint of a short run."""
    train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1")
    return tmp_path / "run" / "last.pt"


@pytest.mark.parametrize("ema", [False, True])
def test_timm_loads_what_was_released(checkpoint, ema, tmp_path) -> None:
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


def test_failure_leaves_nothing(checkpoint, monkeypatch, tmp_path) -> None:
    def fail(model: torch.nn.Module, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vil.training.release.save_for_hf", fail)
    options = ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "released"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OutputError, match="No space left on device"):
        release(options)
    assert sorted(tmp_path.iterdir()) == before


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


def photographs() -> Iterator[bytes]:
    """Yield a photograph held sideways, a drawing on transparent ground, and 16 bits with a transparent level."""
    exif = Image.Exif()
    exif[274] = 6
    gradient = Image.linear_gradient("L").resize((40, 24))
    yield encoded(gradient, "JPEG", exif=exif)
    yield encoded(Image.merge("RGBA", [gradient] * 4), "PNG")
    content = encoded(Image.fromarray(np.arange(960, dtype=np.uint16).reshape(24, 40) * 60), "PNG")
    level = struct.pack(">I4sHI", 2, b"tRNS", 6000, zlib.crc32(b"tRNS" + struct.pack(">H", 6000)))
    yield content[:33] + level + content[33:]


@pytest.mark.parametrize(
    "options",
    [{}, {"background": "white"}, {"exif_rotation": True, "background": "black"}],
    ids=str,
)
def test_images_are_opened_as_in_training(checkpoint, options, tmp_path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["config"]["data"] |= options
    torch.save(content, tmp_path / "run.pt")
    release(ReleaseConfig(checkpoint=str(tmp_path / "run.pt"), folder=str(tmp_path / "small")))
    by_timm = timm.create_model(f"local-dir:{tmp_path / 'small'}", pretrained=True)
    expected = []
    for source in (tmp_path / "small", tmp_path / "run.pt"):
        config = load_subject(EvalConfig(checkpoint=str(source))).config
        assert config.data.background == options.get("background", "none")
        assert config.data.exif_rotation == options.get("exif_rotation", False)
        deviation = torch.tensor(config.data.std)[:, None, None]
        mean = torch.tensor(config.data.mean)[:, None, None]
        images = [val_transform(config)(decode_for(one, config)) / 255 for one in photographs()]
        expected.append([(image - mean) / deviation for image in images])
    features = timm.create_model(
        f"local-dir:{tmp_path / 'small'}", pretrained=True, features_only=True
    )
    for model in (vil.load(tmp_path / "small"), vil.load(tmp_path / "run.pt"), by_timm, features):
        prepare = vil.create_transform(model)
        for number, one in enumerate(photographs()):
            (tmp_path / "photo").write_bytes(one)
            opened = Image.open(tmp_path / "photo")
            before = (opened.size, opened.info.copy())
            path = tmp_path / "photo"
            for image in (one, path, str(path), io.BytesIO(one), opened):
                torch.testing.assert_close(prepare(image), expected[0][number])
                assert torch.equal(expected[0][number], expected[1][number])
            assert (opened.size, opened.info) == before
    for mode in ("L", "RGB", "RGBA"):
        image = Image.open(io.BytesIO(one)).convert(mode)
        assert torch.equal(prepare(np.asarray(image)), prepare(image))
    for array in (np.zeros((4, 4)), np.zeros((3, 4, 5), np.uint8), np.zeros(4, np.uint8)):
        with pytest.raises(
            ValueError, match=r"must be uint8 of shape \(H, W\), .*, got \w+ of shape"
        ):
            prepare(array)
    large = vil.create_transform(model, input_size=(3, 32, 32))(one)
    assert (large.shape, large.dtype) == ((3, 32, 32), torch.float32)
    photograph = next(photographs())
    for other in ({"interpolation": "lanczos"}, {"is_training": True, "interpolation": "random"}):
        assert vil.create_transform(model, **other)(photograph).shape == (3, 16, 16)
    for bad in (b"", b"no image"):
        with pytest.raises(ValueError, match=r"the file is empty|cannot identify"):
            prepare(bad)
    with pytest.raises(FileNotFoundError):
        prepare(tmp_path / "missing.jpg")


@pytest.fixture
def released(checkpoint, tmp_path) -> Path:
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "small")))
    return tmp_path / "small"


def test_release_gives_the_logits_of_the_checkpoint(checkpoint, released) -> None:
    expected = logits(vil.load(checkpoint))
    assert torch.equal(logits(vil.load(released)), expected)
    other = timm.create_model(f"local-dir:{released}", pretrained=True, num_classes=2)
    assert other.head.out_features == 2
    described = json.loads((released / "config.json").read_text())
    assert described["label_names"] == CLASSES
    assert described["architecture"] == "vil_tiny"
    assert (
        vil.load(released).pretrained_cfg["license"] == other.pretrained_cfg["license"] == "other"
    )
    assert len({path.stat().st_mode for path in released.iterdir()}) == 1  # all follow umask
    assert "num_classes" not in described["model_args"]
    model = timm.create_model(f"local-dir:{released}", pretrained=True)
    assert model.pretrained_cfg["label_names"] == CLASSES


@pytest.mark.ci
@pytest.mark.parametrize("route", ["save", "push"])
def test_round_trip_through_the_hub(released, route, monkeypatch, tmp_path) -> None:
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


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [{}, {"patch_stride": 4}, {"img_size": 24}], ids=str)
def test_transformers_load_what_was_released(checkpoint, sizes, tmp_path, monkeypatch) -> None:
    """Also if the grid of the weights is another than the reference grid."""
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"] = vil.load(checkpoint, **sizes).state_dict()
    content["model_args"] |= sizes
    torch.save(content, tmp_path / "other.pt")
    released = tmp_path / "small"
    release(ReleaseConfig(checkpoint=str(tmp_path / "other.pt"), folder=str(released)))
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
def test_card_has_the_metrics_of_the_log(checkpoint, ema, tmp_path) -> None:
    folder = tmp_path / "small"
    release(
        ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder), ema=ema, license="cc-by-4.0")
    )
    card = (folder / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)
    assert "On its split validation:" in text
    assert f"vil_tiny, {count_parameters(vil.load(checkpoint)):,} parameters" in text
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
def test_no_path_of_the_author_is_released(pretrained, said, checkpoint, tmp_path) -> None:
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
