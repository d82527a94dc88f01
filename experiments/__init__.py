"""Training to learn something: recall, images, fine-tuning, and the documents made of the records."""
