"""Memory full of NaN; patches of Triton's interpreter, so that tests take half the time and run with any NumPy."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def nan_where_nothing_is_written() -> Iterator[None]:
    """Let PyTorch fill new memory with NaN, so that an element that a kernel does not write fails a comparison."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _tensors_of_one_element_are_indices() -> None:
    """Let the interpreter's one-element arrays convert to int; Triton 3.6 with NumPy 2.4 cannot."""
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:  # private, and missing in some versions of Triton
        return

    def patch_with_index(tensor: type, *rest: object) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_with_index


@pytest.fixture(scope="session", autouse=True)
def _language_is_patched_once_a_launch() -> None:
    """Patch ``triton.language`` once a launch, not at every call in a kernel: half of the time of a launch."""
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not hasattr(interpreter, "_patch_lang"):  # private, and missing in some versions of Triton
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()  # modules of the language patched in this launch

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
