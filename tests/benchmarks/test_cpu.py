"""Times on a CPU: what is compared, and in which dtype it is computed."""

import pytest
import torch

from benchmarks.cpu import compare, step
from vil.measuring import PASSES


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_are_compared_with_the_first(pass_name: str, dtype: torch.dtype) -> None:
    rows = compare(("deit_tiny_patch16_224", "vil_tiny"), pass_name, 32, 1, dtype, 1)
    assert [row["model"] for row in rows] == ["deit_tiny_patch16_224", "vil_tiny"]
    assert {row["dtype"] for row in rows} == {str(dtype).removeprefix("torch.")}
    assert {row["pass"] for row in rows} == {pass_name}
    assert rows[0]["ratio"] == 1
    expected = rows[1]["ms_per_image"] / rows[0]["ms_per_image"]
    assert rows[1]["ratio"] == pytest.approx(expected)


@pytest.mark.parametrize("pass_name", PASSES)
def test_dtype_is_that_of_the_products(pass_name: str) -> None:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        run = step("vil_tiny", 32, 1, pass_name, dtype)
        with torch.profiler.profile(record_shapes=True) as profiler:
            run()
        found[dtype] = sum(event.key == "aten::_to_copy" for event in profiler.events())
    assert found[torch.bfloat16] > found[torch.float32] + 24  # of the weights, at least
