"""Automatic mixed precision for the operators: activations are cast, parameters are not.

Rates, biases, skips and taps keep their dtype: the kernels compute in float32 and read few of them.
By contrast, torch.library.register_autocast would cast every tensor, to one dtype chosen in
advance.
"""

import torch
from torch import Tensor

from vil.kernels import registration  # noqa: F401  (defines them)

# Operator -> positions of its activations
_ACTIVATIONS = {"scan": (0, 1, 3, 4, 7), "mixer": (0,)}
_DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

_library = torch.library.Library("vil", "FRAGMENT")


def cast(name: str, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Return an operator's arguments; under autocast, activations other than float64 are cast."""
    device = arguments[0].device.type
    if device not in _DEVICES or not torch.is_autocast_enabled(device):
        return arguments
    return _cast(_ACTIVATIONS[name], arguments, device)


def _cast(activations: tuple[int, ...], arguments: tuple[object, ...], device: str) -> tuple[object, ...]:
    def cast_one(value: object) -> object:
        castable = isinstance(value, Tensor) and value.is_floating_point()
        if not castable or value.device.type != device or value.dtype == torch.float64:
            return value
        return value.to(torch.get_autocast_dtype(device))

    return tuple(cast_one(a) if i in activations else a for i, a in enumerate(arguments))


def _register(name: str, activations: tuple[int, ...], device: str, key: str) -> None:
    operator = getattr(torch.ops.vil, name).default
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def rule(*arguments: object) -> object:
        arguments = _cast(activations, arguments, device)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*arguments)

    _library.impl(name, rule, key)


for _name, _positions in _ACTIVATIONS.items():
    for _device, _key in _DEVICES.items():
        _register(_name, _positions, _device, _key)
