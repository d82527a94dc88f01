"""Launch of Triton kernels: on one axis of programs, on the device of a tensor.

A ``Kernel`` holds everything for a launch except the tensors, so that a plan can keep it. It also
keeps what Triton compiled: Triton takes longer to find that again from the arguments than to launch
it. ``recording`` records the launches of a ``with`` block instead of running them; ``compiling``
compiles the kernels at the same time instead.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

_REPORT_S = 5.0  # between two lines about a long compilation
_MAX_TOGETHER = 8  # kernels that are compiled at the same time, up to 0.8 GB each

_record: "Callable[[Launch], object] | None" = None
# Other versions may launch and compile in another way.
_KNOWN = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)


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
        enable_fp_fusion: Whether a product and a sum may become one instruction. Set explicitly
            because the default differs between releases of Triton.
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
        self._values = [constants.get(name) for name in function.arg_names]
        self._places = {name: place for place, name in enumerate(function.arg_names)}
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, on: Tensor, **tensors: Tensor | None) -> None:
        """Launch the kernel on the device of ``on``, with the given tensors."""
        if _record is not None:
            _record(Launch(self.function, tensors | self.constants))
        elif on.device.type == "cpu" or on.device.index == torch.cuda.current_device():
            self._launch(on.device, tensors)
        else:
            with torch.cuda.device_of(on):
                self._launch(on.device, tensors)

    def _launch(self, device: torch.device, tensors: dict[str, Tensor | None]) -> None:
        """Launch what Triton compiled for tensors like these; at first, let Triton compile it."""
        key, values = [device], self._values.copy()
        for name, tensor in tensors.items():
            values[self._places[name]] = tensor
            if tensor is None:
                key.append(None)
            else:
                key += tensor.dtype, tensor.data_ptr() % 16 == 0  # what Triton specialises
        compiled = self._compiled.get(key := tuple(key))
        if compiled is None or _hooked():
            compiled = self.function[(self.programs,)](**tensors, **self.constants)
            if _KNOWN and compiled is not None:  # the interpreter compiles nothing
                self._compiled[key] = compiled
            return
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata,
            None, None, None, *values,
        )  # fmt: skip


def _hooked() -> bool:
    """Return whether a profiler such as Proton must see launches, which Triton reports to it."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


@contextlib.contextmanager
def _noted_by(note: Callable[[Launch], object]) -> Iterator[None]:
    """Call a function with each launch of a ``with`` block, instead of launching."""
    global _record
    previous, _record = _record, note
    try:
        yield
    finally:
        _record = previous


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches in the returned list without running them, which leaves results arbitrary."""
    launches: list[Launch] = []
    with _noted_by(launches.append):
        yield launches


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels of a ``with`` block together instead of launching them.

    This leaves results arbitrary, in all threads: while the block runs, none of them launches. Later
    launches find the kernels in memory, those of other processes in Triton's cache. Without this, a
    kernel is compiled at its first launch, and all that follow wait.
    """
    launches: dict[Any, Launch] = {}

    def note(launch: Launch) -> None:
        values = (a.dtype if isinstance(a, Tensor) else a for a in launch.arguments.values())
        arguments = dict(zip(launch.arguments, values, strict=True))  # tensors would fill memory
        launches[(launch.kernel, *arguments.items())] = Launch(launch.kernel, arguments)

    with _noted_by(note):
        yield
    compile_together(launches.values())


def compile_together(launches: Iterable[Launch]) -> None:
    """Compile the kernels of launches at the same time.

    Dtypes may stand for tensors that are aligned to 16 bytes. A kernel that does not compile raises
    no error here: its launch does. If compiling takes long, lines on standard error say how far it
    is. Versions of Triton that are not known compile nothing here either.
    """
    if not _KNOWN:
        return
    from triton.runtime.jit import MockTensor

    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    # Most of the compiler runs outside Python's lock, so threads suffice.
    with (
        ThreadPoolExecutor(min(len(usable(0)), _MAX_TOGETHER)) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        for launch in launches:
            arguments = {n: MockTensor.wrap_dtype(a) for n, a in launch.arguments.items()}
            launch.kernel.warmup(**arguments, grid=(1,))
        waiting = set(mode.raw_futures)
        count = len(waiting)
        while waiting := wait(waiting, _REPORT_S).not_done:
            done = count - len(waiting)
            sys.stderr.write(f"compiled {done} of {count} kernels\n")
