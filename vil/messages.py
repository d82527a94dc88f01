"""One-line, printable forms of exceptions, file names and values for use in messages; one form of class names."""

import difflib
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

MAX_CHARACTERS = 500  # characters; errors of a hub or an unpickler can be pages long


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of at most 500 characters, or its type if it has no message."""
    text = textwrap.shorten(str(error), MAX_CHARACTERS, placeholder=" ...")
    return f"it lacks {text}" if isinstance(error, KeyError) else text or type(error).__name__


def printable(name: str) -> str:
    """Escape unprintable characters of a name: newlines, terminal escapes, undecodable bytes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: "1 image", "1,200 images"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def named(names: Sequence[str], most: int = 100) -> str:
    """Return the first of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def nfc(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with composed accents (NFC). macOS may write an accent as a character of its own."""
    return tuple(unicodedata.normalize("NFC", name) for name in names)


def first_line(error: BaseException) -> str:
    """Return the first informative line of an error; ``load_state_dict`` puts a heading above its errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.endswith(":")] or lines or [type(error).__name__]
    return textwrap.shorten(telling[0], MAX_CHARACTERS, placeholder=" ...")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar of the known words, or "" if none is similar."""
    close = difflib.get_close_matches(word, sorted(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def short_repr(value: Any) -> str:
    """Return the repr of None, a number of at most 64 bits or 50 characters of a string, else the type name.

    The repr of a small nested list can be huge: a list can contain another list many times, and so on.
    """
    if isinstance(value, str):
        return repr(value[:50])
    is_short = isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64)
    return repr(value) if is_short or value is None else type(value).__name__
