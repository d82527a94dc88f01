"""Training and evaluation on images; start reading at train.py, the main loop."""
