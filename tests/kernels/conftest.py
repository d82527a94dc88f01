"""Triton's interpreter, made to run the kernels' tests in half the time, and with any NumPy."""

import functools
from collections.abc import Callable

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _tensors_of_one_element_are_indices() -> None:
    """Convert the interpreter's arrays of one element to int, which Triton 3.6 cannot with NumPy 2.4."""
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:  # its own: another Triton may do without
        return

    def patch_with_index(tensor: type, *rest: object) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_with_index


@pytest.fixture(scope="session", autouse=True)
def _language_is_patched_once_a_launch() -> None:
    """Skip what the interpreter does again at every call of a function of a kernel.

    It replaces the functions of ``triton.language`` by its own: once for a launch, which is what
    counts, and again whenever a kernel calls another function, which finds them replaced. That is
    half of the time of a launch.
    """
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not hasattr(interpreter, "_patch_lang"):  # its own: another Triton may do without
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()  # in this launch: which of the modules of the language

    @functools.cache
    def modules_of(function: Callable) -> frozenset[str]:
        return frozenset(
            value.__name__
            for value in function.__globals__.values()
            if value is interpreter.tl or value is interpreter.tl.core
        )

    def patch_once(function: Callable) -> object:
        modules = modules_of(function)
        if modules <= patched:
            return None
        patched.update(modules)
        return patch(function)

    def launch_anew(*args: object, **kwargs: object) -> object:
        patched.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
