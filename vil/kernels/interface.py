"""What is asked of a backend: plans, what a scan saves, and where gradients go.

A plan is a backend's one-time preparation for calls with arguments of the same shapes, strides and
dtype, which its key describes. It contains everything about a call that does not depend on tensor
values. It holds no tensor of a call, so several threads can use it at the same time.

Letters: N directions, 1 or 2, B batch, L tokens, D channels of the scan, M state size
(``d_state``), R rank of the step size, K taps, P positions in an order.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class ScanArgs(NamedTuple):
    """Tensors of a scan in N directions, in the order of the operator's arguments.

    With two directions, index 0 scans from the first token to the last and index 1 from the last
    to the first. Their outputs are averaged and gated by ``z``. With one direction the output is
    returned as it is. Gradients of a scan have this type too, with None for absent arguments.
    """

    x: Tensor
    """Values in the order of the tokens, (N, B, L, D)."""
    dt: Tensor
    """Raw step sizes, before bias and sigmoid (Longhorn's beta) or softplus (Mamba), (N, B, L, D).
    With ``dt_weight``, their low-rank factors, (N, B, L, R)."""
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


class ScanKey(NamedTuple):
    """Everything that the plan of a scan depends on."""

    recurrence: str
    reverse: bool
    kappa_scale: float
    """Factor of |k|^2 in the step size."""
    shape: tuple[int, int, int, int]
    """Shape of x, (N, B, L, D)."""
    states: int
    """State size M."""
    rank: int | None
    """Rank R of the step sizes; None if they have full rank."""
    strides: tuple[tuple[int, ...] | None, ...]
    """Strides of x, dt, q, k and z."""
    started: bool
    """Whether there is an initial state."""
    dtype: torch.dtype
    device: torch.device
    dz: tuple[int, ...] | None = None
    """Strides of the tensor that receives the gradient for z; None to allocate it."""
    small: int | None = None
    """Columns of the tensor that receives the gradients for k, q and dt, if the plan ``writes_small``."""


class ConvKey(NamedTuple):
    """Everything that the plan of a convolution depends on."""

    shape: tuple[int, int, int]
    """Shape of x, (B, L, D)."""
    strides: tuple[int, int, int]
    taps: int
    """Number of taps K."""
    positions: int | None
    """Positions in the order; None without an order."""
    aligned: bool
    """Whether x begins at a multiple of two elements."""
    dtype: torch.dtype
    device: torch.device
    dx: tuple[int, ...] | None = None
    """Strides of the tensor that receives the gradient for x; None to allocate it."""


def scan_key(args: ScanArgs, recurrence: str, reverse: bool, kappa_scale: float) -> ScanKey:
    """Return the key of the plan for the arguments."""
    x, dt, _, q, k, _, _, z, state, dt_weight = args
    strides = (x.stride(), dt.stride(), q.stride(), k.stride(), None if z is None else z.stride())
    rank = None if dt_weight is None else dt_weight.shape[2]
    return ScanKey(
        recurrence, reverse, float(kappa_scale), tuple(x.shape), k.shape[3], rank, strides,
        state is not None, x.dtype, x.device,
    )  # fmt: skip


def conv_key(x: Tensor, weight: Tensor, order: Tensor | None) -> ConvKey:
    """Return the key of the plan for the arguments."""
    positions = None if order is None else len(order)
    aligned = x.data_ptr() % (2 * x.element_size()) == 0
    return ConvKey(
        tuple(x.shape), x.stride(), weight.shape[2], positions, aligned, x.dtype, x.device
    )  # fmt: skip


ScanResult = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Output, (B, L, D), and the last state of one direction, (1, B, D, M). Then, if the backend saves
them, the sum of both directions before the gate, (B, L, D), and states, in the backend's form."""


class ScanPlan(Protocol):
    """Scan for a ``ScanKey``."""

    writes_small: bool
    """Whether gradients of low-rank step sizes stay of low rank, and may be written to ``small``."""

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the result of ``reference.scan``; with ``save``, also what the backend saves."""

    def backward(
        self,
        args: ScanArgs,
        grad: Tensor,
        grad_final: Tensor | None,
        saved: tuple[Tensor | None, Tensor] | None = None,
        dz: Tensor | None = None,
        small: Tensor | None = None,
    ) -> ScanArgs:
        """Return the gradients of ``forward``.

        Args:
            args: Same as in ``forward``.
            grad: Gradient of the output, (B, L, D).
            grad_final: Gradient of the last state, (1, B, D, M), for one direction.
            saved: Last two results of ``forward``; it scans again without them.
            dz: Tensor for the gradient of z, with the strides in the key, for backends with
                ``writes_halves``.
            small: Tensor for the gradients of k, q and dt side by side, (N, B, L, columns in the key),
                for plans with ``writes_small``. Columns beyond 2 M + R become zeros.

        Returns:
            Gradients. The one for dt has full rank, (N, B, L, D), and there is none for dt_weight; a
            plan with ``writes_small`` returns both as they were given.
        """


class ConvPlan(Protocol):
    """Convolution for a ``ConvKey``."""

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
        """Return the gradients for x, weight and bias.

        Backends with ``writes_halves`` write the first to ``dx``, which has the strides in the key.
        """


SavedShapes = tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of both tensors that a scan saves: the sum of both directions, and states."""


@runtime_checkable
class Backend(Protocol):
    """A module with an implementation of the operations; ``backends.py`` chooses one."""

    writes_halves: bool
    """Whether plans write the gradients for x and z to ``dx`` and ``dz``, halves of one tensor."""
    arena: AbstractContextManager[None]
    """Context of a mixer's pass, in which temporary tensors may use memory of earlier passes."""

    def scan_plan(self, key: ScanKey) -> ScanPlan:
        """Return the plan of a scan.

        Raises:
            NotImplementedError: If the backend does not support the arguments.
        """

    def conv_plan(self, key: ConvKey) -> ConvPlan:
        """Return the plan of a convolution.

        Raises:
            NotImplementedError: If the backend does not support the arguments.
        """

    def small_weights(
        self, x_proj_weight: Tensor, dt_weight: Tensor, columns: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the result of ``reference.small_weights``."""
