"""The examples run as scripts, on shapes and on folders like a user's."""

import csv
import importlib
import json
import math
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as v2

import vil

for _needed in ("segmentation_models_pytorch", "torchmetrics", "pycocotools", "matplotlib", "tqdm"):
    pytest.importorskip(_needed)

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TINY = ("--model-kwargs", "embed_dim=32", "depth=1", "--img-size", "32", "--batch-size", "4")
METRICS = {"segment": ["miou"], "detect": ["ap", "ap50"]}
Run = Callable[..., None]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let files of examples/ import each other, as Python does for the folder of a script."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in {path.stem for path in EXAMPLES.glob("*.py")} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def run(modules: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a script in this process, where slow imports are done."""

    def run_it(name: str, output: Path, *arguments: str) -> None:
        script = str(EXAMPLES / f"{name}.py")
        common = ("--output", str(output), *(() if "--predict" in arguments else TINY))
        monkeypatch.setattr(sys, "argv", [script, *common, *arguments])
        runpy.run_path(script, run_name="__main__")

    return run_it


@pytest.fixture
def trained(modules: None, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return a list to which runs add the models that they trained."""
    training, models = importlib.import_module("training"), []
    fit = training.fit
    monkeypatch.setattr(training, "fit", lambda args, model, *rest: (fit(args, model, *rest), models.append(model)))
    return models


@pytest.fixture
def painted(modules: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return a list to which runs add the arguments of the pictures that they paint for --predict."""
    pictures, calls = importlib.import_module("pictures"), []
    for name in ("paint_mask", "paint_boxes"):
        paint = getattr(pictures, name)
        monkeypatch.setattr(pictures, name, lambda *args, paint=paint: (paint(*args), calls.append(args)))
    return calls


def check(name: str, output: Path, epochs: int) -> list[dict]:
    """Check the files that an example wrote; return its log."""
    assert {path.name for path in output.iterdir()} == {"log.csv", "model.json", "picture.png", "weights.pt"}
    with (output / "log.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert [row["epoch"] for row in rows] == list(range(1, epochs + 1))
    assert list(rows[0]) == ["epoch", "step", "loss", *METRICS[name], "seconds", "cpu_seconds"]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(0 <= row[key] <= 1 for row in rows for key in METRICS[name])
    with Image.open(output / "picture.png") as picture:
        assert np.asarray(picture).std() > 1
    weights = torch.load(output / "weights.pt", weights_only=True)
    assert all(value.isfinite().all() for value in weights.values())
    return rows


def photograph(path: Path) -> Tensor:
    """Save a photograph that a camera took sideways; return its pixels upright, (3, 45, 70), as they are read."""
    pixels = np.random.default_rng(1).integers(0, 256, (9, 14, 3), np.uint8)
    upright, exif = Image.fromarray(pixels).resize((70, 45)), Image.Exif()
    exif[274] = 6  # a quarter turn clockwise makes it upright
    path.parent.mkdir(parents=True)
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    with Image.open(path) as file:
        assert file.size == (45, 70)
        return v2.pil_to_tensor(ImageOps.exif_transpose(file))


def check_prediction(run: Run, name: str, output: Path, model: nn.Module, painted: list[tuple]) -> list[str]:
    """Check that --predict does the same as the trained model, for a photograph; return its class names."""
    photos = output.parent / "photos"
    photo = photograph(photos / "holiday/beach.jpg")
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff no more")
    if name == "detect":  # make it sure of something after these few steps, and save it again
        nn.init.constant_(model.head.classification_head.cls_logits.bias, 2.0)
        torch.save(model.state_dict(), output / "weights.pt")
    with pytest.raises(OSError, match=r"1 of 2 images have no prediction: cannot read .*broken\.jpg: "):
        run(name, output, "--predict", str(photos))
    with Image.open(output / "predictions/holiday/beach.png") as picture:
        assert picture.size == (70, 45)
        assert not np.array_equal(np.asarray(picture), photo.permute(1, 2, 0))
    ((_, shown, found, classes),) = painted
    assert torch.equal(shown, photo)
    images = v2.to_dtype(v2.resize(photo, [32, 32]), torch.float32, scale=True)
    with torch.inference_mode():
        if name == "segment":
            logits = F.interpolate(model.eval()(images[None]), (45, 70), mode="bilinear")
            assert torch.equal(found, logits[0].argmax(0))
        else:
            (expected,) = model.eval()([images])
            sure = expected["scores"] >= 0.5
            assert sure.any()
            boxes = expected["boxes"] * torch.tensor([70 / 32, 45 / 32] * 2)
            assert torch.equal(found["boxes"], boxes[sure])
            assert all(torch.equal(found[key], expected[key][sure]) for key in ("labels", "scores"))
    return classes


@pytest.mark.ci
@pytest.mark.parametrize("name", METRICS)
def test_an_example_learns_shapes_and_predicts(
    run: Run,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    trained: list[nn.Module],
    painted: list[tuple],
) -> None:
    output = tmp_path / "output"
    run(name, output, "--images", "40", "--epochs", "3")
    rows = check(name, output, epochs=3)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["step"] == 30
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("vil_tiny_pyramid: ")
    assert [line.startswith("epoch ") for line in printed[1:]] == [True] * 3
    classes = check_prediction(run, name, output, *trained, painted)
    assert classes == ["background", "circle", "triangle", "cross", "ring"]
    (said,) = capsys.readouterr().out.splitlines()
    source, picture = tmp_path / "photos/holiday/beach.jpg", output / "predictions/holiday/beach.png"
    assert said.startswith(f"{source} -> {picture}: ")
    assert any(f"{one} " in said for one in classes)


@pytest.mark.ci
@pytest.mark.parametrize("name", METRICS)
def test_an_example_takes_another_backbone_and_its_weights(run: Run, name: str, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pth"
    model = timm.create_model("test_resnet", num_classes=3)
    torch.save(model.state_dict(), weights)
    output = tmp_path / "output"
    arguments = ("--images", "4", "--epochs", "1", "--backbone", "test_resnet", "--lr", "1e-12")
    run(name, output, *arguments, "--weights", str(weights), "--model-kwargs")
    check(name, output, epochs=1)
    saved = torch.load(output / "weights.pt", weights_only=True)
    (trained,) = (value for key, value in saved.items() if key.endswith("layer1.0.conv1.weight"))
    (before,) = (v for k, v in model.state_dict().items() if k.endswith("layer1.0.conv1.weight"))
    assert torch.allclose(trained, before, atol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("way", ["simmim", "mae"])
def test_training_without_labels_makes_better_tokens(
    run: Run, way: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sizes = {"embed_dim": 64, "depth": 2, "patch_size": 8}
    words = [f"{key}={value}" for key, value in sizes.items()]
    arguments = ("--way", way, "--images", "200", "--epochs", "2", "--img-size", "48")
    run("masked", tmp_path, *arguments, "--batch-size", "8", "--model-kwargs", *words)
    printed = capsys.readouterr().out.splitlines()
    untrained, epochs = float(printed[0].removeprefix("untrained  miou ")), printed[2:]
    miou = [float(line.split("miou ")[1].split()[0]) for line in epochs]
    assert len(miou) == 2
    assert miou[-1] > 1.2 * untrained
    assert {path.name for path in tmp_path.iterdir()} == {"backbone.pt", "log.csv", "weights.pt"}
    trained = torch.load(tmp_path / "weights.pt", weights_only=True)
    model = vil.load(tmp_path / "backbone.pt", "vil_tiny", num_classes=3, img_size=48, **sizes)
    for key, value in model.state_dict().items():
        assert key.startswith("head.") or torch.equal(value, trained[f"backbone.{key}"])


def test_training_without_labels_says_what_does_not_fit(run: Run, tmp_path: Path) -> None:
    other = ("--backbone", "test_vit", "--model-kwargs")
    for words in (other, ("--model-kwargs", "patch_stride=8")):
        with pytest.raises(ValueError, match="--backbone must be a model of this package with"):
            run("masked", tmp_path, *words)
    with pytest.raises(ValueError, match=r"--hide must hide 1 to 3 patches, got 0\.1"):
        run("masked", tmp_path, "--hide", "0.1")


def picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    """Return a folder of images and masks of three classes, in two sizes."""
    rng, folder = np.random.default_rng(0), tmp_path / "masks_of_mine"
    for split in ("train", "val"):
        for number, size in enumerate([(40, 50), (64, 48)] * 2):
            mask = rng.integers(0, 3, size, np.uint8)
            mask[:5] = 255
            pixels = rng.integers(0, 256, (*size, 3), np.uint8)
            picture(folder / f"images/{split}/{number}.jpg", pixels)
            picture(folder / f"masks/{split}/{number}.png", mask)
    (folder / "classes.txt").write_text("nothing\nsomething\nanother\n")
    return folder


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Return a folder of images and boxes of two categories with ids that are not consecutive."""
    rng, folder = np.random.default_rng(0), tmp_path / "coco_of_mine"
    (folder / "annotations").mkdir(parents=True)
    size, box = {"width": 50, "height": 40}, {"bbox": [5, 6, 20, 30.5], "iscrowd": 0, "area": 610}
    content = {
        "images": [{"id": 10 + n, "file_name": f"{n}.jpg", **size} for n in range(4)],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
        "annotations": [  # the last image has none
            {"id": n, "image_id": 10 + n, "category_id": (3, 7, 7)[n], **box} for n in range(3)
        ],
    }
    for split in ("train", "val"):
        for number in range(4):
            pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
            picture(folder / f"{split}2017/{number}.jpg", pixels)
        (folder / f"annotations/instances_{split}2017.json").write_text(json.dumps(content))
    return folder


@pytest.mark.ci
@pytest.mark.parametrize(("name", "data"), [("segment", "masks"), ("detect", "coco")])
def test_an_example_learns_a_folder_and_predicts(
    run: Run,
    name: str,
    data: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    trained: list[nn.Module],
    painted: list[tuple],
) -> None:
    folder, output = request.getfixturevalue(data), tmp_path / "output"
    run(name, output, "--data", str(folder), "--epochs", "2")
    assert check(name, output, epochs=2)[-1]["step"] == 2
    classes = check_prediction(run, name, output, *trained, painted)
    assert classes == {"segment": ["nothing", "something", "another"], "detect": ["background", "dog", "cat"]}[name]


DESCRIPTION = {
    "example": "segment",
    "backbone": "vil_tiny_pyramid",
    "model_kwargs": {"embed_dim": 32, "depth": 1},
    "img_size": 32,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "classes": ["nothing", "something"],
}


def test_prediction_says_what_does_not_fit(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    described, weights = tmp_path / "model.json", tmp_path / "weights.pt"

    def predict(name: str = "segment", *words: str) -> None:
        run(name, tmp_path, "--predict", str(tmp_path / "photo.png"), *words)

    with pytest.raises(FileNotFoundError, match=r"model\.json is missing; train with --output .* first"):
        predict()
    described.write_text(json.dumps(DESCRIPTION))
    with pytest.raises(FileNotFoundError, match=r"weights\.pt is missing; train with --output .* first"):
        predict()
    torch.save(Executed(), weights)
    with pytest.raises(FileNotFoundError, match=r"photo\.png does not exist; expected an image or a folder"):
        predict()
    picture(tmp_path / "photo.png", np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(ValueError, match="files that could execute code are not read"):
        predict()
    torch.save({"other": torch.zeros(1)}, weights)
    with pytest.raises(ValueError, match=r"weights\.pt does not fit the model of .*model\.json: "):
        predict()
    with pytest.raises(ValueError, match=r"must be of example detect, got segment; use that script"):
        predict("detect")
    for name, words, said in (
        ("segment", ("--backbone", "resnet18", "--lr", "1"), "leave out --backbone, --lr"),
        ("detect", ("--threshold", "2"), "--threshold must be 0 to 1, got 2"),
    ):
        described.write_text(json.dumps(DESCRIPTION | {"example": name}))
        with pytest.raises(SystemExit):
            predict(name, *words)
        assert said in capsys.readouterr().err
    described.write_text('{"example": ')
    with pytest.raises(ValueError, match=r"model\.json is not JSON: "):
        predict()
    described.write_text('{"example": "segment", "other": 1}')
    with pytest.raises(ValueError, match=r"must be an object with example, backbone, .*, got example, other$"):
        predict()


class Executed:
    """An object that runs a function when a file with it is read without care."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("the file was executed",)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("img_size", True, "a whole number above 0, got True"),
        ("std", [1, 1, 0], "three numbers above 0, got"),
        ("mean", [1, 1], "three numbers, got"),
        ("classes", [], "a list of names, got"),
        ("backbone", 5, "a string, got 5"),
        ("model_kwargs", {"checkpoint_path": "x"}, "an object without arguments that fetch weights, got"),
    ],
)
def test_a_description_with_a_wrong_value_is_refused(
    run: Run, tmp_path: Path, key: str, value: object, allowed: str
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(DESCRIPTION | {key: value}))
    (tmp_path / "weights.pt").touch()
    with pytest.raises(ValueError, match=rf"{key} of .*model\.json must be {allowed}"):
        run("segment", tmp_path, "--predict", "photo.png")


def test_photographs_are_found_in_folders_and_have_their_own_result(folders: ModuleType, tmp_path: Path) -> None:
    for name in ("one/a.jpg", "one/below/a.JPG", "b.png", "one/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = folders.find_photos([tmp_path / "one", tmp_path / "b.png", tmp_path / "b.png"])
    assert {str(k): str(v.relative_to(tmp_path)) for k, v in found.items()} == {
        "a.png": "one/a.jpg",
        "below/a.png": "one/below/a.JPG",
        "b.png": "b.png",
    }
    with pytest.raises(ValueError, match=r"one/a\.jpg and .*below/a\.JPG would both be written to a\.png"):
        folders.find_photos([tmp_path / "one", tmp_path / "one/below/a.JPG"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no images \(\.bmp, "):
        folders.find_photos([tmp_path / "empty"])


@pytest.mark.ci
@pytest.mark.parametrize("name", METRICS)
def test_prediction_does_not_need_the_weights_of_the_backbone(run: Run, name: str, tmp_path: Path) -> None:
    weights, sizes = tmp_path / "release", {"img_size": 32, "embed_dim": 32, "depth": 1}
    model = timm.create_model("vil_tiny", num_classes=5, **sizes)
    save_for_hf(model, weights, model_args=sizes, safe_serialization=True)
    # Ten steps, after which a warm-up of a tenth would be over at the first one.
    run(name, tmp_path, "--images", "40", "--epochs", "1", "--model-kwargs", "--weights", str(weights))
    weights.rename(tmp_path / "gone")
    photograph(tmp_path / "photos/photo.png")
    run(name, tmp_path, "--predict", str(tmp_path / "photos/photo.png"))
    assert (tmp_path / "predictions/photo.png").is_file()


def test_the_description_has_the_arguments_of_the_weights(modules: None, tmp_path: Path) -> None:
    training, sizes = importlib.import_module("training"), {"img_size": 32, "embed_dim": 32, "depth": 1}
    model = timm.create_model("vil_tiny", num_classes=5, **sizes)
    model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "num_classes": 5}
    save_for_hf(model, tmp_path / "release", model_args=sizes, safe_serialization=True)
    parser = training.options("", "segment", 1)
    args = training.parse(parser, ["--weights", str(tmp_path / "release"), "--model-kwargs", "drop_path_rate=0.1"])
    assert {"embed_dim": 32, "depth": 1, "drop_path_rate": 0.1}.items() <= args.model_kwargs.items()
    assert not args.model_kwargs.keys() & {"img_size", "num_classes"}
    assert tuple(args.mean) == (0.1, 0.2, 0.3)
    assert training.parse(parser, []).model_kwargs == training.SMALL
    with pytest.raises(ValueError, match="--model-kwargs must have values that JSON can save"):
        training.parse(parser, ["--model-kwargs", "x={1}"])


@pytest.fixture
def folders(modules: None) -> ModuleType:
    return importlib.import_module("folders")


def test_a_path_may_begin_with_home(modules: None) -> None:
    parser = importlib.import_module("training").options("", "output", 1)
    args = parser.parse_args(["--data=~/data", "--output=~/output"])
    assert (args.data, args.output) == (Path.home() / "data", Path.home() / "output")


def test_boxes_and_labels_are_read_as_coco_means_them(folders: ModuleType, coco: Path) -> None:
    data = folders.CocoFolder(coco, "train")
    assert data.classes == ["background", "dog", "cat"]
    image, found = data[1]
    assert image.shape == (3, 40, 50)
    assert found["boxes"].tolist() == [[5, 6, 25, 36.5]]
    assert found["labels"].tolist() == [2]
    assert data[3][1]["boxes"].shape == (0, 4)
    path = coco / "annotations/instances_train2017.json"
    content = json.loads(path.read_text())
    for key in ("iscrowd", "area"):
        del content["annotations"][1][key]
    path.write_text(json.dumps(content))
    again = folders.CocoFolder(coco, "train")
    assert torch.equal(again[1][1]["boxes"], found["boxes"])
    assert again.coco.anns[1]["area"] == 610
    content["annotations"][1]["category_id"] = 5
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{path}: annotation 1 has category 5, which is not lis"):
        folders.CocoFolder(coco, "train")
    data.coco.imgs[10]["height"] += 1
    with pytest.raises(ValueError, match=r"0\.jpg has 40 x 50 pixels, but .* for 41 x 50"):
        data[0]


def test_training_alone_is_shuffled_and_mirrored(folders: ModuleType, tmp_path: Path) -> None:
    training = importlib.import_module("training")
    args = training.options("", str(tmp_path), 1).parse_args(["--images", "8"])
    torch.manual_seed(0)
    train, val = training.batches(args, folders.CocoFolder, list)
    assert torch.equal(val.dataset[0][0], val.dataset[0][0])
    assert not torch.equal(val.dataset[0][0], train.dataset[0][0].flip(2))  # other shapes
    seen = [[image for image, _ in next(iter(loader))] for loader in (train, val) for _ in range(9)]
    starts = [{round(float(images[0].sum())) for images in part} for part in (seen[:9], seen[9:])]
    assert len(starts[0]) > len(starts[1]) == 1
    ways = [{float(data.dataset[0][0][:, :, :48].sum()) for _ in range(9)} for data in (train, val)]
    assert [len(way) for way in ways] == [2, 1]


def test_the_loss_of_hidden_patches_is_theirs_alone(modules: None) -> None:
    masked = importlib.import_module("masked")
    backbone = timm.create_model("vil_tiny", num_classes=0, img_size=16, patch_size=8, depth=1)
    mean, std = (torch.tensor(backbone.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    images = mean.expand(3, 16, 16).clone()
    images[:, :8, :8] += std  # one of the four patches has values of 1, the others of 0
    for way in ("simmim", "mae"):
        torch.manual_seed(0)
        model = masked.Masked(backbone, way, hide=0.25)
        nn.init.zeros_(model.pixels.weight)
        nn.init.zeros_(model.pixels.bias)
        losses = {round(model(images[None]).item(), 4) for _ in range(20)}
        assert losses == {0, 1}


def test_ignored_pixels_count_in_neither_loss_nor_score(modules: None, tmp_path: Path) -> None:
    segment = importlib.import_module("segment")
    images, masks = torch.rand(2, 3, 8, 8), torch.randint(3, (2, 8, 8))
    masks[:, :4] = 255
    other, model = images.clone(), nn.Conv2d(3, 3, 1)
    other[:, :, :4] = 1 - other[:, :, :4]
    data = SimpleNamespace(classes=["a", "b", "c"])
    scores = []
    for x in (images, other):
        val = type("Val", (list,), {"dataset": data})([(x, masks)])
        scores.append((segment.loss_of(model, x, masks).item(), *segment.mean_iou(model, val).values()))
    assert scores[0] == pytest.approx(scores[1])


def test_the_segmenter_normalises_its_images(modules: None, tmp_path: Path) -> None:
    training, segment = (importlib.import_module(name) for name in ("training", "segment"))
    model, seen = segment.segmenter(training.parse(training.options("", str(tmp_path), 1), []), 5), []
    model[1].encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mean = torch.tensor(timm.get_pretrained_cfg_value("vil_tiny_pyramid", "mean"))
    assert model(mean[:, None, None].expand(2, 3, 64, 64)).shape == (2, 5, 64, 64)
    assert seen[0].abs().max() < 1e-5


def test_only_boxes_that_are_likely_are_drawn(modules: None, tmp_path: Path) -> None:
    draw = importlib.import_module("pictures").draw_boxes
    boxes = {"boxes": torch.tensor([[4.0, 4, 20, 20]]), "labels": torch.tensor([1])}
    for score in (0.4, 0.6):
        found = boxes | {"scores": torch.tensor([score])}
        draw(tmp_path / "a.png", [torch.zeros(3, 32, 32)], [boxes], [found], ["none", "cat"])
        with Image.open(tmp_path / "a.png") as picture:
            below = np.asarray(picture)[picture.height // 2 + 2 :]
        assert below.any() == (score > 0.5)


def test_validation_may_lack_categories_but_not_add_any(folders: ModuleType, coco: Path, tmp_path: Path) -> None:
    training = importlib.import_module("training")
    path = coco / "annotations/instances_val2017.json"
    content = json.loads(path.read_text())
    content |= {"categories": content["categories"][:1], "annotations": content["annotations"][1:]}
    path.write_text(json.dumps(content))
    args = training.options("", str(tmp_path), 1).parse_args(["--data", str(coco)])
    _, val = training.batches(args, folders.CocoFolder, list)
    assert val.dataset.classes == ["background", "dog", "cat"]
    assert val.dataset[1][1]["labels"].tolist() == [2]
    assert len({float(val.dataset[0][0][:, :, :48].sum()) for _ in range(9)}) == 1  # not mirrored
    content["categories"] += [{"id": 8, "name": "cow"}]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"must have only categories .* got also \[\(8, 'cow'\)\]"):
        training.batches(args, folders.CocoFolder, list)


def test_an_example_says_what_does_not_fit(run: Run, masks: Path, tmp_path: Path) -> None:
    data = ("--data", str(masks), "--epochs", "1")
    with pytest.raises(ValueError, match="--batch-size must be at most the 4 training images"):
        run("segment", tmp_path / "output", *data, "--batch-size", "5")
    picture(masks / "masks/val/2.png", np.full((40, 50), 3, np.uint8))
    with pytest.raises(ValueError, match=r"masks/val/2\.png must have classes .* 2 or 255, got \[3\]"):
        run("segment", tmp_path / "output", *data)
    picture(masks / "masks/val/2.png", np.zeros((41, 50), np.uint8))
    with pytest.raises(ValueError, match=r"images/val/2\.\w+ has 40 x 50 pixels, but .* 41 x 50"):
        run("segment", tmp_path / "output", *data)
    (masks / "masks/train/3.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"masks/train/3\.png is missing, the mask of"):
        run("segment", tmp_path / "output", *data)
