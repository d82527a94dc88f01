"""vil.load: every kind of source, every change of the model, and refused files."""

import json
import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.models import _hub, save_for_hf
from torch import Tensor, nn

import vil
from tests.training.run_files import completed
from tests.vil.test_convert import SIZES, official_logits, official_state_dict
from vil.timm_models import create
from vil.training.checkpoint import Run, RunState, save
from vil.training.distributed import World
from vil.training.release import ReleaseConfig, release
from vil.training.settings import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from vil.training.setup import build
from vil.weights.sources import read_weights

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 4}
NO_HEAD = {key: value for key, value in SMALL.items() if key != "num_classes"}  # a file gives it
CLASSES = ("ash", "birch", "cedar", "dogwood")
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


Trained = tuple[Path, nn.Module, nn.Module]
Told = Callable[[], tuple[str, int]]


def logits(model: nn.Module, images: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        return model.eval()(images)


def small(name: str = "vil_tiny", **arguments: Any) -> nn.Module:
    """Return a tiny model with all weights drawn at random."""
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL | arguments)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a checkpoint as train_imagenet.py writes it, its model and its averaged model."""
    folder = tmp_path_factory.mktemp("run")
    config = TrainConfig(
        model=ModelConfig(name="vil_tiny", **SMALL),
        data=DataConfig(batch_size=2, crop_pct=0.9, mean=(0.1, 0.2, 0.3)),
        optim=OptimConfig(model_ema_decay=0.9),
        schedule=ScheduleConfig(warmup_lr=0.0, min_lr=0.0),  # below the peak of this batch
        run=RunConfig(device="cpu"),
    )
    config = completed(config)
    training = build(config, World(), 1)
    training.model.load_state_dict(small().state_dict())
    for parameter in training.ema.module.parameters():
        parameter.data += 0.01
    source = SimpleNamespace(fingerprint="1", classes=CLASSES)
    row = {"epoch": 1, "top1": 50.0, "top5": 100.0, "val_loss": 1.0, "val_images": 9}
    row |= {f"ema_{key}": value for key, value in (("top1", 51.0), ("top5", 99.0), ("loss", 2.0))}
    run = Run(config, config, training, source, source)
    run.state = RunState(step=3, history=[row])
    save(folder, run)
    return folder / "last.pt", training.model, training.ema.module


@pytest.fixture(scope="module")
def checkpoint(run: Trained) -> Path:
    return run[0]


@pytest.fixture(scope="module")
def released(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released") / "small"
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder)))
    return folder


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """Return a function that returns the only line that vil.load logged, and its level."""
    caplog.set_level(logging.INFO, logger="vil")

    def line() -> tuple[str, int]:
        (record,) = (record for record in caplog.records if record.name == "vil")
        caplog.clear()
        return record.getMessage(), record.levelno

    return line


def test_checkpoint_gives_the_model_bit_for_bit(run: Trained, told: Told) -> None:
    path, model, average = run
    count = len([*model.parameters()])
    for ema, expected in ((False, model), (True, average)):
        loaded = vil.load(path, ema=ema)
        assert torch.equal(logits(loaded), logits(expected))
        kind = ", averaged" if ema else ""
        assert told() == (
            f"weights from {path}{kind}, epoch 1: {count} tensors taken",
            logging.INFO,
        )
    assert not torch.equal(logits(model), logits(average))
    unset = vil.load(path, num_classes=None, img_size=None, embed_dim=None)
    assert torch.equal(logits(unset), logits(model))
    assert loaded.pretrained_cfg["label_names"] == list(CLASSES)
    data = timm.data.resolve_model_data_config(loaded)
    assert (data["input_size"], data["crop_pct"]) == ((3, 16, 16), 0.9)
    assert data["mean"] == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("key", ["model", "state_dict", None])
@pytest.mark.parametrize(
    ("prefix", "told_of"),
    [
        *((prefix, "") for prefix in ("", "module.", "_orig_mod.module.", "module._orig_mod.")),
        ("model.", "model."),  # of Lightning
        ("timm_model.", "timm_model."),  # of transformers
        ("module.student.backbone.", "student.backbone."),
    ],
)
def test_state_dicts_of_other_programs(
    prefix: str, told_of: str, key: str | None, run: Trained, told: Told, tmp_path: Path
) -> None:
    """The names of modules around the model are removed, those of wrappers without a word."""
    path = tmp_path / "other.pth"
    state = {prefix + name: value for name, value in run[1].state_dict().items()}
    torch.save(state if key is None else {key: state, "epoch": 3}, path)
    assert torch.equal(logits(vil.load(path, "vil_tiny", **NO_HEAD)), logits(run[1]))
    without = f" (names without {told_of})" if told_of else ""
    form = "; the source does not say whether it has the diagonal or the exact form, taken for longhorn"
    line = f"weights from {path}{without}: 25 tensors taken{form}"
    assert told() == (line, logging.WARNING)


FOREIGN = {
    "Lightning with a weighted loss": ("model.", {"criterion.weight": 5}),
    "torchvision's average": ("module.", {"n_averaged": ()}),
    "a detector": ("backbone.", {f"neck.{i}.conv.weight": (2, 2) for i in range(9)}),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_entries_of_others_are_left_out(name: str, run: Trained, told: Told, tmp_path: Path) -> None:
    prefix, others = FOREIGN[name]
    wrapped = {prefix + key: value for key, value in run[1].state_dict().items()}
    torch.save({"state_dict": wrapped | {k: torch.ones(v) for k, v in others.items()}}, tmp_path / "a")
    assert torch.equal(logits(vil.load(tmp_path / "a", "vil_tiny", **NO_HEAD)), logits(run[1]))
    line = told()[0]
    assert "25 tensors taken" in line
    assert f"left out: {next(iter(others))}" in line
    assert line.count("neck.") == (5 if len(others) > 5 else 0)
    assert ("and 4 more" in line) == (len(others) > 5)


def test_a_classifier_of_others_is_left_out_and_several_models_are_refused(
    run: Trained, told: Told, tmp_path: Path
) -> None:
    own = run[1].state_dict()
    wrapped = {f"backbone.{key}": value for key, value in own.items() if "head" not in key}
    wrapped |= {"head.fc.weight": torch.ones(5, 16), "head.fc.bias": torch.ones(5)}
    torch.save({"state_dict": wrapped}, tmp_path / "mmpretrain.pth")
    loaded = vil.load(tmp_path / "mmpretrain.pth", "vil_tiny", **SMALL)
    assert torch.equal(loaded.blocks[0].mixer.D, run[1].blocks[0].mixer.D)
    line = told()[0]
    assert "names without backbone.; left out: head.fc.weight, head.fc.bias" in line
    assert "new head.weight" in line
    both = {f"{part}.{key}": v for part in ("student", "teacher") for key, v in own.items()}
    torch.save(both, tmp_path / "both.pt")
    with pytest.raises(ValueError, match=r"several models, named student\. and teacher\.; save"):
        vil.load(tmp_path / "both.pt", "vil_tiny", **SMALL)


def test_the_other_form_is_refused_or_told_of(tmp_path: Path, told: Told) -> None:
    """Both forms have the same names and shapes. PyTorch's files record the form, even below other modules."""
    exact, path = timm.create_model("vil_tiny_exact", **SMALL), tmp_path / "exact.pt"
    for module in (exact, nn.ModuleDict({"model": exact})):
        torch.save({"state_dict": module.state_dict()}, path)
        with pytest.raises(ValueError, match="the state dict has weights of 'longhorn_exact'"):
            vil.load(path, "vil_tiny", **SMALL)
        vil.load(path, "vil_tiny_exact", **SMALL)
        assert told()[1] == logging.INFO
    save_file(exact.state_dict(), tmp_path / "exact.safetensors")
    vil.load(tmp_path / "exact.safetensors", "vil_tiny", **SMALL)
    line, level = told()
    assert level == logging.WARNING
    assert line.endswith("whether it has the diagonal or the exact form, taken for longhorn")
    save_file(timm.create_model("vim_tiny", **SMALL).state_dict(), tmp_path / "vim.safetensors")
    vil.load(tmp_path / "vim.safetensors", "vim_tiny", **SMALL)
    assert told()[1] == logging.INFO


