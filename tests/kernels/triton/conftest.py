"""Triton's interpreter, made to round as GPUs do."""

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let casts from float32 to bfloat16 round to nearest, as the instruction does: it cuts (3.9)."""
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
