"""eval.py: every kind of source, its options, and results that are printed even if not saved."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vil
from vil.training.errors import OutputError
from vil.training.evaluation import describe, interval
from vil.training.release import ReleaseConfig, release

ROOT = Path(__file__).parents[2]


def test_all_sources_of_the_same_weights_score_the_same(checkpoint, released, image_folder, evaluate, tmp_path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    row = saved["run"]["history"][-1]
    for number, source in enumerate((checkpoint, released, f"local-dir:{released}", released / "model.safetensors")):
        path = tmp_path / f"{number}.json"
        assert evaluate(str(source), "--data.path", str(image_folder), "--json", str(path)) == 0
        result = json.loads(path.read_text())
        assert result["top1"] == row["top1"]
        assert "top5" not in result  # of four classes
        assert result["loss"] == pytest.approx(row["val_loss"], rel=1e-6)
        assert (result["crop_pct"], result["img_size"], result["num_images"]) == (0.8, 16, 12)
        assert "25 tensors taken" in result["weights"]
        assert result["checkpoint"] == str(source)


def test_size_and_crop_of_the_command_line(checkpoint, evaluate, capsys) -> None:
    assert evaluate(str(checkpoint), "--img-size", "24", "--crop-pct", "1") == 0
    printed = capsys.readouterr().out
    assert "vil_tiny at 24 px" in printed
    assert "resampled pos_embed (1, 5, 16) -> (1, 10, 16)" in printed
    result = json.loads(checkpoint.with_name("last-24px-crop_pct-1.0-eval.json").read_text())
    assert (result["img_size"], result["crop_pct"]) == (24, 1.0)


def test_images_that_are_not_square_are_scored_at_the_size_of_the_weights(
    released, image_folder, evaluate, tmp_path
) -> None:
    described = json.loads((released / "config.json").read_text())
    height = described["pretrained_cfg"]["input_size"][1]
    described["model_args"]["img_size"] = [height, height + 8]
    (released / "config.json").write_text(json.dumps(described))
    source = (str(released), "--data.path", str(image_folder), "--json", tmp_path / "a.json")
    for options, size in (((), [16, 24]), (("--img-size", "16"), 16)):
        assert evaluate(*source, *options) == 0
        assert json.loads((tmp_path / "a.json").read_text())["img_size"] == size


def test_other_classes_are_refused(checkpoint, released, image_folder, pack, evaluate, capsys, tmp_path) -> None:
    capsys.readouterr()
    (image_folder / "val" / "birch").rename(image_folder / "val" / "zelkova")
    for source in (checkpoint, released):
        assert evaluate(str(source), "--data.path", str(image_folder)) == 3
        assert capsys.readouterr().err == "error: class birch is in the model only (2 classes differ)\n"
    # Some of the classes, in folders and in shards with names: their numbers would be others.
    for split, name in (("train", "birch"), ("val", "zelkova")):
        shutil.rmtree(image_folder / split / name)
    shards = pack(image_folder, tmp_path / "some", 8)
    folder = ("--data.path", str(image_folder))
    named = ("--data.dataset", "wds", "--data.path", str(shards), "--data.val-split", "validation")
    for data in (folder, named):
        assert evaluate(str(released), *data, "--json", str(tmp_path / "result.json")) == 3
        assert "class birch is in the model only (1 classes differ)" in capsys.readouterr().err


def test_a_model_without_names_needs_data_with_as_many_classes(image_folder, evaluate, capsys, tmp_path) -> None:
    command = ("vil_tiny", "--img-size", "16", "--data.path", str(image_folder))
    assert evaluate(*command, "--json", str(tmp_path / "result.json")) == 3
    told = "the data has 4 classes and the model, whose class names are unknown, 1000"
    assert told in capsys.readouterr().err


def rename_classes(released: Path, names: list[str] | dict[str, str]) -> None:
    described = json.loads((released / "config.json").read_text())
    (released / "config.json").write_text(json.dumps(described | {"label_names": names}))


def test_names_by_number_are_in_the_order_of_the_numbers(released, image_folder, evaluate, tmp_path) -> None:
    result, losses = tmp_path / "result.json", []
    command = (str(released), "--data.path", str(image_folder), "--json", str(result))
    numbered = {"2": "cedar", "0": "ash", "3": "dogwood", "1": "birch"}
    for names in (["ash", "birch", "cedar", "dogwood"], numbered):
        rename_classes(released, names)
        assert evaluate(*command) == 0
        losses.append(json.loads(result.read_text())["loss"])
    assert losses[0] == losses[1]


def test_classes_of_one_name_are_told_apart(released, image_folder, shard_config, evaluate, capsys, tmp_path) -> None:
    """ImageNet has two cranes: a bird and a machine. These shards have no names of their own."""
    rename_classes(released, ["crane", "boat", "crane", "dog"])
    data = ("--data.dataset", "wds", "--data.path", shard_config.data.path)
    data += ("--data.val-split", shard_config.data.val_split, "--per-class")
    assert evaluate(str(released), *data, "--json", str(tmp_path / "result.json")) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert [*found["per_class"]] == ["crane (class 0)", "boat", "crane (class 2)", "dog"]
    shutil.rmtree(image_folder / "val" / "cedar")
    for old, new in (("ash", "crane"), ("birch", "boat"), ("dogwood", "dog")):
        (image_folder / "val" / old).rename(image_folder / "val" / new)
    assert evaluate(str(released), "--data.path", str(image_folder)) == 3
    assert "class 0 is crane in the model and boat in the data" in capsys.readouterr().err


def test_accents_of_class_names_may_have_another_form(released, image_folder, evaluate, capsys) -> None:
    rename_classes(released, ["ash", "bi\u0301rch", "cedar", "dogwood"])
    (image_folder / "val" / "birch").rename(image_folder / "val" / "b\u00edrch")
    assert evaluate(str(released), "--data.path", str(image_folder)) == 0
    assert "warning" not in capsys.readouterr().out


def test_an_evaluation_is_replaced_and_nothing_else(checkpoint, evaluate, capsys) -> None:
    for options in ((), ("--amp", "True"), ("--per-class",), ("--ema",), ("--img-size", "24")):
        assert evaluate(str(checkpoint), *options) == 0
    for share in ("0.9", "1"):  # a sweep keeps all of its values
        assert evaluate(str(checkpoint), "--crop-pct", share, "--data.background", "white") == 0
    names = {path.name.removeprefix("last-") for path in checkpoint.parent.glob("last-*")}
    kinds = {"", "amp-True-", "per-class-", "ema-", "24px-"}
    kinds |= {f"crop_pct-{share}-background-white-" for share in (0.9, 1.0)}
    assert names == {f"{kind}eval.json" for kind in kinds}
    read = {kind: json.loads(checkpoint.with_name(f"last-{kind}eval.json").read_text()) for kind in kinds}
    assert read["amp-True-"]["amp"] is True
    assert read["amp-True-"]["loss"] != read[""]["loss"]
    assert read["crop_pct-0.9-background-white-"]["crop_pct"] == 0.9
    written = checkpoint.with_name("last-eval.json")
    for content in ("[]", "{}", "mine"):
        written.write_text(content)
        capsys.readouterr()
        assert evaluate(str(checkpoint)) == 5
        said = capsys.readouterr()
        assert f"{written} exists and is not an evaluation; choose another --json" in said.err
        assert "top-1" not in said.out  # before the images are scored
        assert written.read_text() == content


def test_a_result_that_cannot_be_written_is_told_before_scoring(checkpoint, evaluate, capsys, tmp_path) -> None:
    for path in (tmp_path / "missing" / "result.json", tmp_path):
        options = ("--json", str(path), "--data.path", str(tmp_path / "not read"))
        capsys.readouterr()
        assert evaluate(str(checkpoint), *options) == 5
        told = f"--json must be a file in a folder that exists and can be written, got {path}"
        assert told in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(checkpoint, evaluate, capsys) -> None:
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


def test_other_data_has_its_own_result(checkpoint, image_folder, evaluate, capsys, tmp_path) -> None:
    """A folder of classes is scored as a whole, although the run has splits."""
    whole = shutil.copytree(image_folder / "val", tmp_path / "others")
    assert evaluate(str(checkpoint)) == evaluate(str(checkpoint), "--data.path", str(whole)) == 0
    own, others = (checkpoint.with_name(f"last-{name}eval.json") for name in ("", "others-"))
    own, others = json.loads(own.read_text()), json.loads(others.read_text())
    assert (others["path"], others["split"], others["num_images"]) == (str(whole), ".", 12)
    assert (own["path"], own["top1"]) == (str(image_folder), others["top1"])
    again = shutil.copytree(whole, tmp_path / "elsewhere" / "others")
    capsys.readouterr()
    assert evaluate(str(checkpoint), "--data.path", str(again)) == 5
    assert f"has the evaluation of other data (path {whole})" in capsys.readouterr().err


def test_a_fraction_of_images_of_others_has_no_warning(released, image_folder, evaluate, capsys, tmp_path) -> None:
    """The weights do not say that a fraction was held out."""
    data = ("--data.path", str(image_folder / "train"), "--data.val-fraction", "0.4")
    assert evaluate(str(released), *data, "--json", str(tmp_path / "result.json")) == 0
    assert "0.4 of the images" in (told := capsys.readouterr().out)
    assert "held out" not in told


def test_the_worst_classes_and_the_commonest_mistakes_come_first() -> None:
    result = {"model": "vil_tiny", "img_size": 16, "weights": "", "path": "photos", "split": "."}
    result |= {"top1": 50.0, "top1_interval": [40.0, 60.0], "loss": 1.0, "num_images": 60}
    result |= {"params": 1, "gmacs": 1.0, "images_per_s": 1.0, "device": "cpu", "versions": {}}
    result |= {
        "per_class": {
            name: {"top1": top1, "num_images": 20} for name, top1 in (("ash", 90.0), ("birch", 10.0), ("cedar", 50.0))
        },
        "confusion": {"ash": {"birch": 2}, "birch": {"ash": 15, "cedar": 3}},
        "wrong": [{"image": f"{number}.jpg", "predicted": "ash"} for number in range(25)],
    }
    lines = describe(result).splitlines()
    ordered = [line.split()[-1] for line in lines if line.startswith("class ")]
    assert ordered == ["birch", "cedar", "ash"]
    assert [line for line in lines if line.startswith("mistake ")] == [
        "mistake  15 x birch taken for ash",
        "mistake  3 x birch taken for cedar",
        "mistake  2 x ash taken for birch",
    ]
    assert lines[-2:] == ["wrong    19.jpg: ash", "wrong    and 5 more images, in the JSON file"]


def test_the_interval_is_wilsons() -> None:
    low, high = interval(90.0, 100)
    assert (round(low, 1), round(high, 1)) == (82.6, 94.5)
    assert interval(100.0, 12)[1] == pytest.approx(100)
    assert interval(0.0, 12)[0] == 0


ODD_NAMES = ("\x1b[31mred", "two\nlines", "a\rb", "\u202eright to left")


def test_names_that_are_printed_are_one_line_without_commands(
    config, train, evaluate, image_folder, capsys, tmp_path
) -> None:
    """Names of classes, per class and where they differ from the model's, and names of tensors."""
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


def test_precision_is_the_runs_unless_another_is_asked_for(config, train, evaluate, tmp_path) -> None:
    folder = tmp_path / "run"
    assert train(config, "--run.output", str(folder), "--schedule.epochs", "1", "--run.amp") == 0
    losses = []
    for options, name, amp in (((), "", True), (("--amp", "False"), "amp-False-", False)):
        assert evaluate(str(folder / "last.pt"), *options) == 0
        result = json.loads((folder / f"last-{name}eval.json").read_text())
        assert result["amp"] is amp
        losses.append(result["loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.ci
def test_two_processes_score_what_one_does(config, train, tmp_path) -> None:
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
    for key in ("top1", "top1_interval", "num_images", "per_class", "confusion", "wrong"):
        assert one[key] == two[key]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-12)
