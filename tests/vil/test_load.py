"""vil.load: every kind of source, every change of the model, and what is refused."""

import json
import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import _hub, save_for_hf
from torch import Tensor, nn

import vil
from tests.vil.test_convert import SIZES, official_logits, official_state_dict
from vil.training.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from vil.training.distributed import World
from vil.training.run.checkpoint import About, save_checkpoint
from vil.training.run.release import ReleaseConfig, release
from vil.training.run.resolve import fill_from_weights
from vil.training.run.setup import build_training
from vil.training.run.state import RunState
from vil.weights import read_weights

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 4}
CLASSES = ("ash", "birch", "cedar", "dogwood")
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, images: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        return model.eval()(images)


def small(name: str = "vil_tiny", **arguments: Any) -> nn.Module:
    """Return a minuscule model, all of whose weights are drawn at random."""
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL | arguments)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, nn.Module]:
    """A checkpoint as train_imagenet.py writes it, its model and its average."""
    folder = tmp_path_factory.mktemp("run")
    config = TrainConfig(
        model=ModelConfig(name="vil_tiny", **SMALL),
        data=DataConfig(batch_size=2, crop_pct=0.9, mean=(0.1, 0.2, 0.3)),
        optim=OptimConfig(model_ema_decay=0.9),
        run=RunConfig(device="cpu"),
    )
    config = fill_from_weights(config, None)
    training = build_training(config, torch.device("cpu"), World())
    training.model.load_state_dict(small().state_dict())
    for parameter in training.ema.module.parameters():
        parameter.data += 0.01
    about = About(config=config, asked=config, fingerprints={}, classes=CLASSES)
    row = {"epoch": 1, "top1": 50.0, "top5": 100.0, "val_loss": 1.0}
    row |= {f"ema_{key}": value for key, value in (("top1", 51.0), ("top5", 99.0), ("loss", 2.0))}
    save_checkpoint(folder, training, about, RunState(step=3, history=[row]))
    return folder / "last.pt", training.model, training.ema.module


@pytest.fixture(scope="module")
def checkpoint(run: tuple[Path, nn.Module, nn.Module]) -> Path:
    return run[0]


@pytest.fixture(scope="module")
def released(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released") / "small"
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder)))
    return folder


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], tuple[str, int]]:
    """Return a function that gives the one line that vil.load logged, and its level."""
    caplog.set_level(logging.INFO, logger="vil")

    def line() -> tuple[str, int]:
        (record,) = (record for record in caplog.records if record.name == "vil")
        caplog.clear()
        return record.getMessage(), record.levelno

    return line


def test_checkpoint_gives_the_model_bit_for_bit(
    run: tuple[Path, nn.Module, nn.Module], told: Callable[[], tuple[str, int]]
) -> None:
    path, model, average = run
    count = len(model.state_dict())
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


def test_released_folder_gives_the_model_bit_for_bit(
    run: tuple[Path, nn.Module, nn.Module],
    released: Path,
    told: Callable[[], tuple[str, int]],
    tmp_path: Path,
) -> None:
    expected = logits(run[1])
    file = released / "model.safetensors"
    for source in (released, f"local-dir:{released}", file, str(file)):
        loaded = vil.load(source)
        assert torch.equal(logits(loaded), expected)
        assert told() == (f"weights from {source}: 25 tensors taken", logging.INFO)
        assert loaded.pretrained_cfg["label_names"] == list(CLASSES)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(file.read_bytes())
    sizes = {key: value for key, value in SMALL.items() if key != "num_classes"}
    assert torch.equal(logits(vil.load(alone, "vil_tiny", **sizes)), expected)


def test_hub_gives_the_model_bit_for_bit(
    run: tuple[Path, nn.Module, nn.Module], released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repo_id: str, filename: str, revision: str | None, **_: object) -> str:
        asked.append((repo_id, filename, revision))
        return str(released / filename)

    monkeypatch.setattr(_hub, "hf_hub_download", download)
    assert torch.equal(logits(vil.load("hf-hub:me/small@v1")), logits(run[1]))
    assert asked == [("me/small", name, "v1") for name in ("config.json", "model.safetensors")]


def test_name_of_a_timm_model_stands_for_its_weights(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], tuple[str, int]]
) -> None:
    model = timm.create_model("resnet18", num_classes=1000)
    monkeypatch.setattr(
        "timm.models._builder.load_state_dict_from_hf", lambda *_, **__: model.state_dict()
    )
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


