"""Steps and turns as they are measured; no test here is of a speed or of memory."""

import pytest
import timm
import torch

from vil.measuring import in_turns, step_of

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_moves_every_parameter_and_inference_none(dtype: torch.dtype) -> None:
    model = timm.create_model("vil_tiny", img_size=32, embed_dim=32, depth=1, num_classes=5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_of(model, IMAGES, "inference", dtype)()
    assert not model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    step_of(model, IMAGES, "training", dtype)()
    assert model.training
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_turns_leave_out_the_first_round_and_the_first_step_of_each() -> None:
    now, ran, begun = [0.0], [], []

    def step(name: str, seconds: float):
        def run() -> None:
            ran.append(name)
            now[0] += seconds if ran[-3:] == [name] * 3 or ran[-2:] == [name] * 2 else 100.0

        return run

    seconds = in_turns(
        {"a": step("a", 1.0), "b": step("b", 3.0)}, 2, begin=begun.append, clock=lambda: now[0]
    )
    assert ran == ["a", "a", "a", "b", "b", "b"] * 3
    assert seconds == {"a": [1.0, 1.0], "b": [3.0, 3.0]}
    assert begun == [0, 1, 2]
