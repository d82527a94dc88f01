"""A plan launches what Triton compiled before, and asks Triton again when it may have to compile anew."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

import triton

from vil.kernels.triton import launch


class Compiled:
    """Stand-in for a compiled kernel; notes the arguments of its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class Function:
    """Stand-in for a function under ``triton.jit``; compiles anew each time."""

    arg_names = ("x_ptr", "n", "y_ptr", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (7,)

        def compiled(**arguments: Any) -> Compiled:
            assert arguments["num_warps"] == 4
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compiled


@pytest.fixture(autouse=True)
def driver() -> Iterator[None]:
    stream = {"get_current_device": lambda: 3, "get_current_stream": lambda device: 10 * device}
    triton.runtime.driver.set_active(SimpleNamespace(**stream))
    yield
    triton.runtime.driver.set_active(None)


def test_arguments_of_a_later_launch() -> None:
    function = Function()
    kernel = launch.Kernel(function, 7, 4, n=5, BLOCK=8)
    x, y = torch.zeros(16), torch.zeros(16)
    for _ in range(3):
        kernel(x, y_ptr=y, x_ptr=x)
    (compiled,) = function.compiled
    expected = (7, 1, 1, 30, "function", "metadata", None, None, None, x, 5, y, 8)
    assert len(compiled.launches) == 2
    assert all(a is b or a == b for a, b in zip(compiled.launches[1], expected, strict=True))


def test_triton_is_asked_about_other_tensors() -> None:
    function = Function()
    kernel = launch.Kernel(function, 7, 4, n=5, BLOCK=8)
    x = torch.zeros(16)
    kinds = [(x, x), (x[1:], x), (x, x[1:]), (x.double(), x), (x, None), (x[4:], x)]
    for first, second in kinds:
        kernel(x, x_ptr=first, y_ptr=second)
    assert len(function.compiled) == 5  # x[4:] is aligned
    for first, second in kinds:
        kernel(x, x_ptr=first, y_ptr=second)
    assert len(function.compiled) == 5


def test_triton_launches_for_its_hooks_and_in_other_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, hook = Function(), triton.knobs.runtime.launch_exit_hook
    kernel = launch.Kernel(function, 7, 4, n=5, BLOCK=8)
    x = torch.zeros(16)
    kernel(x, x_ptr=x, y_ptr=x)
    monkeypatch.setattr(hook, "calls", [print])
    kernel(x, x_ptr=x, y_ptr=x)
    assert len(function.compiled) == 2
    monkeypatch.setattr(hook, "calls", [])
    kernel(x, x_ptr=x, y_ptr=x)
    assert len(function.compiled) == 2
    monkeypatch.setattr(launch, "_DIRECT", False)
    other = launch.Kernel(function, 7, 4, n=5, BLOCK=8)
    for _ in range(2):
        other(x, x_ptr=x, y_ptr=x)
    assert len(function.compiled) == 4
