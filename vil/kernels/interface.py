"""What the mixer asks of a backend. Letters as in ``args.py``; K taps, P positions in an order."""

from typing import Protocol

from torch import Tensor


class ConvPlan(Protocol):
    """Convolution for a ``plan.ConvKey``."""

    out_strides: tuple[int, ...]
    """Strides of the result; empty if the backend does not fix them."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, order: Tensor | None) -> Tensor:
        """Return the result of ``reference.causal_conv1d_bidirectional``."""

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        order: Tensor | None,
        dx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients for x, weight and bias; backends with ``writes_halves`` write the first to ``dx``."""