def test_released_folder_gives_the_model_bit_for_bit(run: Trained, released: Path, told: Told, tmp_path: Path) -> None:
    expected = logits(run[1])
    file = released / "model.safetensors"
    for source in (released, f"local-dir:{released}", file, str(file)):
        loaded = vil.load(source)
        assert torch.equal(logits(loaded), expected)
        assert told() == (f"weights from {source}: 25 tensors taken", logging.INFO)
        assert loaded.pretrained_cfg["label_names"] == list(CLASSES)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(file.read_bytes())
    assert torch.equal(logits(vil.load(alone, "vil_tiny", **NO_HEAD)), expected)


@pytest.mark.ci
def test_hub_gives_the_model_bit_for_bit(run: Trained, released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo_id: str, filename: str, revision: str | None, **_: object) -> str:
        asked.append((repo_id, filename, revision))
        return str(released / filename)

    monkeypatch.setattr(_hub, "hf_hub_download", download)
    assert torch.equal(logits(vil.load("hf-hub:me/small@v1")), logits(run[1]))
    assert asked == [("me/small", name, "v1") for name in ("config.json", "model.safetensors")]


@pytest.mark.ci
def test_name_of_a_timm_model_stands_for_its_weights(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    model = timm.create_model("resnet18", num_classes=1000)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: model.state_dict())
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(logits(vil.load("resnet18.a1_in1k"), images), logits(model, images))
    assert told() == ("weights from resnet18.a1_in1k: 122 tensors taken", logging.INFO)
    tuned = vil.load("resnet18", num_classes=3, in_chans=1)
    assert tuned.fc.out_features == 3
    weight = model.conv1.weight.sum(1, keepdim=True)
    assert torch.allclose(tuned.conv1.weight, weight, atol=1e-6)
    assert told() == (
        "weights from resnet18: 119 tensors taken; resampled conv1.weight (64, 3, 7, 7) -> "
        "(64, 1, 7, 7); new fc.weight (3, 512), fc.bias (3,)",
        logging.WARNING,
    )
    offline = ConnectionError("the hub cannot be reached")
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", Mock(side_effect=offline))
    told_how = r'cannot be read as .*: the hub .*; without a network, .* "Without a network" in docs/fin'
    with pytest.raises(ValueError, match=told_how):
        vil.load("resnet18.a1_in1k")


