"""Tests of the Triton backend that need a GPU; they are skipped without one."""

import pytest
import timm
import torch

import vil  # noqa: F401  (registers the models)
from vil import selfcheck
from vil.kernels import ops
from vil.kernels.plan import forget_plans
from vil.kernels.triton import tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def tensors(B: int, L: int, D: int, recurrence: str) -> list[torch.Tensor | None]:
    """Return random bfloat16 arguments of ``bidirectional_scan`` that require gradients."""
    torch.manual_seed(0)
    A = -torch.rand(2, D, 16, device="cuda") if recurrence == "mamba" else None
    x, q = torch.randn(2, B, L, D, device="cuda"), torch.randn(2, B, L, 16, device="cuda")
    activations = [t.bfloat16() for t in (x, x + 1, q, q + 1, x[0])]
    x, dt, q, k, z = activations
    given = [x, dt, A, q, k, torch.ones(2, D, device="cuda"), torch.zeros(2, D, device="cuda"), z]
    return [None if t is None else t.clone().requires_grad_() for t in given]


def unaligned(given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return copies, one element behind an aligned address."""
    moved = [None if t is None else t.new_empty(t.numel() + 1)[1:].view(t.shape) for t in given]
    for t, source in zip(moved, given, strict=True):
        if t is not None:
            t.requires_grad_().data.copy_(source)
    return moved


def outcomes(given: list[torch.Tensor | None], recurrence: str) -> list[torch.Tensor]:
    out = ops.bidirectional_scan(*given, recurrence)
    gradients = torch.autograd.grad(out.float().square().sum(), [t for t in given if t is not None])
    return [out.detach(), *gradients]


def test_the_backend_agrees_with_the_reference() -> None:
    passed, failed = selfcheck.check("triton", "cuda")
    assert passed
    assert not failed


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_gradients_are_the_same_bits_from_run_to_run(recurrence: str) -> None:
    given = tensors(16, 197, 384, recurrence)
    first, second = outcomes(given, recurrence), outcomes(given, recurrence)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_later_launches_notice_another_alignment_and_device(recurrence: str) -> None:
    given = tensors(2, 37, 40, recurrence)
    expected = outcomes(given, recurrence)
    other = f"cuda:{torch.cuda.device_count() - 1}"
    elsewhere = [None if t is None else t.detach().to(other).requires_grad_() for t in given]
    for moved in (given, unaligned(given), elsewhere, given):
        for found, truth in zip(outcomes(moved, recurrence), expected, strict=True):
            assert (found.cuda() - truth).float().abs().max() <= 0.01 * truth.float().abs().max()


@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_a_long_sequence_is_cut_and_gives_the_same(recurrence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, counts = tensors(1, 6085, 192, recurrence), []
    splits = tuning.num_splits

    def counted(*arguments: object) -> tuple[int, int]:
        result = splits(*arguments)
        counts.append(result[0])
        return result

    monkeypatch.setattr(tuning, "num_splits", counted)
    forget_plans()
    cut = outcomes(given, recurrence)
    assert max(counts) > 1
    monkeypatch.setattr(tuning, "num_splits", lambda kernel, warps, chunks, *_: (1, chunks))
    forget_plans()
    for result, expected in zip(cut, outcomes(given, recurrence), strict=True):
        error = (result - expected).float().abs().max() / expected.float().abs().max()
        assert error < 0.02  # rounded to bfloat16, products in TF32


@pytest.mark.parametrize("name", ["vil_tiny_exact", "vim_tiny"])
def test_compiled_model_trains_as_the_eager_one(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, depth=2, num_classes=10).cuda()
    images, labels = torch.randn(8, 3, 224, 224, device="cuda"), torch.arange(8, device="cuda")
    state, losses = {k: v.clone() for k, v in model.state_dict().items()}, []
    for step_model in (model, torch.compile(model, fullgraph=True)):
        model.load_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(20):
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(step_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.5
    assert losses[1] == pytest.approx(losses[0], abs=0.1)


def test_another_grid_in_cuda_graphs() -> None:
    """The grid's layout is made at the first call, here in a CUDA graph's memory, and kept."""
    torch.manual_seed(0)
    model = timm.create_model("vil_tiny_exact", img_size=64, depth=2).cuda().eval()
    images = [torch.randn(2, 3, size, size, device="cuda") for size in (128, 192, 160)]
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.inference_mode():
        found = [[compiled(x).clone() for x in images] for _ in range(3)]
        expected = [model(x) for x in images]
    for logits in found:
        for one, own in zip(logits, expected, strict=True):
            torch.testing.assert_close(one, own, rtol=1e-3, atol=1e-3)


def test_other_current_device_does_not_matter() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = [None if t is None else t.detach() for t in tensors(2, 197, 64, "longhorn")]
    moved = [None if t is None else t.to("cuda:1") for t in given]
    with torch.cuda.device(0):
        out = ops.bidirectional_scan(*moved, "longhorn")
    assert torch.equal(out.cpu(), ops.bidirectional_scan(*given, "longhorn").cpu())
