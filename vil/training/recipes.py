"""Recipes: configurations as YAML files, command lines and plain dictionaries, and back.

One parser serves files and the command line: a file is read as the arguments it stands for.
"""

import argparse
import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from vil.forms import misfit
from vil.messages import one_line, said
from vil.training.config import TrainConfig
from vil.training.errors import ConfigError, OutputError, UserError
from vil.training.launcher import said_once

_Config = TypeVar("_Config")

_RENAMED = {"--model.init-checkpoint": "--model.pretrained"}


def load_config(arguments: list[str], default_recipe: Path) -> TrainConfig:
    """Resolve the configuration from a recipe and the command line, which wins.

    Args:
        arguments: The command line without the program's name.
        default_recipe: Recipe where no --config is given.

    Returns:
        The configuration; the output folder is named after the recipe where nothing names it.

    Raises:
        ConfigError: the recipe is missing or malformed, or a key is unknown.
        SystemExit: a value on the command line is wrong; tyro has printed why.
    """
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--config", type=Path, default=default_recipe)
    known, overrides = recipe_parser.parse_known_args(arguments)
    config = parse_arguments(TrainConfig, overrides, read_recipe(known.config))
    if config.run.output is not None:
        return config
    output = str(Path("output", known.config.stem))
    return replace(config, run=replace(config.run, output=output))


def parse_arguments(
    kind: type[_Config], arguments: list[str], default: _Config | None = None
) -> _Config:
    """Parse a command line.

    Args:
        kind: What it describes, a dataclass.
        arguments: The command line without the program's name.
        default: Values of what it leaves out; those of the class if None.

    Raises:
        ConfigError: an argument is unknown.
        SystemExit: a value is wrong; tyro has printed why.
    """
    with said_once():
        config, unknown = tyro.cli(kind, args=arguments, default=default, return_unknown_args=True)
    if unknown:
        given = unknown[0].partition("=")[0]
        if given.replace("_", "-") in _RENAMED:
            raise ConfigError(f"{given} is {_RENAMED[given.replace('_', '-')]} now")
        known = [f"--{key}".replace("_", "-") for key in flat_dict(config)]
        raise ConfigError(f"unrecognized argument {given}{_hint(given.replace('_', '-'), known)}")
    return config


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, but for a key that stands twice in a mapping, of which it takes the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Read a mapping, each key once; what a merge brings in may stand in both.

        Raises:
            ComposerError: a key stands twice.
        """
        node = super().compose_mapping_node(anchor)
        times = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and times[key.value] > 1:
                problem = f"{key.value} stands {times[key.value]} times"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
        return node


def read_recipe(path: Path) -> TrainConfig:
    """Read a YAML recipe on top of the defaults.

    Args:
        path: The recipe: sections of TrainConfig, each with some of its fields.

    Raises:
        ConfigError: the file is missing, not YAML, or has an unknown key, one twice, or a wrong value.
    """
    try:
        sections = yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except Exception as error:  # yaml raises many things, as of the date 2026-99-99
        raise ConfigError(f"--config {path} is not YAML: {one_line(error)}") from error
    pairs = _flatten(path, {} if sections is None else sections)
    arguments = [word for key, value in pairs for word in _words(path, key, value)]
    try:
        with said_once():
            return tyro.cli(TrainConfig, args=arguments, prog=str(path))
    except SystemExit as error:
        raise ConfigError(f"--config {path} has a wrong value, see above") from error


def config_from_dict(values: dict[str, Any], origin: str) -> TrainConfig:
    """Rebuild a configuration from its plain dictionary, as checkpoints store it.

    Args:
        values: What dataclasses.asdict returned, through any serialisation.
        origin: Where the values come from, for error messages.

    Raises:
        OutputError: a value has not the type of its setting.
        ConfigError: a key is unknown to this version.
    """
    wrong = misfit(values, TrainConfig, "config")
    if wrong is not None:
        raise OutputError(f"{origin}: {wrong}")
    sections = {}
    for section in dataclasses.fields(TrainConfig):
        given = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in values.get(section.name, {}).items()
        }
        try:
            sections[section.name] = section.default_factory(**given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{origin}: section {section.name}: {error}") from error
    return TrainConfig(**sections)


def flat_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass of settings and of sections of settings as {"section.key": value}."""
    flat = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": setting for key, setting in value.items()}
        else:
            flat[name] = value
    return flat


def to_yaml(config: TrainConfig) -> str:
    """Write the whole configuration as a recipe."""
    sections = {
        section: {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        for section, fields in dataclasses.asdict(config).items()
    }
    return yaml.safe_dump(sections, sort_keys=False)


def wrote_yaml(content: bytes) -> bool:
    """Tell whether to_yaml wrote a file, and not somebody by hand."""
    try:
        return to_yaml(config_from_dict(yaml.safe_load(content), "it")).encode() == content
    except (yaml.YAMLError, UserError, ValueError, RecursionError):
        return False


def _flatten(path: Path, sections: Any) -> list[tuple[str, Any]]:
    """List the recipe's ("section.key", value) pairs; an unknown one is an error."""
    known = flat_dict(TrainConfig())
    if not isinstance(sections, dict):
        raise ConfigError(f"--config {path} must map sections to keys, got {said(sections)}")
    pairs = []
    for section, fields in sections.items():
        if not isinstance(fields, dict):
            raise ConfigError(
                f"--config {path}: {_spelt(section)} must be a section, got {said(fields)}"
            )
        for key, value in fields.items():
            if not isinstance(section, str) or f"{section}.{key}" not in known:
                name = f"{_spelt(section)}.{_spelt(key)}"
                raise ConfigError(f"--config {path}: unrecognized key {name}{_hint(name, known)}")
            pairs.append((f"{section}.{key}", value))
    return pairs


def _spelt(key: Any) -> str:
    """Show a key as it stands in the file, if that is a word."""
    return key if isinstance(key, str) and re.fullmatch(r"[\w.-]{1,50}", key) else said(key)


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; perhaps you meant {close[0]}" if close else ""


def _words(path: Path, key: str, value: Any) -> list[str]:
    """Spell one setting as the command line would.

    Raises:
        ConfigError: no command line could.
    """
    if isinstance(value, bool):
        section, name = key.split(".")
        return [f"--{key}" if value else f"--{section}.no-{name}"]
    values = value if isinstance(value, list) else [value]
    for item in values:
        is_plain = isinstance(item, str | int | float | date | None) and not isinstance(item, bool)
        if not is_plain or (isinstance(item, str) and item.startswith("--")):
            raise ConfigError(
                f"--config {path}: {key} must be a value or a list of values, none of which begins "
                f"with --; got {said(item)}"
            )
    return [f"--{key}", *map(str, values)]