@pytest.mark.parametrize("key", ["model", "state_dict", None])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_state_dict_of_another_program(key: str | None, prefix: str, tmp_path: Path) -> None:
    model = small()
    state = {prefix + name: value for name, value in model.state_dict().items()}
    path = tmp_path / "other.pth"
    torch.save(state if key is None else {key: state, "epoch": 3}, path)
    sizes = {name: value for name, value in SMALL.items() if name != "num_classes"}
    loaded = vil.load(path, "vil_tiny", **sizes)  # the head tells the number of classes
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", ["model", "bare", "prefixed", "safetensors"])
def test_official_vision_mamba(
    kind: str, tmp_path: Path, told: Callable[[], tuple[str, int]]
) -> None:
    state = official_state_dict()
    path = tmp_path / ("vim.safetensors" if kind == "safetensors" else "vim.pth")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "prefixed":
        torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, path)
    else:
        torch.save({"model": state} if kind == "model" else state, path)
    sizes = {name: value for name, value in SIZES.items() if name != "num_classes"}
    loaded = vil.load(path, "vim_tiny", **sizes)
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    expected = official_logits(state, images)
    assert (logits(loaded, images) - expected).abs().max() < 1e-5
    assert told() == (f"weights from {path}: 27 tensors taken", logging.INFO)


