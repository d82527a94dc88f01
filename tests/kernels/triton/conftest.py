"""Patches of Triton's interpreter: it rounds as GPUs do and checks every memory access."""

from collections.abc import Callable

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast float32 to bfloat16 by rounding to nearest, as GPUs do; the interpreter cuts (3.9)."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = interpreter.tl
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding_cast(builder, source, to):
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, to)
        numbers = torch.from_numpy(np.ascontiguousarray(source.data))
        rounded = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded, to.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding_cast)


@pytest.fixture(autouse=True)
def every_access_is_within_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a kernel loads or stores outside the tensors that it was given."""
    if torch.cuda.is_available():  # GPU kernels are not interpreted
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, launch = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
    arguments: list[tuple[int, int]] = []  # of the running kernel: first address and end

    def checked(name: str, mask_place: int) -> Callable:
        access = getattr(builder, name)

        def access_checked(self: object, pointers: object, *rest: object) -> object:
            found = pointers.data[rest[mask_place].data.astype(bool)]
            inside = np.zeros(found.shape, dtype=bool)
            for first, end in arguments:
                inside |= (found >= first) & (found < end)
            assert inside.all(), f"{(~inside).sum()} accesses outside of every argument"
            return access(self, pointers, *rest)

        return access_checked

    def launch_noting(self: object, *args: object, **kwargs: object) -> object:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        arguments[:] = [(t.data_ptr(), _end(t)) for t in tensors if t.numel()]
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(builder, "create_masked_load", checked("create_masked_load", 0))
    monkeypatch.setattr(builder, "create_masked_store", checked("create_masked_store", 1))
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_noting)


def _end(tensor: torch.Tensor) -> int:
    """Return the address behind a tensor's last element."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
