"""Training experiments (recall, images, fine-tuning), and the documents made from their records."""
