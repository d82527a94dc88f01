"""The reference agrees with independent definitions: plain loops, and the optimisation problem."""

import math

import pytest
import torch
import torch.nn.functional as F

from vil.kernels import reference
from vil.kernels.interface import ScanArgs

B, L, D, M = 2, 7, 5, 4


def scan(
    a: dict, recurrence: str, reverse: bool = False, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the last state of one direction."""
    one = {n: None if t is None else t[None] for n, t in {**a, "initial_state": state}.items()}
    y, final, *_ = reference.scan(ScanArgs(**one, z=None), recurrence, reverse)
    return y, final[0]


def make(recurrence: str, length: int = L) -> dict:
    """Return random float64 arguments of one direction without a state."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": randn(B, length, D),
        "dt": randn(B, length, D),
        "A": -randn(D, M).exp() if recurrence == "mamba" else None,
        "q": randn(B, length, M),
        "k": randn(B, length, M),
        "D": randn(D),
        "bias": randn(D),
    }


def order(reverse: bool) -> list[int]:
    return list(range(L))[::-1] if reverse else list(range(L))


@pytest.mark.parametrize("reverse", [False, True])
def test_diagonal_is_the_loop_of_the_paper(reverse: bool) -> None:
    a = make("longhorn")
    y, final = scan(a, "longhorn", reverse)
    for b in range(B):
        for i in range(D):
            state = [0.0] * M
            for t in order(reverse):
                k = a["k"][b, t].tolist()
                beta = 1 / (1 + math.exp(-float(a["dt"][b, t, i] + a["bias"][i])))
                eps = beta / (1 + beta * sum(v * v for v in k))
                x = float(a["x"][b, t, i])
                state = [(1 - eps * v * v) * s + eps * x * v for s, v in zip(state, k, strict=True)]
                q = a["q"][b, t].tolist()
                expected = sum(v * s for v, s in zip(q, state, strict=True)) + float(a["D"][i]) * x
                assert abs(float(y[b, t, i]) - expected) < 1e-12
            assert (final[b, i] - torch.tensor(state, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kappa_scale", [1.0, 1e-2, 1e2])
def test_exact_solves_the_recall_problem_of_the_paper(reverse: bool, kappa_scale: float) -> None:
    """Eq. 5: minimise |S - S_prev|^2 + sum_i beta_i (S_i.k - x_i)^2 by solving for each row."""
    a = make("longhorn_exact")
    a["k"] *= kappa_scale
    y, final = scan(a, "longhorn_exact", reverse)
    beta = torch.sigmoid(a["dt"] + a["bias"])
    state = torch.zeros(B, D, M, dtype=torch.float64)
    for t in order(reverse):
        k = a["k"][:, t]
        outer = k[:, None, :, None] * k[:, None, None, :]  # (B, 1, M, M)
        system = torch.eye(M, dtype=torch.float64) + beta[:, t, :, None, None] * outer
        right = state + (beta[:, t] * a["x"][:, t])[..., None] * k[:, None]
        state = torch.linalg.solve(system, right.unsqueeze(-1)).squeeze(-1)
        expected = torch.einsum("bm,bdm->bd", a["q"][:, t], state) + a["D"] * a["x"][:, t]
        scale = max(1.0, float(expected.abs().max()))
        assert (y[:, t] - expected).abs().max() < 1e-12 * scale
    assert (final - state).abs().max() < 1e-12 * max(1.0, float(state.abs().max()))


@pytest.mark.parametrize("reverse", [False, True])
def test_mamba_is_the_loop_of_its_paper(reverse: bool) -> None:
    a = make("mamba")
    y, _ = scan(a, "mamba", reverse)
    for b in range(B):
        for i in range(D):
            state = [0.0] * M
            for t in order(reverse):
                dt = math.log1p(math.exp(float(a["dt"][b, t, i] + a["bias"][i])))
                x = float(a["x"][b, t, i])
                read = float(a["D"][i]) * x
                for j in range(M):
                    decay = math.exp(dt * float(a["A"][i, j]))
                    state[j] = decay * state[j] + dt * float(a["k"][b, t, j]) * x
                    read += float(a["q"][b, t, j]) * state[j]
                assert abs(float(y[b, t, i]) - read) < 1e-12


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
def test_reverse_is_the_forward_scan_of_the_flipped_sequence(recurrence: str) -> None:
    a = make(recurrence)
    flipped = {n: t.flip(1) if n in ("x", "dt", "q", "k") else t for n, t in a.items()}
    y, state = scan(a, recurrence, True)
    y_flipped, state_flipped = scan(flipped, recurrence)
    # not bit for bit: the exponentials round differently with the memory layout
    assert (y - y_flipped.flip(1)).abs().max() < 1e-13
    assert (state - state_flipped).abs().max() < 1e-13


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
@pytest.mark.parametrize("reverse", [False, True])
def test_state_carries_a_scan_over_a_cut(recurrence: str, reverse: bool) -> None:
    a = make(recurrence)
    whole, final = scan(a, recurrence, reverse)
    parts = [
        {n: t[:, part] if n in ("x", "dt", "q", "k") else t for n, t in a.items()}
        for part in (slice(None, 3), slice(3, None))
    ]
    state, outputs = None, [None, None]
    for i in (1, 0) if reverse else (0, 1):
        outputs[i], state = scan(parts[i], recurrence, reverse, state)
    assert (torch.cat(outputs, 1) - whole).abs().max() < 1e-13
    assert (state - final).abs().max() < 1e-13


@pytest.mark.parametrize("recurrence", reference.RECURRENCES)
def test_bidirectional_scan_averages_and_gates_both_directions(recurrence: str) -> None:
    one, two = make(recurrence), make(recurrence)
    two = {n: None if t is None else t * 0.7 for n, t in two.items()}
    z = torch.linspace(-3, 3, B * L * D, dtype=torch.float64).view(B, L, D)
    both = {n: None if one[n] is None else torch.stack([one[n], two[n]]) for n in one}
    out, *_ = reference.scan(ScanArgs(**both, z=z), recurrence)
    y_0, _ = scan(one, recurrence, False)
    y_1, _ = scan(two, recurrence, True)
    expected = z * torch.sigmoid(z) * (y_0 + y_1) / 2
    assert (out - expected).abs().max() < 1e-14


def test_convolution_is_causal_and_anti_causal() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((B, L, D), (2, D, 4), (2, D))
    )
    out = reference.causal_conv1d_bidirectional(x, weight, bias)
    for i, sequence in enumerate((x, x.flip(1))):
        expected = F.conv1d(sequence.transpose(1, 2), weight[i].unsqueeze(1), bias[i], padding=3, groups=D)
        expected = F.silu(expected[..., :L]).transpose(1, 2)
        assert (out[i] - (expected.flip(1) if i else expected)).abs().max() < 1e-14


@pytest.mark.parametrize("raw", [-1000.0, -60.0, 60.0, 1000.0])
def test_longhorn_step_size_has_its_limits(raw: float) -> None:
    k = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    dt = torch.full((1, 1, 1), raw, dtype=torch.float64, requires_grad=True)
    eps = reference.step_size(dt, k, None, "longhorn")
    eps.sum().backward()
    assert eps.item() == pytest.approx(1 / 26 if raw > 0 else 0, abs=1e-20)
    assert torch.isfinite(dt.grad).all()


@pytest.mark.parametrize("raw", [-40.0, 0.0, 10.0])
@pytest.mark.parametrize("length", [0.0, 1e-6, 5e4])
def test_gradients_survive_long_and_short_keys(raw: float, length: float) -> None:
    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        dt = torch.tensor([raw], dtype=dtype, requires_grad=True)
        k = torch.tensor([0.6 * length, 0.8 * length], dtype=dtype, requires_grad=True)
        return torch.autograd.grad(reference.step_size(dt, k, None, "longhorn"), (dt, k))

    for found, truth in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=3e-6, atol=1e-35)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    a = {n: None if t is None else t.to(dtype) for n, t in make("longhorn").items()}
    y, state = scan(a, "longhorn", False)
    raised = {n: None if t is None else t.double() for n, t in a.items()}
    exact, _ = scan(raised, "longhorn", False)
    assert y.dtype == dtype
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # rounding to the output's dtype is the largest error left
    assert (y.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps
