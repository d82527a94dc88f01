"""The loader benchmark: every row is produced, and other pixels are found out."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import loader

QUICK = ["--images", "8", "--batch-size", "4", "--num-workers", "0", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "EPOCHS", 1)
    monkeypatch.setattr(loader, "SHARDS", 2)


def test_measures_every_loader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "loader.json"
    assert loader.main([*QUICK, "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    assert [row["name"] for row in figures["loaders"]] == list(loader.CONTESTANTS)
    assert all(row["cpu_ms"][0] > 0 for row in figures["loaders"])
    assert figures["loaders"][0]["ratio"] == 1
    assert figures["different_images"] == []
    assert set(figures["stages"]["ours"]) == {"decode", *loader.STEPS, "collate", "seed", "read"}
    printed = capsys.readouterr().out
    assert all(f"| {row['name']} |" in printed for row in figures["loaders"])


def test_tables_of_a_record_compare_like_with_like(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """timm without mixing is what all are relative to, wherever it stands in the record."""
    milliseconds = {
        "timm, folder, mixup": [4.0, 8.0],
        "timm, folder": [2.0, 6.0],
        "ours": [1.0, 3.0],
    }
    rows = [
        {"name": name, "wall_ms": cpu, "cpu_ms": cpu, "ratio": 9.0}
        for name, cpu in milliseconds.items()
    ]
    record = {"loaders": rows, "device_part": rows[::2], "stages": {}, "different_images": []}
    path = tmp_path / "loader.json"
    path.write_text(json.dumps(record))
    assert loader.main(["--record", str(path)]) == 0
    loaders, device = capsys.readouterr().out.split("On the training device")
    ratios = {name: loaders.split(f"| {name} |")[1].split("|")[4].strip() for name in milliseconds}
    assert ratios == {"timm, folder, mixup": "0.62", "timm, folder": "1.00", "ours": "2.00"}
    assert device.split("| ours |")[1].split("|")[4].strip() == "3.33"


def test_other_pixels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.RECIPE, "interpolation", "bilinear")
    assert loader.main([*QUICK, "--only", "none"]) == 1


def test_names_the_images_that_differ() -> None:
    transform, calls = loader.timm_transform(), itertools.count()

    def brighter_once(image: Image.Image) -> torch.Tensor:
        return transform(image) + (next(calls) == 1)

    files = list(loader.generate(3))
    assert loader.differing(files, transform, transform) == []
    assert loader.differing(files, brighter_once, transform) == [1]


def test_decoding_to_other_pixels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files = list(loader.generate(1))
    monkeypatch.setattr(loader, "our_decode", lambda content: loader.decode(content, "L"))
    assert loader.differing(files, lambda image: torch.empty(0), lambda image: torch.empty(0)) == [
        0
    ]
