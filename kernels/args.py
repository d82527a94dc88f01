"""What a scan is given, and what it computes in: one description for every backend."""

from typing import NamedTuple

import torch
from torch import Tensor


class ScanArgs(NamedTuple):
    """The tensors of a scan in N directions, 1 or 2, in the order of the operator's arguments.

    Of two directions, index 0 goes from the first token to the last and index 1 back; their outputs are
    averaged and gated by ``z``. Of one direction the output is its own. Gradients of a scan are of this type,
    too, None where there is no argument.

    Letters: B batch, L tokens, D channels of the scan, M state size (``d_state``), R rank of the step size.
    """

    x: Tensor
    """Values in the order of the tokens, (N, B, L, D)."""
    dt: Tensor
    """Raw step sizes, before bias and sigmoid (Longhorn's beta) or softplus (Mamba), (N, B, L, D); of rank R,
    (N, B, L, R), if ``dt_weight`` is given."""
    A: Tensor | None
    """Decay rates of Mamba, (N, D, M), all negative."""
    q: Tensor
    """Queries, (N, B, L, M)."""
    k: Tensor
    """Keys, (N, B, L, M)."""
    D: Tensor | None
    """Skip weights, (N, D); no skip if None."""
    bias: Tensor | None
    """Added to dt, (N, D)."""
    z: Tensor | None
    """Gate of two directions before its SiLU, (B, L, D)."""
    initial_state: Tensor | None = None
    """Of one direction, (1, B, D, M) in ``compute_dtype``; zeros if None."""
    dt_weight: Tensor | None = None
    """Makes step sizes of those of rank R, (N, D, R)."""

    def to(self, dtype: torch.dtype) -> "ScanArgs":
        """Return the same in a dtype."""
        return ScanArgs(*(None if t is None else t.to(dtype) for t in self))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of states and sums for activations of the dtype of x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
