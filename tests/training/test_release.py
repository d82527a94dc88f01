"""A released folder gives timm and transformers the same model and the same preprocessing."""

import dataclasses
import io
import json
import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models import save_for_hf

import vil
from tests.strategies import encoded
from tests.training.run_files import at_step, rows, terminate
from vil.preprocess import ImageSpec
from vil.profile import count_parameters
from vil.training.engine import interval
from vil.training.errors import ConfigError, OutputError
from vil.training.release import ReleaseConfig, release
from vil.training.subject import load_subject

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
CLASSES = ["ash", "birch", "cedar", "dogwood"]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IMAGES)


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
    run, small, path = (tmp_path / name for name in ("run.pt", "small", "photo"))
    content = torch.load(checkpoint, weights_only=True)
    images = ImageSpec.of(content["pretrained_cfg"])
    content["pretrained_cfg"] |= dataclasses.replace(images, **options).pretrained_cfg()
    torch.save(content, run)
    release(ReleaseConfig(checkpoint=str(run), folder=str(small)))
    expected = []
    for source in (small, run):
        images = load_subject(str(source)).images
        assert images.background == options.get("background", "none")
        assert images.exif_rotation == options.get("exif_rotation", False)
        mean, deviation = (torch.tensor(v)[:, None, None] for v in (images.mean, images.std))
        read = [images.transform()(images.decode(one)) / 255 for one in photographs()]
        expected.append([(image - mean) / deviation for image in read])
    by_timm = [
        timm.create_model(f"local-dir:{small}", pretrained=True, features_only=features) for features in (False, True)
    ]
    for model in (vil.load(small), vil.load(run), *by_timm):
        prepare = vil.create_transform(model)
        for number, one in enumerate(photographs()):
            path.write_bytes(one)
            opened = Image.open(path)
            before = (opened.size, opened.info.copy())
            for image in (one, path, str(path), io.BytesIO(one), opened):
                torch.testing.assert_close(prepare(image), expected[0][number])
                assert torch.equal(expected[0][number], expected[1][number])
            assert (opened.size, opened.info) == before


def test_arrays_and_arguments_of_timm_are_taken(released, tmp_path) -> None:
    model, photograph = vil.load(released), next(photographs())
    prepare = vil.create_transform(model)
    for mode in ("L", "RGB", "RGBA"):
        image = Image.open(io.BytesIO(photograph)).convert(mode)
        assert torch.equal(prepare(np.asarray(image)), prepare(image))
    wrong = (np.zeros(shape, np.uint8) for shape in ((3, 4, 5), (4,), (0, 5), (5, 0, 3)))
    for array in (np.zeros((4, 4)), *wrong):
        with pytest.raises(ValueError, match=r"must be uint8 of shape \(H, W\), .*, got \w+ of sh"):
            prepare(array)
    for bad in (b"", b"no image"):
        with pytest.raises(ValueError, match=r"the file is empty|cannot identify"):
            prepare(bad)
    with pytest.raises(FileNotFoundError):
        prepare(tmp_path / "missing.jpg")
    expected = prepare(photograph)
    for same in (bytearray(photograph), memoryview(photograph), io.BytesIO(photograph).getbuffer()):
        assert torch.equal(prepare(same), expected)
    with pytest.raises(TypeError, match=r"image must be a path, bytes, .* got Tensor"):
        prepare(torch.zeros(3, 4, 5, dtype=torch.uint8))
    (tmp_path / "broken.jpg").write_bytes(photograph[:200])
    with pytest.raises(ValueError, match=r"broken\.jpg: "):
        prepare(tmp_path / "broken.jpg")
    large = vil.create_transform(model, input_size=(3, 32, 32))(photograph)
    assert (large.shape, large.dtype) == ((3, 32, 32), torch.float32)
    for other in ({"interpolation": "lanczos"}, {"is_training": True, "interpolation": "random"}):
        assert vil.create_transform(model, **other)(photograph).shape == (3, 16, 16)


def thin(width: int, height: int) -> bytes:
    return encoded(Image.new("RGB", (width, height), "red"), "PNG")


