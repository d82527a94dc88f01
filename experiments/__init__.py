"""Training experiments (recall, images), and the documents made from their records."""
