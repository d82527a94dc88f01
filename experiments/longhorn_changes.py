"""Longhorn with one thing changed that others' recurrences have: step sizes, queries and keys, a decay.

The recurrence stays the paper's, exact or diagonal; what it is given changes:

    unit_keys     k <- k / |k|                                     as in arXiv 2406.06484
    silu          k <- silu(k), q <- silu(q)                       as there
    spread_steps  the bias of beta starts uniform in [-4, 4]       as Mamba's step sizes, over a range
    decay         S <- a S before each write, a = sigmoid(w.x + b) one for each token, b = 4 at first
                                                                   as in arXiv 2412.06464

A name is that of the form, "+", and the change. Letters as in ``recurrences.py``.
"""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.recurrences import Longhorn, Sizes
from vil.kernels.ops import longhorn_scan

Form = Literal["diagonal", "exact"]
Change = Literal["unit_keys", "silu", "spread_steps", "decay"]
CHANGES: tuple[Change, ...] = ("unit_keys", "silu", "spread_steps", "decay")
SPREAD = (
    4.0  # sigmoid(-4) to sigmoid(4): 0.018 to 0.982, around the half that all start at otherwise
)
DECAY_BIAS = 4.0  # 0.98 of the state stays: much after 30 tokens, little after 200
# exp(-sum of a chunk's log decays) must fit float32: 32 tokens of at most 2 stay below exp(88).
CHUNK, STRONGEST = 32, -2.0


def change_keys(change: Change, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries and keys (..., N) that a change makes of q and k (..., N)."""
    if change == "unit_keys":
        return q, F.normalize(k, dim=-1)
    if change == "silu":
        return F.silu(q), F.silu(k)
    return q, k


def spread_(bias: Tensor) -> None:
    """Draw the biases of step sizes over a range."""
    nn.init.uniform_(bias, -SPREAD, SPREAD)


def log_decay(logit: Tensor) -> Tensor:
    """Return the logarithm of what remains of the state at each token, at least ``STRONGEST``."""
    return F.logsigmoid(logit).clamp(min=STRONGEST)


def decayed_scan(
    x: Tensor, beta: Tensor, q: Tensor, k: Tensor, decay: Tensor, form: Form
) -> Tensor:
    """Scan as ``longhorn_scan``, the state decaying before every write.

    With P the product of the decays so far, S / P follows the recurrence without a decay for values
    x / P: the scan itself computes it, chunk by chunk, lest P underflow.

    Args:
        x: Values, (B, L, E).
        beta: Step sizes before the sigmoid, (B, L, E).
        q: Queries, (B, L, N).
        k: Keys, (B, L, N).
        decay: Logarithm of what remains of the state at each token, (B, L, 1), at least ``STRONGEST``.
        form: "diagonal" or "exact".

    Returns:
        (B, L, E).
    """
    state, outputs = None, []
    chunks = (tensor.split(CHUNK, dim=1) for tensor in (x, beta, q, k, decay))
    for x_c, beta_c, q_c, k_c, decay_c in zip(*chunks, strict=True):
        kept = decay_c.cumsum(1).exp()  # (B, l, 1)
        y, state = longhorn_scan(
            x_c / kept, beta_c, q_c, k_c, form=form, initial_state=state, return_final_state=True
        )
        state = state * kept[:, -1:]
        outputs.append(y * kept)
    return torch.cat(outputs, dim=1)


class ChangedLonghorn(Longhorn):
    """Longhorn with one of ``CHANGES``: (B, L, E) -> (B, L, E)."""

    def __init__(self, sizes: Sizes, form: Form, change: Change) -> None:
        super().__init__(sizes)
        self.form, self.change = form, change
        with torch.random.fork_rng(devices=[]):  # what is drawn next is as without the change
            if change == "spread_steps":
                spread_(self.dt_proj.bias)
            if change == "decay":
                self.decay_proj = nn.Linear(sizes.inner, 1)
                nn.init.constant_(self.decay_proj.bias, DECAY_BIAS)

    def scan(self, x: Tensor, beta: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Scan as ``Longhorn``, changed."""
        if self.change == "decay":
            return decayed_scan(x, beta, q, k, log_decay(self.decay_proj(x)), self.form)
        return super().scan(x, beta, *change_keys(self.change, q, k))


CHANGED = {
    f"{name}+{change}": partial(ChangedLonghorn, form=form, change=change)
    for name, form in (("longhorn", "diagonal"), ("longhorn_exact", "exact"))
    for change in CHANGES
}
