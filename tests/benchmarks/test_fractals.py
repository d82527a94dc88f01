"""The fractals benchmark: every figure is produced, and the sheet shows what the data set holds."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("numba")

from benchmarks import fractals
from vil.training.data.fractals import FractalSource
from vil.training.data.sources import decode


def test_measures_every_size_and_draws_the_sheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fractals, "SIZES", (16, 32))
    monkeypatch.setattr(fractals, "SEARCHED", 10)
    output, sheet = tmp_path / "fractals.json", tmp_path / "images" / "fractals.png"
    quick = ["--images", "2", "--rounds", "1", "--output", str(output), "--sheet", str(sheet)]
    fractals.main(quick)
    figures = json.loads(output.read_text())
    assert [row["size"] for row in figures["sizes"]] == [16, 32]
    for row in figures["sizes"]:
        assert row["ratio"] == pytest.approx(row["fractals"] / row["photographs"])
    printed = capsys.readouterr().out
    assert f"classes found per second: {figures['classes_per_second']:.0f}" in printed
    assert printed.count("\n|") == 3
    rows, columns, size = fractals.SHEET
    assert Image.open(sheet).size == (columns * size, rows * size)


def test_sheet_has_a_row_for_each_class() -> None:
    sheet = np.asarray(fractals.contact_sheet(3, 4, 16))
    source = FractalSource(0, 3, 4, 16, training=True)
    for index in range(12):
        number, label = divmod(index, 3)
        cell = sheet[16 * label : 16 * label + 16, 16 * number : 16 * number + 16]
        assert np.array_equal(cell, np.asarray(decode(source.read(index), "RGB")))


@pytest.mark.parametrize("name", ["images", "rounds"])
def test_numbers_below_1_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fractals.main([f"--{name}", "0"])
    assert f"--{name} must be at least 1, got 0" in capsys.readouterr().err