def test_official_vision_mamba_is_told_by_its_shapes(tmp_path: Path) -> None:
    wide = timm.create_model("vim_tiny", depth=1, img_size=32).state_dict()
    official = {"layers.0.mixer.in_proj.weight": wide["blocks.0.mixer.in_proj.weight"]}
    for tokens, arguments in ((28 * 28 // 4 + 1, {}), (27 * 27 + 1, {"patch_stride": 8})):
        official["pos_embed"] = torch.zeros(1, tokens, 192)
        torch.save({"model": official}, tmp_path / "vim.pth")
        weights = read_weights(tmp_path / "vim.pth")
        assert weights.architecture == "vim_tiny"
        assert weights.model_args == {"fc_norm": False, **arguments}
    del official["pos_embed"]
    torch.save({"model": official}, tmp_path / "vim.pth")
    with pytest.raises(ValueError, match=r"vim\.pth cannot be read: it lacks 'pos_embed'"):
        read_weights(tmp_path / "vim.pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights(
    dtype: torch.dtype, tmp_path: Path, told: Callable[[], tuple[str, int]]
) -> None:
    model = small().to(dtype)
    torch.save(model.state_dict(), tmp_path / "half.pth")
    loaded = vil.load(tmp_path / "half.pth", "vil_tiny", **SMALL)
    assert told()[0].endswith(": 25 tensors taken")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(logits(loaded), logits(model.float()))
    same = vil.load(tmp_path / "half.pth", "vil_tiny", **SMALL, dtype=dtype)
    assert told()[0].endswith(": 25 tensors taken")
    assert {parameter.dtype for parameter in same.parameters()} == {dtype}


def test_device_and_dtype(checkpoint: Path, told: Callable[[], tuple[str, int]]) -> None:
    loaded = vil.load(checkpoint, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert told()[0].endswith(": 25 tensors taken")
    assert logits(loaded, IMAGES.bfloat16()).dtype == torch.bfloat16


def test_other_classes_have_a_new_head(
    checkpoint: Path, run: tuple, told: Callable[[], tuple[str, int]]
) -> None:
    loaded = vil.load(checkpoint, num_classes=7)
    assert logits(loaded).shape == (2, 7)
    assert told() == (
        f"weights from {checkpoint}, epoch 1: 23 tensors taken; new head.weight (7, 16), "
        "head.bias (7,)",
        logging.WARNING,
    )
    assert torch.equal(loaded.forward_features(IMAGES), run[1].forward_features(IMAGES))
    headless = vil.load(checkpoint, num_classes=0)
    assert told()[0].endswith(": 23 tensors taken")
    with torch.no_grad():
        tokens = run[1].forward_features(IMAGES)
    assert torch.equal(logits(headless), tokens[:, 0])


def test_names_of_classes_are_those_of_the_head(
    checkpoint: Path, released: Path, tmp_path: Path
) -> None:
    for source in (checkpoint, released):
        for arguments in ({}, {"img_size": 32}, {"num_classes": 4}, {"global_pool": "avg"}):
            model = vil.load(source, **arguments)
            assert model.pretrained_cfg["label_names"] == list(CLASSES)
        new = vil.load(source, num_classes=3)
        assert "label_names" not in new.pretrained_cfg
        save_for_hf(new, tmp_path / source.stem, safe_serialization=True)
        assert "label_names" not in (tmp_path / source.stem / "config.json").read_text()
    model = vil.load(released)
    (predicted,) = logits(model, IMAGES[:1]).argmax(1).tolist()
    assert model.pretrained_cfg["label_names"][predicted] in CLASSES


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (dict(enumerate(CLASSES)), CLASSES),
        ({0: "ash", 2: "cedar"}, None),
        (list(CLASSES), CLASSES),
    ],
)
def test_names_of_classes_as_timm_writes_them(names: object, known: object, tmp_path: Path) -> None:
    model_config = {"label_names": names}
    save_for_hf(small(), tmp_path, model_args=SMALL, model_config=model_config)
    assert read_weights(tmp_path).label_names == known
    told = vil.load(tmp_path).pretrained_cfg["label_names"]
    assert told == timm.create_model(f"local-dir:{tmp_path}").pretrained_cfg["label_names"]


@pytest.mark.parametrize("kind", ["checkpoint", "released", "bare"])
@pytest.mark.parametrize("source_size", [16, (16, 32), (8, 32)], ids=str)
@pytest.mark.parametrize("size", [32, (32, 16), (32, 8)], ids=str)
@pytest.mark.parametrize("stride", [8, 4])
def test_other_size_resamples_like_set_input_size(
    kind: str, source_size: Any, size: Any, stride: int, tmp_path: Path
) -> None:
    """The grid is told by the checkpoint's record, or by the arguments of its model."""
    model = small(img_size=source_size, patch_stride=stride)
    model.set_input_size(source_size)
    sizes = {key: value for key, value in SMALL.items() if key != "img_size"}
    sizes["patch_stride"] = stride
    if kind in ("checkpoint", "bare"):
        source = tmp_path / "weights.pt"
        about = {
            "arch": "vil_tiny",
            "model_args": sizes | {"img_size": source_size},
            "pretrained_cfg": {},
            "epoch": 1,
            "config": {},
            "run": {},
        }
        torch.save(
            model.state_dict() if kind == "bare" else about | {"model": model.state_dict()}, source
        )
    else:
        source = tmp_path / "folder"
        save_for_hf(model, source, safe_serialization=True)
    name = "vil_tiny" if kind == "bare" else None
    loaded = vil.load(source, name, img_size=size, **(sizes if kind == "bare" else {}))
    model.set_input_size(size)
    assert loaded.patch_embed.grid_size == model.patch_embed.grid_size
    assert torch.equal(loaded.pos_embed, model.pos_embed)
    pixels = loaded.patch_embed.img_size
    images = torch.randn(1, 3, *pixels)
    assert torch.equal(logits(loaded, images), logits(model, images))
    features = vil.load(
        source,
        name,
        img_size=size,
        features_only=True,
        out_indices=1,
        **(sizes if kind == "bare" else {}),
    )
    assert torch.equal(features.model.pos_embed, model.pos_embed)


def test_resampled_is_told(checkpoint: Path, told: Callable[[], tuple[str, int]]) -> None:
    vil.load(checkpoint, img_size=(24, 32), in_chans=1, patch_size=4)
    assert told() == (
        f"weights from {checkpoint}, epoch 1: 23 tensors taken; resampled pos_embed (1, 5, 16) -> "
        "(1, 49, 16), patch_embed.proj.weight (16, 3, 8, 8) -> (16, 1, 4, 4)",
        logging.INFO,
    )
    vil.load(checkpoint, img_size=(8, 32))  # the same number of patches, in another grid
    assert told()[0].endswith("24 tensors taken; resampled pos_embed (1, 5, 16) -> (1, 5, 16)")


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_other_channels(checkpoint: Path, run: tuple, channels: int) -> None:
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


def test_colours_from_grey(tmp_path: Path, told: Callable[[], tuple[str, int]]) -> None:
    model = small(in_chans=1)
    save_for_hf(model, tmp_path / "grey", safe_serialization=True)
    loaded = vil.load(tmp_path / "grey", in_chans=3)
    told()
    grey = IMAGES.mean(1, keepdim=True)
    assert torch.allclose(
        logits(loaded, grey.expand(-1, 3, -1, -1)), logits(model, grey), atol=1e-5
    )


def test_features(checkpoint: Path, run: tuple, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    features = vil.load(checkpoint, features_only=True, out_indices=(0, 1)).eval()
    expected = run[1].forward_intermediates(IMAGES, [0, 1], intermediates_only=True)
    taps = features(IMAGES)
    assert [tap.shape for tap in taps] == [(2, 16, 2, 2)] * 2
    assert all(torch.equal(a, b) for a, b in zip(taps, expected, strict=True))
    assert not caplog.records
    assert "state_dict" not in features.pretrained_cfg
    assert "state_dict" not in features.model.pretrained_cfg
    one = vil.load(checkpoint, features_only=True, out_indices=[0], num_classes=0).eval()
    assert torch.equal(one(IMAGES)[0], expected[0])


def test_scriptable_and_exportable(checkpoint: Path, run: tuple) -> None:
    expected = logits(run[1])
    scripted = torch.jit.script(vil.load(checkpoint, scriptable=True).eval())
    assert torch.allclose(scripted(IMAGES), expected, atol=1e-6)
    exportable = vil.load(checkpoint, exportable=True)
    assert torch.equal(exportable.pos_embed, run[1].pos_embed)
    assert torch.allclose(logits(exportable), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["checkpoint", "released"])
def test_another_pooling_leaves_the_norm_where_it_was_trained(
    kind: str, checkpoint: Path, released: Path, run: tuple, told: Callable[[], tuple[str, int]]
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


def test_averaging_model_loads_as_a_class_token_model(tmp_path: Path) -> None:
    model = small(global_pool="avg")
    save_for_hf(model, tmp_path / "avg", safe_serialization=True)
    assert torch.equal(logits(vil.load(tmp_path / "avg")), logits(model))
    model.reset_classifier(0, "token")
    assert torch.equal(
        logits(vil.load(tmp_path / "avg", global_pool="token", num_classes=0)), logits(model)
    )


def test_model_of_a_checkpoint_of_timm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit2", num_classes=5)
    content = {"arch": "test_vit2", "state_dict": model.state_dict(), "epoch": 3, "version": 2}
    torch.save(content, tmp_path / "timm.pth.tar")
    loaded = vil.load(tmp_path / "timm.pth.tar")
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(logits(loaded, images), logits(model, images))


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


def test_renamed_tensors_count_as_taken(
    tmp_path: Path, told: Callable[[], tuple[str, int]]
) -> None:
    """A filter of timm's renames what other programs call otherwise."""
    model = timm.create_model("test_convnext", num_classes=5)
    state = {}
    for name, value in model.state_dict().items():
        state[name.replace("head.norm.", "norm.").replace("head.fc.", "head.")] = value
    assert state.keys() != model.state_dict().keys()
    torch.save(state, tmp_path / "convnext.pth")
    loaded = vil.load(tmp_path / "convnext.pth", "test_convnext", num_classes=5)
    assert told()[0].endswith(f": {len(state)} tensors taken")
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(logits(loaded, images), logits(model, images))


class Runs:
    """What pickles to a call."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def refused(call: Callable[[], object], *parts: str, kind: type = ValueError) -> None:
    """Fail unless the call raises one line that has the parts."""
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
    if place == "pickle":  # and yet it would
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


def test_what_is_no_source_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(
        lambda: vil.load(checkpoint.parent), f"{checkpoint.parent} is the folder of a run; name its"
    )
    text = tmp_path / "notes.txt"
    text.write_text("These are my notes.")
    refused(lambda: vil.load(text), f"{text} is no file of torch.save")
    refused(
        lambda: vil.load(tmp_path),
        f"{tmp_path} is no folder with a config.json and weights",
        kind=FileNotFoundError,
    )
    for content in ("[]", "{", "{}", '{"architecture": "vil_tiny"}', '{"model_type": "bert"}'):
        (tmp_path / "config.json").write_text(content)
        refused(lambda: vil.load(tmp_path), f"{tmp_path} cannot be read as a released model")
    monkeypatch.chdir(tmp_path)
    for name in ("vil_tiny.pt", "resnet18.pth", "nothing", "a/b.pt", "local-dir:none"):
        refused(lambda name=name: vil.load(name), name, kind=FileNotFoundError)
    refused(lambda: vil.load("vil_tiny"), "vil_tiny has no trained weights")
    refused(lambda: vil.load("resnet18", ema=True), "no averaged weights", kind=LookupError)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        3,
        {"epoch": 3},
        {"state_dict": {}},
        {"state_dict": {"a": 1}},
        {0: torch.zeros(1)},
        {"arch": torch.zeros(1)},
    ],
    ids=str,
)
def test_files_without_weights_are_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "file.pt")
    refused(lambda: vil.load(tmp_path / "file.pt"), str(tmp_path / "file.pt"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("arch", 3),
        ("arch", "nonesuch"),
        ("model_args", []),
        ("model_args", {"x": 1}),
        ("pretrained_cfg", "a"),
        ("run", 3),
        ("model_args", {"embed_dim": "a"}),
        ("model_args", {"pretrained": True}),
        ("model_args", {"checkpoint_path": "other.pt"}),
    ],
)
def test_checkpoint_of_nonsense_is_refused(
    key: str, value: object, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "odd.pt"
    torch.save(torch.load(checkpoint, weights_only=True) | {key: value}, path)
    refused(lambda: vil.load(path), str(path))


def test_weights_that_do_not_fit_name_the_first_key(checkpoint: Path, tmp_path: Path) -> None:
    refused(lambda: vil.load(checkpoint, embed_dim=32), str(checkpoint), "patch_embed.proj.weight")
    refused(lambda: vil.load(checkpoint, depth=3), "blocks.2.norm.weight is missing in the weights")
    refused(lambda: vil.load(checkpoint, depth=1), "blocks.1.norm.weight is missing in the model")
    refused(lambda: vil.load(checkpoint, d_state=8), "blocks.0.mixer")
    maps = {"features_only": True, "out_indices": 3}
    refused(lambda: vil.load(checkpoint, **maps), str(checkpoint), "last-n (3)")
    refused(lambda: vil.load(checkpoint, nonsense=1), str(checkpoint), "nonsense")
    refused(lambda: vil.load(checkpoint, global_pool="odd"), str(checkpoint), "global_pool")
    refused(lambda: vil.load(checkpoint, checkpoint_path="x"), str(checkpoint), "checkpoint_path")
    refused(lambda: vil.load(checkpoint, "vil_gigantic"), str(checkpoint), "vil_gigantic")
    path = tmp_path / "other.pth"
    torch.save({"a.weight": torch.zeros(3)}, path)
    refused(lambda: vil.load(path), f"{path} does not say which model its weights are of; name it")
    refused(lambda: vil.load(path, "vil_tiny", **SMALL), str(path), "is missing in the weights")
    torch.save({**small().state_dict(), "extra": torch.zeros(1)}, path)
    refused(lambda: vil.load(path, "vil_tiny", **SMALL), "extra is missing in the model")


@pytest.mark.parametrize("kind", ["checkpoint", "released", "bare"])
def test_another_recurrence_is_refused(
    kind: str, checkpoint: Path, released: Path, tmp_path: Path
) -> None:
    if kind == "bare":
        source = tmp_path / "weights.pth"
        torch.save({"model": small().state_dict()}, source)
    else:
        source = checkpoint if kind == "checkpoint" else released
    for name in ("vil_tiny_exact", "vim_tiny"):
        refused(lambda name=name: vil.load(source, name, **SMALL), str(source), "blocks.0.mixer")
    refused(
        lambda: vil.load(source, "vil_tiny", **SMALL, recurrence="longhorn_exact"), "blocks.0.mixer"
    )


def test_recurrence_of_an_argument_is_that_of_the_weights(tmp_path: Path) -> None:
    model = small(recurrence="longhorn_exact")
    save_for_hf(model, tmp_path / "exact", safe_serialization=True)
    assert torch.equal(logits(vil.load(tmp_path / "exact", "vil_tiny_exact")), logits(model))
    refused(lambda: vil.load(tmp_path / "exact", recurrence="longhorn"), "longhorn_exact")


def test_the_weights_themselves_are_left_alone(released: Path) -> None:
    before = load_file(released / "model.safetensors")
    weights = read_weights(released)
    vil.loading.model_with(weights, num_classes=2, img_size=32)
    assert weights.state_dict.keys() == before.keys()
    assert all(torch.equal(weights.state_dict[key], before[key]) for key in before)
