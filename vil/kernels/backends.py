"""Selection of the backend for an operation; no other module chooses one."""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator

import torch

from vil.kernels.interface import Backend, SavedShapes
from vil.kernels.triton import states as triton_states

_logger = logging.getLogger(__name__)

BACKENDS = ("reference", "cpu", "triton")
ENVIRONMENT_VARIABLE = "VIL_BACKEND"

_override: str | None = None


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use the named backend for every operation of this process within a ``with`` block.

    The setting is process-wide, not per thread, because autograd runs backward passes in separate
    threads.

    Args:
        name: "auto", "reference", "cpu" or "triton". Overrides the environment variable
            VIL_BACKEND.

    Raises:
        ValueError: If no backend has that name.
    """
    global _override
    _checked(name, "use_backend(name)")
    previous, _override = _override, name
    try:
        yield
    finally:
        _override = previous


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend that implements the operations for tensors on a device.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations.

    Raises:
        ValueError: If VIL_BACKEND holds an unknown name.
        RuntimeError: If a backend requested by name does not support the device. Also if its
            package is not installed or cannot be imported.
    """
    if _override is not None:
        name, asked_by = _override, "use_backend"
    else:
        name, asked_by = os.environ.get(ENVIRONMENT_VARIABLE, "auto"), ENVIRONMENT_VARIABLE
    if name == "auto":
        name = automatic_backend(device.type, dtype == torch.float64)
    else:
        _checked(name, asked_by)
        if name != "reference":
            _check_serves(name, device, asked_by)
    return _module(name)


def operator_saves(
    device: torch.device, shape: tuple[int, ...], states: int, recurrence: str, dtype: torch.dtype
) -> SavedShapes | None:
    """Return what an operator saves of a scan, given device, shape of x, state size and dtype of x.

    A compiled program needs the shapes before its backend is known. So tensors on a GPU have those
    of the Triton backend, whichever backend computes them.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return None
    return triton_states.saved_shapes(shape, states, recurrence, dtype)


@functools.cache
def _module(name: str) -> Backend:
    if name == "cpu":
        from vil.kernels.cpu import backend
    elif name == "triton":
        from vil.kernels.triton import backend
    else:
        from vil.kernels import reference as backend
    return backend


def _checked(name: str, argument: str) -> None:
    if name not in ("auto", *BACKENDS):
        raise ValueError(f'{argument} must be one of {("auto", *BACKENDS)}, got "{name}"')


def _check_serves(name: str, device: torch.device, asked_by: str) -> None:
    package = {"cpu": "numba", "triton": "triton"}[name]
    # Triton's interpreter runs on the CPU.
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    served = "cpu" if name == "cpu" or interpreted else "cuda"
    if device.type != served:
        raise RuntimeError(
            f'{asked_by} = "{name}" supports tensors on {served}, got tensors on {device}; use "auto" or "reference"'
        )
    if missing := _missing(package):
        raise RuntimeError(f'{asked_by} = "{name}" needs {package}: {missing}')


@functools.cache
def _missing(package: str) -> str | None:
    """Return why a package cannot be used; an installed one may not fit others."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # numba and triton pass on the errors of their dependencies
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{package} is installed but cannot be imported: {reason}"
    return None


@functools.cache
def automatic_backend(device_type: str, double: bool) -> str:
    """Return the name of the fastest backend for a device type, and warn once if it is slow."""
    if device_type == "cpu":
        why = _missing("numba")
        if why is None:
            return "cpu"
    elif device_type == "cuda":
        if double:
            why = "float64 on a GPU"
        elif missing := _missing("triton"):
            why = missing
        else:
            return "triton"
    else:
        why = f"on {device_type}"
    _logger.warning("scans run through plain PyTorch, which is slow (%s)", why)
    return "reference"
