"""Backbones for ablations, registered with timm: small changes of ``VisionLonghorn``, one at a time.

A variant's parameters are those of the model it changes, reshaped by torch's parametrizations, so that
the library's own mixer and scans compute all of them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vil.backbone import VisionLonghorn
from vil.mixer import BidirectionalMixer

Directions = Literal["both", "forward", "alternating"]
Position = Literal["first", "middle", "last"]

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
    """A ``VisionLonghorn`` with one of its choices made otherwise."""

    def __init__(
        self,
        *,
        scalar_beta: bool = False,
        directions: Directions = "both",
        class_token_at: Position = "middle",
        **kwargs: Any,
    ) -> None:
        """Create a variant.

        Args:
            scalar_beta: One step size per token, shared by all channels (the authors' ablation),
                instead of one per token and channel.
            directions: Scan "both" ways in every block, "forward" in all, or "alternating": forward
                in the even blocks, backward in the odd ones.
            class_token_at: Where in the sequence the class token stands.
            **kwargs: Of ``VisionLonghorn``.
        """
        # Another grid's layout is made for a class token in the middle.
        super().__init__(**{"grid_aware": class_token_at == "middle", **kwargs})
        self.class_token_at = class_token_at
        for i, block in enumerate(self.blocks):
            if scalar_beta:
                _share_step_size(block.mixer)
            if directions != "both":
                _scan_one_way(block.mixer, i % 2 if directions == "alternating" else 0)

    def no_weight_decay(self) -> set[str]:
        """Return the patterns of ``VisionLonghorn`` and what they are called when reparametrized."""
        patterns = super().no_weight_decay()
        vectors = [pattern for pattern in patterns if pattern.startswith("blocks")]
        for pattern in vectors:
            mixer, name = pattern.rsplit(".", 1)
            patterns.add(f"{mixer}.parametrizations.{name}.original")
        return patterns

    def _sequence(
        self, x: Tensor, grid: list[int], keep: Tensor | None = None
    ) -> tuple[Tensor, list[int] | None]:
        x, numbers = super()._sequence(x, grid, keep)
        if self.class_token_at != "middle":
            x = super()._class_token_first(x)
        if self.class_token_at == "last":
            x = torch.cat([x[:, 1:], x[:, :1]], dim=1)
        return x, numbers

    def _class_token_first(self, x: Tensor) -> Tensor:
        if self.class_token_at == "middle":
            return super()._class_token_first(x)
        return x if self.class_token_at == "first" else torch.cat([x[:, -1:], x[:, :-1]], dim=1)


def _share_step_size(mixer: BidirectionalMixer) -> None:
    channels = mixer.dt_bias.shape[1]
    for name in _PER_CHANNEL:
        parametrize.register_parametrization(mixer, name, SharedByChannels(channels))


def _scan_one_way(mixer: BidirectionalMixer, direction: int) -> None:
    for name in _PER_DIRECTION:
        parametrize.register_parametrization(mixer, name, OneDirection(direction))
    # The mixer returns the mean of the directions, of which one is zero.
    mixer.register_forward_hook(lambda module, args, output: 2 * output)


def _register(name: str, **changes: Any) -> None:
    def create(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
        arguments = {"embed_dim": 192, "depth": 24, **changes, **kwargs}
        return build_model_with_cfg(Variant, "vil_tiny", pretrained, **arguments)

    create.__name__ = create.__qualname__ = name
    register_model(create)


FORMS = {"diagonal": "longhorn", "exact": "longhorn_exact"}


@dataclass(frozen=True)
class Change:
    """What a variant of a form changes."""

    name: str
    """Of the variant: name_form."""
    what: str
    """Which choice, "" for none."""
    value: str
    """What it is changed to."""
    arguments: dict[str, Any]
    """Of ``Variant``."""
    forms: tuple[str, ...] = tuple(FORMS)
    """That it is made in."""


def _placed(directions: Directions, position: Position) -> Change:
    where = {"directions": directions, "class_token_at": position}
    value = f"{directions}, {position}"
    return Change(f"{directions}_{position}", _PLACE, value, where, ("diagonal",))


_PLACE = "directions, class token"
AS_PUBLISHED = Change("both_middle", "", "as published", {})
CHANGES = (
    AS_PUBLISHED,
    Change("scalar", "beta", "scalar", {"scalar_beta": True}),
    Change("state_8", "d_state", "8", {"d_state": 8}),
    Change("state_64", "d_state", "64", {"d_state": 64}),
    _placed("both", "first"),
    _placed("both", "last"),
    _placed("forward", "last"),
    _placed("alternating", "middle"),
    Change(
        "both_none",
        _PLACE,
        "both, none: average",
        {"class_token": False, "global_pool": "avg"},
        ("diagonal",),
    ),
)
MODELS = {
    f"{change.name}_{form}": (form, change)
    for form in FORMS
    for change in CHANGES
    if form in change.forms
}

for _name, (_form, _change) in MODELS.items():
    _register(_name, recurrence=FORMS[_form], **_change.arguments)
