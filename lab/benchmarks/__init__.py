"""Speed of scans, models, training steps and data loading, next to other implementations."""

import startup  # noqa: F401  before torch
