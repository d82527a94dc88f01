"""Plan of the exact Longhorn scan in registers; the kernels are in ``exact_fragments*.py``."""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vil.kernels.interface import ScanArgs, ScanKey, ScanResult
from vil.kernels.triton import tuning
from vil.kernels.triton.exact_fragments import (
    OPERANDS,
    fragments_forward_kernel,
    fragments_states_kernel,
    operands_kernel,
)
from vil.kernels.triton.exact_fragments_backward import (
    fragments_backward_kernel,
    fragments_gradients_kernel,
    small_gradients_kernel,
)
from vil.kernels.triton.exact_parts import MIN_FIT_FOR_SPLITS
from vil.kernels.triton.exact_splits_backward import MAX_REGISTERS
from vil.kernels.triton.launch import Kernel
from vil.kernels.triton.scan_plan import ScanPlan
from vil.kernels.triton.states import kept_states, padded_states

_MAX_RANK = 32  # the sums for a weight of twice that rank would not fit in the registers


def _reads_low_rank(key: ScanKey) -> bool:
    """Return whether the kernels take step sizes of low rank, as pairs of numbers."""
    return key.rank is not None and key.rank % 2 == 0 and not any(s % 2 for s in key.strides[1][:-1])


def _aligned(tensor: Tensor | None, size: int = 8) -> Tensor | None:
    """Return a tensor that begins at a multiple of so many bytes: itself, or a copy with its strides."""
    if tensor is None or tensor.data_ptr() % size == 0:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class FragmentPlan(ScanPlan):
    """Scan in registers, for keys that ``fits`` accepts; states are (*lead, D, 16)."""

    @staticmethod
    def fits(key: ScanKey) -> bool:
        """Return whether the kernels support a scan."""
        return (
            tuning.fast(key.device) >= 80
            and key.dtype == torch.bfloat16
            and padded_states(key.states, key.recurrence) == 16
            and key.shape[3] % 4 == 0
        )

    def __init__(self, key: ScanKey) -> None:
        super().__init__(key, _MAX_RANK if _reads_low_rank(key) else 0, unit=4)
        fast, sequences, strides = tuning.fast(key.device), self.N * self.B, self.strides
        ahead = self.launch_config("fragments_forward", self.B, MIN_FIT_FOR_SPLITS)
        back = self.launch_config("fragments_backward", sequences, MIN_FIT_FOR_SPLITS)
        self.splits_ahead, self.splits_back = ahead.num_splits, back.num_splits
        self.writes_small = self.makes_steps
        self.ranks = triton.cdiv(key.rank, 16) if self.makes_steps else 0
        self.warps = triton.cdiv(self.D, 32)
        size = {"B": self.B, "L": self.L, "REVERSE": self.reverse}
        norms = {"M": key.states, "kappa_scale": key.kappa_scale}
        chunks, of_norms = sequences * self.chunks, norms | strides["q"] | strides["k"]
        shared = size | {"RANK": key.rank if self.makes_steps else 0, "D": self.D, "FAST": fast}
        shared |= strides["x"] | strides["dt"]
        cut = {"num_splits": ahead.num_splits, "split_chunks": ahead.split_chunks}
        self._operands = Kernel(operands_kernel, chunks, 1, **size, **of_norms)
        block, warps = tuning.blocks("fragments_states", self.D, key.device)
        self._split_states = Kernel(
            fragments_states_kernel, sequences * triton.cdiv(self.D, block), warps, DIRECTIONS=self.N,
            LANES=block, **shared, **cut, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        self._forward = Kernel(
            fragments_forward_kernel, self.B * ahead.blocks * ahead.num_splits, ahead.num_warps, **shared,
            **strides["z"], **cut, back_chunks=back.split_chunks, LANES=ahead.block_d,
            maxnreg=tuning.THREE_WARPS,
        )  # fmt: skip
        cut = {"num_splits": back.num_splits, "split_chunks": back.split_chunks}
        block, warps = tuning.blocks("fragments_states", self.D, key.device)
        self._split_gradients = Kernel(
            fragments_gradients_kernel, sequences * triton.cdiv(self.D, block), warps, LANES=block,
            **{name: value for name, value in shared.items() if not name.startswith("x_")},
            **strides["z_back"], **cut, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        self._backward = Kernel(
            fragments_backward_kernel, sequences * back.blocks * back.num_splits, back.num_warps, **shared,
            **strides["z_back"], **cut, kappa_scale=key.kappa_scale, LANES=back.block_d,
        )  # fmt: skip
        # Gradients of k, q and low-rank dt lie side by side; without the last, in tensors of their own.
        self.columns = (key.small or 2 * key.states + key.rank) if self.ranks else key.states
        self._small = Kernel(
            small_gradients_kernel, chunks, 1, **size, M=key.states, RANKS=self.ranks, warps=self.warps,
            row_step=self.columns, low_columns=self.columns - 2 * key.states,
        )  # fmt: skip

    def prepared(self, args: ScanArgs) -> ScanArgs:
        """Return arguments for the kernels, as ``ScanPlan``, that begin where pairs and fours of numbers may."""
        args = super().prepared(args)
        return args._replace(
            x=_aligned(args.x), dt=_aligned(args.dt, 4 if self.ranks else 8), z=_aligned(args.z),
            dt_weight=_aligned(args.dt_weight), D=args.D.float(), bias=args.bias.float(),
        )  # fmt: skip

    def _packed(self, args: ScanArgs) -> dict[str, Tensor]:
        """Launch the kernel that orders keys and queries as operands; return its results."""
        lead = (self.N, self.B, self.chunks)
        packed = {
            "operands_ptr": self.empty(*lead, OPERANDS.value, 256, dtype=torch.bfloat16),
            "gram_ptr": self.empty(*lead, 16, 16),
            "kappa_ptr": self.empty(*lead, 24),
        }
        self._operands(args.k, q_ptr=args.q, k_ptr=args.k, **packed)
        return packed

    def _padded(self, state: Tensor | None) -> Tensor | None:
        """Return a state (1, B, D, M) with zeros beyond M, (1, B, D, 16)."""
        return None if state is None else F.pad(state, (0, 16 - self.key.states)).contiguous()

    def forward(self, args: ScanArgs, save: bool = False) -> ScanResult:
        """Return the output, the last state, the sum of both directions, and C with states of splits."""
        args = self.prepared(args)
        packed = self._packed(args)
        inputs = {
            "x_ptr": args.x, "dt_ptr": args.dt, "dt_weight_ptr": args.dt_weight, "bias_ptr": args.bias, **packed,
        }  # fmt: skip
        split_states = start = self._padded(args.initial_state)
        if self.splits_ahead > 1:
            split_states = self.empty(self.N, self.B, self.splits_ahead, *self.state)
            self._split_states(split_states, **inputs, start_ptr=start, split_states_ptr=split_states)
        rows, both = (self.B, self.L, self.D), self.N == 2
        out = self.empty(*rows, dtype=self.key.dtype)
        y_pre_gate = self.empty(*rows, dtype=self.sum_dtype) if both else None
        final = None if both else self.empty(1, self.B, *self.state)
        states = self.empty(*self.saved_states, dtype=self.saved_dtype) if save else None
        c, last = kept_states(states, self.key.shape, self.splits_back) if save else (None, None)
        self._forward(
            out, **inputs, z_ptr=args.z, skip_ptr=args.D, split_states_ptr=split_states,
            y_ptr=y_pre_gate, out_ptr=out, c_ptr=c, last_ptr=last, final_ptr=final,
        )  # fmt: skip
        final = None if final is None else final[..., : self.key.states].contiguous()
        return out, final, y_pre_gate if save else None, states

    def backward(
        self,
        args: ScanArgs,
        grad: Tensor,
        grad_final: Tensor | None,
        saved: tuple[Tensor | None, Tensor] | None = None,
        dz: Tensor | None = None,
        small: Tensor | None = None,
    ) -> ScanArgs:
        """Return the gradients of ``forward``, as described in ``interface.ScanPlan``."""
        y_pre_gate, states = self.forward(args, True)[2:] if saved is None else saved
        y_pre_gate, states = _aligned(y_pre_gate), _aligned(states)
        c, last = kept_states(states, self.key.shape, self.splits_back)
        own, grad = self.prepared(args), _aligned(grad.contiguous())
        z = own.z if own.z is None or self.writes_dz else own.z.contiguous()
        inputs = {
            "dt_ptr": own.dt, "dt_weight_ptr": own.dt_weight, "z_ptr": z, "dout_ptr": grad,
            "bias_ptr": own.bias, **self._packed(own),
        }  # fmt: skip
        split_states = start = self._padded(grad_final)
        if self.splits_back > 1:
            split_states = self.empty(self.N, self.B, self.splits_back, *self.state)
            self._split_gradients(split_states, **inputs, start_ptr=start, split_states_ptr=split_states)
        rows, lead = (self.B, self.L, self.D), (self.N, self.B)
        dx, own_dz = self.empty(self.N, *rows, dtype=self.key.dtype), dz
        ddt = None if self.ranks else torch.empty_like(dx)
        if z is not None and not self.writes_dz:
            own_dz = self.empty(*rows, dtype=self.key.dtype)
        dskip, dbias = self.empty(2, *lead, self.splits_back, self.D)
        dweight = self.empty(*lead, self.splits_back, self.D, self.key.rank) if self.ranks else None
        dinitial = None if args.initial_state is None else self.empty(1, self.B, *self.state)
        sums = self.empty(self.warps, *lead, self.chunks, 2 + self.ranks, 256, dtype=torch.bfloat16)
        self._backward(
            grad, **inputs, x_ptr=own.x, y_ptr=y_pre_gate, c_ptr=c, last_ptr=last, skip_ptr=own.D,
            split_states_ptr=split_states, dx_ptr=dx, ddt_ptr=ddt, dz_ptr=own_dz, sums_ptr=sums,
            dskip_ptr=dskip, dbias_ptr=dbias, dweight_ptr=dweight, dinitial_ptr=dinitial,
        )  # fmt: skip
        dk, dq, dlow = self._small_gradients(sums, small)
        dinitial = None if dinitial is None else dinitial[..., : self.key.states].contiguous()
        dweight = None if dweight is None else dweight.sum((1, 2))
        return self.gradients(
            args, dz, x=dx, dt=dlow if self.ranks else ddt, A=None, q=dq, k=dk, D=dskip, bias=dbias, z=own_dz,
            initial_state=dinitial, dt_weight=dweight,
        )  # fmt: skip

    def _small_gradients(self, sums: Tensor, small: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add up the warps' sums; return dk, dq and the gradient of low-rank step sizes, if there are any."""
        M, rows, dlow = self.key.states, (self.N, self.B, self.L), None
        if self.ranks:
            small = self.empty(*rows, self.columns, dtype=self.key.dtype) if small is None else small
            dk, dq, dlow = small[..., :M], small[..., M : 2 * M], small[..., 2 * M :]
            if dlow.shape[3] > 16 * self.ranks:
                dlow[..., 16 * self.ranks :] = 0
        else:
            dk, dq = (self.empty(*rows, M, dtype=self.key.dtype) for _ in range(2))
        self._small(sums, sums_ptr=sums, dk_ptr=dk, dq_ptr=dq, dlow_ptr=dlow)
        return dk, dq, None if dlow is None else dlow[..., : self.key.rank]
