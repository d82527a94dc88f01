"""A run from its settings to its last checkpoint, and what is done with that: evaluation and release."""
