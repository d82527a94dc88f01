"""Read settings from YAML recipes, command lines and checkpoints, and write them as YAML."""

import argparse
import dataclasses
import io
import json
import os
import re
from collections import Counter
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml
from docstring_parser import parse_from_object
from pydantic import TypeAdapter, ValidationError

from vil.messages import one_line, printable, short_repr
from vil.training.errors import ConfigError
from vil.training.settings import TrainConfig

_Options = TypeVar("_Options")


def load_config(arguments: list[str], default_recipe: Path) -> TrainConfig:
    """Load a recipe, by default ``default_recipe``, and override it with the command line, without the program's name.

    The output folder defaults to output/<recipe>.

    Raises:
        ConfigError: If the recipe is missing or malformed, or settings are invalid or incompatible.
        SystemExit: If the command line cannot be parsed; tyro has printed the reason.
    """
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--config", default=str(default_recipe))
    known, overrides = recipe_parser.parse_known_args(arguments)
    recipe = Path(_expanded(known.config, "--config"))
    config = parse(TrainConfig, overrides, read_recipe(recipe))
    if config.run.output is None:
        output = str(Path("output", recipe.stem))
        config = config.changed("run", output=output)
    problems = list(config.contradictions())
    if problems:
        raise ConfigError("; ".join(problems), everywhere=True)
    return config


def parse(kind: type[_Options], arguments: list[str], default: _Options | None = None) -> _Options:
    """Parse a command line and validate every value; raise ConfigError, or SystemExit if tyro cannot parse it."""
    _state_help(kind)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    with nullcontext() if is_first else redirect_stderr(io.StringIO()):
        options = tyro.cli(kind, args=arguments, default=default)
    return from_dict(_expanded(dataclasses.asdict(options), ""), "", kind)


def _state_help(kind: type) -> None:
    """State the text of each option where tyro looks first; it keeps the line breaks of an indented docstring."""
    texts = {text.arg_name: text.description for text in parse_from_object(kind).params}
    for option in dataclasses.fields(kind):
        if dataclasses.is_dataclass(option.default_factory):
            _state_help(option.default_factory)
        elif text := texts.get(option.name):
            option.metadata = {"help": " ".join(text.split())}


def _expanded(value: Any, name: str) -> Any:
    """Return text, or nested dictionaries and lists of it, with ~ and $NAME expanded; names that exist are kept.

    Shells expand them only at the start of a word. Raises ConfigError, which names the option, if a text names an
    unknown user or variable, or has undecodable bytes.
    """
    if isinstance(value, dict):
        return {key: _expanded(v, f"{name}.{key}".strip(".")) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_expanded(v, f"{name}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"{name} must be UTF-8, got {printable(text)}; rename the file or folder")
    if os.path.lexists(text):
        return text
    scheme = "local-dir:" if text.startswith("local-dir:") else ""
    path = os.path.expandvars(os.path.expanduser(text.removeprefix(scheme)))
    if unknown := re.search(r"^~[^/]*|\$\w+|\$\{[^}]*\}", path):
        raise ConfigError(f"{name} names an unknown user or variable, {unknown[0]}, got {text}")
    return scheme + path


def read_recipe(path: Path) -> TrainConfig:
    """Read a YAML recipe with any fields of TrainConfig, which override defaults; raise ConfigError if invalid."""
    try:
        sections = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", everywhere=True) from error
    except Exception as error:  # yaml raises many types, as for the date 2026-99-99
        raise ConfigError(f"--config {path} is not YAML: {one_line(error)}", everywhere=True) from error
    origin = f"--config {path}: "
    try:
        sections = _expanded({} if sections is None else sections, "")
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{origin}{one_line(error)}", everywhere=True) from error
    return from_dict(sections, origin)


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that reads numbers as YAML 1.2 does, and rejects duplicate keys in a mapping."""

    # YAML 1.1 would read 010 as 8, 1:30 as 90 and 1e-3 as text.
    yaml_implicit_resolvers = {  # noqa: RUF012  as in PyYAML
        letter: [(tag, form) for tag, form in forms if not tag.endswith((":int", ":float"))]
        for letter, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Reject duplicate keys in a mapping; a key may override one from a merge."""
        node = super().compose_mapping_node(anchor)
        times = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and times[key.value] > 1:
                problem = f"{key.value} occurs {times[key.value]} times"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Safe YAML dumper that quotes text which the loader would read as a number."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_INT = r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$"  # the core schema of YAML 1.2, 10.3.2
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
for _kind, _form in (("int", _INT), ("float", _FLOAT)):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_form), [*"-+.0123456789"])
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda _, node: int(node.value, 0 if "x" in node.value or "o" in node.value else 10),
)


def from_dict(values: Any, origin: str, kind: type[_Options] = TrainConfig) -> _Options:
    """Build validated settings from plain values; used for YAML, command line and checkpoints.

    Missing fields get their defaults. Raises ConfigError, whose line begins with ``origin`` and lists all problems, if
    a name is unknown or a value out of range.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        problems = "; ".join(map(_described, error.errors()))
        raise ConfigError(f"{origin}{problems}", everywhere=True) from error
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # from json, as for a number of 5,000 digits
        raise ConfigError(f"{origin}{one_line(error)}", everywhere=True) from error


def _described(problem: Any) -> str:
    """Format a pydantic error as "setting must be ..., got ..."."""
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in problem["loc"])[1:]
    words = problem["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ")
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{name} is not an option"
    value = problem["input"]
    shown = " ".join(map(short_repr, value[:8])) if isinstance(value, list | tuple) else short_repr(value)
    return f"{name or 'it'} {words}, got {shown or 'none'}"


def flat(config: Any) -> dict[str, Any]:
    """Return a settings dataclass, which may have sections, as {"section.key": value}."""
    settings = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            settings |= {f"{name}.{key}": setting for key, setting in value.items()}
        else:
            settings[name] = value
    return settings


def to_yaml(config: TrainConfig) -> str:
    """Return all settings as a YAML recipe."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)
