"""Arguments and dtypes of a scan, shared by all backends."""

from typing import NamedTuple

import torch
from torch import Tensor


class ScanArgs(NamedTuple):
    """Tensors of a scan in N directions, 1 or 2, in the order of the operator's arguments.

    With two directions, index 0 scans from the first token to the last and index 1 from the last to the first.
    Their outputs are averaged and gated by ``z``. With one direction the output is returned as it is. Gradients of
    a scan have this type too, with None for absent arguments.

    Letters: B batch, L tokens, D channels of the scan, M state size (``d_state``), R rank of the step size.
    """

    x: Tensor
    """Values in the order of the tokens, (N, B, L, D)."""
    dt: Tensor
    """Raw step sizes, before bias and sigmoid (Longhorn's beta) or softplus (Mamba), (N, B, L, D). With
    ``dt_weight``, their low-rank factors, (N, B, L, R)."""
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
    """Gate before its SiLU, for two directions, (B, L, D)."""
    initial_state: Tensor | None = None
    """Initial state for one direction, (1, B, D, M), in ``compute_dtype``; zeros if None."""
    dt_weight: Tensor | None = None
    """Projection of step sizes from rank R to D channels, (N, D, R)."""

    def to(self, dtype: torch.dtype) -> "ScanArgs":
        """Return the tensors converted to a dtype."""
        return ScanArgs(*(None if t is None else t.to(dtype) for t in self))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of states and sums: float64 if x is float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states that a GPU keeps for the backward pass, given the dtype of x.

    It is bfloat16 for bfloat16, because rounding x, keys and queries to bfloat16 makes a larger error. For float16 it
    is float32, because float16 lacks the range.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