def test_an_image_that_would_be_enlarged_without_bound_is_refused(tmp_path) -> None:
    """In a service, a file of 86 bytes must not cost a gigabyte. Every form of an image has the same limit."""
    model = timm.create_model("vil_tiny", depth=1, embed_dim=16)
    thin_file, allowed = thin(1, 3000), thin(2, 300)
    forms = (thin_file, Image.open(io.BytesIO(thin_file)), np.zeros((3000, 1, 3), np.uint8))
    for mode in ("center", "border", "squash"):
        prepare = vil.create_transform(model, crop_mode=mode)
        small = vil.create_transform(model, crop_mode=mode, max_pixels=599)
        for form in forms:
            if mode == "squash":
                assert prepare(form).shape == (3, 224, 224)
                continue
            most = {"center": "196,608,000", "border": "no"}[mode]
            with pytest.raises(ValueError, match=f"from 1 x 3000 px, it would have {most} pixels"):
                prepare(form)
        with pytest.raises(ValueError, match="it has 600 pixels, which exceeds max_pixels 599"):
            small(allowed)
        assert prepare(allowed).shape == (3, 224, 224)
    with pytest.raises(ValueError, match="resized"):  # by another step of timm
        vil.create_transform(model, input_size=(3, 224, 192))(thin_file)
    with pytest.raises(ValueError, match="images can be prepared for 1 or 3 channels, got a model of 4"):
        vil.create_transform(timm.create_model("vil_tiny", depth=1, embed_dim=16, in_chans=4))


def test_weights_from_the_middle_of_an_epoch_are_not_those_of_its_score(
    config, train, evaluate, capsys, tmp_path
) -> None:
    with at_step(5, terminate):
        assert train(config, "--run.output", str(tmp_path / "run")) == 143
    last = str(tmp_path / "run" / "last.pt")
    release(ReleaseConfig(checkpoint=last, folder=str(tmp_path / "small")))
    card = (tmp_path / "small" / "README.md").read_text()
    assert "weights of epoch 1 and 2 more steps" in card
    assert "## Metrics" not in card
    assert evaluate(last) == 0
    assert "epoch 1 and 2 more steps" in capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "last-eval.json").read_text())
    assert (result["epoch"], result["steps_after_epoch"]) == (1, 2)


@pytest.mark.parametrize("ema", [False, True])
def test_timm_loads_what_was_released(checkpoint, ema, tmp_path) -> None:
    folder, hub = tmp_path / "small", tmp_path / "hub"
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder), ema=ema))
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.safetensors", "config.json", "README.md"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # all follow umask
    saved = torch.load(checkpoint, weights_only=True)["state_dict_ema" if ema else "state_dict"]
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    save_for_hf(model, hub, safe_serialization=True)  # as timm's push_to_hf_hub does
    for loaded in (model, vil.load(folder), vil.load(hub)):
        assert loaded.state_dict().keys() == saved.keys()
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in saved.items())
        assert (loaded.pretrained_cfg["label_names"], loaded.num_classes) == (CLASSES, 4)
        data = resolve_model_data_config(loaded)
        assert (data["input_size"], data["crop_pct"]) == ((3, 16, 16), 0.8)
        assert (data["interpolation"], tuple(data["mean"])) == ("bilinear", (0.1, 0.2, 0.3))
        assert tuple(data["std"]) == (0.4, 0.5, 0.6)
    other = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=2)
    assert other.head.out_features == 2
    described = json.loads((folder / "config.json").read_text())
    assert (described["architecture"], described["label_names"]) == ("vil_tiny", CLASSES)
    assert "num_classes" not in described["model_args"]


def test_failure_leaves_nothing(checkpoint, tmp_path) -> None:
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OutputError, match="File too large"):
            release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "released")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before


def prepared(path: Path, how: dict) -> np.ndarray:
    """Prepare an image as preprocess.json says, without timm and torch."""
    image = Image.open(path).convert({"RGB": "RGB", "grey": "L"}[how["decode"]["channels"]])
    (height, width), (rows, columns) = how["resize"]["size"], how["crop"]["size"]
    assert how["resize"]["rule"] in ("cover", "stretch")
    size = (width, height)
    if how["resize"]["rule"] == "cover":
        ratio = max(height / image.height, width / image.width)
        size = (int(ratio * image.width), int(ratio * image.height))
    image = np.asarray(image.resize(size, getattr(Image.Resampling, how["resize"]["interpolation"].upper())))
    top, left = (round((have - wanted) / 2) for have, wanted in zip(image.shape, (rows, columns), strict=False))
    image = image[top : top + rows, left : left + columns].reshape(rows, columns, -1) / 255
    mean, std = (np.array(how["normalize"][key]) for key in ("mean", "std"))
    return ((image - mean) / std).transpose(2, 0, 1)[None].astype(np.float32)


