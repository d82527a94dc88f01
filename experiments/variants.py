"""Register ablation backbones with timm: ``VisionLonghorn`` with one design choice changed.

Most variants reshape the parameters of the original model with torch's parametrizations. So the library's own mixer
and scans compute them. ``GridMixer`` is a separate mixer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vil.backbone import VisionLonghorn
from vil.block import BidirectionalMixer
from vil.kernels.layout import TokenLayout
from vil.kernels.ops import bidirectional_scan, causal_conv1d_bidirectional

_PER_CHANNEL = ("dt_weight", "dt_bias")


class SharedByChannels(nn.Module):
    """Share one row among ``size`` neighbouring channels: (2, E / size, ...) -> (2, E, ...)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, rows: Tensor) -> Tensor:
        """Repeat the rows."""
        return rows.repeat_interleave(self.size, 1)

    def right_inverse(self, rows: Tensor) -> Tensor:
        """Return the row of each group's first channel."""
        return rows[:, :: self.size].clone()


class GridMixer(BidirectionalMixer):
    """Longhorn's mixer with a 3x3 depthwise convolution of patches; a class token keeps the causal ones."""

    def __init__(self, dim: int, grid: tuple[int, int], class_token: bool, **kwargs: Any) -> None:
        """Create a mixer.

        Args:
            dim: Channels C.
            grid: Rows and columns of patches; other grids are not supported.
            class_token: Whether the middle token is a class token.
            **kwargs: More arguments of ``BidirectionalMixer``.
        """
        super().__init__(dim, **kwargs)
        channels = self.D.shape[1]
        self.grid, self.class_token = grid, class_token
        self.grid_conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        if not class_token:
            del self.conv_weight, self.conv_bias

    def forward(self, x: Tensor, layout: TokenLayout | None = None, save: bool = True) -> Tensor:
        """Mix tokens (B, L, C) -> (B, L, C)."""
        x, z = self.in_proj(x).chunk(2, dim=-1)
        both = self._convolved(x)
        made = torch.einsum("dble,dre->dblr", both, self.x_proj_weight)
        dt, k, q = made.split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt = torch.einsum("dblr,der->dble", dt, self.dt_weight)
        y = bidirectional_scan(both, dt, None, q, k, self.D, self.dt_bias, z, self.recurrence)
        return self.proj(y)

    def _convolved(self, x: Tensor) -> Tensor:
        """Convolve (B, L, E) -> (2, B, L, E); both directions have equal patches."""
        rows, columns = self.grid
        middle = rows * columns // 2
        after = middle + self.class_token
        patches = torch.cat((x[:, :middle], x[:, after:]), dim=1)
        patches = self.grid_conv(patches.unflatten(1, self.grid).permute(0, 3, 1, 2))
        patches = F.silu(patches).flatten(2).mT.expand(2, -1, -1, -1)
        if not self.class_token:
            return patches
        reach = self.conv_weight.shape[-1] - 1
        near = x[:, max(middle - reach, 0) : after + reach]
        token = causal_conv1d_bidirectional(near, self.conv_weight, self.conv_bias)
        token = token[:, :, min(middle, reach), None]
        return torch.cat((patches[:, :, :middle], token, patches[:, :, middle:]), dim=2)


class Variant(VisionLonghorn):
    """A ``VisionLonghorn`` with fewer step sizes or another convolution."""

    def __init__(
        self, *, channels_per_step_size: int = 1, grid_conv: bool = False, **kwargs: Any
    ) -> None:
        """Create a variant.

        Args:
            channels_per_step_size: Number of neighbouring channels that share a step size; 0 for all
                channels (the authors' ablation).
            grid_conv: Convolve over the grid of patches (``GridMixer``).
            **kwargs: More arguments of ``VisionLonghorn``.
        """
        super().__init__(**kwargs)
        for block in self.blocks:
            if grid_conv:
                own = block.mixer
                arguments = {"recurrence": own.recurrence, "d_state": own.d_state}
                arguments |= {"dt_rank": own.dt_rank, "depth": own.depth}
                grid, dim = self.patch_embed.grid_size, self.embed_dim
                block.mixer = GridMixer(dim, grid, self.has_class_token, **arguments)
            if channels_per_step_size != 1:
                _share_step_size(block.mixer, channels_per_step_size)

    def no_weight_decay(self) -> set[str]:
        """Return the patterns of ``VisionLonghorn``, and their names with parametrizations."""
        patterns = super().no_weight_decay()
        for pattern in [pattern for pattern in patterns if pattern.startswith("blocks")]:
            mixer, name = pattern.rsplit(".", 1)
            patterns.add(f"{mixer}.parametrizations.{name}.original")
        return patterns


def _share_step_size(mixer: BidirectionalMixer, channels: int) -> None:
    for name in _PER_CHANNEL:
        shared = SharedByChannels(channels or mixer.dt_bias.shape[1])
        parametrize.register_parametrization(mixer, name, shared)


_CHANGES: dict[str, dict[str, Any]] = {
    "scalar": {"channels_per_step_size": 0},
    "heads": {"channels_per_step_size": 16},
    "conv2d": {"grid_conv": True},
}
_FORMS = {"diagonal": "longhorn", "exact": "longhorn_exact"}
NAMES = tuple(f"{change}_{form}" for change in _CHANGES for form in _FORMS)
"""Names of the models registered with timm."""


def _register(name: str) -> None:
    change, _, form = name.rpartition("_")

    def create(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
        sizes = {"embed_dim": 192, "depth": 24, "recurrence": _FORMS[form]}
        arguments = sizes | _CHANGES[change] | kwargs
        return build_model_with_cfg(Variant, "vil_tiny", pretrained, **arguments)

    create.__name__ = create.__qualname__ = name
    register_model(create)


for _name in NAMES:
    _register(_name)
