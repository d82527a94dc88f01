"""Whether nested plain values, as a file holds them, have the form that a type describes."""

import dataclasses
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from vil.messages import said


def is_dictionary(value: Any) -> bool:
    """Tell whether a value is a dictionary; a file can give an OrderedDict a number as its ``items``."""
    return isinstance(value, dict) and not any(
        hasattr(OrderedDict, name) for name in getattr(value, "__dict__", ())
    )


class Rule(NamedTuple):
    """What a value must be beside its type, stated as ``Annotated[type, Rule(words, holds)]``."""

    words: str
    """What stands after the type in a message, as in "text that is not empty"."""
    holds: Callable[[Any], bool]
    """Whether a value of the type is right."""


class Range(NamedTuple):
    """A rule for a number: ``Annotated[int, Range(1)]``. NaN and infinity are in no range."""

    low: float
    high: float = math.inf
    open: Literal["", "low", "high"] = ""
    """The end that is not in the range itself."""

    @property
    def words(self) -> str:
        """Return the range in words."""
        low = f"above {self.low}" if self.open == "low" else f"of at least {self.low}"
        high = f"below {self.high}" if self.open == "high" else f"at most {self.high}"
        return low if self.high == math.inf else f"{low} and {high}"

    def holds(self, value: float) -> bool:
        """Return whether a number is in the range."""
        is_end = value == {"low": self.low, "high": self.high}.get(self.open)
        return self.low <= value <= self.high and abs(value) <= sys.float_info.max and not is_end


class Plain:
    """A form: numbers, texts, None, and lists, tuples and dictionaries of such, few enough to print.

    A list can hold another twice, which holds another twice, and so on: a file of some kilobytes would
    take for ever to print, compare or copy. No object of this class is ever made.
    """


_MOST = 10_000  # values and characters of a plain value, those in it counted as often as they stand there
_DEEPEST = 8


def misfit(value: Any, form: Any, name: str) -> str | None:
    """Say what about a value is not as it must be.

    Args:
        value: Of dictionaries, lists, tuples and anything in them.
        form: A class, Any, Plain, a Literal, a TypedDict, or a dataclass for the dictionary of its
            fields, which may lack some. Or a union, list, dict or tuple of such. Any of these may be
            Annotated with rules. A list does for a tuple, an integer for a float, and keys that a form
            does not know are left alone.
        name: Of the value, for the message.

    Returns:
        A line that names the first part that does not fit, or None if all of it does.
    """
    origin, parts = get_origin(form), get_args(form)
    if form is Any:
        return None
    if form is Plain:
        return _not_plain(value, name)
    if origin is Annotated:
        wrong = misfit(value, parts[0], name)
        if wrong is None and all(rule.holds(value) for rule in parts[1:]):
            return None
        if get_origin(parts[0]) is None:
            return _wrong(value, _told(form), name)
        return wrong or f"{name} must be {_told(form)}, got {_listed(value)}"
    if origin in (Union, types.UnionType):
        wrong = [misfit(value, part, name) for part in parts]
        if None in wrong:
            return None
        if isinstance(value, list | tuple) and len(parts) == 2:  # the other one is None
            return wrong[parts[0] is type(None)]
        return _wrong(value, " or ".join(map(_told, parts)), name)
    if origin is Literal:
        fits = any(type(value) is type(part) and value == part for part in parts)
        return None if fits else _wrong(value, " or ".join(map(str, parts)), name)
    if is_typeddict(form) or dataclasses.is_dataclass(form):
        return _misfit_fields(value, form, name)
    kinds = {list: list, tuple: (list, tuple), dict: dict}.get(origin, _kinds(form))
    fits = is_dictionary(value) if kinds is dict else isinstance(value, kinds)
    if not fits or (isinstance(value, bool) and form is not bool):
        return _wrong(value, _told(form), name)
    if origin is dict:
        keys = ((key, parts[0], f"a key of {name}") for key in value)
        items = ((item, parts[1], f"{name}[{said(key)}]") for key, item in value.items())
        return _first(misfit, keys) or _first(misfit, items)
    if origin is tuple and parts[-1] is not Ellipsis:
        if len(value) != len(parts):
            return f"{name} must have {len(parts)} values, got {len(value)}"
        pairs = enumerate(zip(value, parts, strict=True))
        return _first(misfit, ((item, part, f"{name}[{i}]") for i, (item, part) in pairs))
    if origin in (list, tuple):
        return _first(misfit, ((item, parts[0], f"{name}[{i}]") for i, item in enumerate(value)))
    return None


def _misfit_fields(value: Any, form: Any, name: str) -> str | None:
    """Check a dictionary by its keys."""
    if not is_dictionary(value):
        return _wrong(value, "dict", name)
    known = get_type_hints(form, include_extras=True)
    required = getattr(form, "__required_keys__", ())
    missing = [key for key in known if key in required and key not in value]
    if missing:
        return f"{name} lacks {', '.join(missing)}"
    fields = ((value[k], hint, f"{name}.{k}") for k, hint in known.items() if k in value)
    return _first(misfit, fields)


def _not_plain(value: Any, name: str) -> str | None:
    """Say what makes a value no plain one, or too large a one; the time it takes has a limit."""
    left, pending = _MOST, [(value, 0)]
    while pending:
        item, depth = pending.pop()
        inside: list[Any] = []
        left -= len(item) if isinstance(item, str | list | tuple | dict) else 0
        if left < 0 or depth > _DEEPEST or (isinstance(item, int) and item.bit_length() > 64):
            return (
                f"{name} must have at most {_MOST} values and characters, {_DEEPEST} levels, and no "
                "whole number of more than 64 bits"
            )
        if type(item) is dict:
            inside = [*item, *item.values()]
        elif type(item) in (list, tuple):
            inside = [*item]
        elif item is not None and type(item) not in (str, int, float, bool):
            return f"{name} must be of numbers, texts, lists and dictionaries, got {said(item)}"
        pending += [(part, depth + 1) for part in inside]
    return None


def _first(check: Callable[..., str | None], cases: Any) -> str | None:
    return next((wrong for case in cases if (wrong := check(*case)) is not None), None)


def _kinds(form: Any) -> Any:
    return (int, float) if form is float else type(None) if form is None else form


def _told(form: Any) -> str:
    if get_origin(form) is Annotated:
        nouns = {int: "a whole number", float: "a finite number", str: "text", tuple: "a list"}
        noun = nouns[get_origin(form.__origin__) or form.__origin__]
        return " ".join([noun, *(rule.words for rule in form.__metadata__)])
    if get_origin(form) is Literal:
        return " or ".join(map(str, get_args(form)))
    return "None" if form is type(None) else getattr(form, "__name__", str(form))


def _wrong(value: Any, form: str, name: str) -> str:
    return f"{name} must be {form}, got {said(value)}"


def _listed(values: list[Any] | tuple[Any, ...]) -> str:
    return " ".join(map(said, values[:8])) or "none"