@pytest.mark.ci
@pytest.mark.parametrize("sizes", ["own", "any"])
def test_onnx_beside_the_weights_needs_neither_timm_nor_torch(checkpoint, sizes, tmp_path) -> None:
    """Resized by each rule: "own" with the checkpoint's, which stretches, "any" with the usual one."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    folder = tmp_path / "released"
    if sizes == "any":
        content = torch.load(checkpoint, weights_only=True)
        content["pretrained_cfg"]["crop_mode"] = content["config"]["data"]["crop_mode"] = "center"
        checkpoint = tmp_path / "center.pt"
        torch.save(content, checkpoint)
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder), onnx=sizes))
    assert {path.name for path in folder.iterdir()} >= {"model.onnx", "model.onnx.data", "preprocess.json"}
    how = json.loads((folder / "preprocess.json").read_text())
    assert how["label_names"] == CLASSES
    assert how["resize"]["rule"] == {"own": "stretch", "any": "cover"}[sizes]
    assert how["input"]["shape"] == ["batch", 3, *([16, 16] if sizes == "own" else ["height", "width"])]
    photo = tmp_path / "photo.png"
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 256, (44, 30, 3), dtype=np.uint8)).save(photo)
    session = runtime.InferenceSession(folder / "model.onnx")
    images = prepared(photo, how)
    (logits,) = session.run([how["output"]["name"]], {how["input"]["name"]: images})
    model = vil.load(folder).eval()
    with torch.no_grad():
        expected = model(vil.create_transform(model)(photo)[None])
        assert torch.allclose(torch.from_numpy(logits), expected, atol=1e-5)
        if sizes == "any":  # other sizes are images at the scale of training
            other = torch.randn(2, 3, 25, 40)
            (logits,) = session.run(None, {"images": other.numpy()})
            same = vil.load(folder, grid_aware=False, dynamic_img_pad=True).eval()(other)
            assert torch.allclose(torch.from_numpy(logits), same, atol=1e-5)


def test_onnx_that_cannot_be_written_leaves_nothing(checkpoint, tmp_path, monkeypatch) -> None:
    before = sorted(tmp_path.iterdir())
    options = ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "released"), onnx="own")
    monkeypatch.setattr("vil.training.onnx.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--onnx needs onnx, onnxscript, onnxruntime; run pip install onnx"):
        release(options)
    monkeypatch.undo()

    def fail(*_: object, **__: object) -> None:
        raise torch.onnx.OnnxExporterError("this node is unknown")

    monkeypatch.setattr("torch.onnx.export", fail)
    with pytest.raises(OutputError, match="cannot export vil_tiny to ONNX: this node is unknown"):
        release(options)
    assert sorted(tmp_path.iterdir()) == before


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
    side = sizes.get("img_size", 16)
    assert pixels.shape == (1, 3, side, side)


@pytest.mark.parametrize("ema", [False, True])
def test_card_has_the_metrics_of_the_log(checkpoint, ema, tmp_path) -> None:
    folder = tmp_path / "small"
    options = {"ema": ema, "license": "cc-by-4.0"}
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(folder), **options))
    card = (folder / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)
    assert "On its split validation (12 images, scored after each of 1 epoch):" in text
    assert f"vil_tiny, {count_parameters(vil.load(checkpoint)):,} parameters" in text
    described = yaml.safe_load(front)
    assert described["license"] == "cc-by-4.0"
    assert described["library_name"] == "timm"
    assert described["pipeline_tag"] == "image-classification"
    assert "vision-longhorn" in described["tags"]
    config = json.loads((folder / "config.json").read_text())
    assert config["pretrained_cfg"]["license"] == "cc-by-4.0"
    (row,) = rows(checkpoint.parent)
    top1, loss = (float(row[key]) for key in (("ema_top1", "ema_loss") if ema else ("top1", "val_loss")))
    low, high = interval(top1, 12)
    assert f"| {top1:.2f} | {low:.1f} to {high:.1f} | {loss:.4f} |" in text
    assert "top-5" not in text  # of four classes
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["model"]["embed_dim"] == 16
    assert recipe["schedule"]["epochs"] == 1


def test_no_path_of_the_author_is_released(checkpoint, tmp_path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    config, secret = content["config"], "/home/alice/secret"
    config["data"] |= {"path": f"{secret}/images", "train_split": f"{secret}/a"}
    for number, (pretrained, said) in enumerate(
        (
            (f"{secret}/weights.pth", "weights.pth"),
            (f"local-dir:{secret}/vil_tiny_in1k", "vil\\_tiny\\_in1k"),
            ("hf-hub:me/vil", "hf-hub:me/vil"),
        )
    ):
        config["model"]["pretrained"] = pretrained
        torch.save(content, tmp_path / "own.pt")
        folder = tmp_path / f"small-{number}"
        release(ReleaseConfig(checkpoint=str(tmp_path / "own.pt"), folder=str(folder)))
        for path in folder.iterdir():
            for word in (b"alice", b"secret", str(tmp_path).encode()):
                assert word not in path.read_bytes(), path
        assert f"fine-tuned from {said}." in (folder / "README.md").read_text(encoding="utf-8")
