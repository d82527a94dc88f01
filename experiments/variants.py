"""Backbones for ablations, registered with timm: ``VisionLonghorn`` with one choice made otherwise.

A variant's parameters are those of the model that it changes, reshaped by torch's parametrizations. So the library's own
mixer and scans compute it.
"""

from typing import Any, Literal

import torch
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vil.backbone import VisionLonghorn
from vil.block import BidirectionalMixer

Directions = Literal["both", "forward", "alternating"]
_PER_DIRECTION = ("conv_weight", "conv_bias", "x_proj_weight", "dt_weight", "dt_bias", "D")
_PER_CHANNEL = ("dt_weight", "dt_bias")


class SharedByChannels(nn.Module):
    """One row for all channels: (2, 1, ...) -> (2, E, ...)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, row: Tensor) -> Tensor:
        """Repeat the row."""
        return row.expand(-1, self.channels, *row.shape[2:])

    def right_inverse(self, rows: Tensor) -> Tensor:
        """Begin with the first channel's."""
        return rows[:, :1].clone()


class OneDirection(nn.Module):
    """Parameters of one direction, zeros for the other, which then adds nothing: (1, ...) -> (2, ...)."""

    def __init__(self, direction: int) -> None:
        super().__init__()
        self.direction = direction

    def forward(self, own: Tensor) -> Tensor:
        """Put zeros in the other direction's place."""
        pair = [own, torch.zeros_like(own)]
        return torch.cat(pair if self.direction == 0 else pair[::-1])

    def right_inverse(self, both: Tensor) -> Tensor:
        """Keep the direction's own."""
        return both[self.direction : self.direction + 1].clone()


class Variant(VisionLonghorn):
    """A ``VisionLonghorn`` with one step size for all channels, or with other directions."""

    def __init__(
        self, *, scalar_beta: bool = False, directions: Directions = "both", **kwargs: Any
    ) -> None:
        """Create a variant.

        Args:
            scalar_beta: One step size per token, shared by all channels (the authors' ablation),
                instead of one per token and channel.
            directions: Scan "both" ways in every block, "forward" in all, or "alternating": forward
                in the even blocks, backward in the odd ones.
            **kwargs: Of ``VisionLonghorn``.
        """
        super().__init__(**kwargs)
        for i, block in enumerate(self.blocks):
            if scalar_beta:
                _share_step_size(block.mixer)
            if directions != "both":
                _scan_one_way(block.mixer, i % 2 if directions == "alternating" else 0)

    def no_weight_decay(self) -> set[str]:
        """Return the patterns of ``VisionLonghorn`` and what they are called when reparametrized."""
        patterns = super().no_weight_decay()
        for pattern in [pattern for pattern in patterns if pattern.startswith("blocks")]:
            mixer, name = pattern.rsplit(".", 1)
            patterns.add(f"{mixer}.parametrizations.{name}.original")
        return patterns


def _share_step_size(mixer: BidirectionalMixer) -> None:
    channels = mixer.dt_bias.shape[1]
    for name in _PER_CHANNEL:
        parametrize.register_parametrization(mixer, name, SharedByChannels(channels))


def _scan_one_way(mixer: BidirectionalMixer, direction: int) -> None:
    for name in _PER_DIRECTION:
        parametrize.register_parametrization(mixer, name, OneDirection(direction))
    # The mixer returns the mean of the directions, of which one is zero.
    mixer.register_forward_hook(lambda module, args, output: 2 * output)


_CHANGES: dict[str, dict[str, Any]] = {
    "scalar": {"scalar_beta": True},
    "forward": {"directions": "forward"},
    "alternating": {"directions": "alternating"},
    "state_8": {"d_state": 8},
    "state_64": {"d_state": 64},
}
_FORMS = {"diagonal": "longhorn", "exact": "longhorn_exact"}
NAMES = tuple(f"{change}_{form}" for change in _CHANGES for form in _FORMS)
"""Models that are registered with timm."""


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
