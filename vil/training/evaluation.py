"""Evaluate a checkpoint, or a model by name, and record the result as JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import timm
import tyro
from timm.data import resolve_model_data_config
from torch import nn
from tyro.conf import Positional

from vil.training.augment import Normalize
from vil.training.checkpoint import load_checkpoint, load_weights
from vil.training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from vil.training.data import ValData
from vil.training.distributed import World
from vil.training.engine import evaluate
from vil.training.errors import ConfigError, OutputError
from vil.training.files import write_text
from vil.training.recipes import config_from_dict
from vil.training.report import model_size
from vil.training.setup import build_model, resolve_device, versions

_BATCH_SIZE = 128  # where no checkpoint says
_FILE_SUFFIXES = (".pt", ".pth", ".tar", ".bin", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig:
    """The validation data; what is None stays as the checkpoint has it."""

    dataset: Literal["digits", "folder", "wds", "fractals"] | None = None
    """scikit-learn's digits, a folder per class, webdataset shards, or fractals."""
    path: str | None = None
    """Root folder of the data."""
    val_split: str | None = None
    """Sub-folder, or shards."""
    validation_batch_size: int | None = None
    """Images per step."""
    num_workers: int | None = None
    """Loader processes."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluate a vision model."""

    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT_OR_MODEL")]
    """Checkpoint that train_imagenet.py wrote, or the name of a timm model."""
    model: str | None = None
    """timm model that the file's weights belong to, where another program wrote the file."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    img_size: int | None = None
    """Height and width in pixels; None stays as trained."""
    ema: bool = False
    """Evaluate the averaged weights instead of the last ones."""
    amp: bool | None = None
    """Autocast to bfloat16; None does as in training."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes CUDA where there is one."""
    json: str | None = None
    """Where to write the result; None writes <checkpoint>-eval.json, or nothing for a name."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate and the configuration that says how."""

    model: nn.Module
    config: TrainConfig
    weights: str
    """Where the weights come from."""
    epoch: int | None


def load_subject(options: EvalConfig) -> Subject:
    """Build the model, load its weights, and merge the options into its configuration.

    Raises:
        ConfigError: the name is unknown, or an option does not fit the checkpoint.
        OutputError: the checkpoint cannot be read or does not fit the model.
    """
    path = Path(options.checkpoint)
    is_file = path.is_file() or path.suffix in _FILE_SUFFIXES
    if is_file and options.model is None:
        subject = _from_checkpoint(path, options.ema)
    elif is_file:
        subject = _from_foreign_file(path, options.model, options.ema)
    else:
        subject = _from_name(options)
    return _with_options(subject, options)


def run_evaluation(subject: Subject, options: EvalConfig) -> dict[str, Any]:
    """Score the model and describe what was scored.

    Returns:
        What is printed and written as JSON.
    """
    config = subject.config
    device = resolve_device(config.run, World())
    model = subject.model.to(device)
    data = ValData(config, device, World())
    [score] = evaluate([model], data, Normalize(config, device), config.run.amp)
    return {
        "checkpoint": str(Path(options.checkpoint).resolve()),
        "model": config.model.name,
        "weights": subject.weights,
        "epoch": subject.epoch,
        **score._asdict(),
        **model_size(model, config),
        "gmacs_count_scans": True,
        "img_size": config.model.img_size,
        "crop_pct": config.data.crop_pct,
        "interpolation": config.data.interpolation,
        "dataset": config.data.dataset,
        "path": config.data.path,
        "device": str(device),
        "amp": config.run.amp,
        "versions": versions(),
    }


