"""Launch of Triton kernels: on one axis of programs, on the device of a tensor.

A ``Kernel`` holds everything for a launch except the tensors, so that a plan can keep it. ``recording``
records the launches of a ``with`` block instead of running them; ``benchmarks.kernels`` compiles them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

_record: "list[Launch] | None" = None


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: Function under ``triton.jit``.
        arguments: Arguments of the function and options of the compiler, by name.
    """

    kernel: triton.JITFunction
    arguments: dict[str, Any]


class Kernel:
    """A kernel with all of its arguments except tensors.

    Args:
        function: Function under ``triton.jit``.
        programs: Number of programs, all on the first grid axis: the other axes end at 65,535.
        num_warps: Warps per program.
        enable_fp_fusion: Whether a product and a sum may become one instruction. Set explicitly because
            the default differs between releases of Triton.
        **constants: Arguments of the function, by name; ``maxnreg`` to limit registers.
    """

    def __init__(
        self,
        function: triton.JITFunction,
        programs: int,
        num_warps: int,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": enable_fp_fusion}
        self.function, self.programs, self.constants = function, programs, constants | options

    def __call__(self, on: Tensor, **tensors: Any) -> None:
        """Launch the kernel on the device of ``on``, with the given tensors."""
        if _record is not None:
            _record.append(Launch(self.function, tensors | self.constants))
            return
        with torch.cuda.device_of(on):
            self.function[(self.programs,)](**tensors, **self.constants)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches in the returned list without running them, which leaves results arbitrary."""
    global _record
    previous, _record = _record, []
    try:
        yield _record
    finally:
        _record = previous
