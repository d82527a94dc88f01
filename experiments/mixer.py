"""Causal token mixers that differ only in their recurrence.

Every mixer is Mamba's block (arXiv 2312.00752, Fig. 3). It projects to values and gate, then applies
a causal depthwise convolution with SiLU. It projects the values to queries and keys of ``d_state``
channels. The recurrence, a skip, the gate and a projection back follow. ``recurrences.py`` explains
the recurrences and letters.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.recurrences import RECURRENCES, Sizes


class Mixer(nn.Module):
    """Mix the tokens of a sequence causally."""

    def __init__(
        self,
        dim: int,
        recurrence: str,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        depth: int = 1,
    ) -> None:
        """Create a mixer.

        Args:
            dim: Channels C of input and output.
            recurrence: A key of ``RECURRENCES``.
            d_state: State size N per channel.
            d_conv: Taps of the depthwise convolution.
            expand: Channels of the recurrence per channel of the block.
            depth: Number of mixers in the residual stack; the initial output projection is divided
                by its square root.

        Raises:
            ValueError: If ``recurrence`` is unknown.
        """
        super().__init__()
        if recurrence not in RECURRENCES:
            raise ValueError(f"recurrence must be one of {list(RECURRENCES)}, got {recurrence!r}")
        inner, rank = expand * dim, math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(d_conv, inner))
        self.conv_bias = nn.Parameter(torch.empty(inner))
        self.recurrence = RECURRENCES[recurrence](Sizes(dim, inner, d_state, rank))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        with torch.no_grad():
            for parameter in (self.conv_weight, self.conv_bias):
                nn.init.uniform_(parameter, -(d_conv**-0.5), d_conv**-0.5)
            self.out_proj.weight.div_(math.sqrt(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens (B, L, C) -> (B, L, C)."""
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(causal_conv(x, self.conv_weight, self.conv_bias))
        y = torch.addcmul(self.recurrence(x), self.D, x)
        return self.out_proj(y * F.silu(z))


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve every channel over each token and the tokens before it.

    Args:
        x: (B, L, E).
        weight: Taps, (K, E); the last one multiplies the token itself.
        bias: (E,).

    Returns:
        (B, L, E).
    """
    taps, length = len(weight), x.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    y = bias.expand_as(x)
    for tap in range(taps):
        y = torch.addcmul(y, padded[:, tap : tap + length], weight[tap])
    return y
