"""Recurrences for the mixers of ``mixer.py``.

All but ``softmax`` and ``none`` keep a state of E x N numbers. Per token, one key writes it and one
query reads it; all channels share them. Keys and queries are projected from the values. Letters: B
batch, L tokens, C channels of the block, E = expand * C channels of the recurrence, N state size, R
rank of projections that give step sizes.

With value x_i of channel i, key k_j, query q_j and y_i = q.S_i:

    longhorn               S_ij <- (1 - eps_i k_j^2) S_ij + eps_i k_j x_i      arXiv 2407.14207, Eq. 7
    longhorn_exact         S_i <- S_i + eps_i (x_i - k.S_i) k                  the same, Eq. 6
                           eps_i = beta_i / (1 + beta_i |k|^2), beta = sigmoid(.)
    longhorn_scalar        longhorn with one beta per token for all channels (the authors' ablation)
    longhorn_exact_scalar  longhorn_exact with one beta per token
    mamba                  S_ij <- exp(d_i A_ij) S_ij + d_i k_j x_i            arXiv 2312.00752, Alg. 2
    linear_attention       S_i <- S_i + k x_i                                  arXiv 2006.16236
    retnet                 S_i <- g_h S_i + k x_i, g_h = 1 - 2^(-5 - h)        arXiv 2307.08621, Eq. 6
    gla                    S_ij <- a_j S_ij + k_j x_i, a = sigmoid(.)^(1/16)   arXiv 2312.06635, Eq. 3
    deltanet               S_i <- S_i + b (x_i - k.S_i) k, |k| = 1             arXiv 2406.06484, Eq. 3
    softmax                y = softmax(q k^T / sqrt(C)) x, q and k of width C  arXiv 1706.03762
    none                   y = 0

These are the recurrences, not the published architectures. Linear attention lacks its feature map
and normaliser. RetNet lacks its rotation of queries and keys and its group normalisation. GLA lacks
its output normalisation and its keys per head. DeltaNet lacks its SiLU on queries and keys, its
normalised queries and its output normalisation. Attention has one head and no position embedding.
RetNet's heads h are groups of channels that share queries and keys.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.kernels.ops import longhorn_scan, mamba_scan

RETNET_HEADS = 4
GLA_TEMPERATURE = 16
# exp(-sum of a chunk's log decays) must fit float32: 32 tokens of at most 2 stay below exp(88).
GLA_CHUNK, GLA_STRONGEST = 32, -2.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a mixer that its recurrence is built from."""

    dim: int
    """Channels C of the block."""
    inner: int
    """Channels E of the recurrence."""
    state: int
    """State size N."""
    rank: int
    """Rank R of the projections that give step sizes."""


# ------------------------------------------------------------------ recurrences of this library


