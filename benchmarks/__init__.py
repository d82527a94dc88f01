"""Speed of scans, models, training steps and data loading, next to other implementations."""

import threads  # noqa: F401  before torch
