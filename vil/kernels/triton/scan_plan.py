"""What the plans of both families of scans share: sizes, strides, and arguments for the kernels.

A plan is made once for all calls with arguments of the same shapes, strides and dtype. It has the
blocks, splits, strides and options; a call adds its tensors. The passes are in ``diagonal.py`` and
``exact.py``, each kernel after kernel, in the order of launches.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vil.kernels.interface import ScanArgs, ScanKey
from vil.kernels.reference import dt_proj
from vil.kernels.triton import tuning
from vil.kernels.triton.states import saved_shapes, state_shape


class LaunchConfig(NamedTuple):
    """Distribution of a kernel's work over the device."""

    block_d: int
    """Channels per program."""
    num_warps: int
    blocks: int
    """Number of channel blocks."""
    num_splits: int
    split_chunks: int


def _named(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Return the strides before the last by their names in the kernels; z has no direction."""
    axes = ("dir", "b", "l")[4 - len(strides) :]
    return {f"{name}_stride_{axis}": s for axis, s in zip(axes, strides, strict=False)}


class ScanPlan:
    """Sizes and strides of a scan; letters as in ``kernels.interface``, S splits.

    Args:
        key: Description of the arguments.
        max_rank: Largest rank of step sizes that the kernels multiply with their weight.
        unit: Neighbouring channels that the kernels access together.

    Raises:
        NotImplementedError: If x is float64.
    """

    writes_small = False

    def __init__(self, key: ScanKey, max_rank: int = 0, unit: int = 1) -> None:
        if key.dtype == torch.float64:
            raise NotImplementedError('the backend "triton" computes in float32, x is torch.float64; use "reference"')
        self.key, (self.N, self.B, self.L, self.D) = key, key.shape
        N, B, L, D = key.shape
        self.chunks, self.reverse = triton.cdiv(L, tuning.CHUNK), key.reverse and N == 1
        self.makes_steps = 0 < (key.rank or 0) <= max_rank
        self.state = state_shape(D, key.states, key.recurrence)
        saved = saved_shapes(key.shape, key.states, key.recurrence, key.dtype)
        (_, self.sum_dtype), (self.saved_states, self.saved_dtype) = saved
        # Arguments are copied if their last axis is not contiguous, or if 16 tokens span 2^31
        # elements: offsets within a chunk have 32 bits.
        self.copied, strides = [], {}
        widths = {"x": D, "dt": key.rank or D, "q": key.states, "k": key.states, "z": D}
        for (name, width), own in zip(widths.items(), key.strides, strict=True):
            strides[name] = own or (0, 0, 0)
            step = unit if width == D else 1
            if own is not None and (own[-1] != 1 or own[-2] > 2**27 or any(s % step for s in own[:-1])):
                self.copied.append(name)
                strides[name] = (B * L * width, L * width, width, 1)[-len(own) :]
        # The gradient for z has the strides of z. If these do not fit dz, z is copied.
        self.writes_dz = key.dz is not None and key.dz == strides["z"]
        strides["z_back"] = strides["z"] if N == 1 or self.writes_dz else (L * D, D, 1)
        strides["dt_full"] = strides["dt"] if key.rank is None else (B * L * D, L * D, D, 1)
        if not self.makes_steps:
            strides["dt"] = strides["dt_full"]
        self.strides = {name: _named(name.partition("_")[0], s) for name, s in strides.items()}

    def launch_config(
        self, kernel: str, sequences: int, min_fit: float, cut: tuple[int, int] | None = None
    ) -> LaunchConfig:
        """Return the distribution of a kernel's work over the device.

        Args:
            kernel: Name of the kernel in ``tuning``.
            sequences: Number of sequences, each with one program per block of channels.
            min_fit: Same as in ``tuning.num_splits``.
            cut: Number of splits and chunks per split, if already known.
        """
        block_d, warps = tuning.blocks(kernel, self.D, self.key.device)
        blocks = triton.cdiv(self.D, block_d)
        if cut is None:
            total = sequences * blocks * warps
            cut = tuning.num_splits(kernel, total, self.chunks, self.key.device, min_fit)
        return LaunchConfig(block_d, warps, blocks, *cut)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(shape, dtype=dtype, device=self.key.device)

    def prepared(self, args: ScanArgs) -> ScanArgs:
        """Return arguments for the kernels: contiguous channels, and zeros for an absent weight.

        Step sizes of low rank are multiplied with their weight, unless the kernels do it.
        """
        own = {name: getattr(args, name).contiguous() for name in self.copied}
        if args.dt_weight is not None:
            dt, weight = own.get("dt", args.dt), args.dt_weight.to(self.key.dtype).contiguous()
            if not self.makes_steps:
                dt, weight = dt_proj(dt, weight), None
            own |= {"dt": dt, "dt_weight": weight}
        for name, weight in (("D", args.D), ("bias", args.bias)):
            weight = self.empty(self.N, self.D).zero_() if weight is None else weight
            own[name] = weight.contiguous()
        return args._replace(**own)

    def gradients(self, args: ScanArgs, dz: Tensor | None, **grads: Tensor | None) -> ScanArgs:
        """Return the gradients for all arguments; the one for z is written to ``dz`` if given.

        ``grads`` has sums for D and bias of every sequence and split, (N, B, S, D).
        """
        for name, weight in (("D", args.D), ("bias", args.bias)):
            # Sums in a fixed order are bit-identical.
            grads[name] = None if weight is None else grads[name].sum((1, 2)).to(weight.dtype)
        if dz is not None and grads["z"] is not dz:
            grads["z"] = dz.copy_(grads["z"])
        return ScanArgs(**grads)