@pytest.mark.ci
def test_official_vision_mamba(tmp_path: Path, told: Told) -> None:
    state = official_state_dict()
    paths = tmp_path / "vim.pth", tmp_path / "vim.safetensors"
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, paths[0])
    save_file(state, paths[1])
    sizes = {name: value for name, value in SIZES.items() if name != "num_classes"}
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    for path in paths:
        loaded = vil.load(path, "vim_tiny", **sizes)
        assert (logits(loaded, images) - official_logits(state, images)).abs().max() < 1e-5
        assert told() == (f"weights from {path}: 27 tensors taken", logging.INFO)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights(dtype: torch.dtype, tmp_path: Path, told: Told) -> None:
    model = small().to(dtype)
    torch.save(model.state_dict(), tmp_path / "half.pth")
    loaded = vil.load(tmp_path / "half.pth", "vil_tiny", **SMALL)
    assert told()[0].endswith(": 25 tensors taken")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(logits(loaded), logits(model.float()))
    same = vil.load(tmp_path / "half.pth", "vil_tiny", **SMALL, dtype=dtype)
    assert told()[0].endswith(": 25 tensors taken")
    assert {parameter.dtype for parameter in same.parameters()} == {dtype}


def test_other_classes_have_a_new_head(checkpoint: Path, run: Trained, told: Told) -> None:
    loaded = vil.load(checkpoint, num_classes=7)
    assert logits(loaded).shape == (2, 7)
    assert told() == (
        f"weights from {checkpoint}, epoch 1: 23 tensors taken; new head.weight (7, 16), head.bias (7,)",
        logging.WARNING,
    )
    assert torch.equal(loaded.forward_features(IMAGES), run[1].forward_features(IMAGES))
    headless = vil.load(checkpoint, num_classes=0)
    assert told()[0].endswith(": 23 tensors taken")
    with torch.no_grad():
        tokens = run[1].forward_features(IMAGES)
    assert torch.equal(logits(headless), tokens[:, 0])


