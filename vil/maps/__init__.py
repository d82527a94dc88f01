"""What a model reads where: maps of its tokens, and of the pixels behind a feature or a class.

    python -m vil.maps output/digits/best.pt digit.png --output maps.png

A scan is linear in its values, so that for given keys, queries and steps each block has an exact matrix of
what every token reads from every other (``scans.py``). Gradients give what any model of timm rests on
(``gradients.py``), and ``drawing.py`` lays all of it over the image. docs/inspect.md says which of these maps are
faithful to the model and which are not.
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
