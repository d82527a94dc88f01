"""Training experiments (recall, images), and the documents made from their records."""

import threads  # noqa: F401  before torch
