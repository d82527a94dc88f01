"""How every Triton kernel is launched: on one axis of programs, on the device of a tensor.

``recording`` notes the launches of a ``with`` block instead of running them: what ``vil.warmup``
compiles ahead.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from vil.kernels.triton import compile_lock

compile_lock.install()

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


def launch(
    kernel: triton.JITFunction,
    programs: int,
    tensor: Tensor,
    *,
    num_warps: int,
    enable_fp_fusion: bool = True,
    **arguments: Any,
) -> None:
    """Run a kernel on the device of a tensor.

    Args:
        kernel: The function under ``triton.jit``.
        programs: How many, all on the first axis of the grid: the others end at 65,535.
        tensor: On the device to run on.
        num_warps: Of a program.
        enable_fp_fusion: Whether a product and a sum may become one instruction; said explicitly
            since releases of Triton differ in what is meant by nothing.
        **arguments: Of the kernel, by name; ``maxnreg`` where registers are limited.
    """
    options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": enable_fp_fusion}
    if _record is not None:
        _record.append(Launch(kernel, arguments | options))
        return
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](**arguments, **options)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Note launches in the list returned instead of running them, so that results are arbitrary."""
    global _record
    previous, _record = _record, []
    try:
        yield _record
    finally:
        _record = previous
