"""The published downstream runs: ADE20K with UperNet and COCO with Cascade Mask R-CNN."""

import startup  # noqa: F401  before torch
