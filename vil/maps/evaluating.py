"""A model as it is evaluated, whatever mode it is in."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model and all of its parts in evaluation mode within a ``with`` block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_images(images: Tensor) -> None:
    """Check that there is a batch of images.

    Raises:
        ValueError: they are no floating-point numbers, or not four-dimensional.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            "images must be floating-point numbers (B, in_chans, height, width), got "
            f"{images.dtype} {tuple(images.shape)}"
        )
