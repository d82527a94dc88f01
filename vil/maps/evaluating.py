"""Temporary evaluation mode, and a check of image batches."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model and its submodules into evaluation mode for a ``with`` block, then restore their modes."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_images(images: Tensor) -> None:
    """Check that ``images`` is a batch of images.

    Raises:
        ValueError: If the tensor is not floating-point or not four-dimensional.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            "images must be floating-point numbers (B, in_chans, height, width), got "
            f"{images.dtype} {tuple(images.shape)}"
        )
