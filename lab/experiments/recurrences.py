"""Causal token mixers that differ only in their recurrence.

Every mixer is Mamba's block (arXiv 2312.00752, Fig. 3). It projects to values and gate, then applies
a causal depthwise convolution with SiLU. It projects the values to queries, keys and step sizes. The
recurrence, a skip, the gate and a projection back follow. A recurrence keeps a state of E x N numbers.
Per token, one key writes it and one query reads it; all channels share them. Letters: B batch, L
tokens, C channels of the block, E = 2 C channels of the recurrence, N state size, R rank of
projections that give step sizes.

With value x_i of channel i, key k_j, query q_j and y_i = q.S_i:

    longhorn          S_ij <- (1 - eps_i k_j^2) S_ij + eps_i k_j x_i      arXiv 2407.14207, Eq. 7
    longhorn_exact    S_i <- S_i + eps_i (x_i - k.S_i) k                  the same, Eq. 6
                      eps_i = beta_i / (1 + beta_i |k|^2), beta = sigmoid(.)
    mamba             S_ij <- exp(d_i A_ij) S_ij + d_i k_j x_i            arXiv 2312.00752, Alg. 2
    linear_attention  S_i <- S_i + k x_i                                  arXiv 2006.16236
    deltanet          S_i <- S_i + b (x_i - k.S_i) k, |k| = 1             arXiv 2406.06484, Eq. 3

These are the recurrences, not the published architectures. Linear attention lacks its feature map
and normaliser. DeltaNet lacks its SiLU on queries and keys, its normalised queries and its output
normalisation.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vil.kernels.ops import longhorn_scan, mamba_scan

D_CONV = 4  # taps of the convolution
EXPAND = 2  # channels of the recurrence per channel of the block


class Longhorn(nn.Module):
    """Longhorn, diagonal: (B, L, E) -> (B, L, E)."""

    form = "longhorn"

    def __init__(self, inner: int, state: int, rank: int) -> None:
        super().__init__()
        self.splits = [rank, state, state]
        self.x_proj = nn.Linear(inner, sum(self.splits), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        nn.init.zeros_(self.dt_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        beta, k, q = self.x_proj(x).split(self.splits, dim=-1)
        return longhorn_scan(x, self.dt_proj(beta), q, k, recurrence=self.form)


class LonghornExact(Longhorn):
    """Longhorn, exact: (B, L, E) -> (B, L, E)."""

    form = "longhorn_exact"


class Mamba(nn.Module):
    """Mamba's selective recurrence: (B, L, E) -> (B, L, E)."""

    def __init__(self, inner: int, state: int, rank: int) -> None:
        super().__init__()
        self.splits = [rank, state, state]
        self.x_proj = nn.Linear(inner, sum(self.splits), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        with torch.no_grad():  # steps start log-uniform in [0.001, 0.1], as in Mamba
            dt = torch.empty(inner).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        dt, k, q = self.x_proj(x).split(self.splits, dim=-1)
        return mamba_scan(x, self.dt_proj(dt), -torch.exp(self.A_log), q, k)


class LinearAttention(nn.Module):
    """Linear attention: (B, L, E) -> (B, L, E)."""

    def __init__(self, inner: int, state: int, rank: int) -> None:
        super().__init__()
        self.qk_proj = nn.Linear(inner, 2 * state, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_attention(x, *self.qk_proj(x).chunk(2, dim=-1))


def linear_attention(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return q_t . sum of k_s x_s over s <= t, (B, L, E), for x (B, L, E), q and k (B, L, N)."""
    return (q @ k.mT).tril() @ x


class DeltaNet(nn.Module):
    """The delta rule with keys of length 1: (B, L, E) -> (B, L, E)."""

    def __init__(self, inner: int, state: int, rank: int) -> None:
        super().__init__()
        self.splits = [1, state, state]
        self.x_proj = nn.Linear(inner, sum(self.splits), bias=False)

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


RECURRENCES: dict[str, type[nn.Module]] = {
    "longhorn": Longhorn,
    "longhorn_exact": LonghornExact,
    "mamba": Mamba,
    "linear_attention": LinearAttention,
    "deltanet": DeltaNet,
}


class Mixer(nn.Module):
    """Mix the tokens of a sequence causally."""

    def __init__(self, dim: int, recurrence: str, d_state: int, depth: int = 1) -> None:
        """Create a mixer.

        Args:
            dim: Channels C of input and output.
            recurrence: A key of ``RECURRENCES``.
            d_state: State size N per channel.
            depth: Number of mixers in the residual stack; the initial output projection is divided
                by its square root.
        """
        super().__init__()
        inner = EXPAND * dim
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(D_CONV, inner))  # the last tap: the token itself
        self.conv_bias = nn.Parameter(torch.empty(inner))
        self.recurrence = RECURRENCES[recurrence](inner, d_state, math.ceil(dim / 16))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        with torch.no_grad():
            for parameter in (self.conv_weight, self.conv_bias):
                parameter.uniform_(-(D_CONV**-0.5), D_CONV**-0.5)
            self.out_proj.weight.div_(math.sqrt(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens (B, L, C) -> (B, L, C)."""
        x, z = self.in_proj(x).chunk(2, dim=-1)
        padded, length = F.pad(x, (0, 0, D_CONV - 1, 0)), x.shape[1]
        taps = (padded[:, t : t + length] * tap for t, tap in enumerate(self.conv_weight))
        x = F.silu(sum(taps, self.conv_bias))
        y = torch.addcmul(self.recurrence(x), self.D, x)
        return self.out_proj(y * F.silu(z))
