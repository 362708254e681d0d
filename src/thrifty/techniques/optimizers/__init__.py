"""Optimizers: turn gradients into parameter updates."""
