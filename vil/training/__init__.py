"""Training and evaluation on images; train.py has a run from top to bottom."""
