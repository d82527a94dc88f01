"""Training experiments (recall, images), and the documents made from their records."""

import startup  # noqa: F401  before torch
