"""Training and evaluation on images: settings here, images and batches in data/, runs in run/."""
