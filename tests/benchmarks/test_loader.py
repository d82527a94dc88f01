"""The loader benchmark: every row is produced, and other pixels are found out."""

import pytest
import torch

from benchmarks import loader

QUICK = ["--images", "8", "--batch-size", "4", "--num-workers", "0", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "EPOCHS", 1)
    monkeypatch.setattr(loader, "SHARDS", 2)


def test_other_pixels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.RECIPE, "interpolation", "bilinear")
    assert loader.main([*QUICK, "--only", "none"]) == 1


def test_decoding_to_other_pixels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files = list(loader.generate(1))
    monkeypatch.setattr(loader, "our_decode", lambda content: loader.decode(content, "L"))
    assert loader.differing(files, lambda image: torch.empty(0), lambda image: torch.empty(0)) == [
        0
    ]
