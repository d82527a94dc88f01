"""Times on a CPU: what is compared, and in which dtype it is computed."""

import pytest
import torch

from benchmarks.cpu import compare, inference, training


@pytest.mark.parametrize("make", [inference, training])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_are_compared_with_the_first(make, dtype: torch.dtype) -> None:
    rows = compare(("deit_tiny_patch16_224", "vil_tiny"), make, 32, 1, dtype, 1)
    assert [row["model"] for row in rows] == ["deit_tiny_patch16_224", "vil_tiny"]
    assert {row["dtype"] for row in rows} == {str(dtype).removeprefix("torch.")}
    assert {row["pass"] for row in rows} == {make.__name__}
    assert rows[0]["ratio"] == 1
    expected = rows[1]["ms_per_image"] / rows[0]["ms_per_image"]
    assert rows[1]["ratio"] == pytest.approx(expected)


@pytest.mark.parametrize("make", [inference, training])
def test_dtype_is_that_of_the_products(make) -> None:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        step = make("vil_tiny", 32, 1, dtype)
        with torch.profiler.profile(record_shapes=True) as profiler:
            step()
        found[dtype] = sum(event.key == "aten::_to_copy" for event in profiler.events())
    assert found[torch.bfloat16] > found[torch.float32] + 24  # of the weights, at least
