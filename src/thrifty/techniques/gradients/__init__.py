"""Transforms of gradients before the optimizer."""
