"""Triton's interpreter, made to run the kernels' tests in half the time."""

import functools
from collections.abc import Callable

import pytest
import torch


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
