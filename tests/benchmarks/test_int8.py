"""The benchmark of int8: its ways differ, and the tables say what was measured."""

import pytest
import timm
import torch

from benchmarks.int8 import WAYS, costs, table, variants


def test_int8_is_smaller_and_close() -> None:
    pytest.importorskip("torchao")
    model = timm.create_model("vil_tiny", img_size=32, embed_dim=64, depth=1).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected, *others = (made(images) for made in variants(model).values())
    assert torch.equal(expected, model(images))
    for logits in others:
        assert 0 < (logits - expected).abs().max() < 0.1 * expected.abs().max()
    assert not torch.equal(*others)


def test_costs_have_a_row_for_each_way() -> None:
    pytest.importorskip("torchao")
    rows = costs("test_vit", size=160, batch=1, rounds=1)
    assert [row["way"] for row in rows] == list(WAYS)
    assert rows[0]["ratio"] == 1.0
    assert rows[0]["MB"] > 1.5 * rows[1]["MB"]
    assert min(row["ms"] for row in rows) > 0


def test_table_has_the_columns_that_are_asked_for() -> None:
    lines = table([{"way": "float32", "MB": 1.25, "ms": 2.0}], {"MB": ".1f"}).splitlines()
    assert lines == ["|  | MB |", "|---|---|", "| float32 | 1.2 |"]
