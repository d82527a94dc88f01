"""The Triton backend through the operators and a whole model; in the interpreter without a GPU."""

import pytest
import timm
import torch

import vil  # noqa: F401  (registers the models)
from vil.kernels import ops, reference

backend = pytest.importorskip("vil.kernels.triton.backend")

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_saves_what_it_says(recurrence: str, dtype: torch.dtype) -> None:
    x, k, z = (
        torch.ones(shape, dtype=dtype, device=DEVICE)
        for shape in ((2, 1, 1, 4),) * 2 + ((1, 1, 4),)
    )
    ones = torch.ones(2, 4, device=DEVICE)
    A = -torch.ones(2, 4, 4, device=DEVICE) if recurrence == "mamba" else None
    inputs = (x, x, A, k, k, ones, ones, z)
    _, *saved = backend.bidirectional_scan_saving(*inputs, recurrence)
    assert backend.saved(x, k, recurrence) == tuple((t.shape, t.dtype) for t in saved)


@pytest.mark.ci
@pytest.mark.parametrize("recurrence", ops.RECURRENCES)
def test_backward_from_saved_states_gives_the_same_bits(recurrence: str) -> None:
    torch.manual_seed(0)
    A = -torch.rand(2, 8, 4, device=DEVICE) if recurrence == "mamba" else None
    x, q = torch.randn(2, 1, 18, 8, device=DEVICE), torch.randn(2, 1, 18, 4, device=DEVICE)
    tensors = (x, x + 1, A, q, q + 1, x[:, 0, 0], x[:, 0, 1], x[0])
    gradients = []
    with ops.use_backend("triton"):
        for save in (True, False):
            given = [None if t is None else t.clone().requires_grad_() for t in tensors]
            out, y_sum, states = torch.ops.vil.bidirectional_scan(*given, recurrence, save)
            assert bool(states.numel()) == bool(y_sum.numel()) == save
            gradients.append(torch.autograd.grad(out.sum(), [t for t in given if t is not None]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def scan_inputs(recurrence: str, length: int) -> tuple[torch.Tensor | None, ...]:
    """Return arguments of a scan both ways up to the gate, and a gradient of its output."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    A = -randn(2, 8, 4).exp() if recurrence == "mamba" else None
    rows, keys, parameters = (2, 1, length, 8), (2, 1, length, 4), (2, 8)
    return (
        randn(*rows), randn(*rows), A, randn(*keys), randn(*keys), randn(*parameters),
        randn(*parameters), randn(*rows[1:]), randn(*rows[1:]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recurrence", "segments"),
    [("longhorn", True), ("longhorn_exact", False), ("longhorn_exact", True), ("mamba", False)],
)
def test_a_factor_on_the_norm_of_keys(
    recurrence: str, segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of all inputs, from saved states and not; Mamba heeds no factor."""
    if segments:
        monkeypatch.setattr(
            backend.sequential.tuning, "segments", lambda warps, chunks, *_, **__: (chunks, 1)
        )
    *inputs, grad = scan_inputs(recurrence, 18)
    exact = [None if t is None else t.double() for t in inputs]
    truth = reference.bidirectional_scan(*exact, recurrence, 4.0)
    gradients = reference.bidirectional_scan_backward(grad.double(), *exact, recurrence, 4.0)
    out, *saved = backend.bidirectional_scan_saving(*inputs, recurrence, 4.0)
    assert torch.equal(out, backend.bidirectional_scan(*inputs, recurrence, 4.0))
    results = backend.bidirectional_scan_backward(grad, *inputs, recurrence, saved, 4.0)
    again = backend.bidirectional_scan_backward(grad, *inputs, recurrence, key_norm=4.0)
    for result, other, expected in zip(
        (out, *results), (out, *again), (truth, *gradients), strict=True
    ):
        if expected is None:
            assert result is None
            continue
        assert torch.equal(result, other)
        assert (result.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.ci
def test_more_states_than_a_program_holds_are_refused() -> None:
    x, q = torch.randn(1, 4, 8, device=DEVICE), torch.randn(1, 4, 256, device=DEVICE)
    with ops.use_backend("triton"):
        with pytest.raises(NotImplementedError, match=r"up to 64 states of longhorn, k has 256"):
            ops.longhorn_scan(x, x, q, q)
        with pytest.raises(NotImplementedError, match=r"up to 128 states of longhorn_exact, k has"):
            ops.longhorn_scan(x, x, q, q, form="exact")
