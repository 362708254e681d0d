"""Gradient transforms: change the gradients before the optimizer."""