def test_names_of_classes_are_those_of_the_head(checkpoint: Path, released: Path, tmp_path: Path) -> None:
    for source in (checkpoint, released):
        for arguments in ({}, {"img_size": 32}, {"num_classes": 4}, {"global_pool": "avg"}):
            model = vil.load(source, **arguments)
            assert model.pretrained_cfg["label_names"] == list(CLASSES)
        new = vil.load(source, num_classes=3)
        assert "label_names" not in new.pretrained_cfg
        save_for_hf(new, tmp_path / source.stem, safe_serialization=True)
        assert "label_names" not in (tmp_path / source.stem / "config.json").read_text()


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["checkpoint", "released", "bare"])
@pytest.mark.parametrize("source_size", [16, (16, 32), (8, 32)], ids=str)
@pytest.mark.parametrize("size", [32, (32, 16), (32, 8)], ids=str)
@pytest.mark.parametrize("stride", [8, 4])
def test_other_size_resamples_like_set_input_size(
    kind: str, source_size: Any, size: Any, stride: int, tmp_path: Path
) -> None:
    """The grid comes from the checkpoint's record, or from the arguments of its model."""
    model = small(img_size=source_size, patch_stride=stride)
    model.set_input_size(source_size)
    sizes = {key: value for key, value in SMALL.items() if key != "img_size"}
    sizes["patch_stride"], source = stride, tmp_path / "weights"
    about = {"arch": "vil_tiny", "model_args": sizes | {"img_size": source_size}}
    about |= {"pretrained_cfg": {}, "epoch": 1, "config": {}, "run": {}}
    if kind == "released":
        save_for_hf(model, source, safe_serialization=True)
    else:
        state = model.state_dict()
        torch.save(state if kind == "bare" else about | {"model": state}, source)
    name, given = ("vil_tiny", sizes) if kind == "bare" else (None, {})
    loaded = vil.load(source, name, img_size=size, **given)
    model.set_input_size(size)
    assert loaded.patch_embed.grid_size == model.patch_embed.grid_size
    assert torch.equal(loaded.pos_embed, model.pos_embed)
    images = torch.randn(1, 3, *loaded.patch_embed.img_size)
    assert torch.equal(logits(loaded, images), logits(model, images))
    given |= {"features_only": True, "out_indices": 1}
    features = vil.load(source, name, img_size=size, **given)
    assert torch.equal(features.model.pos_embed, model.pos_embed)


def test_overlapping_patches_of_an_image_that_is_turned_are_resampled(tmp_path: Path) -> None:
    """Both grids have as many patches; the arguments of the saved model tell which one it was."""
    model = small(img_size=(16, 32), patch_stride=4)
    save_for_hf(model, tmp_path / "saved", safe_serialization=True)
    loaded = vil.load(tmp_path / "saved", img_size=(32, 16))
    model.set_input_size((32, 16))
    assert torch.equal(loaded.pos_embed, model.pos_embed)


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_other_channels(checkpoint: Path, run: Trained, channels: int) -> None:
    loaded = vil.load(checkpoint, in_chans=channels)
    weight, source = loaded.patch_embed.proj.weight, run[1].patch_embed.proj.weight
    assert weight.shape == (16, channels, 8, 8)
    if channels == 1:
        expected = source.sum(1, keepdim=True)
    else:
        expected = source.repeat(1, 2, 1, 1)[:, :channels] * 3 / channels
    assert torch.allclose(weight, expected, atol=1e-6)
    features = vil.load(checkpoint, in_chans=channels, features_only=True, out_indices=1)
    assert torch.equal(features.model.patch_embed.proj.weight, weight)


