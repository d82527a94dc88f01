"""Training and evaluation on images: configuration, data, loops, checkpoints and reports."""
