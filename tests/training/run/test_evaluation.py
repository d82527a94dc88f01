"""eval.py: every kind of source, its options, and a result that is not lost where it cannot be written."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from rich.console import Console

import vil
from vil.training.config import TrainConfig
from vil.training.data.shard_writer import MakeOptions, make_shards
from vil.training.errors import OutputError
from vil.training.run.evaluation import EvalConfig, load_subject
from vil.training.run.release import ReleaseConfig, release

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkpoint(config: TrainConfig, train: Callable[..., int], tmp_path: Path) -> Path:
    """The last checkpoint of a short run."""
    arguments = ("--schedule.epochs", "1", "--data.crop-pct", "0.8")
    assert train(config, "--run.output", str(tmp_path / "run"), *arguments) == 0
    return tmp_path / "run" / "last.pt"


@pytest.fixture
def released(checkpoint: Path, tmp_path: Path) -> Path:
    release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(tmp_path / "small")))
    return tmp_path / "small"


def test_all_sources_of_the_same_weights_score_the_same(
    checkpoint: Path,
    released: Path,
    image_folder: Path,
    evaluate: Callable[..., int],
    tmp_path: Path,
) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((released / "model.safetensors").read_bytes())
    row = saved["run"]["history"][-1]
    for number, source in enumerate(
        (checkpoint, released, f"local-dir:{released}", released / "model.safetensors")
    ):
        path = tmp_path / f"{number}.json"
        assert evaluate(str(source), "--data.path", str(image_folder), "--json", str(path)) == 0
        result = json.loads(path.read_text())
        assert (result["top1"], result["top5"]) == (row["top1"], row["top5"])
        assert result["loss"] == pytest.approx(row["val_loss"], rel=1e-6)
        assert (result["crop_pct"], result["img_size"], result["num_images"]) == (0.8, 16, 12)
        assert "25 tensors taken" in result["weights"]
        assert result["checkpoint"] == str(source)


def test_weights_of_another_program_are_scored(
    checkpoint: Path,
    image_folder: Path,
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The head tells the number of classes, and ImageNet's preprocessing is taken."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4, img_size=32)
    path = tmp_path / "other.pth"
    torch.save({"model": model.state_dict()}, path)
    data = ("--data.path", str(image_folder))
    assert evaluate(str(path), *data) == 2
    assert "--model is missing: " in capsys.readouterr().err
    assert evaluate(str(path), "--model", "test_vit", "--img-size", "32", *data) == 0
    result = json.loads((tmp_path / "other-eval.json").read_text())
    assert (result["img_size"], result["num_images"], result["model"]) == (32, 12, "test_vit")
    assert result["epoch"] is None


def test_missing_file_is_no_model_by_that_name(
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """timm takes vil_tiny.pt for vil_tiny with a tag, whose weights would be random ones."""
    monkeypatch.chdir(tmp_path)
    for name in ("vil_tiny.pt", "vil_tiny.safetensors", "vil_tiny/best.pt"):
        assert evaluate(name) == 2
        assert f"error: {name} is no file, no folder" in capsys.readouterr().err


def test_folder_named_like_a_model_goes_before_the_name(
    released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released.rename(released.parent / "vil_tiny")
    monkeypatch.chdir(released.parent)
    subject = load_subject(EvalConfig(checkpoint="vil_tiny"))
    assert subject.weights == "from vil_tiny: 25 tensors taken"


def test_size_and_crop_of_the_command_line(
    checkpoint: Path, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(str(checkpoint), "--img-size", "24", "--crop-pct", "1") == 0
    printed = capsys.readouterr().out
    assert "vil_tiny at 24 px" in printed
    assert "resampled pos_embed (1, 5, 16) -> (1, 10, 16)" in printed
    result = json.loads(checkpoint.with_name("last-eval.json").read_text())
    assert (result["img_size"], result["crop_pct"]) == (24, 1.0)


def test_options_out_of_range_are_refused(
    checkpoint: Path, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for option, message in (
        *(
            (f"--crop-pct={crop}", "above 0 and at most 2 or None, got")
            for crop in (0, -1, 2.5, "nan")
        ),
        (
            "--data.validation-batch-size=0",
            "validation_batch_size must be a whole number of at least 1",
        ),
        ("--img-size=0", "img_size"),
        ("--img-size=-16", "img_size"),
    ):
        assert evaluate(str(checkpoint), option) == 2, option
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_other_classes_are_refused(
    checkpoint: Path,
    released: Path,
    image_folder: Path,
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    (image_folder / "val" / "birch").rename(image_folder / "val" / "zelkova")
    for source in (checkpoint, released):
        assert evaluate(str(source), "--data.path", str(image_folder)) == 3
        error = capsys.readouterr().err
        assert "class 1 is cedar in the data and birch in the model" in error
        assert error.count("\n") == 1
    (image_folder / "val" / "ash").rename(image_folder / "val" / "maple")
    for name in ("cedar", "dogwood"):
        (image_folder / "val" / name).rename(image_folder / "val" / f"other {name}")
    assert evaluate(str(checkpoint), "--data.path", str(image_folder)) == 0
    told = capsys.readouterr().out
    assert told.count("warning: ") == 1
    assert (
        "no class of the data has a name of the model's, as class 0, maple in the data and " in told
    )


@pytest.mark.parametrize("kind", ["wds", "digits"])
def test_other_classes_of_any_data_are_told(
    kind: str,
    checkpoint: Path,
    image_folder: Path,
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Shards that make_shards.py wrote name their classes; digits have names, too."""
    data = ("--data.dataset", "digits")
    content = torch.load(checkpoint, weights_only=True)
    if kind == "digits":  # as of a run on ten classes
        content["pretrained_cfg"]["label_names"] = [f"{digit}!" for digit in range(9)] + ["zero"]
        for key in ("state_dict", "state_dict_ema"):
            for name in ("head.weight", "head.bias"):
                values = content[key][name]
                content[key][name] = values.repeat(3, *[1] * (values.ndim - 1))[:10]
        content["model_args"]["num_classes"] = content["config"]["model"]["num_classes"] = 10
    else:
        content["pretrained_cfg"]["label_names"] = ["oak", "elm", "yew", "fir"]
        options = MakeOptions(images=str(image_folder), shards=str(tmp_path / "shards"))
        make_shards(options, Console(quiet=True))
        data = ("--data.dataset", "wds", "--data.path", str(tmp_path / "shards"))
    torch.save(content, checkpoint)
    capsys.readouterr()
    assert evaluate(str(checkpoint), *data) == 0
    assert "warning: no class of the data has a name of the model's" in capsys.readouterr().out
    content["pretrained_cfg"]["label_names"][0] = "1" if kind == "digits" else "dogwood"
    torch.save(content, checkpoint)
    assert evaluate(str(checkpoint), *data) == 3
    assert re.search("class 0 is (0|ash) in the data and (1|dogwood) in", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--data.path", "other"), "path"),
        (("--data.val-split", "train"), "split (validation -> train)"),
        (("--img-size", "24"), "img_size (16 -> 24)"),
        (("--crop-pct", "1"), "crop_pct (0.8 -> 1.0)"),
        (("--amp", "True"), "amp (False -> True)"),
    ],
)
def test_evaluation_of_something_else_is_not_overwritten(
    options: tuple[str, ...],
    told: str,
    checkpoint: Path,
    image_folder: Path,
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(image_folder.parent)
    shutil.copytree(image_folder, "other")
    assert evaluate(str(checkpoint), "--per-class") == 0
    written = checkpoint.with_name("last-eval.json")
    before = written.read_text()
    capsys.readouterr()
    assert evaluate(str(checkpoint), *options, "--per-class") == 5
    said = capsys.readouterr()
    assert f"{written} is an evaluation with other {told}" in said.err
    assert "choose another --json" in said.err
    assert "top-1" not in said.out  # not scored
    assert written.read_text() == before


def test_evaluation_that_is_repeated_is_written_anew(
    checkpoint: Path,
    image_folder: Path,
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = checkpoint.with_name("last-eval.json")
    monkeypatch.chdir(image_folder.parent)
    assert evaluate(str(checkpoint)) == 0
    written.write_text(written.read_text().replace('"num_images": 12', '"num_images": 1'))
    again = ("--data.path", image_folder.name, "--per-class", "--data.validation-batch-size", "1")
    assert evaluate(str(checkpoint), *again) == 0
    assert json.loads(written.read_text())["num_images"] == 12
    assert evaluate(str(checkpoint)) == 5
    assert "per_class, which this one does not tell" in capsys.readouterr().err
    assert evaluate(str(checkpoint), "--ema") == 0
    assert json.loads(checkpoint.with_name("last-ema-eval.json").read_text())["ema"]


def test_weights_that_are_not_finite_are_refused(
    checkpoint: Path, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"]["head.bias"][0] = torch.nan
    content["state_dict"]["norm.weight"][1] = torch.inf
    torch.save(content, checkpoint)
    capsys.readouterr()
    assert evaluate(str(checkpoint)) == 5
    told = capsys.readouterr().err
    assert told == f"error: {checkpoint}: norm.weight is not finite, nor are 1 other tensors\n"
    assert not checkpoint.with_name("last-eval.json").exists()
    assert evaluate(str(checkpoint), "--ema") == 0
    with pytest.raises(ValueError, match=r"norm\.weight is not finite"):
        vil.load(checkpoint)
    with pytest.raises(OutputError, match=r"norm\.weight is not finite"):
        release(ReleaseConfig(checkpoint=str(checkpoint), folder=str(checkpoint.parent / "new")))
    assert not (checkpoint.parent / "new").exists()


def test_score_that_is_not_finite_is_an_error(
    checkpoint: Path, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of weights that are finite and too large."""
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"]["head.weight"].fill_(3e38)
    torch.save(content, checkpoint)
    capsys.readouterr()
    assert evaluate(str(checkpoint)) == 4
    told = capsys.readouterr()
    assert "top-1" not in told.out
    assert re.fullmatch(
        r"error: the validation loss is (nan|inf) with the weights of .*last\.pt\n", told.err
    )
    assert not checkpoint.with_name("last-eval.json").exists()


def test_other_number_of_classes_is_refused(
    checkpoint: Path,
    image_folder: Path,
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    (image_folder / "val" / "new").mkdir()
    first = next((image_folder / "val" / "ash").iterdir())
    first.rename(image_folder / "val" / "new" / first.name)
    assert evaluate(str(checkpoint), "--data.path", str(image_folder)) == 3
    error = capsys.readouterr().err
    assert "5 classes" in error
    assert error.count("\n") == 1


def test_label_names_of_another_number_do_not_break_the_comparison(
    checkpoint: Path, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["pretrained_cfg"]["label_names"] = ["ash", "birch", "cedar"]
    torch.save(content, checkpoint)
    capsys.readouterr()
    assert evaluate(str(checkpoint)) == 3
    assert "class 3 is dogwood in the data and missing in the model" in capsys.readouterr().err


@pytest.mark.parametrize("why", ["refused", "no folder"])
def test_result_is_printed_before_it_is_written(
    why: str,
    checkpoint: Path,
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a folder that can only be read."""
    capsys.readouterr()
    if why == "refused":

        def refuse(path: Path, text: str) -> None:
            raise OutputError(f"cannot write {path}: Read-only file system")

        monkeypatch.setattr("vil.training.run.evaluation.write_text", refuse)
        assert evaluate(str(checkpoint)) == 5
    else:
        assert evaluate(str(checkpoint), "--json", "nowhere/result.json") == 5
    told = capsys.readouterr()
    assert "on 12 images" in told.out
    assert "written" not in told.out
    assert "cannot write" in told.err
    assert told.err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_result_of_a_checkpoint_in_a_read_only_folder_is_printed(
    checkpoint: Path, evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.parent.chmod(0o500)
    try:
        assert evaluate(str(checkpoint)) == 5
    finally:
        checkpoint.parent.chmod(0o700)
    assert "on 12 images" in capsys.readouterr().out


def test_classes_are_told_one_by_one(
    config: TrainConfig,
    train: Callable[..., int],
    evaluate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1")
    capsys.readouterr()
    assert evaluate(str(tmp_path / "run" / "last.pt"), "--per-class") == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "last-eval.json").read_text())
    rows = result["per_class"]
    assert list(rows) == ["ash", "birch", "cedar", "dogwood"]
    assert [row["num_images"] for row in rows.values()] == [3, 3, 3, 3]
    assert statistics.fmean(row["top1"] for row in rows.values()) == pytest.approx(result["top1"])
    told = [line.split()[-1] for line in printed.splitlines() if line.startswith("class ")]
    assert told == sorted(rows, key=lambda name: rows[name]["top1"])


ODD_NAMES = ("\x1b[31mred", "two\nlines", "a\rb", "\u202eright to left")


def test_names_that_are_printed_are_one_line_without_commands(
    config: TrainConfig,
    train: Callable[..., int],
    evaluate: Callable[..., int],
    image_folder: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Of classes, one by one and where they differ from the model's, and of tensors."""
    for old, new in zip(("ash", "birch", "cedar", "dogwood"), ODD_NAMES, strict=True):
        for split in ("train", "val"):
            (image_folder / split / old).rename(image_folder / split / new)
    assert train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1") == 0
    weights = str(tmp_path / "run" / "last.pt")
    assert evaluate(weights, "--per-class") == 0
    (image_folder / "val" / ODD_NAMES[1]).rename(image_folder / "val" / "birch")
    evaluate(weights, "--json", str(tmp_path / "other.json"))
    content = torch.load(weights, weights_only=True)
    values = content["state_dict"]
    values["\x1b[31m\nred"] = values.pop("norm.weight")
    torch.save(content, tmp_path / "renamed.pt")
    assert evaluate(str(tmp_path / "renamed.pt")) != 0
    printed = "".join(capsys.readouterr())
    assert "two\\nlines" in printed
    assert not [c for c in printed if c != "\n" and not c.isprintable()]


@pytest.mark.slow
def test_two_processes_score_what_one_does(
    config: TrainConfig, train: Callable[..., int], tmp_path: Path
) -> None:
    train(config, "--run.output", str(tmp_path / "run"), "--schedule.epochs", "1")
    results = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        path = tmp_path / f"{len(launcher)}.json"
        command = [sys.executable, *launcher, str(ROOT / "eval.py")]
        options = [str(tmp_path / "run" / "last.pt"), "--json", str(path), "--per-class"]
        options += ["--device", "cpu", "--data.validation-batch-size", "1"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        assert done.stdout.count("top-1 ") == 1
        results.append(json.loads(path.read_text()))
    one, two = results
    for key in ("top1", "top5", "num_images", "per_class"):
        assert one[key] == two[key]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-12)