@pytest.mark.parametrize("name", ["vil_tiny", "deit_tiny_patch16_224"])
@pytest.mark.parametrize("features", [False, True])
def test_images_are_those_that_a_model_was_created_for(name: str, features: bool, tmp_path: Path) -> None:
    """However a model is made, saved and loaded: its size and channels, and mean and std for these."""
    sizes = {
        "img_size": 96,
        "embed_dim": 12,
        "depth": 4,
        "num_classes": 3,
        "dynamic_img_size": True,
    }
    made = timm.create_model(name, **sizes)
    save_for_hf(made, tmp_path / "small", safe_serialization=True)
    folder = str(tmp_path / "small")
    by_timm = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=features)
    expected = [(made, (3, 96, 96)), (by_timm, (3, 96, 96))]
    for arguments, size in (
        ({}, (3, 96, 96)),
        ({"in_chans": 1}, (1, 96, 96)),
        ({"img_size": 64}, (3, 64, 64)),
        ({"img_size": 64, "in_chans": 1}, (1, 64, 64)),
    ):
        expected.append((vil.load(folder, features_only=features, **arguments), size))
    for model, size in expected:
        image = vil.create_transform(model)(np.full((50, 70, 3), 128, np.uint8))
        assert image.shape == size
        assert model(image[None]) is not None
        if name == "vil_tiny":  # what timm's scripts, transformers and hubs read
            assert tuple(resolve_model_data_config(model)["input_size"]) == size
    weights = read_weights(folder)
    filled = completed(TrainConfig(model=ModelConfig(pretrained=folder)), weights)
    assert filled.model.img_size == 96
    made.set_input_size(img_size=64)
    assert vil.create_transform(made)(Image.new("RGB", (50, 70))).shape == (3, 64, 64)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["checkpoint", "released"])
def test_another_pooling_leaves_the_norm_where_it_was_trained(
    kind: str, checkpoint: Path, released: Path, run: Trained, told: Told
) -> None:
    source = checkpoint if kind == "checkpoint" else released
    loaded = vil.load(source, global_pool="avg")
    assert told()[0].endswith(": 25 tensors taken")
    assert isinstance(loaded.fc_norm, nn.Identity)
    with torch.no_grad():
        tokens = run[1].forward_features(IMAGES)
        expected = run[1].head(tokens[:, 1:].mean(1))
    assert torch.allclose(logits(loaded), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"vil_tiny: fc_norm\.weight is missing in the weights"):
        vil.load(source, global_pool="avg", fc_norm=True)


def test_background_class_of_a_hub_model_is_left_out(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=6)
    save_for_hf(model, tmp_path / "folder", safe_serialization=True)
    described = json.loads((tmp_path / "folder" / "config.json").read_text())
    described["num_classes"] = described["pretrained_cfg"]["num_classes"] = 5
    described["model_args"]["num_classes"] = 5
    described["pretrained_cfg"]["label_offset"] = 1
    (tmp_path / "folder" / "config.json").write_text(json.dumps(described))
    loaded = vil.load(tmp_path / "folder")
    assert torch.equal(loaded.get_classifier().bias, model.get_classifier().bias[1:])


