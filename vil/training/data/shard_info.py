"""_info.json, timm's description of a folder of shards: their names, lengths and classes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vil.training.data.reading import read_file
from vil.training.errors import DataError

INFO_NAME = "_info.json"


@dataclass(frozen=True)
class Split:
    """What _info.json, timm's description of a folder of shards, says about a split."""

    filenames: tuple[str, ...]
    lengths: tuple[int, ...] | None
    """Images of each shard."""
    classes: tuple[str, ...] | None
    """Names of the classes; only make_shards.py writes them."""
    made_from: dict[str, Any] | None
    """What make_shards.py made it from."""


def read_info(root: Path) -> dict[str, Split]:
    """Read the splits that _info.json of a folder of shards describes; none if there is no such file.

    Args:
        root: The folder.

    Raises:
        DataError: the file cannot be read or is not of timm's form.
    """
    path = root / INFO_NAME
    try:
        splits = json.loads(read_file(path))["splits"]
        return {name: _split(entry) for name, entry in splits.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} does not describe shards as timm does: {error!r}") from error


def find_split(splits: dict[str, Split], name: str) -> Split | None:
    """Return a split by its name; validation also goes by its usual short one."""
    return splits.get("val" if name == "validation" and name not in splits else name)


def _split(entry: dict[str, Any]) -> Split:
    """Check one split of _info.json; what is wrong is named by an error of any kind."""
    filenames = _list(entry, "filenames", str)
    lengths = _list(entry, "shard_lengths", int)
    if filenames is None:
        raise KeyError("filenames")
    if lengths is not None and len(lengths) != len(filenames):
        raise ValueError(f"{len(lengths)} shard_lengths for {len(filenames)} filenames")
    made_from = entry.get("made_from")
    if made_from is not None and not isinstance(made_from, dict):
        raise TypeError("made_from must map options to values")
    classes = _list(entry, "classes", str)
    if classes is not None and len(set(classes)) < len(classes):
        raise ValueError("two classes of one name")
    return Split(filenames, lengths, classes, made_from)


def _list(entry: dict[str, Any], key: str, kind: type) -> tuple[Any, ...] | None:
    """Return one list of a split; None if it has no such list."""
    values = entry.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise TypeError(f"{key} must be a list of {kind.__name__}")
    return tuple(values)
