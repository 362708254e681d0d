"""Datasets that yield batches: texts, conversations, images, images with captions, and datasets of users."""
