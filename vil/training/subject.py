"""A model to evaluate or predict with: its weights, and how its images are prepared."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import timm
from torch import nn

from vil.backbone import VisionLonghorn
from vil.messages import one_line
from vil.preprocess import ImageSpec
from vil.timm_models import create
from vil.training.errors import ConfigError
from vil.training.recipes import from_dict
from vil.training.resolve import read_source
from vil.training.sampler import seed_everything
from vil.training.settings import RunConfig, TrainConfig
from vil.weights.build import model_with
from vil.weights.sources import Weights, is_model_name, no_weights


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and what its source states."""

    name: str
    """timm's name of the model."""
    model: nn.Module
    images: ImageSpec
    weights: Weights
    """Their source's description, without tensors."""
    origin: str
    """Where the weights come from, as text."""
    settings: TrainConfig | None
    """All settings of the run that trained the weights; None if this package did not."""

    def run_options(self, device: str, amp: bool | None, cuda_graphs: bool = True) -> RunConfig:
        """Return how to run the model; ``amp`` None keeps the setting of the training."""
        trained = RunConfig() if self.settings is None else self.settings.run
        return RunConfig(
            device=device,
            amp=trained.amp if amp is None else amp,
            cuda_graphs=cuda_graphs,
            num_threads=trained.num_threads,
        )


def load_subject(
    source: str,
    model: str | None = None,
    img_size: int | None = None,
    ema: bool = False,
    **stated: Any,
) -> Subject:
    """Build the model of a source with its weights, or with random ones if timm has none for it.

    Args:
        source: Same as in ``vil.load``; or any timm model's name.
        model: timm's name of the model, if the source does not state it.
        img_size: Height and width in pixels; None keeps the size of the source.
        ema: Load the averaged weights.
        **stated: Fields of ``ImageSpec``; None keeps the value of the source.

    Raises:
        ConfigError: If an argument is invalid, or the weights do not exist or do not fit the model.
        OutputError: If the weights cannot be read.
    """
    is_random = is_model_name(source) and not timm.is_model_pretrained(source)
    if is_random and (ema or model is not None):
        raise ConfigError(f"--ema and --model need weights, but timm has none for {source}")
    weights = no_weights(source) if is_random else read_source(source, ema)
    name = model or weights.architecture
    if name is None:
        raise ConfigError(f"--model is missing: {source} does not name its timm model")
    settings = None if weights.config is None else from_dict(weights.config, f"{source}: ")
    size = {} if img_size is None else {"img_size": img_size}
    try:
        stated["img_size"] = None if img_size is None else (img_size, img_size)
        images = ImageSpec.of(weights.pretrained_cfg, **stated)
        if is_random:
            seed_everything(0)  # same random weights on all ranks
            built, origin = create(name, **size), "RANDOM (timm has no pretrained weights)"
        else:
            built, origin = model_with(weights, model, **size)
        # If the model accepts any size and resizes these images, keep the weights' own grid.
        if not is_random and size and isinstance(built, VisionLonghorn) and built.dynamic_img_size:
            embed = built.patch_embed
            if built.grid_inside(embed.img_size) != embed.grid_size:
                built, origin = model_with(weights, model)
    except ValueError as error:
        raise ConfigError(f"cannot evaluate {source}: {one_line(error)}") from error
    if "; new " in origin:
        raise ConfigError(f"{source} has no head for {name}: {origin}")
    return Subject(
        name=name,
        model=built,
        images=images,
        weights=dataclasses.replace(weights, state_dict={}),
        origin=origin,
        settings=settings,
    )
