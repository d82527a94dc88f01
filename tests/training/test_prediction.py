"""predict.py: the rows are what eval.py counts, whatever is in the folder, and the sheet can be looked at."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

import predict as predict_script
from vil.training.settings import TrainConfig


@pytest.fixture
def predict(program) -> Callable[..., int]:
    return partial(program, predict_script.main, "--device", "cpu")


@pytest.fixture
def config(config: TrainConfig, image_folder: Path) -> TrainConfig:
    """Return a run on photographs of which half are held sideways, and on drawings on transparent ground."""
    sideways = Image.Exif()
    sideways[274] = 6
    for number, path in enumerate(sorted(image_folder.glob("*/*/*.jpg"))):
        with Image.open(path) as file:
            image = file.convert("RGB")
        if number % 3 == 0:
            image.putalpha(Image.linear_gradient("L").resize(image.size))
            image.save(path.with_suffix(".png"))
            path.unlink()
        elif number % 3 == 1:
            image.save(path, exif=sideways)
    return config.changed("data", exif_rotation=True, background="white")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_what_eval_counts(checkpoint, released, image_folder, predict, evaluate, tmp_path, capsys) -> None:
    for source in (checkpoint, released):
        result, output = tmp_path / "result.json", tmp_path / "predictions.csv"
        data = ("--data.path", str(image_folder), "--per-class", "--json", str(result))
        assert evaluate(str(source), *data) == 0
        found = json.loads(result.read_text())
        assert predict(source, image_folder / "val", "--output", output, "--num-workers", 2) == 0
        rows = rows_of(output)
        assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
        assert len(rows) == found["num_images"] == 12
        for name, row in found["per_class"].items():
            own = [each for each in rows if Path(each["path"]).parent.name == name]
            hits = sum(each["class_1"] == name for each in own)
            assert (len(own), 100 * hits / len(own)) == (row["num_images"], row["top1"])
        wrong = {row["path"]: row["class_1"] for row in rows}
        wrong = {path: name for path, name in wrong.items() if name != Path(path).parent.name}
        assert {one["image"]: one["predicted"] for one in found["wrong"]} == wrong
        pairs = Counter((Path(path).parent.name, name) for path, name in wrong.items())
        told = found["confusion"]
        assert {(a, b): n for a, others in told.items() for b, n in others.items()} == pairs
        for row in rows:
            shares = [float(row[f"probability_{n}"]) for n in range(1, 5)]
            assert sorted(shares, reverse=True) == shares
            assert sum(shares) == pytest.approx(1, abs=1e-5)
            assert {row[f"class_{n}"] for n in range(1, 5)} == {"ash", "birch", "cedar", "dogwood"}
            assert row["error"] == ""
    assert "12 of 12 images read, with vil_tiny" in capsys.readouterr().out


def test_folders_and_files_of_every_kind(checkpoint, image_folder, predict, tmp_path, capsys) -> None:
    """Images that cannot be read have a row with the reason; other files are left out, with their number."""
    inner = tmp_path / "mine" / "2" / "deeper"
    inner.mkdir(parents=True)
    good = next(image_folder.glob("val/*/*.jpg")).read_bytes()
    (tmp_path / "mine" / "10.jpg").write_bytes(good)
    (inner / "wörk \udcff.jpg").write_bytes(good)
    (inner / "cut off.jpg").write_bytes(good[:300])
    for name in ("notes.txt", "1.heic", "2.HEIC", "Thumbs.db"):
        (inner / name).write_bytes(b"nothing")
    (inner / ".hidden.jpg").write_bytes(good)
    named = tmp_path / "photo"  # a file that is named may have any extension
    named.write_bytes(good)
    capsys.readouterr()
    assert predict(checkpoint, named, tmp_path / "mine", "--top", 2, "--img-size", 24) == 3
    said = capsys.readouterr()
    assert re.search(r"error: 1 of 4 images cannot be read: .*cut off\.jpg: .*[Tt]runc", said.err)
    first, *lines = said.out.splitlines()
    where = f"{named}, {tmp_path / 'mine'}"
    assert first.startswith(f"warning: 3 files left out of {where} (2 .heic, 1 .txt), because")
    assert first.endswith("; convert .heic files to JPEG first")
    assert [line.split(": ")[0].rpartition("/")[2] for line in lines[:4]] == [
        "photo",
        "10.jpg",
        "cut off.jpg",
        "wörk \\udcff.jpg",
    ]
    assert lines[0].count("%") == 2
    assert "truncated" in lines[2].lower()
    assert "3 of 4 images read" in lines[4]
    output = tmp_path / "one.csv"
    assert predict(checkpoint, inner / "cut off.jpg", "--output", output) == 3
    assert "1 of 1 image cannot be read" in capsys.readouterr().err
    [row] = rows_of(output)
    assert "truncated" in row["error"].lower()
    assert row["class_1"] == ""


def test_refusals(checkpoint, image_folder, predict, tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "1.heic").write_bytes(b"not read")
    for arguments, code, told in (
        ((checkpoint, tmp_path / "missing.jpg"), 3, "missing.jpg does not exist"),
        ((checkpoint, tmp_path / "empty"), 3, "there are no images in"),
        ((checkpoint, tmp_path / "phone"), 3, "1 file left out of "),
        ((tmp_path / "missing.pt", image_folder), 2, "is not a file, a folder"),
        (("vil_tiny", image_folder), 2, "vil_tiny has no weights"),
    ):
        assert predict(*arguments) == code, arguments
        assert told in capsys.readouterr().err


def test_only_its_own_files_are_replaced(checkpoint, image_folder, predict, tmp_path) -> None:
    output = tmp_path / "predictions.csv"
    command = (checkpoint, image_folder / "val", "--output", output)
    assert predict(*command, "--top", 1) == predict(*command) == predict(*command) == 0
    own = output.read_bytes()
    output.write_bytes(b"mine")
    assert predict(*command) == 5
    assert output.read_bytes() == b"mine"
    assert predict(*command, "--overwrite") == 0
    assert output.read_bytes() == own


def test_a_file_that_cannot_be_written_is_told_before_the_work(image_folder, predict, tmp_path, capsys) -> None:
    for path in (tmp_path / "missing" / "file", tmp_path, image_folder / "val/ash/0.jpg/file"):
        assert predict(tmp_path / "not read.pt", image_folder, "--output", path, "--overwrite") == 5
        told = f"--output must be a file in a folder that exists and can be written, got {path}"
        assert capsys.readouterr().err == f"error: {told}\n"


def test_an_interruption_keeps_the_rows(checkpoint, image_folder, tmp_path) -> None:
    """The third image is a pipe, which the program waits for."""
    images, output = sorted(image_folder.glob("val/*/*.jpg")), tmp_path / "a.csv"
    pipe = tmp_path / "p"
    os.mkfifo(pipe)
    command = [sys.executable, predict_script.__file__, checkpoint, *images[:2], pipe, images[2]]
    command += ["--output", output, "--num-workers", "0", "--batch-size", "1", "--device", "cpu"]
    program = subprocess.Popen(list(map(str, command)))
    writer = None
    while writer is None and program.poll() is None:
        try:
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the program has not opened it yet
            time.sleep(0.01)
    program.terminate()
    os.close(writer)  # else the program reads on if the signal came right before it began to
    assert program.wait() == 128 + signal.SIGTERM
    rows = rows_of(output)
    assert [row["path"] for row in rows] == list(map(str, images[:2]))
    assert all(row["class_4"] for row in rows)


def test_the_options_of_a_run_are_followed(checkpoint, predict, image_folder, tmp_path) -> None:
    """A photograph held sideways is seen upright: turning its pixels changes nothing."""
    photographs = sorted(image_folder.glob("val/*/*.jpg"))
    held = next(path for path in photographs if 274 in Image.open(path).getexif())
    with Image.open(held) as file:
        upright = file.transpose(Image.Transpose.ROTATE_270)
    upright.save(tmp_path / "upright.png")
    output = tmp_path / "both.csv"
    assert predict(checkpoint, held, tmp_path / "upright.png", "--output", output) == 0
    one, other = ([float(row[f"probability_{n}"]) for n in (1, 2)] for row in rows_of(output))
    assert one == pytest.approx(other, abs=1e-3)
    assert torch.load(checkpoint, weights_only=True)["config"]["data"]["exif_rotation"]


def test_size_average_and_precision_are_those_asked_for(checkpoint, predict, image_folder, tmp_path) -> None:
    output, found = tmp_path / "one.csv", set()
    command = (checkpoint, image_folder / "val", "--output", output, "--num-workers", 0)
    for options in ((), ("--img-size", 24), ("--ema",), ("--amp", "True")):
        assert predict(*command, *options) == 0
        found.add(output.read_text())
    assert len(found) == 4