class Runs:
    """An object that runs a call when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def refused(call: Callable[[], object], *parts: str, kind: type = ValueError) -> None:
    """Check that the call raises an error of one line that contains the parts."""
    with pytest.raises(kind) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said
    for part in parts:
        assert part in said


@pytest.mark.parametrize("place", ["zip", "legacy", "pickle", "folder", "hub", "inside"])
def test_pickled_code_is_refused_and_not_executed(
    place: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, released: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pth"
    if place == "zip":
        torch.save(Runs(), path)
    elif place == "legacy":
        torch.save({"model": Runs()}, path, _use_new_zipfile_serialization=False)
    elif place == "pickle":
        path.write_bytes(pickle.dumps(Runs(), protocol=2))
    elif place == "inside":
        torch.save(torch.load(checkpoint, weights_only=True) | {"extra": Runs()}, path)
    else:
        path = tmp_path / "pytorch_model.bin"
        torch.save({"model": Runs()}, path)
        (tmp_path / "config.json").write_bytes((released / "config.json").read_bytes())

        def download(repo_id: str = "", filename: str = "", **_: object) -> str:
            if filename == "model.safetensors":
                raise _hub.EntryNotFoundError("none")
            return str(tmp_path / filename)

        monkeypatch.setattr(_hub, "hf_hub_download", download)
    source = {"folder": str(tmp_path), "hub": "hf-hub:evil/model"}.get(place, str(path))
    refused(lambda: vil.load(source, "vil_tiny"), source)
    assert not Path("executed").exists()
    if place == "pickle":  # unpickling it would run the call
        pickle.loads(path.read_bytes())
        assert Path("executed").exists()


def test_damaged_files_are_refused(checkpoint: Path, released: Path, tmp_path: Path) -> None:
    content = checkpoint.read_bytes()
    path = tmp_path / "damaged.pt"
    for length in (0, 1, 2, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(lambda: vil.load(path), str(path))
    with zipfile.ZipFile(checkpoint) as archive:
        info = max(archive.infolist(), key=lambda each: each.file_size)
    flipped = bytearray(content)
    flipped[info.header_offset + 200 + info.file_size // 2] ^= 1
    path.write_bytes(flipped)
    refused(lambda: vil.load(path), str(path), "damaged")
    tensors = (released / "model.safetensors").read_bytes()
    path = tmp_path / "damaged.safetensors"
    for length in (0, 4, 100, len(tensors) - 1):
        path.write_bytes(tensors[:length])
        refused(lambda: vil.load(path, "vil_tiny"), str(path))


def test_what_is_no_source_is_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        lambda: vil.load(checkpoint.parent),
        f"{checkpoint.parent} is not",
        "it is the folder of a run: pass its",
        kind=FileNotFoundError,
    )
    text = tmp_path / "notes.txt"
    text.write_text("These are my notes.")
    refused(lambda: vil.load(text), f"{text} is not a torch.save file")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    refused(lambda: vil.load(tmp_path / "list.pt"), "list.pt has no state dict", "it has list")
    refused(
        lambda: vil.load(tmp_path),
        f"{tmp_path} is not a file, a folder with config.json and weights",
        kind=FileNotFoundError,
    )
    for content in ("[]", "{", "{}", '{"architecture": "vil_tiny"}', '{"model_type": "bert"}'):
        (tmp_path / "config.json").write_text(content)
        refused(lambda: vil.load(tmp_path), f"{tmp_path} cannot be read as a released model")
    monkeypatch.chdir(tmp_path)
    for name in ("vil_tiny.pt", "resnet18.pth", "nothing", "a/b.pt", "local-dir:none"):
        refused(lambda name=name: vil.load(name), name, kind=FileNotFoundError)
    refused(lambda: vil.load("vil_tiny"), "timm has no weights for vil_tiny")
    refused(lambda: vil.load("resnet18", ema=True), "no averaged weights", kind=LookupError)


@pytest.mark.parametrize(
    ("build", "meant"),
    [
        (lambda: create("vil_tinny"), "vil_tiny"),
        (lambda: create("vil_tiny", embed_dimm=8), "embed_dim"),
        (lambda: create("deit_tiny_patch16_224", drop_path_ratee=0.1), "drop_path_rate"),
        (lambda: vil.load("vim_tinny.midclstok_in1k"), "vim_tiny.midclstok_in1k"),
    ],
)
def test_a_misspelt_name_suggests_the_right_one(build, meant) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=rf"; did you mean {meant}\?$"):
        build()
