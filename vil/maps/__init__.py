"""Interpretability maps: token-to-token reads, and the pixels behind a feature or a class.

    python -m vil.maps output/digits/best.pt digit.png --output maps.png

A scan is linear in its values. For given keys, queries and step sizes, each block therefore has an exact matrix of
what every token reads from every other (``scans.py``). Gradient maps work with any timm model (``gradients.py``).
``drawing.py`` overlays the maps on the image. docs/inspect.md says which maps are faithful to the model.
"""

from vil.maps.drawing import Panel, draw
from vil.maps.gradients import evidence, receptive_field
from vil.maps.scans import (
    channel_matrices,
    decay,
    pooled_reads,
    rollout,
    step_size,
    token_matrix,
)

__all__ = [
    "Panel",
    "channel_matrices",
    "decay",
    "draw",
    "evidence",
    "pooled_reads",
    "receptive_field",
    "rollout",
    "step_size",
    "token_matrix",
]
