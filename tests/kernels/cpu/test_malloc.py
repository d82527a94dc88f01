"""What the CPU backend asks of glibc, and that whoever has asked for something else gets that."""

import pytest

from vil.kernels.cpu import backend


@pytest.mark.parametrize("told", [None, "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_goes_first(told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if told is not None:
        monkeypatch.setenv(told, "1")
    asked = []
    monkeypatch.setattr(
        backend, "_libc_function", lambda name: lambda *values: asked.append(values)
    )
    backend._set_malloc()
    assert asked == ([(-1, 64 << 20), (-3, 8 << 20)] if told is None else [])


def test_other_libraries_than_glibc_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda name: object())
    assert backend._libc_function("mallopt") is None
    backend._set_malloc()
