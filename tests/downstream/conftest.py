"""Heads of few channels that look at few boxes, for all tests of this folder."""

import pytest


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    cascade = pytest.importorskip("downstream.cascade", reason="needs torchvision")
    from tests.downstream.small_heads import SIZES

    for name, value in SIZES.items():
        monkeypatch.setattr(cascade, name, value)
