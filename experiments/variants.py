"""Backbones for ablations, registered with timm: small changes of ``VisionLonghorn``, one at a time.

A variant's parameters are those of the model it changes, reshaped by torch's parametrizations, so that
the library's own mixer and scans compute them. ``ChangedMixer`` has the changes of ``longhorn_changes.py``.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from experiments.longhorn_changes import (
    CHANGES,
    DECAY_BIAS,
    Change,
    Form,
    change_keys,
    decayed_scan,
    log_decay,
    spread_,
)
from vil.backbone import VisionLonghorn
from vil.kernels.ops import causal_conv1d_bidirectional, longhorn_scan
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


class ChangedMixer(BidirectionalMixer):
    """A mixer of Longhorn with one of ``longhorn_changes.CHANGES``, of one operation after another."""

    def __init__(self, mixer: BidirectionalMixer, change: Change) -> None:
        """Take over a mixer.

        Args:
            mixer: Of either form of Longhorn; its initial values are kept.
            change: What to change; weights of another change, or of none, are refused from then on.

        Raises:
            ValueError: the mixer is of another recurrence, or the change is unknown.
        """
        if mixer.recurrence not in _FORM_OF:
            raise ValueError(f"mixer must be of one of {[*_FORM_OF]}, got {mixer.recurrence!r}")
        if change not in CHANGES:
            raise ValueError(f"change must be one of {list(CHANGES)}, got {change!r}")
        inner = mixer.D.shape[1]
        sizes = {"d_state": mixer.d_state, "d_conv": mixer.conv_weight.shape[2]}
        dim = mixer.out_proj.out_features
        with torch.random.fork_rng(devices=[]):  # what is drawn next is as without the change
            super().__init__(
                dim, mixer.recurrence, **sizes, expand=inner // dim, dt_rank=mixer.dt_rank
            )
            self.load_state_dict(mixer.state_dict())
            self.change, self.form = change, _FORM_OF[mixer.recurrence]
            self.recurrence = f"{mixer.recurrence}+{change}"
            if change == "spread_steps":
                spread_(self.dt_bias)
            if change == "decay":
                bound = inner**-0.5
                self.decay_weight = nn.Parameter(torch.empty(2, inner).uniform_(-bound, bound))
                self.decay_bias = nn.Parameter(torch.full((2,), DECAY_BIAS))

    def forward(
        self,
        x: Tensor,
        grid: list[int] | None = None,
        valid: Tensor | None = None,
        save: bool = True,
    ) -> Tensor:
        """Mix tokens (B, L, C) -> (B, L, C), whatever the grid.

        Raises:
            ValueError: patches are missing.
        """
        if valid is not None:
            raise ValueError(f"a mixer with {self.change} takes no mask, got valid {valid.shape}")
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = causal_conv1d_bidirectional(x, self.conv_weight, self.conv_bias)
        y = [self._scan(x[0], 0), self._scan(x[1].flip(1), 1).flip(1)]
        return self.out_proj((y[0] + y[1]) / 2 * F.silu(z))

    def _scan(self, x: Tensor, i: int) -> Tensor:
        """Scan what direction i meets, (B, L, E), in the order in which it meets it."""
        sizes = [self.dt_rank, self.d_state, self.d_state]
        low, k, q = F.linear(x, self.x_proj_weight[i]).split(sizes, dim=-1)
        q, k = change_keys(self.change, q, k)
        steps = F.linear(low, self.dt_weight[i], self.dt_bias[i])
        if self.change == "decay":
            logit = F.linear(x, self.decay_weight[i, None], self.decay_bias[i, None])
            y = decayed_scan(x, steps, q, k, log_decay(logit), self.form)
        else:
            y = longhorn_scan(x, steps, q, k, form=self.form)
        return torch.addcmul(y, self.D[i], x)


class Variant(VisionLonghorn):
    """A ``VisionLonghorn`` with one of its choices made otherwise."""

    def __init__(
        self,
        *,
        scalar_beta: bool = False,
        directions: Directions = "both",
        class_token_at: Position = "middle",
        change: Change | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a variant.

        Args:
            scalar_beta: One step size per token, shared by all channels (the authors' ablation),
                instead of one per token and channel.
            directions: Scan "both" ways in every block, "forward" in all, or "alternating": forward
                in the even blocks, backward in the odd ones.
            class_token_at: Where in the sequence the class token stands.
            change: What else is changed, None for nothing; such a model is not ``grid_aware``.
            **kwargs: Of ``VisionLonghorn``.
        """
        # Another grid's layout is made for the published mixer and a class token in the middle.
        as_published = class_token_at == "middle" and change is None
        super().__init__(**{"grid_aware": as_published, **kwargs})
        if change is not None and self.grid_aware:
            raise ValueError(f"grid_aware must be False with change {change!r}, got True")
        self.class_token_at = class_token_at
        for i, block in enumerate(self.blocks):
            if scalar_beta:
                _share_step_size(block.mixer)
            if change is not None:
                block.mixer = ChangedMixer(block.mixer, change)
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


FORMS: dict[Form, str] = {"diagonal": "longhorn", "exact": "longhorn_exact"}
_FORM_OF = {recurrence: form for form, recurrence in FORMS.items()}


@dataclass(frozen=True)
class Ablation:
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


def _placed(directions: Directions, position: Position) -> Ablation:
    where = {"directions": directions, "class_token_at": position}
    value = f"{directions}, {position}"
    return Ablation(f"{directions}_{position}", _PLACE, value, where, ("diagonal",))


_PLACE = "directions, class token"
AS_PUBLISHED = Ablation("both_middle", "", "as published", {})
ABLATIONS = (
    AS_PUBLISHED,
    Ablation("scalar", "beta", "scalar", {"scalar_beta": True}),
    Ablation("state_8", "d_state", "8", {"d_state": 8}),
    Ablation("state_64", "d_state", "64", {"d_state": 64}),
    _placed("both", "first"),
    _placed("both", "last"),
    _placed("forward", "last"),
    _placed("alternating", "middle"),
    Ablation(
        "both_none",
        _PLACE,
        "both, none: average",
        {"class_token": False, "global_pool": "avg"},
        ("diagonal",),
    ),
)
MODELS = {
    f"{ablation.name}_{form}": (form, ablation)
    for form in FORMS
    for ablation in ABLATIONS
    if form in ablation.forms
}

for _name, (_form, _ablation) in MODELS.items():
    _register(_name, recurrence=FORMS[_form], **_ablation.arguments)
UNCHANGED = f"{AS_PUBLISHED.name}_diagonal"
CHANGED = {f"{change}_diagonal": change for change in CHANGES}
for _name, _change in CHANGED.items():
    _register(_name, recurrence=FORMS["diagonal"], change=_change)
