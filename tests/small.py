"""A small model with all weights drawn at random, so that taps, steps and skips matter, and images for it."""

import timm
import torch
from torch import Tensor

import vil

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_classes": 5}


def small(name: str = "vil_tiny", **arguments: object) -> vil.VisionLonghorn:
    """Return a model in evaluation mode, the same at each call."""
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | arguments)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(height: int = 32, width: int = 32, count: int = 2, channels: int = 3) -> Tensor:
    """Return images of noise, (count, channels, height, width), the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, channels, height, width, generator=generator)
