"""Command line of ``python -m vil.maps``: draw the maps of a model for an image."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor, nn
from tyro.conf import Positional

from vil.backbone import VisionLonghorn
from vil.maps.drawing import Panel, draw
from vil.maps.gradients import evidence, receptive_field
from vil.maps.scans import decay, pooled_reads, rollout, step_size, token_matrix
from vil.messages import one_line
from vil.training.distributed import connect
from vil.training.errors import ConfigError, DataError, log
from vil.training.evaluation import EvalConfig, Subject, load_subject
from vil.training.files import write_atomically
from vil.training.images import decode_for
from vil.training.settings import Count, CropPct, Section, Text, TrainConfig
from vil.training.transforms import Normalize, val_transform


@dataclass(frozen=True, kw_only=True)
class MapsConfig(Section):
    """Draw what a model reads in an image. timm models from outside this package have no scans; for them
    only evidence and receptive field are drawn."""

    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Weights, same as for eval.py: a checkpoint of train_imagenet.py, a folder of release.py, a .safetensors
    file, a file with a state dict, local-dir:FOLDER, hf-hub:NAME, or a timm model's name."""
    image: Annotated[Positional[str], tyro.conf.arg(metavar="IMAGE")]
    """Image file."""
    output: Text = "maps.png"
    """PNG file to write; replaced if it exists."""
    target: Text | None = None
    """Name or number of the class to show evidence for; None takes the most probable class."""
    block: int = -1
    """Index of the block whose scan is shown; negative indices count from the end."""
    model: Text | None = None
    """timm model that the weights belong to, if SOURCE does not name it."""
    img_size: Count | None = None
    """Height and width in pixels; None keeps the size of training."""
    crop_pct: CropPct | None = None
    """Resize to img_size / crop_pct and crop the centre; None keeps the value of training."""
    ema: bool = False
    """Use the averaged weights (EMA) instead of the last ones."""
    device: Text = "auto"
    """cpu, cuda, ...; auto uses CUDA if available."""


def draw_as(options: MapsConfig) -> None:
    """Draw the maps that the options ask for, write the PNG file, and log what was drawn.

    Raises:
        ConfigError: If the weights, the class, the block or the output are invalid.
        DataError: If the image cannot be read.
        OutputError: If the weights cannot be read or the PNG file cannot be written.
    """
    output = _checked_output(options)
    shared = {field.name: getattr(options, field.name) for field in _shared_fields()}
    subject = load_subject(EvalConfig(**shared))
    pixels = _read(options.image, subject.config)
    with connect(subject.config.run) as world:
        model = subject.model.to(world.device).eval()
        images = Normalize(subject.config, world.device)(pixels[None])
    target, name, probability = _classified(model, images, subject, options.target)
    title = f"{name}, {100 * probability:.1f} %"
    try:
        panels = _panels(model, images, target, name, options.block)
    except ValueError as error:
        raise ConfigError(one_line(error)) from error
    figure = draw(pixels / 255, panels, title)
    write_atomically(output, lambda file: figure.savefig(file, format="png", dpi=110))
    log.info(f"weights  {subject.weights}\nclass    {title}\nwritten  {output}")


def _shared_fields() -> list[dataclasses.Field]:
    """Return the options that eval.py has too."""
    names = {field.name for field in dataclasses.fields(EvalConfig)}
    return [field for field in dataclasses.fields(MapsConfig) if field.name in names]


def _checked_output(options: MapsConfig) -> Path:
    output = Path(options.output)
    if output.suffix.lower() != ".png":
        raise ConfigError(f"--output must end with .png, got {options.output}")
    if output.resolve() == Path(options.image).resolve():
        raise ConfigError(f"--output must not be the image, {options.image}")
    return output


def _read(path: str, config: TrainConfig) -> Tensor:
    """Return the image after evaluation preprocessing, uint8 (C, H, W)."""
    channels = config.model.in_chans
    if channels not in (1, 3):
        raise ConfigError(f"the model must take images of 1 or 3 channels, it takes {channels}")
    try:
        content = Path(path).read_bytes()
        return val_transform(config)(decode_for(content, config))
    except (DataError, OSError) as error:
        raise DataError(f"image {path} cannot be read: {one_line(error)}") from error


@torch.no_grad()
def _classified(
    model: nn.Module, images: Tensor, subject: Subject, asked: str | None
) -> tuple[int, str, float]:
    """Return the index, name and probability of the class to show."""
    probabilities = model(images)[0].softmax(0)
    names = subject.label_names
    if asked is None:
        target = int(probabilities.argmax())
    elif names is not None and asked in names:
        target = names.index(asked)
    elif asked.isdecimal() and int(asked) < len(probabilities):
        target = int(asked)
    else:
        known = "the name of a class of the weights or " if names else ""
        raise ConfigError(f"--target must be {known}0 to {len(probabilities) - 1}, got {asked}")
    name = f"class {target}" if names is None else names[target]
    return target, name, probabilities[target].item()


def _panels(model: nn.Module, images: Tensor, target: int, name: str, block: int) -> list[Panel]:
    """Return the panels to draw: all maps that the model supports."""
    field = Panel("receptive field", receptive_field(model, images)[0], "|derivative|", "log")
    if not isinstance(model, VisionLonghorn):
        return [_evidence(model, images, target, name, None), field]
    through, matrix = rollout(model, images), token_matrix(model, images, block)
    pooled = "by the class token" if model.global_pool == "token" else "by all patches"
    where = f"block {block % len(model.blocks)}"
    steps, forgotten = step_size(model, images, block)[0], decay(model, images, block)[0]
    H, W = steps.shape
    centre = matrix[0, model.num_prefix_tokens + H // 2 * W + W // 2, model.num_prefix_tokens :]
    return [
        _evidence(model, images, target, name, model.patch_embed.stride),
        Panel(f"read in {where}", pooled_reads(model, images, matrix)[0], pooled),
        Panel("read in all blocks", pooled_reads(model, images, through)[0], pooled),
        Panel(f"read in {where}", centre.unflatten(0, (H, W)), "by the centre", "log"),
        field,
        Panel(f"written in {where}", steps, "step size"),
        Panel(f"forgotten in {where}", forgotten, "share of the state"),
    ]


def _evidence(
    model: nn.Module, images: Tensor, target: int, name: str, cell: tuple[int, int] | None
) -> Panel:
    values = evidence(model, images, target, cell)[0]
    return Panel("evidence", values, f"for {name}", "signed")
