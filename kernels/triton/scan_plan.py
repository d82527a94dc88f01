"""How the kernels of a scan are launched, forth and back, whatever the recurrence is.

A plan is made once for arguments of the same shapes, strides and dtype, and serves every call with such ones: it has
blocks, segments, strides and options; a call adds its tensors. What the chunked and the sequential kernels differ in
is in ``longhorn_exact.py`` and ``sequential.py``, whose plans derive from the one here.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vil.kernels.args import ScanArgs
from vil.kernels.plan import ScanKey
from vil.kernels.reference import full_steps
from vil.kernels.triton import tuning
from vil.kernels.triton.launch import Kernel

Saved = tuple[Tensor | None, Tensor]


class Spread(NamedTuple):
    """How a kernel's work is spread over the device."""

    block_d: int
    """Channels of a program."""
    num_warps: int
    blocks: int
    """Of channels."""
    segments: int
    segment_chunks: int


class ScanPlan:
    """The launches of a scan in N directions; letters as in ``kernels.args``, S segments.

    Args:
        key: What the arguments are; their last axes are contiguous.
    """

    least_tokens: ClassVar[int] = 1
    """Sequences that are shorter are filled up with zeros, whose keys change nothing at either end."""

    def __init__(self, key: ScanKey) -> None:
        self.key, (self.N, self.B, self.L, self.D) = key, key.shape
        self.chunks, self.reverse = triton.cdiv(self.L, tuning.CHUNK), key.reverse and self.N == 1

    # ------------------------------------------------------------- what the recurrences differ in

    forward_kernel: Kernel
    backward_kernel: Kernel
    segments: int
    """Of the backward pass."""
    sum_dtype: torch.dtype
    """Of the sum of both directions before the gate."""

    def state_shape(self, *lead: int) -> tuple[int, ...]:
        """Return the shape of states (*lead, D, M) as the kernels store them."""
        raise NotImplementedError

    def to_kernel(self, state: Tensor | None) -> Tensor | None:
        """Return states (1, B, D, M) as the kernels store them, zero beyond M."""
        raise NotImplementedError

    def from_kernel(self, state: Tensor) -> Tensor:
        """Return (..., D, M) of states as the kernels store them."""
        raise NotImplementedError

    def inputs(self, args: ScanArgs) -> dict[str, Tensor | None]:
        """Return what all kernels over tokens are given, keys and queries packed."""
        raise NotImplementedError

    def forward_inputs(self, args: ScanArgs) -> tuple[ScanArgs, dict[str, Tensor | None]]:
        """Return the arguments, step sizes as the forward kernel takes them, and what it alone takes."""
        dt = full_steps(args.dt, args.dt_weight)
        return args._replace(dt=dt, dt_weight=None), {}

    def entries(
        self, inputs: dict[str, Tensor | None], start: Tensor | None, dout: Tensor | None
    ) -> Tensor | None:
        """Return the states that segments start from, (N, B, S, *state), None if all are zero.

        Args:
            inputs: What the kernels are given.
            start: State before the first segment on the way, (1, B, *state).
            dout: Gradient of the output, (B, L, D); what is returned is then gradients of the states after segments.
        """
        raise NotImplementedError

    def sums(self) -> dict[str, Tensor | None]:
        """Return room for what the backward kernel leaves to ``finish``."""
        raise NotImplementedError

    def finish(
        self, args: ScanArgs, inputs: dict[str, Tensor | None], sums: dict[str, Tensor | None]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the gradients of A, q and k."""
        raise NotImplementedError

    # ------------------------------------------------------------------------ what they share

    def spread(
        self, kernel: str, sequences: int, overhead: float, cut: tuple[int, int] | None = None
    ) -> Spread:
        """Return how a kernel's work is spread over the device.

        Args:
            kernel: Its name in ``tuning``.
            sequences: Whose channels, in blocks, are programs of their own.
            overhead: How many times the work a scan in segments takes.
            cut: Segments and their chunks, if they are given.
        """
        block_d, warps = tuning.blocks(kernel, self.D, self.key.device)
        blocks = triton.cdiv(self.D, block_d)
        if cut is None:
            cut = tuning.segments(
                sequences * blocks * warps, self.chunks, self.key.device, overhead
            )
        return Spread(block_d, warps, blocks, *cut)

    def strides(self, *names: str) -> dict[str, int]:
        """Return the strides of arguments by the names that kernels know them by."""
        found = dict(zip(("x", "dt", "q", "k", "z"), self.key.strides, strict=True))
        if self.key.rank is not None and not self.makes_steps:
            found["dt"] = (self.B * self.L * self.D, self.L * self.D, self.D)
        found["z"] = found["z"] or (0, 0)
        axes = {"z": ("b", "l")}
        return {
            f"{name}_stride_{axis}": stride
            for name in names
            for axis, stride in zip(axes.get(name, ("dir", "b", "l")), found[name], strict=False)
        }

    makes_steps = False
    """Whether the forward kernel makes step sizes of those of low rank."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.key.device)

    def empty_states(self, *lead: int) -> Tensor:
        """Return room for states (*lead, D, M)."""
        return self.empty(*self.state_shape(*lead))

    def forward(
        self, args: ScanArgs, save: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return out, the last state, the sum of both directions and states, as ``backend.scan``."""
        args, more = self.forward_inputs(args)
        inputs = self.inputs(args)
        entry = self.entries(inputs, self.to_kernel(args.initial_state), None)
        rows = (self.B, self.L, self.D)
        out = self.empty(*rows, dtype=self.key.dtype)
        y_sum = self.empty(*rows, dtype=self.sum_dtype) if self.N == 2 else None
        final = self.empty_states(1, self.B) if self.N == 1 else None
        states = self.empty_states(self.N, self.B, self.chunks) if save else None
        self.forward_kernel(
            out, **inputs, **more, skip_ptr=args.D.contiguous(), entry_ptr=entry, y_ptr=y_sum,
            out_ptr=out, states_ptr=states, final_ptr=final,
        )  # fmt: skip
        final = None if final is None else self.from_kernel(final)
        return out, final, y_sum if save else None, states

    def backward(
        self, args: ScanArgs, dout: Tensor, dfinal: Tensor | None, saved: Saved | None
    ) -> ScanArgs:
        """Return the gradients of ``forward``, given those of its output and of its last state."""
        y_sum, states = self.forward(args, True)[2:] if saved is None else saved
        inputs, dout = self.inputs(args), dout.contiguous()
        entry = self.entries(inputs, self.to_kernel(dfinal), dout)
        dx, ddt = (self.empty(*self.key.shape, dtype=self.key.dtype) for _ in range(2))
        dz = None if args.z is None else self.empty(*args.z.shape, dtype=self.key.dtype)
        dskip, dbias = self.empty(2, self.N, self.B, self.segments, self.D)
        dinitial = None if args.initial_state is None else self.empty_states(1, self.B)
        sums = self.sums()
        self.backward_kernel(
            dout, **inputs, **sums, skip_ptr=args.D.contiguous(), dout_ptr=dout, y_ptr=y_sum,
            states_ptr=states, entry_ptr=entry, dx_ptr=dx, ddt_ptr=ddt, dz_ptr=dz, dskip_ptr=dskip,
            dbias_ptr=dbias, dinitial_ptr=dinitial,
        )  # fmt: skip
        dA, dq, dk = self.finish(args, inputs, sums)
        dinitial = None if dinitial is None else self.from_kernel(dinitial)
        # Sums in a fixed order: the same bits from run to run.
        dD, dbias = dskip.sum((1, 2)).to(args.D.dtype), dbias.sum((1, 2)).to(args.bias.dtype)
        return ScanArgs(dx, ddt, dA, dq, dk, dD, dbias, dz, dinitial)


def prepared(args: ScanArgs, least_tokens: int) -> ScanArgs:
    """Return arguments as the kernels take them: enough tokens, neighbouring channels, no absent weight."""
    N, _, L, D = args.x.shape
    found = {}
    for name in ("x", "dt", "q", "k", "z"):
        tensor = getattr(args, name)
        if tensor is not None:
            found[name] = adjacent_channels(padded_tokens(tensor, least_tokens - L))
    for name in ("D", "bias"):
        if getattr(args, name) is None:
            found[name] = args.x.new_zeros(N, D, dtype=torch.float32)
    return args._replace(**found)


def adjacent_channels(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if neighbours on its last axis are not neighbours in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def padded_tokens(tensor: Tensor, missing: int) -> Tensor:
    """Return a tensor (..., L, D) with so many more tokens of zeros, if any."""
    return F.pad(tensor, (0, 0, 0, missing)) if missing > 0 else tensor