def json_path(options: EvalConfig) -> Path | None:
    """Return where the result goes, having checked that nothing else is there.

    Raises:
        OutputError: the file exists and is not an evaluation of the same checkpoint.
    """
    checkpoint = Path(options.checkpoint)
    if options.json is not None:
        path = Path(options.json)
    elif checkpoint.is_file():
        path = checkpoint.with_name(f"{checkpoint.stem}-eval.json")
    else:
        return None
    if path.exists():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            earlier = None
        if not isinstance(earlier, dict) or earlier.get("checkpoint") != str(checkpoint.resolve()):
            raise OutputError(
                f"{path} exists and is not an evaluation of {checkpoint}; choose another --json"
            )
    return path


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result as JSON, unless there is no path."""
    if path is not None:
        write_text(path, json.dumps(result, indent=2) + "\n")


def describe(result: dict[str, Any], path: Path | None) -> str:
    """Put the result into words."""
    epoch = "" if result["epoch"] is None else f", epoch {result['epoch']}"
    installed = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"model    {result['model']} at {result['img_size']} px, {result['weights']}{epoch}\n"
        f"top-1    {result['top1']:.2f}%   top-5 {result['top5']:.2f}%   "
        f"loss {result['loss']:.4f}   on {result['num_images']:,} images\n"
        f"cost     {result['params']:,} parameters, {result['gmacs']:.4g} GMACs with scans, "
        f"{result['images_per_s']:,.0f} images/s on {result['device']}\n"
        f"versions {installed}" + (f"\nwritten  {path}" if path else "")
    )


def _from_checkpoint(path: Path, ema: bool) -> Subject:
    """Rebuild what train_imagenet.py saved."""
    checkpoint = load_checkpoint(path)
    config = config_from_dict(checkpoint["config"], str(path))
    key = "state_dict_ema" if ema else "state_dict"
    if key not in checkpoint:
        raise ConfigError(f"--ema: checkpoint {path} has no averaged weights")
    model = build_model(config.model)
    load_weights(model, checkpoint[key], path, config.model.name)
    return Subject(model, config, "averaged weights" if ema else "weights", checkpoint["epoch"])


def _from_foreign_file(path: Path, name: str, ema: bool) -> Subject:
    """Load weights that another program saved, in any layout that timm reads."""
    model = _create(name, pretrained=False)
    try:
        timm.models.load_checkpoint(model, str(path), use_ema=ema)
    except FileNotFoundError as error:
        raise OutputError(f"checkpoint {path} does not exist") from error
    except Exception as error:  # torch.load raises whatever its unpickler meets
        reason = " ".join(str(error).split())[:200]
        raise OutputError(f"checkpoint {path} does not fit model {name}: {reason}") from error
    return Subject(model, _config_of(name, model), f"weights of {path.name}", None)


def _from_name(options: EvalConfig) -> Subject:
    """Create a model by name, with timm's weights where it has them."""
    name = options.checkpoint
    if options.model is not None or options.ema:
        raise ConfigError(f"--model and --ema need a checkpoint file, {name} is not a file")
    pretrained = ":" in name or timm.is_model_pretrained(name)
    model = _create(name, pretrained)
    weights = "pretrained weights" if pretrained else "RANDOM weights (it has no pretrained ones)"
    return Subject(model, _config_of(name, model), weights, None)


def _create(name: str, pretrained: bool) -> nn.Module:
    """Create a timm model as its entry point defines it."""
    try:
        return timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # also whatever a download raises
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} is neither a file nor a model of timm: {reason}") from error


def _config_of(name: str, model: nn.Module) -> TrainConfig:
    """Derive the configuration of a model that was not trained here."""
    resolved = resolve_model_data_config(model)
    channels, _, width = resolved["input_size"]
    return TrainConfig(
        model=ModelConfig(
            name=name, num_classes=model.num_classes, in_chans=channels, img_size=width
        ),
        data=DataConfig(
            validation_batch_size=_BATCH_SIZE,
            **{key: resolved[key] for key in ("mean", "std", "interpolation", "crop_pct")},
        ),
    )


def _with_options(subject: Subject, options: EvalConfig) -> Subject:
    """Merge the command line into the configuration, and resize the model if asked to."""
    config, model = subject.config, subject.model
    chosen = {k: v for k, v in dataclasses.asdict(options.data).items() if v is not None}
    amp = config.run.amp if options.amp is None else options.amp
    sizes = config.model
    if options.img_size is not None and options.img_size != sizes.img_size:
        try:
            model.set_input_size(img_size=options.img_size)
        except (AttributeError, AssertionError, ValueError) as error:
            raise ConfigError(f"--img-size {options.img_size}: {error}") from error
        sizes = dataclasses.replace(sizes, img_size=options.img_size)
    config = dataclasses.replace(
        config,
        model=sizes,
        data=dataclasses.replace(config.data, **chosen),
        run=RunConfig(device=options.device, amp=amp, num_threads=config.run.num_threads),
    )
    return dataclasses.replace(subject, config=config)
