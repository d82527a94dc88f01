"""How every Triton kernel is launched: on one axis of programs, on the device of a tensor.

A ``Kernel`` has everything of a launch but its tensors, for a plan to hold. ``recording`` notes the launches of a ``with`` block instead of running them: what
``vil.warmup`` compiles ahead.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from vil.kernels.triton import compile_lock

_record: "list[Launch] | None" = None


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: The function under ``triton.jit``.
        arguments: Its arguments and the compiler's options, by name.
    """

    kernel: triton.JITFunction
    arguments: dict[str, Any]


class Kernel:
    """A kernel with all of its arguments but tensors.

    Args:
        function: The function under ``triton.jit``.
        programs: How many, all on the first axis of the grid: the others end at 65,535.
        num_warps: Of a program.
        enable_fp_fusion: Whether a product and a sum may become one instruction; said explicitly
            since releases of Triton differ in what is meant by nothing.
        **constants: Of the function, by name; ``maxnreg`` where registers are limited.
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
        self._was_launched = False

    def __call__(self, on: Tensor, **tensors: Any) -> None:
        """Launch it on the device of a tensor, with its other arguments."""
        if _record is not None:
            _record.append(Launch(self.function, tensors | self.constants))
            return
        with torch.cuda.device_of(on):
            if self._was_launched:
                self.function[(self.programs,)](**tensors, **self.constants)
                return
            with compile_lock.held(self.function.__name__):
                self.function[(self.programs,)](**tensors, **self.constants)
            self._was_launched = True


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Note launches in the list returned instead of running them, so that results are arbitrary."""
    global _record
    previous, _record = _record, []
    try:
        yield _record
    finally:
        _record = previous
