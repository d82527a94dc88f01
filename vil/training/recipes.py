"""Recipes: configurations as YAML files, command lines and plain dictionaries, and back.

One parser serves files and the command line: a file is read as the arguments it stands for.
"""

import argparse
import dataclasses
import difflib
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro
import yaml

from vil.messages import one_line
from vil.training.config import TrainConfig
from vil.training.errors import ConfigError
from vil.training.launcher import said_once

_Config = TypeVar("_Config")

_RENAMED = {"--model.init-checkpoint": "--model.pretrained"}
# What may differ between a run and its continuation: where it is, how it is watched, and what at
# most rounds differently. Whether data.path still holds the same images is checked by itself.
_FREE_ON_RESUME = (
    "data.path",
    "data.num_workers",
    "data.validation_batch_size",
    "data.max_bad_images",
    "optim.max_bad_steps",
    "run.output",
    "run.device",
    "run.grad_accum_steps",
    "run.num_threads",
    "run.log_interval",
    "run.save_minutes",
    "run.tracker",
)
# What run.allow_changes lets differ besides: how a run goes on training, not what it trains on what.
_CHANGEABLE = re.compile(
    r"schedule\..*|augment\..*|optim\.(?!opt$).*|model\.drop_path_rate|run\.(amp|torchcompile)"
)


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
    output = Path(config.run.output or Path("output", known.config.stem))
    return replace(config, run=replace(config.run, output=str(output)))


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


def read_recipe(path: Path) -> TrainConfig:
    """Read a YAML recipe on top of the defaults.

    Args:
        path: The recipe: sections of TrainConfig, each with some of its fields.

    Raises:
        ConfigError: the file is missing, not YAML, or has an unknown key or a wrong value.
    """
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {one_line(error)}") from error
    arguments = [word for key, value in _flatten(path, sections) for word in _words(key, value)]
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
        ConfigError: a key is unknown to this version.
    """
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


class Change(NamedTuple):
    """A setting that is another one than a run has had so far."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} ({self.before} -> {self.after})"

    @property
    def allowed(self) -> bool:
        """Whether run.allow_changes lets a run go on with it."""
        return _CHANGEABLE.fullmatch(self.key) is not None


def changes(asked: TrainConfig, resolved: TrainConfig, new: TrainConfig) -> list[Change]:
    """List what would make a resumed run another run.

    Args:
        asked: The run's settings as they were asked for.
        resolved: The same with everything filled in; to ask for that is no change either.
        new: What is asked for now.
    """
    before, filled, after = flat_dict(asked), flat_dict(resolved), flat_dict(new)
    return [
        Change(key, filled[key], after[key])
        for key in before
        if key not in _FREE_ON_RESUME and after[key] not in (before[key], filled[key])
    ]


def continued(resolved: TrainConfig, new: TrainConfig, changed: list[Change]) -> TrainConfig:
    """Return the settings that a run goes on with.

    Args:
        resolved: What it has had so far.
        new: What is asked for now; of it hold the settings that are free, and those that are changed.
        changed: What is another one now and may be.
    """
    after = flat_dict(new)
    for key in (*_FREE_ON_RESUME, *(change.key for change in changed)):
        section, name = key.split(".")
        values = replace(getattr(resolved, section), **{name: after[key]})
        resolved = replace(resolved, **{section: values})
    return resolved


def to_yaml(config: TrainConfig) -> str:
    """Write the whole configuration as a recipe."""
    sections = {
        section: {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        for section, fields in dataclasses.asdict(config).items()
    }
    return yaml.safe_dump(sections, sort_keys=False)


def _flatten(path: Path, sections: Any) -> list[tuple[str, Any]]:
    """List the recipe's ("section.key", value) pairs; an unknown one is an error."""
    known = flat_dict(TrainConfig())
    if not isinstance(sections, dict):
        raise ConfigError(f"--config {path} must map sections to keys, got {sections!r}")
    pairs = []
    for section, fields in sections.items():
        if not isinstance(fields, dict):
            raise ConfigError(f"--config {path}: {section} must be a section, got {fields!r}")
        pairs += [(f"{section}.{key}", value) for key, value in fields.items()]
    for key, _ in pairs:
        if key not in known:
            raise ConfigError(f"--config {path}: unrecognized key {key}{_hint(key, known)}")
    return pairs


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; perhaps you meant {close[0]}" if close else ""


def _words(key: str, value: Any) -> list[str]:
    """Spell one setting as the command line would."""
    if isinstance(value, bool):
        section, name = key.split(".")
        return [f"--{key}" if value else f"--{section}.no-{name}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *map(str, values)]
