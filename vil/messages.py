"""What exceptions say and files are called, on one line, for messages that quote it."""

import textwrap
from typing import Any

_MOST = 500  # characters; what a hub or an unpickler says can be pages


def one_line(error: BaseException) -> str:
    """Return all that an error says, or as much of it as a line should have; else its type."""
    text = textwrap.shorten(str(error), _MOST, placeholder=" ...")
    return f"it lacks {text}" if isinstance(error, KeyError) else text or type(error).__name__


def printable(name: str) -> str:
    """Escape what a name can have and a line cannot: its end, a terminal's commands, no characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def first_line(error: BaseException) -> str:
    """Return the first line that says something; torch puts a heading above what does not fit a model."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.endswith(":")] or lines or [type(error).__name__]
    return textwrap.shorten(telling[0], _MOST, placeholder=" ...")


def brief(value: Any) -> str:
    """Show a value that somebody gave if it is short for certain, and of anything else its kind.

    A list can hold another many times, which holds another many times, and so on.
    """
    if isinstance(value, str):
        return repr(value[:50])
    is_short = isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64)
    return repr(value) if is_short or value is None else type(value).__name__
