"""Printing that ends no run: what it prints to may be a closed terminal, or a file on a full disk."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console


class _Lenient:
    """A text stream that drops what cannot be written, and is the wrapped one in all else."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError):
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                self._file.write(text.encode("ascii", "backslashreplace").decode())

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def new_console(quiet: bool = False, stderr: bool = False) -> Console:
    """Return a console that neither colours numbers nor wraps lines in logs, or says nothing."""
    file = _Lenient(sys.stderr if stderr else sys.stdout)
    return Console(file=file, highlight=False, soft_wrap=True, markup=False, quiet=quiet)


def give_up_output() -> None:
    """Drop what was printed and cannot be written, which Python would make its exit code of."""
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
