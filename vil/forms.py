"""Whether nested plain values, as a file holds them, have the form that a type describes."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from vil.messages import said


def misfit(value: Any, form: Any, name: str) -> str | None:
    """Say what about a value is not as it must be.

    Args:
        value: Of dictionaries, lists, tuples and anything in them.
        form: A type: a class, Any, a Literal, a union, list, dict and tuple of such, a TypedDict, or a
            dataclass for the dictionary of its fields, which may lack some. A list does for a tuple, an
            integer for a float, and keys that a form does not know are left alone.
        name: Of the value, for the message.

    Returns:
        A line that names the first part that does not fit, or None if all of it does.
    """
    origin, parts = get_origin(form), get_args(form)
    if form is Any:
        return None
    if origin in (Union, types.UnionType):
        wrong = [misfit(value, part, name) for part in parts]
        return None if None in wrong else _wrong(value, " or ".join(map(_told, parts)), name)
    if origin is Literal:
        fits = any(type(value) is type(part) and value == part for part in parts)
        return None if fits else _wrong(value, " or ".join(map(str, parts)), name)
    if is_typeddict(form) or dataclasses.is_dataclass(form):
        return _misfit_fields(value, form, name)
    kinds = {list: list, tuple: (list, tuple), dict: dict}.get(origin, _kinds(form))
    if not isinstance(value, kinds) or (isinstance(value, bool) and form is not bool):
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
    if not isinstance(value, dict):
        return _wrong(value, "dict", name)
    known, required = get_type_hints(form), getattr(form, "__required_keys__", ())
    missing = [key for key in known if key in required and key not in value]
    if missing:
        return f"{name} lacks {', '.join(missing)}"
    fields = ((value[k], hint, f"{name}.{k}") for k, hint in known.items() if k in value)
    return _first(misfit, fields)


def _first(check: Callable[..., str | None], cases: Any) -> str | None:
    return next((wrong for case in cases if (wrong := check(*case)) is not None), None)


def _kinds(form: Any) -> Any:
    return (int, float) if form is float else type(None) if form is None else form


def _told(form: Any) -> str:
    return "None" if form is type(None) else getattr(form, "__name__", str(form))


def _wrong(value: Any, form: str, name: str) -> str:
    return f"{name} must be {form}, got {said(value)}"
