"""Launches of the kernels of a scan, for any recurrence.

A plan is made once for all calls with arguments of the same shapes, strides and dtype. It has the blocks, splits,
strides and options; a call adds its tensors. The plans in ``exact.py`` and ``diagonal.py`` derive
from the plan here.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vil.kernels.interface import ScanArgs, ScanKey
from vil.kernels.reference import dt_proj
from vil.kernels.triton import tuning
from vil.kernels.triton.launch import Kernel
from vil.kernels.triton.states import saved_shapes, state_shape

Saved = tuple[Tensor | None, Tensor]
_ROWS = ("x", "dt", "q", "k", "z")  # arguments with tokens, in the order of a key's strides


class LaunchConfig(NamedTuple):
    """Distribution of a kernel's work over the device."""

    block_d: int
    """Channels per program."""
    num_warps: int
    blocks: int
    """Number of channel blocks."""
    num_splits: int
    split_chunks: int


class ScanPlan:
    """Launches of a scan in N directions; letters as in ``kernels.args``, S splits.

    Args:
        key: Description of the arguments.

    Raises:
        NotImplementedError: If x is float64.
    """

    least_tokens: ClassVar[int] = 1
    """Shorter sequences are padded with zeros; zero keys leave the state unchanged in either direction."""

    def __init__(self, key: ScanKey) -> None:
        if key.dtype == torch.float64:
            raise NotImplementedError(
                'the backend "triton" computes in float32, x is torch.float64; use "reference"'
            )
        self.key, (self.N, self.B, self.length, self.D) = key, key.shape
        self.L = max(self.length, self.least_tokens)
        self.missing = self.L - self.length
        self.chunks, self.reverse = triton.cdiv(self.L, tuning.CHUNK), key.reverse and self.N == 1
        self.state = state_shape(self.D, key.states, key.recurrence)
        saved = saved_shapes(key.shape, key.states, key.recurrence, key.dtype)
        (_, self.sum_dtype), (self.saved_states, self.saved_dtype) = saved
        self._copied, self._strides = self._layout()
        # The gradient for z is written with the strides of z. If these do not fit dz, z is copied.
        self.writes_dz = key.dz is not None and not self.missing and key.dz == self._strides["z"]

    # ------------------------------------------------------------- specific to a recurrence

    forward_kernel: Kernel
    backward_kernel: Kernel
    num_splits: int
    """Splits of the backward pass."""

    def to_kernel(self, state: Tensor | None) -> Tensor | None:
        """Convert states (1, B, D, M) to the kernel shape, zero beyond M."""
        raise NotImplementedError

    def from_kernel(self, state: Tensor) -> Tensor:
        """Convert states of the kernel shape to (..., D, M)."""
        raise NotImplementedError

    def packed_inputs(self, args: ScanArgs) -> dict[str, Tensor | None]:
        """Return the arguments of all kernels over tokens, with keys and queries packed."""
        raise NotImplementedError

    makes_steps: bool = False
    """Whether the kernels multiply low-rank step sizes with their weight."""

    def split_states(
        self, inputs: dict[str, Tensor | None], start: Tensor | None, dout: Tensor | None
    ) -> Tensor | None:
        """Return the states that splits start from, (N, B, S, *state), None if all are zero.

        Args:
            inputs: Arguments of the kernels.
            start: State before the first split that is processed, (1, B, *state).
            dout: Gradient of the output, (B, L, D). If given, return gradients of the states after splits instead.
        """
        raise NotImplementedError

    def empty_sums(self) -> dict[str, Tensor | None]:
        """Return uninitialised tensors for the sums that the backward kernel leaves to ``final_gradients``."""
        raise NotImplementedError

    def final_gradients(
        self, args: ScanArgs, inputs: dict[str, Tensor | None], sums: dict[str, Tensor | None]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the gradients of A, q and k."""
        raise NotImplementedError

    # ------------------------------------------------------------------------ shared

    def launch_config(
        self, kernel: str, sequences: int, least: float, cut: tuple[int, int] | None = None
    ) -> LaunchConfig:
        """Return the distribution of a kernel's work over the device.

        Args:
            kernel: Name of the kernel in ``tuning``.
            sequences: Number of sequences, each with one program per block of channels.
            least: As in ``tuning.num_splits``.
            cut: Number of splits and chunks per split, if already known.
        """
        block_d, warps = tuning.blocks(kernel, self.D, self.key.device)
        blocks = triton.cdiv(self.D, block_d)
        if cut is None:
            warps_in_all = sequences * blocks * warps
            cut = tuning.num_splits(kernel, warps_in_all, self.chunks, self.key.device, least)
        return LaunchConfig(block_d, warps, blocks, *cut)

    def _layout(self) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]]]:
        """Return the names of arguments that are copied before use, and the strides of all arguments.

        Arguments are copied if their last axis is not contiguous, or if 16 tokens span 2^31 elements: offsets within a
        chunk have 32 bits. All are copied if tokens are missing.
        """
        D, M, R = self.D, self.key.states, self.D if self.key.rank is None else self.key.rank
        copied, found = [], {}
        for name, width, given in zip(_ROWS, (D, R, M, M, D), self.key.strides, strict=True):
            strides = given or (0, 0, 0)
            if given is not None and (self.missing or given[-1] != 1 or given[-2] > 2**27):
                copied.append(name)
                strides = (self.B * self.L * width, self.L * width, width, 1)[-len(given) :]
            found[name] = strides
        return tuple(copied), found

    def strides(self, *names: str, back: bool = False, full_rank: bool = False) -> dict[str, int]:
        """Return the strides of arguments by their names in the kernels.

        Args:
            *names: Names of the arguments.
            back: Whether for the backward pass.
            full_rank: Whether for step sizes that are already multiplied with their weight.
        """
        found = dict(self._strides)
        if back and self.N == 2 and not self.writes_dz:
            found["z"] = (self.L * self.D, self.D, 1)
        if self.key.rank is not None and (full_rank or not self.makes_steps):
            found["dt"] = (self.B * self.L * self.D, self.L * self.D, self.D)
        axes = {"z": ("b", "l")}
        return {
            f"{name}_stride_{axis}": stride
            for name in names
            for axis, stride in zip(axes.get(name, ("dir", "b", "l")), found[name], strict=False)
        }

    def prepared(self, args: ScanArgs) -> ScanArgs:
        """Return arguments for the kernels: enough tokens, contiguous channels, no absent weight.

        Step sizes of low rank are multiplied with their weight, unless the kernels do it.
        """
        found = {}
        for name in self._copied:
            found[name] = _padded(getattr(args, name), self.missing).contiguous()
        if args.dt_weight is not None:
            weight, dt = args.dt_weight.to(self.key.dtype).contiguous(), found.get("dt", args.dt)
            made = (dt, weight) if self.makes_steps else (dt_proj(dt, weight), None)
            found["dt"], found["dt_weight"] = made
        for name in ("D", "bias"):
            if getattr(args, name) is None:
                found[name] = self.empty(self.N, self.D).zero_()
        return args._replace(**found) if found else args

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.key.device)

    def empty_states(self, *lead: int) -> Tensor:
        """Return an uninitialised tensor for states (*lead, D, M)."""
        return self.empty(*lead, *self.state)

    def forward(
        self, args: ScanArgs, save: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the output, the last state, the sum of both directions and states, as ``reference.scan``."""
        args = self.prepared(args)
        inputs = self.packed_inputs(args)
        split_states = self.split_states(inputs, self.to_kernel(args.initial_state), None)
        rows = (self.B, self.L, self.D)
        out = self.empty(*rows, dtype=self.key.dtype)
        y_pre_gate = self.empty(*rows, dtype=self.sum_dtype) if self.N == 2 else None
        final = self.empty_states(1, self.B) if self.N == 1 else None
        states = self.empty(*self.saved_states, dtype=self.saved_dtype) if save else None
        self.forward_kernel(
            out, **inputs, skip_ptr=args.D.contiguous(), split_states_ptr=split_states, y_ptr=y_pre_gate,
            out_ptr=out, states_ptr=states, final_ptr=final,
        )  # fmt: skip
        final = None if final is None else self.from_kernel(final)
        out, y_pre_gate = self._cut(out), self._cut(y_pre_gate) if save else None
        return out, final, y_pre_gate, states

    def backward(
        self,
        given: ScanArgs,
        dout: Tensor,
        dfinal: Tensor | None,
        saved: Saved | None = None,
        dz: Tensor | None = None,
    ) -> ScanArgs:
        """Return the gradients of ``forward``, given the gradients of its output and its last state.

        The gradient for dt has full rank, (N, B, L, D). The gradient for z is written to ``dz``, if given.
        """
        args = self.prepared(given)
        y_pre_gate, states = self.forward(given, True)[2:] if saved is None else saved
        y_pre_gate = None if y_pre_gate is None else _padded(y_pre_gate, self.missing)
        if self.N == 2 and not self.writes_dz:
            args = args._replace(z=args.z.contiguous())
        inputs, dout = self.packed_inputs(args), _padded(dout, self.missing).contiguous()
        split_states = self.split_states(inputs, self.to_kernel(dfinal), dout)
        rows = (self.B, self.L, self.D)
        dx, ddt = (self.empty(self.N, *rows, dtype=self.key.dtype) for _ in range(2))
        wanted = dz
        if not self.writes_dz:
            dz = None if args.z is None else self.empty(*rows, dtype=self.key.dtype)
        dskip, dbias = self.empty(2, self.N, self.B, self.num_splits, self.D)
        dinitial = None if args.initial_state is None else self.empty_states(1, self.B)
        sums = self.empty_sums()
        self.backward_kernel(
            dout, **inputs, **sums, skip_ptr=args.D.contiguous(), dout_ptr=dout, y_ptr=y_pre_gate,
            states_ptr=states, split_states_ptr=split_states, dx_ptr=dx, ddt_ptr=ddt, dz_ptr=dz, dskip_ptr=dskip,
            dbias_ptr=dbias, dinitial_ptr=dinitial,
        )  # fmt: skip
        dA, dq, dk = self.final_gradients(args, inputs, sums)
        dinitial = None if dinitial is None else self.from_kernel(dinitial)
        # Sums in a fixed order are bit-identical.
        dD, dbias = dskip.sum((1, 2)).to(args.D.dtype), dbias.sum((1, 2)).to(args.bias.dtype)
        dx, ddt, dq, dk, dz = (self._cut(t) for t in (dx, ddt, dq, dk, dz))
        if wanted is not None and wanted is not dz:
            dz = wanted.copy_(dz)
        grads = ScanArgs(dx, ddt, dA, dq, dk, dD, dbias, dz, dinitial)
        return ScanArgs(*(None if t is None else g for t, g in zip(given, grads, strict=True)))

    def _cut(self, rows: Tensor | None) -> Tensor | None:
        """Return (..., L, D) without padding tokens."""
        if rows is None or not self.missing:
            return rows
        return rows[..., : self.length, :].contiguous()


def _padded(rows: Tensor, missing: int) -> Tensor:
    """Return (..., L, D) with ``missing`` more tokens of zeros."""
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
