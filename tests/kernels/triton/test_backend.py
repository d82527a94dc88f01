"""The Triton backend through the operators and a whole model; interpreted if there is no GPU."""

import pytest
import timm
import torch

import vil  # noqa: F401  (registers the models)
from vil.kernels import ops

pytest.importorskip("vil.kernels.triton.backend")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "name", ["vil_tiny", "vil_tiny_exact", pytest.param("vim_tiny", marks=pytest.mark.ci)]
)
def test_model_equals_the_reference(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=16, patch_size=4, embed_dim=16, depth=1, num_classes=3
    ).to(DEVICE)
    images = torch.randn(1, 3, 16, 16, device=DEVICE)
    results = []
    for backend in ("reference", "triton"):
        model.zero_grad()
        with ops.use_backend(backend):
            logits = model(images)
            logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    names = ["logits", *(name for name, _ in model.named_parameters())]
    for result_name, expected, result in zip(names, *results, strict=True):
        error = (result - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
        assert error < 2e-5, result_name


@pytest.mark.ci
def test_more_states_than_a_program_holds_are_refused() -> None:
    x, q = torch.randn(1, 4, 8, device=DEVICE), torch.randn(1, 4, 256, device=DEVICE)
    with ops.use_backend("triton"):
        with pytest.raises(NotImplementedError, match=r"up to 64 states of longhorn, k has 256"):
            ops.longhorn_scan(x, x, q, q)
        with pytest.raises(NotImplementedError, match=r"up to 128 states of longhorn_exact, k has"):
            ops.longhorn_scan(x, x, q, q, recurrence="longhorn_exact")