class Longhorn(nn.Module):
    """Longhorn, diagonal: (B, L, E) -> (B, L, E)."""

    recurrence = "longhorn"
    scalar = False

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        # One beta for all channels needs no low-rank projection.
        self.splits = [1 if self.scalar else sizes.rank, sizes.state, sizes.state]
        self.x_proj = nn.Linear(sizes.inner, sum(self.splits), bias=False)
        self.dt_proj = nn.Identity() if self.scalar else nn.Linear(sizes.rank, sizes.inner)
        if not self.scalar:
            nn.init.zeros_(self.dt_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        beta, k, q = self.x_proj(x).split(self.splits, dim=-1)
        return self.scan(x, self.dt_proj(beta).expand_as(x), q, k)

    def scan(self, x: Tensor, beta: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Scan values and step sizes (B, L, E) with queries and keys (B, L, N): (B, L, E)."""
        return longhorn_scan(x, beta, q, k, recurrence=self.recurrence)


class LonghornExact(Longhorn):
    """Longhorn, exact: (B, L, E) -> (B, L, E)."""

    recurrence = "longhorn_exact"


class LonghornScalar(Longhorn):
    """Longhorn, diagonal, one beta per token: (B, L, E) -> (B, L, E)."""

    scalar = True


class LonghornExactScalar(Longhorn):
    """Longhorn, exact, one beta per token: (B, L, E) -> (B, L, E)."""

    recurrence = "longhorn_exact"
    scalar = True


class Mamba(nn.Module):
    """Mamba's selective recurrence: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.splits = [sizes.rank, sizes.state, sizes.state]
        self.x_proj = nn.Linear(sizes.inner, sum(self.splits), bias=False)
        self.dt_proj = nn.Linear(sizes.rank, sizes.inner)
        rates = torch.arange(1, sizes.state + 1, dtype=torch.float32)
        self.A_log = nn.Parameter(rates.log().repeat(sizes.inner, 1))
        with torch.no_grad():  # steps start log-uniform in [0.001, 0.1], as in Mamba
            dt = torch.empty(sizes.inner).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        dt, k, q = self.x_proj(x).split(self.splits, dim=-1)
        return mamba_scan(x, self.dt_proj(dt), -torch.exp(self.A_log), q, k)


# ------------------------------------------------------- other recurrences, in parallel form


class LinearAttention(nn.Module):
    """Linear attention: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.qk_proj = nn.Linear(sizes.inner, 2 * sizes.state, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_attention(x, *self.qk_proj(x).chunk(2, dim=-1))


def linear_attention(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return q_t . sum of k_s x_s over s <= t.

    Args:
        x: Values, (B, L, E).
        q: Queries, (B, L, N).
        k: Keys, (B, L, N).

    Returns:
        (B, L, E).
    """
    return (q @ k.mT).tril() @ x


class RetNet(LinearAttention):
    """Retention: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        if sizes.inner % RETNET_HEADS:
            raise ValueError(f"expand * dim must be divisible by {RETNET_HEADS}, got {sizes.inner}")
        decays = 1 - 2.0 ** (-5 - torch.arange(RETNET_HEADS))
        self.register_buffer("decays", decays, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return retention(x, *self.qk_proj(x).chunk(2, dim=-1), self.decays)


def retention(x: Tensor, q: Tensor, k: Tensor, decays: Tensor) -> Tensor:
    """Return q_t . sum of g^(t - s) k_s x_s over s <= t, g a constant of the channel's head.

    Args:
        x: Values, (B, L, E).
        q: Queries, (B, L, N).
        k: Keys, (B, L, N).
        decays: Decays of H heads of E / H neighbouring channels, (H,).

    Returns:
        (B, L, E).
    """
    t = torch.arange(x.shape[1], device=x.device)
    distance = (t[:, None] - t).clamp(min=0)
    weights = (decays[:, None, None] ** distance).tril()  # (H, L, L)
    heads = x.unflatten(-1, (len(decays), -1)).transpose(1, 2)  # (B, H, L, E / H)
    y = ((q @ k.mT).unsqueeze(1) * weights) @ heads
    return y.transpose(1, 2).flatten(2)


class GLA(nn.Module):
    """Gated linear attention: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.splits = [sizes.rank, sizes.state, sizes.state]
        self.x_proj = nn.Linear(sizes.inner, sum(self.splits), bias=False)
        self.decay_proj = nn.Linear(sizes.rank, sizes.state)

    def forward(self, x: Tensor) -> Tensor:
        decay, k, q = self.x_proj(x).split(self.splits, dim=-1)
        log_decay = F.logsigmoid(self.decay_proj(decay)) / GLA_TEMPERATURE
        return gated_linear_attention(x, q, k, log_decay.clamp(min=GLA_STRONGEST))


def gated_linear_attention(x: Tensor, q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Scan with a decay per token and state channel, chunk by chunk.

    Args:
        x: Values, (B, L, E).
        q: Queries, (B, L, N).
        k: Keys, (B, L, N).
        log_decay: Logarithm of the share of the state that remains at each token, (B, L, N), at
            least ``GLA_STRONGEST``.

    Returns:
        (B, L, E).
    """
    state = x.new_zeros(x.shape[0], k.shape[2], x.shape[2])
    outputs = []
    chunks = (tensor.split(GLA_CHUNK, dim=1) for tensor in (x, q, k, log_decay))
    for x_c, q_c, k_c, log_c in zip(*chunks, strict=True):
        since_start = log_c.cumsum(1)
        from_start = q_c * since_start.exp()
        scores = from_start @ (k_c * (-since_start).exp()).mT
        outputs.append(from_start @ state + scores.tril() @ x_c)
        to_end = since_start[:, -1:] - since_start
        kept = since_start[:, -1].exp().unsqueeze(-1)
        state = kept * state + (k_c * to_end.exp()).mT @ x_c
    return torch.cat(outputs, dim=1)


class DeltaNet(nn.Module):
    """The delta rule with keys of length 1: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.splits = [1, sizes.state, sizes.state]
        self.x_proj = nn.Linear(sizes.inner, sum(self.splits), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        beta, k, q = self.x_proj(x).split(self.splits, dim=-1)
        return delta_rule(x, q, F.normalize(k, dim=-1), torch.sigmoid(beta))


def delta_rule(x: Tensor, q: Tensor, k: Tensor, step: Tensor) -> Tensor:
    """Scan with the delta rule, all tokens at once.

    The state is the sum of k_s u_s, where u_t = step_t (x_t - sum of (k_t.k_s) u_s over s < t) is
    solved as a triangular system (the UT transform of arXiv 2406.06484, Eq. 10).

    Args:
        x: Values, (B, L, E).
        q: Queries, (B, L, N).
        k: Keys, (B, L, N).
        step: Step sizes, (B, L, 1).

    Returns:
        (B, L, E).
    """
    before = (step * (k @ k.mT)).tril(-1)
    # The diagonal of ones is implied by unitriangular.
    u = torch.linalg.solve_triangular(before, step * x, upper=False, unitriangular=True)
    return linear_attention(u, q, k)


# -------------------------------------------------------------------------------- without state


class Softmax(nn.Module):
    """Attention to all earlier tokens: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.qk_proj = nn.Linear(sizes.inner, 2 * sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk_proj(x).chunk(2, dim=-1)
        return F.scaled_dot_product_attention(q, k, x, is_causal=True)


class NoState(nn.Module):
    """Zeros, so that only convolution and skip remain: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


RECURRENCES: dict[str, type[nn.Module]] = {
    "longhorn": Longhorn,
    "longhorn_exact": LonghornExact,
    "longhorn_scalar": LonghornScalar,
    "longhorn_exact_scalar": LonghornExactScalar,
    "mamba": Mamba,
    "linear_attention": LinearAttention,
    "retnet": RetNet,
    "gla": GLA,
    "deltanet": DeltaNet,
    "softmax": Softmax,
    "none": NoState,
}
